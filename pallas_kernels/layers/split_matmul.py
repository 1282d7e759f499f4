"""A matrix product of a few rows with a large weight, returned as partial sums that the next kernel adds up.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal parts of k;   the sum over s is x @ w.T

With few rows, reading the weight takes all the time. There are too few output tiles to read it fast with one Pallas
program per tile. So the sum over k is divided into parts, and different programs compute different parts. The kernel
that reads the result (`residual_norm`, `rope_append`) adds up the partial sums, which saves a launch.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers import hopper_kernel
from pallas_kernels.layers.grouped_matmul import packed_tiles
from pallas_kernels.layers.hopper_tiling import HopperTiles, choose_tiles
from pallas_kernels.layers.partial_sums import PartialSums, Scaled, join
from pallas_kernels.layers.products import Factors, factors, matmul_grouped, matmul_unscaled
from pallas_kernels.layers.quantize_rows import FP8, Activation
from pallas_kernels.layers.shard import Shard
from pallas_kernels.layers.weights import Inputs, Quantized, Weight, has_dynamic_activations, has_group_scales

MOST_ROWS = 64  # most rows that the kernel supports; with more rows, XLA computes each partial sum
OUT_TILE = 128  # rows and columns of an output tile of XLA's product
TILES = 132  # output tiles that keep the GPU busy, one per multiprocessor
FEW_ROWS = 16  # smallest side of a product on tensor cores
LEAST_OUT, LEAST_INNER = 1024, 2048  # a smaller weight is read before a second kernel has started
WIDEST_OUT = 16384  # a wider output has enough tiles even if the sum over k is not divided
INNER_BYTES = 128  # bytes of a weight's row that a loop iteration loads, unless its sizes are `LONG`
NARROW_OUT = 4096  # up to this output width, four parts of k are faster with other sizes; above, two parts are
LEAST_PROGRAMS = 112  # from this number of programs on, no more parts of k are needed to keep the GPU busy
MOST_PARTS = 12  # fewer parts of k than these, where a kernel's steps do not divide into as many as are fastest
SPLIT_AGAIN = 2048  # length of a part of k from which XLA may split it again
MANY_ROWS = 96  # from this number of rows on, XLA splits a part only if there are half as many tiles
XLA_TILE = 64, 128  # rows and columns of a tile in XLA's decision


class SplitSizes(NamedTuple):
    """The sizes of the kernel's programs."""

    parts: int  # parts of k
    tile: int  # columns of an output tile
    columns: int  # values of k per loop iteration
    stages: int  # loop iterations whose loads are in flight


# With weights of two bytes; four stages if a multiprocessor has one program. At 64 rows every stage but one takes 32
# KiB of shared memory, of which compute capability 8.9 has 99.
LONG = SplitSizes(parts=2, tile=64, columns=128, stages=3)


def parts_of(
    rows: int, out: int, inner: int, dtype: jnp.dtype, weight_bytes: int = 2, *, quantize_output: bool = False
) -> int:
    """Returns the number of parts into which the sum over k of a product is divided; 1 if it is not divided.

    The Hopper kernel (`hopper_tiles`) does not use this number; it always divides the sum into two parts.

    Args:
        rows, out, inner: sizes in the shapes of x [rows, inner] and of the weight [out, inner].
        dtype: dtype of x.
        weight_bytes: bytes per value of the weight.
        quantize_output: whether x is quantised to the weight's dtype.
    """
    if dtype not in (jnp.bfloat16, jnp.float16) or out > WIDEST_OUT:
        return 1
    tiles = math.ceil(rows / OUT_TILE) * math.ceil(out / OUT_TILE)
    if rows > MOST_ROWS and (tiles >= TILES or not (weight_bytes == 2 or quantize_output)):
        return 1
    if rows <= MOST_ROWS:
        return sizes.parts if (sizes := choose_sizes(rows, out, inner, weight_bytes)) else 1
    step = INNER_BYTES // weight_bytes
    if out < LEAST_OUT or inner < LEAST_INNER or out % _out_tile(rows, out) or inner % (4 * step):
        return 1
    parts = 2
    while _is_split_again(rows, out, inner, parts) and inner % (2 * parts * step) == 0:
        parts *= 2
    return parts


def _is_split_again(rows: int, out: int, inner: int, parts: int) -> bool:
    """Returns whether XLA would divide the sum over each part of k again, and add up the results in one more launch.

    The rule is fitted to XLA's choices for the products of Llama-3.1-8B with 72 to 320 rows. For other shapes XLA may
    choose differently.
    """
    height, width = XLA_TILE
    tiles = math.ceil(rows / height) * math.ceil(out / width) * parts
    return inner // parts >= SPLIT_AGAIN and tiles < (TILES if rows >= MANY_ROWS else 2 * TILES)


