"""The kernels that add low-rank adapters to a product, in which a program reads the tables that its rows chose.

    z[t] = A_t x[t]            y[t] = sum_s sums[s, t] + B_t z[t]            t: the table that a row chose

A program has up to 16 rows of one sequence. It does its work once for each table that these rows chose, which is one
for most programs, and masks the results of the other rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense import split_kernel
from pallas_kernels.layers.partial_sums import PartialSums, split_scales, sum_f32
from pallas_kernels.layers.quantize_rows import Activation, activate

T = TypeVar("T")
BLOCK = 16  # rows of a program, the smallest side of a product on tensor cores
COLUMNS = 16  # rows of A of a program
STEP = 512  # most values of k per loop iteration of `inner_parts`
MOST_PARTS = 16  # most parts of the sum over k of `inner_parts`
TILES = 128, 64  # columns of a tile of the result: the first of these that divides every module
WIDEST_GATED = 128  # with more columns of a table, gate and up in a tile of 128 exceed the registers


def row_blocks(rows: int, tokens: int) -> int:
    """Returns the number of blocks of up to `BLOCK` rows, of one sequence each, for sequences of `tokens` rows."""
    return rows // tokens * math.ceil(tokens / BLOCK)


def _rows(block: Array, tokens: int) -> tuple[Int[Array, " rows"], Array]:
    """Returns the rows of a block, and whether they exist."""
    blocks = math.ceil(tokens / BLOCK)
    token = block % blocks * BLOCK + jnp.arange(BLOCK)
    return block // blocks * tokens + token, token < tokens


def _for_each_table(table: Int[Array, " rows"], add: Callable[[Array, T], T], total: T) -> T:
    """Returns `total` after `total = add(table, total)` for each table that rows chose, inside of a kernel."""

    def next_table(carry):
        left, total = carry
        chosen = jnp.max(left)
        return jnp.where(left == chosen, 0, left), add(chosen, total)

    return jax.lax.while_loop(lambda carry: jnp.max(carry[0]) > 0, next_table, (table, total))[1]


def _multiply_inner(
    x_ref: Any, a_ref: Any, table_ref: Any, inner_ref: Any, *, block: Array, part: Array, tile: Array, **sizes: int
) -> None:
    """Multiplies the rows of a block by some rows of A of each table that they chose, over a part of k, in a program.

    Args:
        x_ref: [T, K].
        a_ref: [columns, K].
        table_ref: [T].
        inner_ref: output, partial sums [parts, T, width] float32; zeros for a row without an adapter.
        block, part, tile: indices of the rows, of the part of k, and of the rows of A.
        sizes: `tokens` of a sequence, `inner` values of k per loop iteration, and `steps` iterations per part.
    """
    width, tokens, step, steps = inner_ref.shape[2], sizes["tokens"], sizes["inner"], sizes["steps"]
    row, is_row = _rows(block, tokens)
    column = tile * COLUMNS + jnp.arange(COLUMNS)
    inside = column < width
    table = pltriton.load(table_ref.at[row], mask=is_row, other=0)

    def multiply(chosen, total):
        def add(index, product):
            k = (part * steps + index) * step + jnp.arange(step)[None, :]
            x = pltriton.load(x_ref.at[row[:, None], k], mask=is_row[:, None], other=0)
            a = pltriton.load(a_ref.at[(chosen - 1) * width + column[:, None], k], mask=inside[:, None], other=0)
            return product + pltriton.dot(x, a, trans_b=True)

        product = jax.lax.fori_loop(0, steps, add, jnp.zeros((BLOCK, COLUMNS), jnp.float32))
        return jnp.where((table == chosen)[:, None], product, total)

    total = _for_each_table(table, multiply, jnp.zeros((BLOCK, COLUMNS), jnp.float32))
    mask = is_row[:, None] & inside[None, :]
    pltriton.store(inner_ref.at[part, row[:, None], column[None, :]], total, mask=mask)


def _inner_kernel(x_ref, a_ref, table_ref, inner_ref, **sizes):
    """Runs `_multiply_inner` in one Pallas program."""
    block, part, tile = (pl.program_id(axis) for axis in range(3))
    _multiply_inner(x_ref, a_ref, table_ref, inner_ref, block=block, part=part, tile=tile, **sizes)


def inner_parts(x: Array, weight: Adapted, tokens: int, *, interpret: bool) -> Float[Array, "parts rows width"]:
    """Returns z as partial sums, for x [rows, inner] in sequences of `tokens` rows."""
    rows, inner = x.shape
    step = math.gcd(inner, STEP)
    parts = max(parts for parts in range(1, MOST_PARTS + 1) if inner // step % parts == 0)
    return pl.pallas_call(
        functools.partial(_inner_kernel, tokens=tokens, inner=step, steps=inner // step // parts),
        grid=(row_blocks(rows, tokens), parts, math.ceil(weight.width / COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((parts, rows, weight.width), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="low_rank_inner",
    )(x, weight.a, weight.table.reshape(rows))


def _both_kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [N, K]
    a_ref,  # [columns, K]
    table_ref,  # [T]
    *refs,  # `after`, which is not read, if it was passed; outputs: sums_ref [parts, T, N] and inner_ref as above
    # static parameters
    blocks,  # blocks of rows
    programs,  # programs of A in each part of k
    tokens,  # rows of a sequence
    **sizes,  # those of `split_kernel.multiply_tile`
):
    """Computes a tile of the weight's product in one Pallas program, or in the first programs a tile of z."""
    *_, sums_ref, inner_ref = refs
    index, part = pl.program_id(0), pl.program_id(1)

    @pl.when(index < programs)
    def multiply_inner():
        of_rows = {"tokens": tokens, "inner": sizes["inner"], "steps": sizes["steps"]}
        at = {"block": index % blocks, "part": part, "tile": index // blocks}
        _multiply_inner(x_ref, a_ref, table_ref, inner_ref, **at, **of_rows)

    @pl.when(index >= programs)
    def multiply_weight():
        split_kernel.multiply_tile(x_ref, weight_ref, (), sums_ref, block=index - programs, part=part, **sizes)


def sizes_of_both(rows: int, tokens: int, weight: Adapted) -> split_kernel.SplitSizes | None:
    """Returns the sizes of the programs of `both_products`; None: the weight's product has a launch of its own.

    All programs must run at once, because those of A take as long as the others.
    """
    if not isinstance(weight.weight, jax.Array):
        return None
    (out, inner), dtype = weight.weight.shape, weight.weight.dtype
    extra = row_blocks(rows, tokens) * math.ceil(weight.width / COLUMNS)
    sizes = split_kernel.kernel_sizes(rows, out, inner, dtype, dtype.itemsize, extra=extra)
    return sizes if sizes and split_kernel.run_at_once(out // sizes.tile + extra, sizes) else None


def both_products(
    x: Array, weight: Adapted, after: Array | None, tokens: int, *, sizes: split_kernel.SplitSizes, interpret: bool
) -> tuple[Float[Array, "parts rows out"], Float[Array, "parts rows width"]]:
    """Returns partial sums of the weight's product and of z by one launch; the arguments are as above."""
    (rows, inner), out, parts = x.shape, weight.shape[0], sizes.parts
    blocks = row_blocks(rows, tokens)
    programs = blocks * math.ceil(weight.width / COLUMNS)
    static = {"rows": rows, "steps": inner // sizes.columns // parts, "tile": sizes.tile, "inner": sizes.columns}
    kernel = functools.partial(_both_kernel, blocks=blocks, programs=programs, tokens=tokens, first=0, **static)
    sums, inner_sums = pl.pallas_call(
        kernel,
        grid=(programs + out // sizes.tile, parts),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, size), jnp.float32) for size in (out, weight.width)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="split_matmul_low_rank",
    )(x, weight.weight, weight.a, weight.table.reshape(rows), *([] if after is None else [after]))
    return sums, inner_sums


def _sum_kernel(
    # inputs
    sums_ref,  # partial sums of the weight's product [parts, T, N]; with a gate [parts, T, 2 N]
    inner_ref,  # partial sums [parts, T, width]
    b_ref,  # [N, columns]; with a gate [2 N, columns]
    table_ref,  # [T]
    scale_refs,  # float32 scales of the sums, of rows [T] and of columns; empty: no scales
    # outputs
    out_ref,  # [T, N]
    # static parameters
    *,
    tokens,  # rows of a sequence
    tile,  # columns of a tile of the result
    ends,  # end of each module's rows of the weight; (): every row has all columns of a table
    gate,  # activation function of the gate; None: the product has no gate
):
    """Computes a tile of columns for the rows of a block, of which the weight's rows are of one module."""
    width, tile_at = inner_ref.shape[2], pl.program_id(1) * tile
    rank = width // max(len(ends), 1)
    row, is_row = _rows(pl.program_id(0), tokens)
    column = jnp.arange(max(pl.next_power_of_2(rank), BLOCK))[None, :]
    table = pltriton.load(table_ref.at[row], mask=is_row, other=0)

    def load_parts(ref, columns, mask):
        return [pltriton.load(ref.at[part, row[:, None], columns], mask=mask, other=0) for part in range(ref.shape[0])]

    def add_parts(start):
        """Returns the tile's rows of the weight, their columns of a table, z of these, and the weight's product."""
        out = start + tile_at + jnp.arange(tile)
        at = sum((start + tile_at >= end).astype(jnp.int32) for end in ends[:-1]) * rank + column
        sums = load_parts(sums_ref, out[None, :], is_row[:, None])
        inner, total = sum_f32(load_parts(inner_ref, at, is_row[:, None] & (column < rank))), sum_f32(sums)
        if scale_refs:
            total = total * pltriton.load(scale_refs[0].at[row], mask=is_row, other=0)[:, None]
            total = total * pltriton.load(scale_refs[1].at[out])[None, :]
        return out, at, inner, total

    pieces = [add_parts(start) for start in range(0, sums_ref.shape[2], out_ref.shape[1])]  # one, or gate and up

    def multiply(chosen, totals):
        first, mask, of_table = (chosen - 1) * width, column < rank, (table == chosen)[:, None]
        blocks = [pltriton.load(b_ref.at[out[:, None], first + at], mask=mask, other=0) for out, at, *_ in pieces]
        inners = [jnp.where(of_table, inner, 0).astype(b_ref.dtype) for *_, inner, _ in pieces]
        products = [pltriton.dot(inner, b, trans_b=True) for inner, b in zip(inners, blocks, strict=True)]
        return [total + product for total, product in zip(totals, products, strict=True)]

    totals = _for_each_table(table, multiply, [total for *_, total in pieces])
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
    rows, tokens, modules = math.prod(shape), shape[-1], weight.modules or (out,)
    tiles = TILES[1:] if gate and weight.width // len(modules) > WIDEST_GATED else TILES
    tile = next((size for size in tiles if all(end % size == 0 for end in (out, *modules))), None)
    ends = tuple(sum(modules[: index + 1]) for index in range(len(modules))) if tile and weight.modules else ()
    tile = tile or TILES[-1]
    result = pl.pallas_call(
        functools.partial(_sum_kernel, tokens=tokens, tile=tile, ends=ends, gate=gate),
        grid=(row_blocks(rows, tokens), out // tile),
        out_shape=jax.ShapeDtypeStruct((rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="low_rank_sum",
    )(
        *(values.reshape(-1, rows, weight.shape[0]), inner, weight.b, weight.table.reshape(rows)),
        [s.ravel() for s in scales],
    )
    return result.reshape(*shape, out)
