"""The kernel of `split_matmul`, for weights of one or two bytes per value, and into how many parts it divides k."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from pallas_kernels.layers import hopper
from pallas_kernels.layers.partial_sums import Factors

DTYPES = jnp.bfloat16, jnp.float16  # of x
MOST_ROWS = 64  # most rows that the kernel supports; with more rows, XLA computes each partial sum
OUT_TILE = 128  # rows and columns of an output tile of XLA's product
TILES = 132  # output tiles that keep the GPU busy, and programs, one per multiprocessor
FEW_ROWS = 16  # smallest side of a product on tensor cores
LEAST_OUT, LEAST_INNER = 1024, 2048  # a smaller weight is read before a second kernel has started
WIDEST_OUT = 16384  # XLA multiplies by wider weights
INNER_BYTES = 128  # bytes of a weight's row that a loop iteration loads, unless its sizes are `LONG`
NARROW_OUT = 4096  # up to this output width, four parts of k are faster with other sizes; above, two parts are
LEAST_PROGRAMS = 112  # from this number of programs on, no more parts of k are needed to keep the GPU busy
LEAST_UNDIVIDED = 192  # from this number of output tiles on, a sum over all of k is faster than two parts
TWO_PROGRAMS = 32  # most rows at which a Hopper multiprocessor has shared memory for two programs of four stages
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


# With weights of two bytes; four stages if all programs run at once. Of 99 KiB of shared memory, which compute
# capability 8.9 has, four stages take 96 at 64 rows.
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
    if rows <= MOST_ROWS:
        return sizes.parts if (sizes := kernel_sizes(rows, out, inner, dtype, weight_bytes)) else 1
    if dtype not in DTYPES or out > WIDEST_OUT:
        return 1
    tiles = math.ceil(rows / OUT_TILE) * math.ceil(out / OUT_TILE)
    if tiles >= TILES or not (weight_bytes == 2 or quantize_output):
        return 1
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


def kernel_sizes(
    rows: int, out: int, inner: int, dtype: jnp.dtype, weight_bytes: int, *, extra: int = 0, copied: bool = False
) -> SplitSizes | None:
    """Returns the sizes of the kernel's programs; None if XLA multiplies.

    The arguments are those of `parts_of`, the number of `extra` programs in each part of k, and whether XLA would copy
    the weight, so that fewer parts of k than are fastest take less time.
    """
    if rows > MOST_ROWS or dtype not in DTYPES or not LEAST_OUT <= out <= WIDEST_OUT or inner < LEAST_INNER:
        return None
    if weight_bytes == 2 and out % LONG.tile == 0:
        for parts in (1, 2, 4):
            programs = out // LONG.tile * parts
            least = LEAST_UNDIVIDED if parts == 1 else LEAST_PROGRAMS
            if programs >= least and inner % (LONG.columns * parts) == 0:
                stages = 4 if programs + extra * parts <= _most_programs(rows) else 3
                return LONG._replace(parts=parts, stages=stages)
    tile, columns = _out_tile(rows, out), INNER_BYTES // weight_bytes
    if out % tile or inner % columns:
        return None
    # With weights of one byte, an iteration loads twice as many columns of x: six stages exceed the 99 KiB of shared
    # memory of compute capability 8.9.
    steps, stages = inner // columns, 6 if weight_bytes > 1 else 5
    wanted = [*range(4 if out <= NARROW_OUT else 2, MOST_PARTS), *(range(2, 4) if copied else ())]
    return next((SplitSizes(parts, tile, columns, stages) for parts in wanted if steps % parts == 0), None)


def _most_programs(rows: int) -> int:
    """Returns the number of programs with four stages that the GPU runs at once; only Hopper GPUs were timed."""
    count = hopper.multiprocessors()
    return TILES if count is None else count * (2 if rows <= TWO_PROGRAMS else 1)


def run_at_once(blocks: int, sizes: SplitSizes) -> bool:
    """Returns whether the GPU runs a number of programs in each part of k at once, two on a multiprocessor."""
    return blocks * sizes.parts <= 2 * (hopper.multiprocessors() or TILES)


def _out_tile(rows: int, out: int) -> int:
    """Returns the number of columns of the kernel's output tile for a number of rows and of columns in all."""
    return 128 if rows <= FEW_ROWS and out % 128 == 0 else 64


def reference(factors, after, *, parts, dtype, first=0):
    """Computes what `multiply` does, by XLA."""
    x, weight, _, scale = factors
    pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight[first:].astype(x.dtype)))
    dims = (((2,), (2,)), ((1,), (1,)))
    unscaled = dtype if scale is None else jnp.float32
    sums = jax.lax.dot_general(pieces, weights, dims, preferred_element_type=unscaled)
    return factors.scaled(sums).astype(dtype)


def _kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [first + N, K], one or two bytes per value
    *refs,  # float32 scales: none, of the columns [N], or of the rows [T] and the columns; then `after`, which is not
    # read, if it was passed; output: parts_ref [parts, T, N]
    # static parameters
    scales,  # number of scale arrays
    **sizes,  # rows: T; steps: loop iterations per part of k; tile: columns of an output tile; inner: values of k per
    # iteration; first: first row of the weight that is multiplied
):
    """Computes one output tile, summed over one part of k, in one Pallas program.

    The weight is the first operand of the tensor-core product, because the first operand can have more rows than the
    second.
    """
    *scale_refs, parts_ref = refs[:scales] + refs[-1:]
    block, part = pl.program_id(0), pl.program_id(1)
    multiply_tile(x_ref, weight_ref, scale_refs, parts_ref, block=block, part=part, **sizes)


def multiply_tile(
    x_ref: Any,
    weight_ref: Any,
    scale_refs: Sequence[Any],
    parts_ref: Any,
    *,
    block: Array,
    part: Array,
    rows: int,
    steps: int,
    tile: int,
    inner: int,
    first: int,
) -> None:
    """Computes one output tile over one part of k; the arguments are those of `_kernel`, and the program's indices."""
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


def multiply(
    factors: Factors, after: Array | None, *, sizes: SplitSizes, dtype: jnp.dtype, first: int, interpret: bool
) -> Array:
    """Runs the kernel, and returns partial sums [parts, rows, out].

    Args:
        factors: activations [rows, inner], weight [first + out, inner], and their scales.
        after: an array that the kernel waits for but does not read, or None.
        sizes: sizes of the programs, those of `kernel_sizes`.
        dtype: dtype of the partial sums.
        first: first of the weight's rows that are multiplied.
        interpret: whether the kernel is interpreted.
    """
    x, weight, *both = factors
    (rows, inner), out = x.shape, weight.shape[0] - first
    scales = [array for array in both if array is not None]
    static = {"rows": rows, "steps": inner // sizes.columns // sizes.parts, "tile": sizes.tile, "inner": sizes.columns}
    return pl.pallas_call(
        functools.partial(_kernel, scales=len(scales), first=first, **static),
        grid=(out // sizes.tile, sizes.parts),
        out_shape=jax.ShapeDtypeStruct((sizes.parts, rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="split_matmul",
    )(x, weight, *scales, *([] if after is None else [after]))