def choose_sizes(rows: int, out: int, inner: int, weight_bytes: int) -> SplitSizes | None:
    """Returns the sizes of the kernel's programs for up to 64 rows; None if the sum over k is not divided."""
    if out < LEAST_OUT or inner < LEAST_INNER:
        return None
    if weight_bytes == 2 and out % LONG.tile == 0:
        for parts in (2, 4):
            programs = out // LONG.tile * parts
            if programs >= LEAST_PROGRAMS and inner % (LONG.columns * parts) == 0:
                return LONG._replace(parts=parts, stages=4 if programs <= TILES else 3)
    tile, columns = _out_tile(rows, out), INNER_BYTES // weight_bytes
    if out % tile or inner % columns:
        return None
    # With weights of one byte, an iteration loads twice as many columns of x: six stages exceed the 99 KiB of shared
    # memory of compute capability 8.9.
    steps, stages = inner // columns, 6 if weight_bytes > 1 else 5
    wanted = range(4 if out <= NARROW_OUT else 2, MOST_PARTS)
    return next((SplitSizes(parts, tile, columns, stages) for parts in wanted if steps % parts == 0), None)


def _out_tile(rows: int, out: int) -> int:
    """Returns the number of columns of the kernel's output tile for a number of rows and of columns in all."""
    return 128 if rows <= FEW_ROWS and out % 128 == 0 else 64


def _reference(x, weight, row_scale, scale, after, *, parts, dtype, first=0):
    weight = weight[first:].astype(x.dtype)
    pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    unscaled = dtype if row_scale is None and scale is None else jnp.float32
    sums = jax.lax.dot_general(pieces, weights, dims, preferred_element_type=unscaled)
    return Factors(x, weight, row_scale, scale).scaled(sums).astype(dtype)


def _kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [first + N, K], one or two bytes per value
    *refs,  # float32 scales: none, of the columns [N], or of the rows [T] and the columns; then `after`, which is not
    # read, if it was passed; output: parts_ref [parts, T, N]
    # static parameters
    scales,  # number of scale arrays
    rows,  # T
    steps,  # loop iterations per part of k
    tile,  # columns of an output tile
    inner,  # values of k per loop iteration
    first,  # first row of the weight that is multiplied
):
    """Computes one output tile, summed over one part of k, in one Pallas program.

    The weight is the first operand of the tensor-core product, because the first operand can have more rows than the
    second.
    """
    *scale_refs, parts_ref = refs[:scales] + refs[-1:]
    block, part = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(max(pl.next_power_of_2(rows), FEW_ROWS))
    is_row = (row < rows)[:, None]
    out = block * tile + jnp.arange(tile)

    def step(index, total):
        column = (part * steps + index) * inner + jnp.arange(inner)[None, :]
        x = pltriton.load(x_ref.at[row[:, None], column], mask=is_row)  # padding rows are arbitrary and not stored
        weight = pltriton.load(weight_ref.at[first + out[:, None], column]).astype(x.dtype)
        return total + pltriton.dot(weight, x, trans_b=True)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile, row.shape[0]), jnp.float32))
    if scale_refs:
        total = total * pltriton.load(scale_refs[-1].at[out])[:, None]
    if len(scale_refs) == 2:
        total = total * pltriton.load(scale_refs[0].at[row], mask=row < rows, other=0)[None, :]
    total = total.astype(parts_ref.dtype)
    pltriton.store(parts_ref.at[part, row[None, :], out[:, None]], total, mask=(row < rows)[None, :])


