"""A matrix product by XLA, in the form that is fast on the platform of the program.

On a CPU, XLA reorders the second operand of a product before it multiplies: with x first, the whole weight at each
call, which takes longer than the product of a few rows. So with a few rows of float32, the weight is the first operand:

    y = (w @ x.T).T          instead of          y = x @ w.T

A product of one row needs no such order. On a CPU with instructions for bfloat16, products of bfloat16 are faster with
x first.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MOST_ROWS = 16  # with more rows, the product itself takes most of the time
MULTIPLE = 8  # XLA computes other numbers of columns above `FEW_ROWS` as several products
FEW_ROWS = 4


def plain_product(
    x: Float[Array, "*rows inner"], weight: Float[Array, "out inner"], dtype: jnp.dtype
) -> Float[Array, "*rows out"]:
    """Returns x @ weight.T, summed in float32 and rounded to `dtype`; float32 is multiplied in float32 everywhere."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    multiply = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=dtype)
    last, rows = x.ndim - 1, math.prod(x.shape[:-1])

    def x_first(x, weight):
        return multiply(x, weight, (((last,), (1,)), ((), ())))

    def weight_first(x, weight):
        padding = -rows % MULTIPLE if rows > FEW_ROWS else 0
        columns = jnp.pad(x.reshape(rows, -1), ((0, padding), (0, 0)))
        # Without the barrier, XLA would merge the transposition into the product, with x first.
        sums = jax.lax.optimization_barrier(multiply(weight, columns, (((1,), (1,)), ((), ()))))
        return sums[:, :rows].T.reshape(*x.shape[:-1], -1)

    if x.dtype != jnp.float32 or not 1 < rows <= MOST_ROWS:
        return x_first(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=weight_first, default=x_first)
