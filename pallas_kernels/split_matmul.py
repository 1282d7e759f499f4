"""A product of a few rows with a large weight, left as partial sums for the kernel that reads it next.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal pieces of k;   their sum over s is x @ w.T

With few rows such a product is bound by reading the weight, which takes more programs than the output has tiles, so
the sum over k is split. Adding up the parts is left to whoever reads them (`residual_norm`, `rotary`): a kernel less.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, choose

MOST_ROWS = 64  # beyond, the output has tiles enough
FEW_ROWS = 16  # smallest side of a product on tensor cores
LEAST_OUT, LEAST_INNER = 1024, 2048  # a smaller weight is read before a second kernel has started
WIDEST_OUT = 16384  # beyond, the output has tiles enough
INNER = 64  # columns of a tile
PROGRAMS = 256  # two for each of 132 multiprocessors


def parts_of(rows: int, out: int, inner: int, dtype: jnp.dtype) -> int:
    """How many parts a product comes in: a matter of its shape alone, on every platform. 1: it is not split."""
    if dtype not in (jnp.bfloat16, jnp.float16) or rows > MOST_ROWS or out > WIDEST_OUT:
        return 1
    tile = _out_tile(rows)
    if out < LEAST_OUT or inner < LEAST_INNER or out % tile or inner % (4 * INNER):
        return 1
    return 4 if 4 * (out // tile) <= PROGRAMS else 2


def _out_tile(rows: int) -> int:
    return 128 if rows <= FEW_ROWS else 64


def _reference(x, weight, *, parts):
    pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(pieces, weights, dims, preferred_element_type=jnp.float32)


def _kernel(x_ref, weight_ref, parts_ref, *, rows, steps, tile):
    """One program: one tile of the output, one part. The weight's rows are those of the matrix product."""
    block, part = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(max(pl.next_power_of_2(rows), FEW_ROWS))
    inside = (row < rows)[:, None]
    out = block * tile + jnp.arange(tile)

    def step(index, total):
        column = (part * steps + index) * INNER + jnp.arange(INNER)[None, :]
        x = pltriton.load(x_ref.at[row[:, None], column], mask=inside, other=0)
        return total + pltriton.dot(pltriton.load(weight_ref.at[out[:, None], column]), x, trans_b=True)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile, row.shape[0]), jnp.float32))
    pltriton.store(parts_ref.at[part, row[None, :], out[:, None]], total, mask=(row < rows)[None, :])


def _pallas(x, weight, *, parts, interpret):
    (rows, inner), out = x.shape, weight.shape[0]
    tile = _out_tile(rows)
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows, steps=inner // INNER // parts, tile=tile),
        grid=(out // tile, parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=5),
        interpret=interpret,
        name="split_matmul",
    )(x, weight)


@functools.partial(jax.jit, static_argnames=("implementation",))
def split_matmul(
    x: Float[Array, "*rows inner"], weight: Float[Array, "out inner"], *, implementation: Implementation = "auto"
) -> Float[Array, "parts *rows out"]:
    """x @ weight.T as parts to be added up: float32 if there are several, else one of x's dtype.

    Float32 inputs are multiplied in float32 on every device.

    Args:
        implementation: as in `paged_attention`; a product that is not split is XLA's.
    """
    flat = x.reshape(-1, x.shape[-1])
    parts = parts_of(flat.shape[0], weight.shape[0], weight.shape[1], x.dtype)
    if parts == 1:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=precision)[None]
    kernel, reference = functools.partial(_pallas, parts=parts), functools.partial(_reference, parts=parts)
    out = choose(implementation, None, kernel, reference, flat, weight)
    return out.reshape(parts, *x.shape[:-1], weight.shape[0])


def add_up(parts: Float[Array, "parts *rows out"], dtype: jnp.dtype) -> Float[Array, "*rows out"]:
    """The sum of the parts, in their order, rounded once. (With jax 0.11.2 on a CPU a reduction is less exact.)"""
    first, *others = parts
    return sum(others, first).astype(dtype)