def _pallas(x, weight, row_scale, scale, after, *, parts, dtype, first, interpret):
    (rows, inner), out = x.shape, weight.shape[0] - first
    chosen = choose_sizes(rows, out, inner, weight.dtype.itemsize)
    assert chosen is not None and chosen.parts == parts
    scales = [array for array in (row_scale, scale) if array is not None]
    sizes = {"rows": rows, "steps": inner // chosen.columns // parts, "tile": chosen.tile, "inner": chosen.columns}
    return pl.pallas_call(
        functools.partial(_kernel, scales=len(scales), first=first, **sizes),
        grid=(out // chosen.tile, parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=chosen.stages),
        interpret=interpret,
        name="split_matmul",
    )(x, weight, *scales, *([] if after is None else [after]))


def _hopper(x, weight, row_scale, scale, after, *, tiles, interpret):
    return hopper_kernel.multiply(x, weight, row_scale, scale, tiles=tiles, dtype=jnp.float32, interpret=interpret)


def hopper_tiles(rows: int, weight: Weight) -> HopperTiles | None:
    """Returns the tile sizes of the Hopper kernel for a product of `rows` rows; None if the Hopper kernel is not used.

    The Hopper kernel is used for weights of "fp8_dynamic" with 17 to 64 rows, because it is faster there.
    """
    multiprocessors = hopper_kernel.multiprocessors()
    if multiprocessors is None or not has_dynamic_activations(weight) or not FEW_ROWS < rows <= MOST_ROWS:
        return None
    out, inner = weight.shape
    return choose_tiles(rows, inner, out, FP8, multiprocessors, parts=2)


@functools.partial(jax.jit, static_argnames=("gate", "dtype", "first", "implementation"))
def split_matmul(
    x: Inputs,
    weight: Weight,
    *,
    gate: Activation | None = None,
    after: Float[Array, "..."] | None = None,
    dtype: jnp.dtype | None = None,
    first: int = 0,
    implementation: Implementation = "auto",
) -> PartialSums:
    """Returns x @ weight.T as partial sums [parts, *rows, out], which the caller adds up in float32.

    A single partial sum has x's dtype. Several partial sums are float32. There are exceptions:
    - With more than 64 rows of bfloat16, several partial sums are bfloat16, because they are written faster. Their
      total rounding error is about that of one rounding of the sum, unless the partial sums cancel each other.
    - The product of several devices is that of `join`. If devices hold columns, several partial sums of bfloat16 rows
      are bfloat16, so that devices exchange half as many bytes.
    - With "fp8_dynamic", the result is a `Scaled` if there is a single partial sum (in float32 up to 64 rows), or if
      there are more than 64 rows.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        gate: activation function; x has gate and up side by side [*rows, 2 * inner], and activation(gate) * up is
            multiplied by the weight. None: x is multiplied.
        after: an array that the kernel waits for but does not read, to order launches that could run side by side. XLA
            and the Hopper kernel ignore it.
        dtype: dtype of several partial sums of at most 64 rows; None: float32. The Hopper kernel ignores it.
        first: first of the weight's rows that are multiplied; up to 64 rows copy none. Quantised weights have all.
        implementation: as in `paged_attention`. XLA computes a product with one partial sum or with more than 64 rows,
            unless the weight has group scales (`grouped_matmul`). The Hopper kernel computes some products of
            "fp8_dynamic" on a Hopper GPU (`hopper_tiles`). There a product of "int4" has as many partial sums as
            `packed_tiles` chooses.
    """
    if isinstance(weight, Shard):
        own_dtype = x.dtype if weight.by == "columns" and x.dtype == jnp.bfloat16 else dtype
        own = split_matmul(x, weight.weight, gate=gate, after=after, dtype=own_dtype, implementation=implementation)
        return join(own, weight, x.dtype)
    assert not first or not isinstance(weight, Quantized)
    (out, inner), shape = (weight.shape[0] - first, weight.shape[1]), x.shape[:-1]
    rows, width = math.prod(shape), 1 if isinstance(weight, Quantized) else weight.dtype.itemsize
    parts = parts_of(rows, out, inner, x.dtype, width, quantize_output=has_dynamic_activations(weight))
    many = x.dtype if rows > MOST_ROWS and x.dtype == jnp.bfloat16 else None
    if has_group_scales(weight):
        if weight.kind == "int4" and LEAST_OUT <= out <= WIDEST_OUT:
            packed = packed_tiles(rows, weight.values.shape, weight.scale.shape[1], x.dtype)
            parts = packed.parts if packed else parts
        return matmul_grouped(x, weight, many, parts=parts, gate=gate, implementation=implementation)
    if first and (parts == 1 or rows > MOST_ROWS) and not isinstance(weight, Quantized):
        weight, first = weight[first:], 0  # XLA may copy these
    if parts == 1:
        return matmul_unscaled(x, weight, gate=gate, implementation=implementation)
    f = factors(x, weight, gate=gate, implementation=implementation)
    flat = f.x.reshape(-1, inner)
    if rows > MOST_ROWS:
        sums = _reference(flat, f.weight, None, None, None, parts=parts, dtype=many or jnp.float32)
        sums = sums.reshape(parts, *shape, out)
        if f.row_scale is None or f.scale is None:
            return sums
        return Scaled(sums, f.row_scale, f.scale)
    row_scale = None if f.row_scale is None else f.row_scale.reshape(-1)
    awaited = None if after is None else jax.tree.leaves(after)[0]
    arguments = flat, f.weight, row_scale, f.scale, awaited
    tiles = hopper_tiles(rows, weight)
    parts = tiles.parts if tiles else parts
    own = {"parts": parts, "dtype": dtype or jnp.float32, "first": first}
    reference = functools.partial(_reference, **own)
    if tiles:
        kernel = functools.partial(_hopper, tiles=tiles)
        sums = hopper_kernel.choose_compiled(implementation, kernel, reference, *arguments)
    else:
        sums = dispatch(implementation, None, functools.partial(_pallas, **own), reference, *arguments)
    return sums.reshape(parts, *shape, out)
