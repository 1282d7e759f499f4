"""The kernels that add low-rank adapters to a product, in which a program reads the tables that its rows chose.

    z[t] = A_t x[t]            y[t] = sum_s sums[s, t] + B_t z[t]            t: the table that a row chose

A program has up to 16 rows that chose the same table, in any places (`row_blocks`), so that it reads this table once.
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
from pallas_kernels.layers.partial_sums import PartialSums, split_scales, sum_f32
from pallas_kernels.layers.quantize_rows import Activation, activate

BLOCK = 16  # rows of a program, the smallest side of a product on tensor cores
COLUMNS = 16  # rows of A of a program
STEP = 512  # most values of k per loop iteration of `inner_parts`
MOST_PARTS = 16  # most parts of the sum over k of `inner_parts`
TILES = 128, 64  # columns of a tile of the result: the first of these that divides every module
WIDEST_GATED = 128  # with more columns of a table, gate and up in a tile of 128 exceed the registers


class RowBlocks(NamedTuple):
    """Blocks of up to `BLOCK` rows that chose the same table."""

    rows: Int[Array, "blocks block"]  # numbers of the rows; the number of all rows where a block has fewer
    tables: Int[Array, " blocks"]  # table that the rows chose, 0: none; -1: there are no rows


def most_blocks(rows: int, weight: Adapted) -> int:
    """Returns the largest number of blocks of a number of rows."""
    chosen = min(rows, weight.a.shape[0] // weight.width + 1)
    return chosen + (rows - chosen) // BLOCK


def row_blocks(weight: Adapted) -> RowBlocks:
    """Returns the rows of a weight's `table` in blocks, which are in the order of the tables."""
    table = weight.table.reshape(-1)
    rows, blocks = len(table), most_blocks(len(table), weight)
    row = jnp.arange(rows)
    before = ((table[:, None] == table) & (row < row[:, None])).sum(1)  # rows of the same table
    is_first = before % BLOCK == 0
    block = ((table < table[:, None]) & is_first).sum(1) + before // BLOCK
    place = block * BLOCK + before % BLOCK
    row_of = jnp.where(place == jnp.arange(blocks * BLOCK)[:, None], row, rows).min(1)
    tables = jnp.where(block == jnp.arange(blocks)[:, None], table, -1).max(1)
    return RowBlocks(row_of.reshape(blocks, BLOCK).astype(jnp.int32), tables.astype(jnp.int32))


def _multiply_inner(
    x_ref: Any, a_ref: Any, blocks: Any, inner_ref: Any, *, block: Array, part: Array, tile: Array, **sizes: int
) -> None:
    """Multiplies the rows of a block by some rows of A of their table, over a part of k, in a program.

    Args:
        x_ref: [T, K].
        a_ref: [columns, K].
        blocks: `RowBlocks` of references.
        inner_ref: output, partial sums [parts, T, width] float32; rows without an adapter are not written.
        block, part, tile: indices of the block, of the part of k, and of the rows of A.
        sizes: `inner` values of k per loop iteration, and `steps` iterations per part.
    """
    width, step, steps = inner_ref.shape[2], sizes["inner"], sizes["steps"]
    row, chosen = pltriton.load(blocks.rows.at[block, jnp.arange(BLOCK)]), pltriton.load(blocks.tables.at[block])
    is_row, column = row < x_ref.shape[0], tile * COLUMNS + jnp.arange(COLUMNS)
    inside = column < width

    @pl.when(chosen > 0)
    def multiply():
        def add(index, product):
            k = (part * steps + index) * step + jnp.arange(step)[None, :]
            x = pltriton.load(x_ref.at[row[:, None], k], mask=is_row[:, None], other=0)
            a = pltriton.load(a_ref.at[(chosen - 1) * width + column[:, None], k], mask=inside[:, None], other=0)
            return product + pltriton.dot(x, a, trans_b=True)

        product = jax.lax.fori_loop(0, steps, add, jnp.zeros((BLOCK, COLUMNS), jnp.float32))
        mask = is_row[:, None] & inside[None, :]
        pltriton.store(inner_ref.at[part, row[:, None], column[None, :]], product, mask=mask)


