"""A matrix product of a few rows with a large weight, returned as partial sums that the next kernel adds up.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal parts of k;   the sum over s is x @ w.T

With few rows, reading the weight takes all the time. There are too few output tiles to read it fast with one Pallas
program per tile. So the sum over k is divided into parts, and different programs compute different parts. The kernel
that reads the result (`residual_norm`, `rope_append`) adds up the partial sums, which saves a launch.
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
from pallas_kernels.layers.grouped_matmul import packed_tiles
from pallas_kernels.layers.hopper_tiling import Tiles, choose_tiles
from pallas_kernels.layers.quantize_rows import FP8, Activation
from pallas_kernels.layers.quantized import (
    Factors,
    Inputs,
    PartialSums,
    Quantized,
    Scaled,
    Weight,
    factors,
    has_dynamic_activations,
    has_group_scales,
    join,
    matmul_grouped,
    matmul_unscaled,
)
from pallas_kernels.layers.shard import Shard

MOST_ROWS = 64  # most rows that the kernel supports; with more rows, XLA computes each partial sum
OUT_TILE = 128  # rows and columns of an output tile of XLA's product
TILES = 132  # output tiles that keep the GPU busy, one per multiprocessor
FEW_ROWS = 16  # smallest side of a product on tensor cores
LEAST_OUT, LEAST_INNER = 1024, 2048  # a smaller weight is read before a second kernel has started
WIDEST_OUT = 16384  # a wider output has enough tiles even if the sum over k is not divided
INNER_BYTES = 128  # bytes of a weight's row that a loop iteration loads
NARROW_OUT = 4096  # up to this output width, four parts of k are faster; above, two parts are faster
MOST_PARTS = 12  # fewer parts of k than these, where a kernel's steps do not divide into as many as are fastest
SPLIT_AGAIN = 2048  # length of a part of k from which XLA may split it again
MANY_ROWS = 96  # from this number of rows on, XLA splits a part only if there are half as many tiles
XLA_TILE = 64, 128  # rows and columns of a tile in XLA's decision


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
    tile, step = _out_tile(rows, out), INNER_BYTES // weight_bytes
    if out < LEAST_OUT or inner < LEAST_INNER or out % tile or inner % step:
        return 1
    if rows <= MOST_ROWS:
        wanted, steps = 4 if out <= NARROW_OUT else 2, inner // step
        return next((parts for parts in range(wanted, MOST_PARTS) if steps % parts == 0), 1)
    if inner % (4 * step):
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


def _out_tile(rows: int, out: int) -> int:
    """Returns the number of columns of the kernel's output tile for a number of rows and of columns in all."""
    return 128 if rows <= FEW_ROWS and out % 128 == 0 else 64


def _reference(x, weight, row_scale, scale, after, *, parts, dtype):
    weight = weight.astype(x.dtype)
    pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    first = dtype if row_scale is None and scale is None else jnp.float32
    sums = jax.lax.dot_general(pieces, weights, dims, preferred_element_type=first)
    return Factors(x, weight, row_scale, scale).scaled(sums).astype(dtype)


def _kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [N, K], one or two bytes per value; in pieces: [rows of all, K of a piece]
    *refs,  # float32 scales: none, of the columns [N], or of the rows [T] and the columns; then `after`, which is not
    # read, if it was passed; output: parts_ref [parts, T, N]
    # static parameters
    scales,  # number of scale arrays
    rows,  # T
    steps,  # loop iterations per part of k
    tile,  # columns of an output tile
    inner,  # values of k per loop iteration
    in_piece,  # number of parts of k in a piece; None: the weight is not in pieces
    first,  # first row of the first piece
    height,  # N
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
    weight_row, weight_part = out, part
    if in_piece is not None:
        weight_row, weight_part = first + jax.lax.div(part, in_piece) * height + out, jax.lax.rem(part, in_piece)

    def step(index, total):
        column, weight_column = (
            (own * steps + index) * inner + jnp.arange(inner)[None, :] for own in (part, weight_part)
        )
        x = pltriton.load(x_ref.at[row[:, None], column], mask=is_row)  # padding rows are arbitrary and not stored
        weight = pltriton.load(weight_ref.at[weight_row[:, None], weight_column]).astype(x.dtype)
        return total + pltriton.dot(weight, x, trans_b=True)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile, row.shape[0]), jnp.float32))
    if scale_refs:
        total = total * pltriton.load(scale_refs[-1].at[out])[:, None]
    if len(scale_refs) == 2:
        total = total * pltriton.load(scale_refs[0].at[row], mask=row < rows, other=0)[None, :]
    total = total.astype(parts_ref.dtype)
    pltriton.store(parts_ref.at[part, row[None, :], out[:, None]], total, mask=(row < rows)[None, :])


