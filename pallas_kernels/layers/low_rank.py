"""Adds low-rank adapters to a product of up to a few hundred rows, in two kernels that read the chosen tables alone.

XLA multiplies every row by all tables, and by the zeros of B where a weight is fused from several modules, in four to
six launches. Here a first kernel computes A x as partial sums over parts of k, beside the weight's product if launches
may run concurrently. For up to 16 rows of most weights of two bytes a value, but not of gate and up, one launch
computes both. A second kernel adds up all partial sums and B (A x), and applies the gate of a feed-forward.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.low_rank_kernels import LEAST_STEP, MOST_INNER, TILES, columns_of, inner_parts
from pallas_kernels.layers.dense.low_rank_sum import sum_products
from pallas_kernels.layers.dense.plain_product import plain_product
from pallas_kernels.layers.partial_sums import PartialSums, add_adapters
from pallas_kernels.layers.quantize_rows import Activation, gated

DTYPES = jnp.bfloat16, jnp.float16  # of x, A and B
MOST_ROWS = 320  # with more rows, the products of XLA with all tables take less time


def product_f32(x: Float[Array, "*rows inner"], weight: Float[Array, "out inner"]) -> Float[Array, "*rows out"]:
    """Returns x @ weight.T in float32."""
    return plain_product(x, weight, jnp.dtype("float32"))


def has_kernel(x: Array | jax.ShapeDtypeStruct, weight: Adapted) -> bool:
    """Returns whether the kernels support a product of x [*rows, inner] with a weight that has adapters."""
    (*shape, inner), (out, _) = x.shape, weight.shape
    if x.dtype not in DTYPES or not x.dtype == weight.a.dtype == weight.b.dtype or tuple(shape) != weight.table.shape:
        return False
    divides = inner % LEAST_STEP == 0 and out % (2 * TILES[-1]) == 0
    return divides and math.prod(shape) <= MOST_ROWS and columns_of(weight) <= MOST_INNER


@functools.partial(jax.jit, static_argnames=("dtype", "gate", "implementation"))
def add_low_rank(
    sums: PartialSums,
    x: Float[Array, "*rows inner"],
    weight: Adapted,
    dtype: jnp.dtype,
    *,
    gate: Activation | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*rows columns"]:
    """Returns a product with a weight that has adapters, or activation(gate) * up of a product that holds both.

    Args:
        sums: product of x with the weight without adapters, not of several devices.
        x: activations.
        weight: the weight [out, inner], or gate above up [2 * out, inner].
        dtype: dtype of the result.
        gate: activation function of the gate; None: the product has no gate.
        implementation: as in `paged_attention`. XLA computes what the kernels do not support (`has_kernel`).
    """

    def reference(sums, x, weight):
        (product,) = add_adapters(sums, x, weight, product_f32, dtype)
        return gated(product, gate) if gate else product

    def kernel(sums, x, weight, interpret):
        inner = inner_parts(x.reshape(-1, x.shape[-1]), weight, interpret=interpret)
        return sum_products(sums, inner, weight, dtype, gate=gate, interpret=interpret)

    return dispatch(implementation, [Kernel(TRITON, kernel, not has_kernel(x, weight))], reference, sums, x, weight)
