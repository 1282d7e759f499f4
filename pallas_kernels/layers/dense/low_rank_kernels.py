"""The kernels that multiply rows by A of low-rank adapters, alone or beside the weight's product.

    z[t] = A_t x[t]            y[t] = sum_s sums[s, t] + B_t z[t]            t: the table that a row chose

A program has up to 32 rows. It multiplies all of them by one of the tables that they chose, and stores the products of
the rows that chose this one. `low_rank_sum` has the kernel of B.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense import split_kernel

LEAST = 16  # the smallest side of a product on tensor cores, and rows of A of a program
MOST_BLOCK = 32  # most rows of a block
STEP, LEAST_STEP = 128, 64  # values of k per loop iteration of `inner_parts`: of `MOST_PARTS`, and the least
MOST_PARTS = 8  # most parts of the sum over k of `inner_parts`
MOST_VALUES = 1 << 12  # most values of z of a module in a program of B with more than `LEAST` rows
MOST_INNER = 256  # most partial sums of a row of z of a module, which a program of B has in registers
TILES = 128, 64, 32  # columns of a tile of the result: one of these that divides every module


class TableSizes(NamedTuple):
    """The sizes that the kernels of a weight's adapters share."""

    block: int  # rows of a program
    rank: int  # columns of a table of each module
    stride: int  # columns of all tables of a module


def tiled_modules(weight: Adapted) -> tuple[int, ...]:
    """Returns the rows of each module of a weight; (): not known, or no tile divides each of them."""
    return weight.modules if all(rows % TILES[-1] == 0 for rows in weight.modules) else ()


def columns_of(weight: Adapted) -> int:
    """Returns the number of columns of a table that a program of B has.

    They are those of one module, or of all if `tiled_modules` is (). The number is the next power of two, and at least
    `LEAST`.
    """
    return max(pl.next_power_of_2(weight.rank if tiled_modules(weight) else weight.width), LEAST)


def table_sizes(weight: Adapted) -> TableSizes:
    """Returns the sizes for the rows of a weight.

    Up to 32 rows are one block, so that a table is read once. More rows are those of sequences with several rows, of
    which a small block has few, and so few tables.
    """
    rows = weight.table.size
    is_one_block = rows <= MOST_BLOCK and columns_of(weight) * MOST_BLOCK <= MOST_VALUES
    block = max(pl.next_power_of_2(rows), LEAST) if is_one_block else LEAST
    return TableSizes(block, weight.rank, weight.stride)


def blocks_of_tables(weight: Adapted) -> tuple[int, int]:
    """Returns the number of blocks of rows, and the most tables that the rows of a block can choose."""
    rows, block = weight.table.size, table_sizes(weight).block
    return math.ceil(rows / block), min(rows, block, weight.tables)


def chosen_tables(weight: Adapted) -> Int[Array, "blocks places"]:
    """Returns the tables that the rows of each block chose, each table once, in order; 0: no more tables."""
    rows, (blocks, places) = weight.table.size, blocks_of_tables(weight)
    padding = blocks * min(table_sizes(weight).block, rows) - rows
    table = jnp.pad(weight.table.reshape(rows), (0, padding)).reshape(blocks, -1)
    row = jnp.arange(table.shape[1])
    earlier = (table[:, :, None] == table[:, None]) & (row < row[:, None])
    is_first = (table > 0) & ~earlier.any(2)
    place = (is_first[:, None] & (table[:, None] < table[:, :, None])).sum(2)
    is_at = is_first[:, None] & (place[:, None] == jnp.arange(places)[:, None])
    return jnp.where(is_at, table[:, None], 0).max(2).astype(jnp.int32)


