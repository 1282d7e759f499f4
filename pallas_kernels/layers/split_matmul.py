"""A product of a few rows with a large weight, left as partial sums for the kernel that reads it next.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal pieces of k;   their sum over s is x @ w.T

With few rows such a product is bound by reading the weight, which takes more programs than the output has tiles, so
the sum over k is split. Adding up the parts is left to whoever reads them (`residual_norm`, `rotary`): a kernel less.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers import hopper_kernel
from pallas_kernels.layers.hopper_tiling import Tiles, choose_tiles
from pallas_kernels.layers.quantize_rows import FP8
from pallas_kernels.layers.quantized import (
    Factors,
    Inputs,
    PartialSums,
    Quantized,
    Scaled,
    Weight,
    factors,
    has_dynamic_activations,
    matmul_unscaled,
    split_scales,
)

MOST_ROWS = 64  # of the kernel; beyond, XLA takes the parts one by one
OUT_TILE = 128  # rows and columns of a tile of the output by XLA's product
TILES = 132  # from which on there are enough: one for each multiprocessor
FEW_ROWS = 16  # smallest side of a product on tensor cores
LEAST_OUT, LEAST_INNER = 1024, 2048  # a smaller weight is read before a second kernel has started
WIDEST_OUT = 16384  # beyond, the output has tiles enough
INNER_BYTES = 128  # of a weight's row in a tile
NARROW_OUT = 4096  # up to which four parts make up for the few tiles; of a wider output two are faster
SPLIT_AGAIN = 2048  # length of a part from which on XLA may split it again
MANY_ROWS = 96  # from which on it is content with half as many tiles
XLA_TILE = 64, 128  # rows and columns of one


def parts_of(
    rows: int, out: int, inner: int, dtype: jnp.dtype, weight_bytes: int = 2, *, quantize_output: bool = False
) -> int:
    """How many parts a product comes in: a matter of its shape alone, but for `hopper_tiles`. 1: it is not split.

    Args:
        quantize_output: so are the inputs, to the weight's dtype.
    """
    if dtype not in (jnp.bfloat16, jnp.float16) or out > WIDEST_OUT:
        return 1
    tiles = math.ceil(rows / OUT_TILE) * math.ceil(out / OUT_TILE)
    if rows > MOST_ROWS and (tiles >= TILES or not (weight_bytes == 2 or quantize_output)):
        return 1
    tile, step = _out_tile(rows), INNER_BYTES // weight_bytes
    if out < LEAST_OUT or inner < LEAST_INNER or out % tile or inner % (4 * step):
        return 1
    if rows <= MOST_ROWS:
        return 4 if out <= NARROW_OUT else 2
    parts = 2
    while _is_split_again(rows, out, inner, parts) and inner % (2 * parts * step) == 0:
        parts *= 2
    return parts


def _is_split_again(rows: int, out: int, inner: int, parts: int) -> bool:
    """Whether XLA would split each of the parts again, and add up in a launch of its own.

    Fitted to what it does with the products of Llama-3.1-8B; of other shapes it may still split some, or none of less.
    """
    height, width = XLA_TILE
    tiles = math.ceil(rows / height) * math.ceil(out / width) * parts
    return inner // parts >= SPLIT_AGAIN and tiles < (TILES if rows >= MANY_ROWS else 2 * TILES)


def _out_tile(rows: int) -> int:
    return 128 if rows <= FEW_ROWS else 64


def _reference(x, weight, row_scale, scale, after, *, parts, dtype=jnp.float32):
    weight = weight.astype(x.dtype)
    pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    product = jax.lax.dot_general(pieces, weights, dims, preferred_element_type=dtype)
    return Factors(x, weight, row_scale, scale).scaled(product)


def _kernel(x_ref, weight_ref, *refs, scales, rows, steps, tile, inner):
    """One program: one tile of the output, one part. The weight's rows are those of the matrix product."""
    *scale_refs, parts_ref = refs[:scales] + refs[-1:]  # of the rows, if there are two, and of the weight's
    block, part = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(max(pl.next_power_of_2(rows), FEW_ROWS))
    inside = (row < rows)[:, None]
    out = block * tile + jnp.arange(tile)

    def step(index, total):
        column = (part * steps + index) * inner + jnp.arange(inner)[None, :]
        x = pltriton.load(x_ref.at[row[:, None], column], mask=inside)  # rows that are not there are not stored
        weight = pltriton.load(weight_ref.at[out[:, None], column]).astype(x.dtype)
        return total + pltriton.dot(weight, x, trans_b=True)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile, row.shape[0]), jnp.float32))
    if scale_refs:
        total = total * pltriton.load(scale_refs[-1].at[out])[:, None]
    if len(scale_refs) == 2:
        total = total * pltriton.load(scale_refs[0].at[row], mask=row < rows, other=0)[None, :]
    pltriton.store(parts_ref.at[part, row[None, :], out[:, None]], total, mask=(row < rows)[None, :])