def _inner_kernel(x_ref, a_ref, blocks, inner_ref, **sizes):
    """Runs `_multiply_inner` in one Pallas program."""
    block, part, tile = (pl.program_id(axis) for axis in range(3))
    _multiply_inner(x_ref, a_ref, blocks, inner_ref, block=block, part=part, tile=tile, **sizes)


def inner_parts(x: Array, weight: Adapted, *, interpret: bool) -> Float[Array, "parts rows width"]:
    """Returns z as partial sums, for x [rows, inner]; those of rows without an adapter are arbitrary."""
    (rows, inner), blocks = x.shape, row_blocks(weight)
    step = math.gcd(inner, STEP)
    parts = max(parts for parts in range(1, MOST_PARTS + 1) if inner // step % parts == 0)
    return pl.pallas_call(
        functools.partial(_inner_kernel, inner=step, steps=inner // step // parts),
        grid=(len(blocks.tables), parts, math.ceil(weight.width / COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((parts, rows, weight.width), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="low_rank_inner",
    )(x, weight.a, blocks)


def _both_kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [N, K]
    a_ref,  # [columns, K]
    blocks,  # blocks of rows, as references
    *refs,  # `after`, which is not read, if it was passed; outputs: sums_ref [parts, T, N] and inner_ref as above
    # static parameters
    programs,  # programs of A in each part of k
    **sizes,  # those of `split_kernel.multiply_tile`
):
    """Computes a tile of the weight's product in one Pallas program, or in the first programs a tile of z."""
    *_, sums_ref, inner_ref = refs
    index, part = pl.program_id(0), pl.program_id(1)

    @pl.when(index < programs)
    def multiply_inner():
        steps, count = {"inner": sizes["inner"], "steps": sizes["steps"]}, blocks.tables.shape[0]
        at = {"block": index % count, "part": part, "tile": index // count}
        _multiply_inner(x_ref, a_ref, blocks, inner_ref, **at, **steps)

    @pl.when(index >= programs)
    def multiply_weight():
        split_kernel.multiply_tile(x_ref, weight_ref, (), sums_ref, block=index - programs, part=part, **sizes)


def sizes_of_both(rows: int, weight: Adapted) -> split_kernel.SplitSizes | None:
    """Returns the sizes of the programs of `both_products`; None: the weight's product has a launch of its own.

    All programs must run at once, because those of A take as long as the others.
    """
    if not isinstance(weight.weight, jax.Array):
        return None
    (out, inner), dtype = weight.weight.shape, weight.weight.dtype
    extra = most_blocks(rows, weight) * math.ceil(weight.width / COLUMNS)
    sizes = split_kernel.kernel_sizes(rows, out, inner, dtype, dtype.itemsize, extra=extra)
    return sizes if sizes and split_kernel.run_at_once(out // sizes.tile + extra, sizes) else None


def both_products(
    x: Array, weight: Adapted, after: Array | None, *, sizes: split_kernel.SplitSizes, interpret: bool
) -> tuple[Float[Array, "parts rows out"], Float[Array, "parts rows width"]]:
    """Returns partial sums of the weight's product and of z by one launch; the arguments are as above."""
    (rows, inner), out, parts = x.shape, weight.shape[0], sizes.parts
    blocks = row_blocks(weight)
    programs = len(blocks.tables) * math.ceil(weight.width / COLUMNS)
    static = {"rows": rows, "steps": inner // sizes.columns // parts, "tile": sizes.tile, "inner": sizes.columns}
    kernel = functools.partial(_both_kernel, programs=programs, first=0, **static)
    sums, inner_sums = pl.pallas_call(
        kernel,
        grid=(programs + out // sizes.tile, parts),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, size), jnp.float32) for size in (out, weight.width)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="split_matmul_low_rank",
    )(x, weight.weight, weight.a, blocks, *([] if after is None else [after]))
    return sums, inner_sums


def _sum_kernel(
    # inputs
    sums_ref,  # partial sums of the weight's product [parts, T, N]; with a gate [parts, T, 2 N]
    inner_ref,  # partial sums [parts, T, width]
    b_ref,  # [N, columns]; with a gate [2 N, columns]
    blocks,  # blocks of rows, as references
    scale_refs,  # float32 scales of the sums, of rows [T] and of columns; empty: no scales
    # outputs
    out_ref,  # [T, N]
    # static parameters
    *,
    tile,  # columns of a tile of the result
    ends,  # end of each module's rows of the weight; (): every row has all columns of a table
    gate,  # activation function of the gate; None: the product has no gate
):
    """Computes a tile of columns for the rows of a block, of which the weight's rows are of one module."""
    width, block, tile_at = inner_ref.shape[2], pl.program_id(0), pl.program_id(1) * tile
    rank = width // max(len(ends), 1)
    row, chosen = pltriton.load(blocks.rows.at[block, jnp.arange(BLOCK)]), pltriton.load(blocks.tables.at[block])
    is_row, has_adapter = row < out_ref.shape[0], chosen > 0
    column = jnp.arange(max(pl.next_power_of_2(rank), BLOCK))[None, :]

    def load_parts(ref, columns, mask):
        return [pltriton.load(ref.at[part, row[:, None], columns], mask=mask, other=0) for part in range(ref.shape[0])]

    def operands(start):
        """Returns a tile of the weight's product, z of its module, and B."""
        out = start + tile_at + jnp.arange(tile)
        at = sum((start + tile_at >= end).astype(jnp.int32) for end in ends[:-1]) * rank + column
        of_table = has_adapter & (column < rank)
        total = sum_f32(load_parts(sums_ref, out[None, :], is_row[:, None]))
        inner = sum_f32(load_parts(inner_ref, at, is_row[:, None] & of_table))
        if scale_refs:
            total = total * pltriton.load(scale_refs[0].at[row], mask=is_row, other=0)[:, None]
            total = total * pltriton.load(scale_refs[1].at[out])[None, :]
        b = pltriton.load(b_ref.at[out[:, None], (chosen - 1) * width + at], mask=of_table, other=0)
        return total, inner.astype(b.dtype), b

    @pl.when(chosen >= 0)
    def add():
        # All loads before the first product, whose barriers would hold up later ones.
        pieces = [operands(start) for start in range(0, sums_ref.shape[2], out_ref.shape[1])]  # one, or gate and up
        totals = [total + pltriton.dot(inner, b, trans_b=True) for total, inner, b in pieces]
        total = activate(totals[0], gate) * totals[1] if gate else totals[0]
        at = out_ref.at[row[:, None], tile_at + jnp.arange(tile)[None, :]]
        pltriton.store(at, total.astype(out_ref.dtype), mask=is_row[:, None])


def sum_products(
    sums: PartialSums,
    inner: Float[Array, "inner_parts flat_rows width"],
    weight: Adapted,
    dtype: jnp.dtype,
    *,
    gate: Activation | None,
    interpret: bool,
) -> Float[Array, "*shape columns"]:
    """Returns y, or activation(gate) * up of a y that holds both.

    Args:
        sums: partial sums of the weight's product [parts, *rows, out], with scales or none.
        inner: partial sums of z.
        weight: the weight.
        dtype: dtype of the result.
        gate: activation function of the gate; None: the product has no gate.
        interpret: whether the kernel is interpreted.
    """
    shape, out, (values, scales) = weight.table.shape, weight.shape[0] // (2 if gate else 1), split_scales(sums)
    rows, modules, blocks = math.prod(shape), weight.modules or (out,), row_blocks(weight)
    tiles = TILES[1:] if gate and weight.width // len(modules) > WIDEST_GATED else TILES
    tile = next((size for size in tiles if all(end % size == 0 for end in (out, *modules))), None)
    ends = tuple(sum(modules[: index + 1]) for index in range(len(modules))) if tile and weight.modules else ()
    tile = tile or TILES[-1]
    result = pl.pallas_call(
        functools.partial(_sum_kernel, tile=tile, ends=ends, gate=gate),
        grid=(len(blocks.tables), out // tile),
        out_shape=jax.ShapeDtypeStruct((rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="low_rank_sum",
    )(
        *(values.reshape(-1, rows, weight.shape[0]), inner, weight.b, blocks),
        [s.ravel() for s in scales],
    )
    return result.reshape(*shape, out)
