"""The kernels that add low-rank adapters to a product, in which a program reads the tables that its rows chose.

    z[t] = A_t x[t]            y[t] = sum_s sums[s, t] + B_t z[t]            t: the table that a row chose

A program has up to 32 rows. One of A multiplies all of them by one table, and stores the products of the rows that
chose it. One of B adds the products with one table after another, of which those of other rows are zeros.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense import split_kernel
from pallas_kernels.layers.partial_sums import PartialSums, split_scales, sum_f32
from pallas_kernels.layers.quantize_rows import Activation, activate

LEAST = 16  # the smallest side of a product on tensor cores, and rows of A of a program
MOST_BLOCK = 32  # most rows of a program
STEP = 128  # values of k per loop iteration of `inner_parts` where a row has `MOST_PARTS`
MOST_PARTS = 8  # most parts of the sum over k of `inner_parts`
MOST_INNER = 256  # most partial sums of a row of z of a module, which a program of B has in registers
TILES = 128, 64, 32  # columns of a tile of the result: the first of these that divides every module
MOST_BYTES = 1 << 15  # bytes of a program's operands, which limit its tile
MOST_SHARED = 1 << 16  # bytes of the tiles of B whose loads are in flight
STAGES = 4  # most tables whose loads are in flight


def block_of(rows: int) -> int:
    """Returns the number of rows of a program; a block of few has few tables where sequences have several rows."""
    return max(pl.next_power_of_2(rows), LEAST) if rows <= MOST_BLOCK else LEAST


def module_rank(weight: Adapted) -> int:
    """Returns the number of columns that a table has of each module, as a power of two of at least `LEAST`."""
    return max(pl.next_power_of_2(weight.width // max(len(weight.modules), 1)), LEAST)


def blocks_of_tables(rows: int, weight: Adapted) -> tuple[int, int]:
    """Returns the number of blocks of rows, and the most tables that the rows of a block can choose."""
    return math.ceil(rows / block_of(rows)), min(rows, block_of(rows), weight.stride // weight.rank)


def chosen_tables(weight: Adapted) -> Int[Array, "blocks places"]:
    """Returns the tables that the rows of each block chose, each table once, in order; 0: no more tables."""
    rows = weight.table.size
    blocks, places = blocks_of_tables(rows, weight)
    padding = blocks * min(block_of(rows), rows) - rows
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
    index: Array,
    part: Array,
    tile: Array,
    **sizes: int,
) -> None:
    """Multiplies the rows of a block by some rows of A of one table, over a part of k, in a program.

    Args:
        x_ref: [T, K].
        a_ref: [columns, K].
        table_ref: [T].
        chosen_ref: [blocks, places].
        inner_ref: output, partial sums [parts, T, width] float32; rows without an adapter are not written.
        index, part, tile: indices of the block and of its table, of the part of k, and of the rows of A.
        sizes: `inner` values of k per loop iteration, `steps` iterations per part, and `rank` of each module.
    """
    (rows, _), width, step, steps, rank = (
        x_ref.shape,
        inner_ref.shape[2],
        *(sizes[n] for n in ("inner", "steps", "rank")),
    )
    block, places = block_of(rows), chosen_ref.shape[1]
    chosen = pltriton.load(chosen_ref.at[index // places, index % places])
    row, column = index // places * block + jnp.arange(block), tile * LEAST + jnp.arange(LEAST)
    is_row, inside = row < rows, column < width
    row_of_a = column // rank * (a_ref.shape[0] * rank // width) + (chosen - 1) * rank + column % rank

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


def _inner_kernel(x_ref, a_ref, table_ref, chosen_ref, inner_ref, **sizes):
    """Runs `_multiply_inner` in one Pallas program."""
    index, part, tile = (pl.program_id(axis) for axis in range(3))
    _multiply_inner(x_ref, a_ref, table_ref, chosen_ref, inner_ref, index=index, part=part, tile=tile, **sizes)


def inner_parts(x: Array, weight: Adapted, *, interpret: bool) -> Float[Array, "parts rows width"]:
    """Returns z as partial sums, for x [rows, inner]; those of rows without an adapter are arbitrary."""
    (rows, inner), chosen = x.shape, chosen_tables(weight)
    most = min(MOST_PARTS, MOST_INNER // module_rank(weight))
    step = math.gcd(inner, STEP * min(MOST_PARTS // most, 4))
    parts = max(parts for parts in range(1, most + 1) if inner // step % parts == 0)
    return pl.pallas_call(
        functools.partial(_inner_kernel, inner=step, steps=inner // step // parts, rank=weight.rank),
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
    rank,  # columns of a table of each module
    **sizes,  # those of `split_kernel.multiply_tile`
):
    """Computes a tile of the weight's product in one Pallas program, or in the first programs a tile of z."""
    *_, sums_ref, inner_ref = refs
    index, part = pl.program_id(0), pl.program_id(1)

    @pl.when(index < programs)
    def multiply_inner():
        steps, count = {"inner": sizes["inner"], "steps": sizes["steps"]}, math.prod(chosen_ref.shape)
        at = {"index": index % count, "part": part, "tile": index // count, "rank": rank}
        _multiply_inner(x_ref, a_ref, table_ref, chosen_ref, inner_ref, **at, **steps)

    @pl.when(index >= programs)
    def multiply_weight():
        split_kernel.multiply_tile(x_ref, weight_ref, (), sums_ref, block=index - programs, part=part, **sizes)


def sizes_of_both(rows: int, weight: Adapted) -> split_kernel.SplitSizes | None:
    """Returns the sizes of the programs of `both_products`; None: the weight's product has a launch of its own.

    All programs must run at once, because those of A take as long as the others. With more rows, launches that run side
    by side are as fast or faster.
    """
    if not isinstance(weight.weight, jax.Array) or rows > LEAST:
        return None
    (out, inner), dtype = weight.weight.shape, weight.weight.dtype
    extra = math.prod(blocks_of_tables(rows, weight)) * math.ceil(weight.width / LEAST)
    sizes = split_kernel.kernel_sizes(rows, out, inner, dtype, dtype.itemsize, extra=extra)
    if sizes is None or sizes.parts * module_rank(weight) > MOST_INNER:
        return None
    return sizes if split_kernel.run_at_once(out // sizes.tile + extra, sizes) else None


def both_products(
    x: Array, weight: Adapted, after: Array | None, *, sizes: split_kernel.SplitSizes, interpret: bool
) -> tuple[Float[Array, "parts rows out"], Float[Array, "parts rows width"]]:
    """Returns partial sums of the weight's product and of z by one launch; the arguments are as above."""
    (rows, inner), out, parts, chosen = x.shape, weight.shape[0], sizes.parts, chosen_tables(weight)
    programs = chosen.size * math.ceil(weight.width / LEAST)
    static = {"rows": rows, "steps": inner // sizes.columns // parts, "tile": sizes.tile, "inner": sizes.columns}
    kernel = functools.partial(_both_kernel, programs=programs, rank=weight.rank, first=0, **static)
    sums, inner_sums = pl.pallas_call(
        kernel,
        grid=(programs + out // sizes.tile, parts),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, size), jnp.float32) for size in (out, weight.width)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="split_matmul_low_rank",
    )(x, weight.weight, weight.a, weight.table.reshape(rows), chosen, *([] if after is None else [after]))
    return sums, inner_sums


def _sum_kernel(
    # inputs
    sums_ref,  # partial sums of the weight's product [parts, T, N]; with a gate [parts, T, 2 N]
    inner_ref,  # partial sums [parts, T, width]
    b_ref,  # [N, columns]; with a gate [2 N, columns]
    table_ref,  # [T]
    chosen_ref,  # [blocks, places]
    scale_refs,  # float32 scales of the sums, of rows [T] and of columns; empty: no scales
    # outputs
    out_ref,  # [T, N]
    # static parameters
    *,
    tile,  # columns of a tile of the result
    rank,  # columns of a table of each module
    ends,  # end of each module's rows of the weight; (): every row has all columns of a table
    gate,  # activation function of the gate; None: the product has no gate
):
    """Computes a tile of columns for the rows of a block, of which the weight's rows are of one module."""
    (rows, _), width, places = out_ref.shape, inner_ref.shape[2], chosen_ref.shape[1]
    block, tile_at, stride = pl.program_id(0), pl.program_id(1) * tile, b_ref.shape[1] * rank // width
    columns = rank if ends else width  # of a table, which the rows of the weight have
    row = block * block_of(rows) + jnp.arange(block_of(rows))
    is_row, column = row < rows, jnp.arange(max(pl.next_power_of_2(columns), LEAST))[None, :]
    table = pltriton.load(table_ref.at[row], mask=is_row, other=0)
    place = jnp.arange(pl.next_power_of_2(places))
    tables = jnp.sum(pltriton.load(chosen_ref.at[block, place], mask=place < places, other=0) > 0)

    def load_parts(ref, columns, mask):
        return [pltriton.load(ref.at[part, row[:, None], columns], mask=mask, other=0) for part in range(ref.shape[0])]

    def add_parts(start):
        """Returns the tile's rows of the weight, their columns of the first table, z of these, and the product."""
        out = start + tile_at + jnp.arange(tile)
        module = sum((start + tile_at >= end).astype(jnp.int32) for end in ends[:-1])
        first = module * stride + column if columns == rank else column // rank * stride + column % rank
        is_inner = (table > 0)[:, None] & (column < columns)
        sums = load_parts(sums_ref, out[None, :], is_row[:, None])
        inner, total = sum_f32(load_parts(inner_ref, module * rank + column, is_inner)), sum_f32(sums)
        if scale_refs:
            total = total * pltriton.load(scale_refs[0].at[row], mask=is_row, other=0)[:, None]
            total = total * pltriton.load(scale_refs[1].at[out])[None, :]
        return out, first, inner, total

    pieces = [add_parts(start) for start in range(0, sums_ref.shape[2], out_ref.shape[1])]  # one, or gate and up

    def add_table(index, totals):
        chosen = pltriton.load(chosen_ref.at[block, index])
        is_chosen, mask = (table == chosen)[:, None], column < columns

        def add(total, out, first, inner):
            b = pltriton.load(b_ref.at[out[:, None], (chosen - 1) * rank + first], mask=mask, other=0)
            return total + pltriton.dot(jnp.where(is_chosen, inner, 0).astype(b.dtype), b, trans_b=True)

        return [add(total, *piece) for total, piece in zip(totals, pieces, strict=True)]

    *pieces, totals = *[piece[:3] for piece in pieces], [total for *_, total in pieces]
    totals = jax.lax.fori_loop(0, tables, add_table, totals)
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
    rows, modules, chosen = math.prod(shape), weight.modules or (out,), chosen_tables(weight)
    width, pieces = module_rank(weight) * weight.b.dtype.itemsize, 2 if gate else 1
    column = (width + block_of(rows) * values.shape[0] * 4) * pieces
    tiles = [size for size in TILES if size * column <= MOST_BYTES] or TILES[-1:]
    tile = next((size for size in tiles if all(end % size == 0 for end in (out, *modules))), None)
    ends = tuple(sum(modules[: index + 1]) for index in range(len(modules))) if tile and weight.modules else ()
    tile = tile or TILES[-1]
    stages = max(1, min(STAGES, MOST_SHARED // (pieces * tile * width)))
    result = pl.pallas_call(
        functools.partial(_sum_kernel, tile=tile, rank=weight.rank, ends=ends, gate=gate),
        grid=(chosen.shape[0], out // tile),
        out_shape=jax.ShapeDtypeStruct((rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="low_rank_sum",
    )(
        *(values.reshape(-1, rows, weight.shape[0]), inner, weight.b, weight.table.reshape(rows), chosen),
        [s.ravel() for s in scales],
    )
    return result.reshape(*shape, out)