def _multiply_inner(
    x_ref: Any,
    a_ref: Any,
    table_ref: Any,
    chosen_ref: Any,
    inner_ref: Any,
    *,
    sizes: TableSizes,
    index: Array,
    part: Array,
    tile: Array,
    step: int,
    steps: int,
) -> None:
    """Multiplies the rows of a block by some rows of A of one table, over a part of k, in a program.

    Args:
        x_ref: [T, K].
        a_ref: [columns, K].
        table_ref: [T].
        chosen_ref: [blocks, places].
        inner_ref: output, partial sums [parts, T, width] float32; rows without an adapter are not written.
        sizes: sizes of blocks and tables.
        index, part, tile: indices of the block and of its table, of the part of k, and of the rows of A.
        step: values of k per loop iteration.
        steps: loop iterations per part.
    """
    (rows, _), width, places, (block, rank, stride) = x_ref.shape, inner_ref.shape[2], chosen_ref.shape[1], sizes
    chosen = pltriton.load(chosen_ref.at[index // places, index % places])
    row, column = index // places * block + jnp.arange(block), tile * LEAST + jnp.arange(LEAST)
    is_row, inside = row < rows, column < width
    row_of_a = column // rank * stride + (chosen - 1) * rank + column % rank

    @pl.when(chosen > 0)
    def multiply():
        def add(at, product):
            k = (part * steps + at) * step + jnp.arange(step)[None, :]
            x = pltriton.load(x_ref.at[row[:, None], k], mask=is_row[:, None], other=0)
            a = pltriton.load(a_ref.at[row_of_a[:, None], k], mask=inside[:, None], other=0)
            return product + pltriton.dot(x, a, trans_b=True)

        product = jax.lax.fori_loop(0, steps, add, jnp.zeros((block, LEAST), jnp.float32))
        is_chosen = pltriton.load(table_ref.at[row], mask=is_row, other=0) == chosen
        mask = is_chosen[:, None] & inside[None, :]
        pltriton.store(inner_ref.at[part, row[:, None], column[None, :]], product, mask=mask)


def _inner_kernel(x_ref, a_ref, table_ref, chosen_ref, inner_ref, **static):
    """Runs `_multiply_inner` in one Pallas program."""
    index, part, tile = (pl.program_id(axis) for axis in range(3))
    _multiply_inner(x_ref, a_ref, table_ref, chosen_ref, inner_ref, index=index, part=part, tile=tile, **static)


def _step_and_parts(inner: int, weight: Adapted) -> tuple[int, int]:
    """Returns the values of k per loop iteration, and the number of parts; the more parts, the shorter a program."""
    most = min(MOST_PARTS, MOST_INNER // columns_of(weight))
    widest = STEP * min(MOST_PARTS // most, 4)  # fewer parts have longer iterations
    steps = [step for step in (widest >> i for i in range(4)) if step >= LEAST_STEP and inner % step == 0]

    def parts(step: int) -> int:
        return max(count for count in range(1, most + 1) if inner // step % count == 0)

    step = max(steps, key=parts)
    return step, parts(step)


def inner_parts(x: Array, weight: Adapted, *, interpret: bool) -> Float[Array, "parts rows width"]:
    """Returns z as partial sums, for x [rows, inner]; those of rows without an adapter are arbitrary."""
    (rows, inner), chosen, (step, parts) = x.shape, chosen_tables(weight), _step_and_parts(x.shape[1], weight)
    steps = inner // step // parts
    return pl.pallas_call(
        functools.partial(_inner_kernel, sizes=table_sizes(weight), step=step, steps=steps),
        grid=(chosen.size, parts, math.ceil(weight.width / LEAST)),
        out_shape=jax.ShapeDtypeStruct((parts, rows, weight.width), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3 if step <= STEP else 2),
        interpret=interpret,
        name="low_rank_inner",
    )(x, weight.a, weight.table.reshape(rows), chosen)


def _both_kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [N, K]
    a_ref,  # [columns, K]
    table_ref,  # [T]
    chosen_ref,  # [blocks, places]
    *refs,  # `after`, which is not read, if it was passed; outputs: sums_ref [parts, T, N] and inner_ref as above
    # static parameters
    programs,  # programs of A in each part of k
    tables,  # sizes of blocks and tables
    **sizes,  # those of `split_kernel.multiply_tile`
):
    """Computes a tile of the weight's product in one Pallas program, or in the first programs a tile of z."""
    *_, sums_ref, inner_ref = refs
    index, part = pl.program_id(0), pl.program_id(1)

    @pl.when(index < programs)
    def multiply_inner():
        refs, count = (x_ref, a_ref, table_ref, chosen_ref, inner_ref), math.prod(chosen_ref.shape)
        steps = {"step": sizes["inner"], "steps": sizes["steps"]}
        _multiply_inner(*refs, sizes=tables, index=index % count, part=part, tile=index // count, **steps)

    @pl.when(index >= programs)
    def multiply_weight():
        split_kernel.multiply_tile(x_ref, weight_ref, (), sums_ref, block=index - programs, part=part, **sizes)


def sizes_of_both(weight: Adapted) -> split_kernel.SplitSizes | None:
    """Returns the sizes of the programs of `both_products`; None: the weight's product has a launch of its own.

    All programs must run at once, because those of A take as long as the others. With more rows, launches that run side
    by side are as fast or faster.
    """
    rows = weight.table.size
    if not isinstance(weight.weight, jax.Array) or rows > split_kernel.FEW_ROWS:
        return None
    (out, inner), dtype = weight.weight.shape, weight.weight.dtype
    extra = math.prod(blocks_of_tables(weight)) * math.ceil(weight.width / LEAST)
    sizes = split_kernel.kernel_sizes(rows, out, inner, dtype, dtype.itemsize, extra=extra)
    if sizes is None or sizes.parts * columns_of(weight) > MOST_INNER:
        return None
    return sizes if split_kernel.run_at_once(out // sizes.tile + extra, sizes) else None


def both_products(
    x: Array, weight: Adapted, after: Array | None, *, sizes: split_kernel.SplitSizes, interpret: bool
) -> tuple[Float[Array, "parts rows out"], Float[Array, "parts rows width"]]:
    """Returns partial sums of the weight's product and of z by one launch.

    Args:
        x: activations [rows, inner].
        weight: the weight.
        after: an array that the kernel waits for but does not read, or None.
        sizes: sizes of the programs, those of `sizes_of_both`.
        interpret: whether the kernel is interpreted.
    """
    (rows, inner), out, parts, chosen = x.shape, weight.shape[0], sizes.parts, chosen_tables(weight)
    programs = chosen.size * math.ceil(weight.width / LEAST)
    static = {"rows": rows, "steps": inner // sizes.columns // parts, "tile": sizes.tile, "inner": sizes.columns}
    kernel = functools.partial(_both_kernel, programs=programs, tables=table_sizes(weight), first=0, **static)
    sums, inner_sums = pl.pallas_call(
        kernel,
        grid=(programs + out // sizes.tile, parts),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, size), jnp.float32) for size in (out, weight.width)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="split_matmul_low_rank",
    )(x, weight.weight, weight.a, weight.table.reshape(rows), chosen, *([] if after is None else [after]))
    return sums, inner_sums