def _pallas(x, weight, row_scale, scale, after, *, parts, interpret):
    (rows, inner), out = x.shape, weight.shape[0]
    tile, columns = _out_tile(rows), INNER_BYTES // weight.dtype.itemsize
    scales = [array for array in (row_scale, scale) if array is not None]
    return pl.pallas_call(
        functools.partial(
            _kernel, scales=len(scales), rows=rows, steps=inner // columns // parts, tile=tile, inner=columns
        ),
        grid=(out // tile, parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), jnp.float32),
        # Beside numbers of one byte x takes more of a tile: six stages would not fit into 99 KiB of shared memory.
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=6 if weight.dtype.itemsize > 1 else 5),
        interpret=interpret,
        name="split_matmul",
    )(x, weight, *scales, *([] if after is None else [after]))


def _hopper(x, weight, row_scale, scale, after, *, tiles, interpret):
    return hopper_kernel.multiply(x, weight, row_scale, scale, tiles=tiles, dtype=jnp.float32, interpret=interpret)


def hopper_tiles(rows: int, weight: Weight) -> Tiles | None:
    """How the Hopper kernel takes a product, in parts: float8 by more rows than are few, where it is faster."""
    multiprocessors = hopper_kernel.multiprocessors()
    if multiprocessors is None or not has_dynamic_activations(weight) or not FEW_ROWS < rows <= MOST_ROWS:
        return None
    out, inner = weight.shape
    return choose_tiles(rows, inner, out, FP8, multiprocessors, parts=2)


@functools.partial(jax.jit, static_argnames=("is_gated", "implementation"))
def split_matmul(
    x: Inputs,
    weight: Weight,
    *,
    is_gated: bool = False,
    after: Float[Array, "..."] | Scaled | None = None,
    implementation: Implementation = "auto",
) -> PartialSums:
    """x @ weight.T as parts to be added up in float32: if one, of x's dtype; if several, float32.

    But several parts of more than 64 rows of bfloat16, whose bytes count, are rounded to it: together such errors are
    about as large as one of their sum, unless parts cancel. Parts by a weight of "fp8_dynamic" come back as `Scaled` if
    there is one alone (float32 up to 64 rows), or of more than 64 rows.

    Args:
        weight: [out, inner].
        is_gated: x is gate and up side by side, and silu(gate) * up is multiplied.
        after: what this kernel waits for without reading it, where launches run side by side; other kernels do not.
        implementation: as in `paged_attention`; a product that is not split, or of many rows, is XLA's. Some of
            "fp8_dynamic" on a Hopper GPU are another kernel's (`hopper_tiles`).
    """
    (out, inner), shape = weight.shape, x.shape[:-1]
    rows, width = math.prod(shape), 1 if isinstance(weight, Quantized) else 2
    parts = parts_of(rows, out, inner, x.dtype, width, quantize_output=has_dynamic_activations(weight))
    if parts == 1:
        return matmul_unscaled(x, weight, is_gated=is_gated, implementation=implementation)
    taken = factors(x, weight, is_gated=is_gated, implementation=implementation)
    flat = taken.x.reshape(-1, inner)
    if rows > MOST_ROWS:
        dtype = x.dtype if x.dtype == jnp.bfloat16 else jnp.float32
        product = _reference(flat, taken.weight, None, None, None, parts=parts, dtype=dtype)
        product = product.reshape(parts, *shape, out)
        if taken.row_scale is None or taken.scale is None:
            return product
        return Scaled(product, taken.row_scale, taken.scale)
    row_scale = None if taken.row_scale is None else taken.row_scale.reshape(-1)
    before = None if after is None else split_scales(after)[0]
    arguments = flat, taken.weight, row_scale, taken.scale, before
    tiles = hopper_tiles(rows, weight)
    parts = tiles.parts if tiles else parts
    reference = functools.partial(_reference, parts=parts)
    if tiles:
        kernel = functools.partial(_hopper, tiles=tiles)
        product = hopper_kernel.choose_compiled(implementation, kernel, reference, *arguments)
    else:
        product = dispatch(implementation, None, functools.partial(_pallas, parts=parts), reference, *arguments)
    return product.reshape(parts, *shape, out)