def _pallas(x, weight, row_scale, scale, after, *, parts, dtype, interpret, in_piece=None, first=0, out=None):
    (rows, inner), out = x.shape, out or weight.shape[0]
    tile, columns = _out_tile(rows, out), INNER_BYTES // weight.dtype.itemsize
    scales = [array for array in (row_scale, scale) if array is not None]
    sizes = {"rows": rows, "steps": inner // columns // parts, "tile": tile, "inner": columns}
    sizes |= {"in_piece": in_piece, "first": first, "height": out}
    return pl.pallas_call(
        functools.partial(_kernel, scales=len(scales), **sizes),
        grid=(out // tile, parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), dtype),
        # With weights of one byte per value, a loop iteration loads twice as many columns of x. Six stages would exceed
        # the 99 KiB of shared memory of compute capability 8.9.
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=6 if weight.dtype.itemsize > 1 else 5),
        interpret=interpret,
        name="split_matmul",
    )(x, weight, *scales, *([] if after is None else [after]))


def _hopper(x, weight, row_scale, scale, after, *, tiles, interpret):
    return hopper_kernel.multiply(x, weight, row_scale, scale, tiles=tiles, dtype=jnp.float32, interpret=interpret)


def hopper_tiles(rows: int, weight: Weight) -> Tiles | None:
    """Returns the tile sizes of the Hopper kernel for a product of `rows` rows; None if the Hopper kernel is not used.

    The Hopper kernel is used for weights of "fp8_dynamic" with 17 to 64 rows, because it is faster there.
    """
    multiprocessors = hopper_kernel.multiprocessors()
    if multiprocessors is None or not has_dynamic_activations(weight) or not FEW_ROWS < rows <= MOST_ROWS:
        return None
    out, inner = weight.shape
    return choose_tiles(rows, inner, out, FP8, multiprocessors, parts=2)


@functools.partial(jax.jit, static_argnames=("gate", "dtype", "implementation"))
def split_matmul(
    x: Inputs,
    weight: Weight,
    *,
    gate: Activation | None = None,
    after: Float[Array, "..."] | None = None,
    dtype: jnp.dtype | None = None,
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
        implementation: as in `paged_attention`. XLA computes a product with one partial sum or with more than 64 rows,
            unless the weight has group scales (`grouped_matmul`). The Hopper kernel computes some products of
            "fp8_dynamic" on a Hopper GPU (`hopper_tiles`). There a product of "int4" has as many partial sums as
            `packed_tiles` chooses.
    """
    if isinstance(weight, Shard):
        own_dtype = x.dtype if weight.by == "columns" and x.dtype == jnp.bfloat16 else dtype
        own = split_matmul(x, weight.weight, gate=gate, after=after, dtype=own_dtype, implementation=implementation)
        return join(own, weight, x.dtype)
    (out, inner), shape = weight.shape, x.shape[:-1]
    rows, width = math.prod(shape), 1 if isinstance(weight, Quantized) else 2
    parts = parts_of(rows, out, inner, x.dtype, width, quantize_output=has_dynamic_activations(weight))
    many = x.dtype if rows > MOST_ROWS and x.dtype == jnp.bfloat16 else None
    if has_group_scales(weight):
        if weight.kind == "int4" and LEAST_OUT <= out <= WIDEST_OUT:
            packed = packed_tiles(rows, weight.values.shape, weight.scale.shape[1], x.dtype)
            parts = packed.parts if packed else parts
        return matmul_grouped(x, weight, many, parts=parts, gate=gate, implementation=implementation)
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
    own = {"parts": parts, "dtype": dtype or jnp.float32}
    reference = functools.partial(_reference, **own)
    if tiles:
        kernel = functools.partial(_hopper, tiles=tiles)
        sums = hopper_kernel.choose_compiled(implementation, kernel, reference, *arguments)
    else:
        sums = dispatch(implementation, None, functools.partial(_pallas, **own), reference, *arguments)
    return sums.reshape(parts, *shape, out)


def _pieces_reference(x, weight, *, parts, dtype, first):
    (total, out, _), rows = weight.shape, len(x)
    pieces = total - first
    own = x.reshape(rows, pieces, parts // pieces, -1)
    weights = weight[first:].reshape(pieces, out, parts // pieces, -1)
    dims = (((3,), (3,)), ((1, 2), (0, 2)))
    return jax.lax.dot_general(own, weights, dims, preferred_element_type=dtype).reshape(parts, rows, out)


def _pieces_pallas(x, weight, *, parts, dtype, first, interpret):
    pieces, (_, out, width) = weight.shape[0] - first, weight.shape
    own = {"in_piece": parts // pieces, "first": first * out, "out": out}
    flat = weight.reshape(-1, width)
    return _pallas(x, flat, None, None, None, parts=parts, dtype=dtype, interpret=interpret, **own)


@functools.partial(jax.jit, static_argnames=("first", "implementation"))
def pieces_matmul(
    x: Float[Array, "*rows inner"],
    weight: Float[Array, "all out width"],
    *,
    first: int,
    implementation: Implementation = "auto",
) -> Float[Array, "parts *rows out"]:
    """Returns the product of `split_matmul` for a weight whose columns are in pieces, one after another in an array.

    The pieces are read where they are: a slice of the array's first axis, or of what a kernel reads, is not copied.

    Args:
        x: activations, whose columns are those of all pieces.
        weight: the pieces, behind other arrays of their shape.
        first: index of the first piece.
        implementation: as in `split_matmul`.
    """
    (total, out, width), shape = weight.shape, x.shape[:-1]
    rows, pieces = math.prod(shape), total - first
    flat, parts = x.reshape(rows, -1), parts_of(rows, out, pieces * width, x.dtype)
    dtype = x.dtype if rows > MOST_ROWS and x.dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    if pieces == 1 and (parts == 1 or rows > MOST_ROWS):
        return split_matmul(x, weight[first], implementation=implementation)
    if rows > MOST_ROWS or parts % pieces or width % (INNER_BYTES // weight.dtype.itemsize):
        sums = _pieces_reference(flat, weight, parts=pieces, dtype=dtype, first=first)
    else:
        kernel, reference = (
            functools.partial(run, parts=parts, dtype=dtype, first=first) for run in (_pieces_pallas, _pieces_reference)
        )
        sums = dispatch(implementation, None, kernel, reference, flat, weight)
    return sums.reshape(-1, *shape, out)
