"""The kernel that adds B of low-rank adapters to a product, where `low_rank_kernels` has multiplied the rows by A.

A program has a block of rows and a tile of columns. It adds the products with one table after another, each of which is
zero for the rows that chose another.
"""

import functools
import math
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.low_rank_kernels import (
    LEAST,
    TILES,
    chosen_tables,
    columns_of,
    table_sizes,
    tiled_modules,
)
from pallas_kernels.layers.partial_sums import PartialSums, split_scales, sum_f32
from pallas_kernels.layers.quantize_rows import Activation, activate

MOST_BYTES = 1 << 15  # bytes of a program's operands, which limit its tile
MOST_SHARED = 1 << 16  # bytes of the tiles of B whose loads are in flight
STAGES = 4  # most tables whose loads are in flight


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
    sizes,  # sizes of blocks and tables
    tile,  # columns of a tile of the result
    ends,  # end of each module's rows of the weight; (): every row has all columns of a table
    gate,  # activation function of the gate; None: the product has no gate
):
    """Computes a tile of columns, which are rows of one module of the weight, for the rows of a block."""
    (rows, _), width, places = out_ref.shape, inner_ref.shape[2], chosen_ref.shape[1]
    (block, rank, stride), index, tile_at = sizes, pl.program_id(0), pl.program_id(1) * tile
    columns = rank if ends else width  # of a table, which the rows of the weight have
    row = index * block + jnp.arange(block)
    is_row, column = row < rows, jnp.arange(max(pl.next_power_of_2(columns), LEAST))[None, :]
    table = pltriton.load(table_ref.at[row], mask=is_row, other=0)
    place = jnp.arange(pl.next_power_of_2(places))
    tables = jnp.sum(pltriton.load(chosen_ref.at[index, place], mask=place < places, other=0) > 0)

    def load_parts(ref, columns, mask):
        return [pltriton.load(ref.at[part, row[:, None], columns], mask=mask, other=0) for part in range(ref.shape[0])]

    def add_parts(start):
        """Returns the product, and for B the tile's rows of the weight, their columns of the first table, and z."""
        out = start + tile_at + jnp.arange(tile)
        module = sum((start + tile_at >= end).astype(jnp.int32) for end in ends[:-1])
        first = module * stride + column if columns == rank else column // rank * stride + column % rank
        is_inner = (table > 0)[:, None] & (column < columns)
        sums = load_parts(sums_ref, out[None, :], is_row[:, None])
        inner, total = sum_f32(load_parts(inner_ref, module * rank + column, is_inner)), sum_f32(sums)
        if scale_refs:
            total = total * pltriton.load(scale_refs[0].at[row], mask=is_row, other=0)[:, None]
            total = total * pltriton.load(scale_refs[1].at[out])[None, :]
        return total, (out, first, inner)

    starts = range(0, sums_ref.shape[2], out_ref.shape[1])  # one, or those of gate and up
    totals, operands = zip(*map(add_parts, starts), strict=True)

    def add_table(place, totals):
        chosen = pltriton.load(chosen_ref.at[index, place])
        is_chosen, mask = (table == chosen)[:, None], column < columns

        def add(total, out, first, inner):
            b = pltriton.load(b_ref.at[out[:, None], (chosen - 1) * rank + first], mask=mask, other=0)
            return total + pltriton.dot(jnp.where(is_chosen, inner, 0).astype(b.dtype), b, trans_b=True)

        return [add(total, *factors) for total, factors in zip(totals, operands, strict=True)]

    totals = jax.lax.fori_loop(0, tables, add_table, list(totals))
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
    rows, modules, chosen = math.prod(shape), tiled_modules(weight), chosen_tables(weight)
    sizes, halves = table_sizes(weight), 2 if gate else 1
    bytes_of_b = columns_of(weight) * weight.b.dtype.itemsize  # of a column of the result
    column_bytes = halves * (bytes_of_b + sizes.block * values.shape[0] * 4)
    tiles = [size for size in TILES if size * column_bytes <= MOST_BYTES] or TILES[-1:]
    tile = next(size for size in tiles if all(count % size == 0 for count in (out, *modules)))
    stages = max(1, min(STAGES, MOST_SHARED // (halves * tile * bytes_of_b)))
    result = pl.pallas_call(
        functools.partial(_sum_kernel, sizes=sizes, tile=tile, ends=tuple(accumulate(modules)), gate=gate),
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
