"""Products of each head with its own matrix, and the rows of a latent cache (DeepSeek-V2, arXiv:2405.04434, 2.1).

    head_products       out[r, h] = x[r, h, :K] W_h^T
    append_latent       x[r, h, :K] W_h, and the rotated channels of query x[r, h]; and writes the latent vector of a
                        row, and the row's shared key, rotated, to the paged cache

The rotary embedding is that of `rope_append`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention.kv_pages import POOL_DTYPES, Pool, VPool, append, cast_to_pool, check_pools
from pallas_kernels.attention.rope_append import KEYS, QUERIES, rotate, written_rows
from pallas_kernels.attention.tiling import MMA_ROWS
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.row_blocks import in_row_blocks

FIXED_ROWS = 64  # rows of a Pallas program in deterministic products, and with many rows
WIDTH = 128  # columns of the product that a Pallas program computes
INNER = 64  # values of the sum that a loop iteration adds up
FEW_WIDTH, FEW_INNER = 32, 128  # the same with few rows: more programs of fewer iterations, which wait for memory
MOST_INNER = 4096  # most rows and most columns of a head's matrix


def _product(x, weight, terms):
    wide = x.astype(jnp.float32), weight.astype(jnp.float32)  # not every CPU product widens bfloat16
    return jnp.einsum(terms, *wide, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)


def _products_reference(x, weight, *, deterministic):
    def product(x):
        return _product(x.reshape(-1, weight.shape[0], weight.shape[2]), weight, "rhk,hnk->rhn")

    return in_row_blocks(product, x) if deterministic else product(x)


def _append_reference(k_pool, v_pool, queries, weight, rows, tables, page_table, first_row, valid, *, starts, **fixed):
    (heads, inner, _), rotated, size = weight.shape, k_pool.shape[3], v_pool.shape[3]
    first_query, first = starts

    def turn(x, tables):
        return rotate(x[None], tables.swapaxes(0, 1)[:, None])[0]

    def split(queries, rows, tables):
        q = queries[:, first_query : first_query + heads * (inner + rotated)].reshape(-1, heads, inner + rotated)
        turned = turn(q[..., inner:], tables[:, QUERIES])
        q = jnp.concatenate([_product(q[..., :inner], weight, "rhk,hkn->rhn"), turned], axis=-1)
        key = turn(rows[:, None, first + size : first + size + rotated], tables[:, KEYS])
        return q, key, rows[:, None, first : first + size]

    arrays = queries, rows, tables.swapaxes(0, 1)
    found = in_row_blocks(split, *arrays) if fixed["deterministic"] else split(*arrays)
    q, key, latent = (array.reshape(*valid.shape, *array.shape[1:]) for array in found)
    return q, *append(k_pool, v_pool, key, latent, page_table, first_row, valid, implementation="reference")


class _Blocks(NamedTuple):
    """How the Pallas programs divide products of heads: the static sizes of a call."""

    rows: int  # rows per program
    width: int  # columns of the product per program
    step: int  # values of the sum per loop iteration
    is_transposed: bool  # whether a head's matrix is [N, K]
    precision: Any  # precision of the matrix products

    def own_rows(self, block, count):
        """Returns the rows of a program and whether they exist, and existing rows to load, [rows, 1] each.

        Args:
            block: index of the block of rows.
            count: number of rows that exist.
        """
        row = block * self.rows + jnp.arange(self.rows)[:, None]
        return row, row < count, jnp.minimum(row, count - 1)


def _multiply(x_ref, weight_ref, out_ref, first, place, blocks):
    """Multiplies some rows of one head by some columns of its matrix, in one Pallas program.

    Args:
        x_ref: [rows, columns], from `first` on the K values of the head.
        weight_ref: [H, K, N], or [H, N, K] if it is transposed.
        out_ref: [rows, H, N or more].
        first: column of x.
        place: indices of the block of rows, of the head and of the block of columns.
        blocks: `_Blocks`.
    """
    block, head, tile = place
    sizes, (width, step) = weight_ref.shape[1:], (blocks.width, blocks.step)
    inner, out = sizes[::-1] if blocks.is_transposed else sizes
    row, is_row, own = blocks.own_rows(block, x_ref.shape[0])
    column = tile * width + jnp.arange(width)
    is_column = column < out

    def add(index, total):
        term = index * step + jnp.arange(step)
        is_inner, is_out = (term < inner) if inner % step else None, is_column if out % width else None
        x = pltriton.load(x_ref.at[own, first + term[None, :]], **_masked((blocks.rows, step), None, is_inner))
        if blocks.is_transposed:
            ref, mask = weight_ref.at[head, column[:, None], term[None, :]], _masked((width, step), is_out, is_inner)
        else:
            ref, mask = weight_ref.at[head, term[:, None], column[None, :]], _masked((step, width), is_inner, is_out)
        weight = pltriton.load(ref, **mask)
        return total + pltriton.dot(x, weight, trans_b=blocks.is_transposed, precision=blocks.precision)

    total = jax.lax.fori_loop(0, pl.cdiv(inner, step), add, jnp.zeros((blocks.rows, width), jnp.float32))
    ref = out_ref.at[row, head, column[None, :]]
    pltriton.store(ref, total.astype(out_ref.dtype), mask=is_row & is_column[None, :])


def _masked(shape, rows, columns):
    """Returns mask options for a load of this shape; a condition of None holds for all rows or all columns."""
    known = [] if rows is None else [rows[:, None]]
    known += [] if columns is None else [columns[None, :]]
    return {"mask": jnp.broadcast_to(functools.reduce(jnp.logical_and, known), shape), "other": 0} if known else {}


def _products_kernel(x_ref, weight_ref, out_ref, *, blocks):
    """Runs `_multiply` for rows of all heads side by side."""
    place = tuple(pl.program_id(axis) for axis in range(3))
    _multiply(x_ref, weight_ref, out_ref, place[1] * weight_ref.shape[2], place, blocks)


def _append_kernel(
    # inputs
    queries_ref,  # [rows, columns], from `first_query` on H * (K + 2 * half)
    weight_ref,  # [H, K, N]
    rows_ref,  # [rows, columns], from `first` on N + 2 * half
    tables_ref,  # [tables, rows, half]
    pool_row_ref,  # [rows] int32: page * page size + row in the page; -1: not written
    _k_in,  # [pages, 1, page, 2 * half]; the outputs alias the pools
    _v_in,  # [pages, 1, page, N]
    # outputs
    out_ref,  # [rows, H, N + 2 * half]
    k_ref,
    v_ref,
    # static parameters
    *,
    starts,  # `first_query` and `first`
    blocks,
):
    """Multiplies or rotates some rows of one head, or writes some rows to the cache, in one Pallas program."""
    place, (first_query, first) = tuple(pl.program_id(axis) for axis in range(3)), starts
    block, head, tile = place
    (heads, inner, out), (count, half), (page, size) = weight_ref.shape, tables_ref.shape[1:], v_ref.shape[2:]
    first_query += head * (inner + 2 * half)
    products = pl.cdiv(out, blocks.width)
    channel, column = jnp.arange(pl.next_power_of_2(half))[None, :], jnp.arange(pl.next_power_of_2(size))[None, :]

    def turned(ref, row, start, tables):
        """Returns both halves of the rotated channels from column `start` on, [rows, half] each."""
        inside = jnp.broadcast_to(channel < half, (row.shape[0], channel.size))
        load = functools.partial(pltriton.load, mask=inside, other=0)
        one, other = (load(ref.at[row, start + part * half + channel]).astype(jnp.float32) for part in (0, 1))
        cos, sin = (load(tables_ref.at[table, row, channel]) for table in range(tables_ref.shape[0])[tables])
        return [values.astype(ref.dtype) for values in (one * cos - other * sin, other * cos + one * sin)]

    def turn():
        row, is_row, own = blocks.own_rows(block, count)
        halves = turned(queries_ref, own, first_query + inner, QUERIES)
        for part, values in enumerate(halves):
            ref = out_ref.at[row, head, out + part * half + channel]
            pltriton.store(ref, values, mask=is_row & (channel < half))

    def write(index, carry):
        own = index * heads + head  # in the block
        row = jnp.full((1, 1), block * blocks.rows + own)
        exists, row = (row < count) & (own < blocks.rows), jnp.minimum(row, count - 1)
        pool_row = jnp.where(exists, pltriton.load(pool_row_ref.at[row]), -1)
        mask = (pool_row >= 0) & (column < size)
        latent = pltriton.load(rows_ref.at[row, first + column], mask=mask, other=0)
        ref = v_ref.at[pool_row // page, 0, pool_row % page, column]
        pltriton.store(ref, cast_to_pool(latent, v_ref.dtype), mask=mask)
        for part, values in enumerate(turned(rows_ref, row, first + size, KEYS)):
            ref = k_ref.at[pool_row // page, 0, pool_row % page, part * half + channel]
            pltriton.store(ref, cast_to_pool(values, k_ref.dtype), mask=(pool_row >= 0) & (channel < half))
        return carry

    pl.when(tile < products)(lambda: _multiply(queries_ref, weight_ref, out_ref, first_query, place, blocks))
    pl.when(tile == products)(turn)
    pl.when(tile > products)(lambda: jax.lax.fori_loop(0, pl.cdiv(blocks.rows, heads), write, None))


def _grid(x, weight, *, is_transposed, deterministic, interpret):
    """Returns the `_Blocks` of a product of heads, and the numbers of blocks of rows, of heads and of columns."""
    rows, (heads, *sizes) = x.shape[0], weight.shape
    inner, out = sizes[::-1] if is_transposed else sizes
    wide = x.dtype == jnp.float32 and not interpret
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if wide else jax.lax.Precision.HIGHEST
    is_few = not deterministic and rows <= 2 * MMA_ROWS
    most = (FEW_WIDTH, FEW_INNER) if is_few else (WIDTH, INNER)
    width, step = (
        min(max(pl.next_power_of_2(size), MMA_ROWS), limit) for size, limit in zip((out, inner), most, strict=True)
    )
    blocks = _Blocks(MMA_ROWS if is_few else FIXED_ROWS, width, step, is_transposed, precision)
    return blocks, (pl.cdiv(rows, blocks.rows), heads, pl.cdiv(out, width))


def _products_pallas(x, weight, *, deterministic, interpret):
    blocks, grid = _grid(x, weight, is_transposed=True, deterministic=deterministic, interpret=interpret)
    return pl.pallas_call(
        functools.partial(_products_kernel, blocks=blocks),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], *weight.shape[:2]), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="head_products",
    )(x, weight)


def _append_pallas(
    k_pool, v_pool, queries, weight, rows, tables, page_table, first_row, valid, *, starts, deterministic, interpret
):
    blocks, (*grid, products) = _grid(
        queries, weight, is_transposed=False, deterministic=deterministic, interpret=interpret
    )
    pool_rows = written_rows(page_table, first_row, valid, v_pool.shape[2]).reshape(-1)
    inputs = (queries, weight, rows, tables, pool_rows)
    q = jax.ShapeDtypeStruct((queries.shape[0], weight.shape[0], weight.shape[2] + k_pool.shape[3]), queries.dtype)
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)]
    q, *pools = pl.pallas_call(
        functools.partial(_append_kernel, starts=starts, blocks=blocks),
        grid=(*grid, products + 2),
        out_shape=[q, *pools],
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="append_latent",
    )(*inputs, k_pool, v_pool)
    return q.reshape(*valid.shape, *q.shape[1:]), *pools


def _unsupported(x: Array, weight: Array) -> str | None:
    """Returns a text that says which limit of the kernels a product exceeds; None if it is supported."""
    if x.dtype != weight.dtype or x.dtype not in POOL_DTYPES[:3]:
        return f"x and weight must be bfloat16, float16 or float32 alike, got {x.dtype} and {weight.dtype}"
    if max(weight.shape[1:]) > MOST_INNER:
        return f"at most {MOST_INNER} channels, got {weight.shape}"
    return None


@functools.partial(jax.jit, static_argnames=("deterministic", "implementation"))
def head_products(
    x: Float[Array, "*rows width"],
    weight: Float[Array, "H N K"],
    *,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "*rows H N"]:
    """Returns x[..., h * K : (h + 1) * K] @ weight[h].T for each head h, summed in float32 and rounded once.

    Args:
        x: the channels of all heads side by side [*rows, H * K].
        weight: matrix of each head [H, N, K].
        deterministic: make the bits of a row's result independent of the number of rows.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the sizes or dtypes.
    """
    runs = _products_pallas, _products_reference
    kernel, reference = (functools.partial(run, deterministic=deterministic) for run in runs)
    rows = x.reshape(-1, x.shape[-1])
    out = dispatch(implementation, _unsupported(x, weight), kernel, reference, rows, weight)
    return out.reshape(*x.shape[:-1], *out.shape[1:])


@functools.partial(jax.jit, static_argnames=("first_query", "first", "deterministic", "implementation"))
def append_latent(
    k_pool: Pool,
    v_pool: VPool,
    queries: Float[Array, "B T columns"],
    weight: Float[Array, "H K N"],
    rows: Float[Array, "B T width"],
    cos_sin: Float[Array, "tables B T half"],
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    *,
    first_query: int = 0,
    first: int = 0,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T H out"], Pool, VPool]:
    """Writes latent vectors and rotated keys of new rows to the cache, and returns the queries that attend to them.

    The latent vector of row t of sequence b is written to cache row first_row[b] + t of the pool of V, and the row's
    other channels, rotated, to that of the pool of K, where valid[b, t]. The query of a head is the product of its
    first K channels with weight[head], summed in float32 and rounded once, then its other channels, rotated.

    Args:
        k_pool, v_pool: pages of rotated keys [pages, 1, page, 2 * half] and of latent vectors [pages, 1, page, N].
        queries: columns [B, T, columns], from `first_query` on those of the query heads, K + 2 * half each.
        weight: matrix of each head [H, K, N].
        rows: columns [B, T, width], from `first` on latent vectors and keys side by side, N + 2 * half.
        cos_sin: rotary tables, as in `HeadTransform`.
        page_table, first_row, valid: as in `append`.
        first_query: first column of the queries.
        first: first column of the latent vectors.
        deterministic: make the bits of a row's results independent of the number of rows.
        implementation: as in `paged_attention`.

    Returns:
        The queries [B, T, H, N + 2 * half]; and the new pools, which take the memory of the old pools if the old pools
        are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the sizes or dtypes.
    """
    check_pools(k_pool, v_pool)
    if first + k_pool.shape[3] + v_pool.shape[3] > rows.shape[-1] or k_pool.shape[1] != 1:
        expected = f"[pages, 1, page, _] of at most {rows.shape[-1] - first} channels together"
        raise ValueError(f"pools must be {expected}, got {k_pool.shape} and {v_pool.shape}")
    options = {"starts": (first_query, first), "deterministic": deterministic}
    kernel, reference = (functools.partial(run, **options) for run in (_append_pallas, _append_reference))
    reason = _unsupported(queries, weight)
    if k_pool.dtype not in POOL_DTYPES:
        reason = f"the pool's dtype must not be {k_pool.dtype}"
    by_row = (array.reshape(*array.shape[:-3], -1, array.shape[-1]) for array in (queries, rows, cos_sin))
    flat_queries, flat_rows, tables = by_row
    arguments = (k_pool, v_pool, flat_queries, weight, flat_rows, tables, page_table, first_row, valid)
    return dispatch(implementation, reason, kernel, reference, *arguments)
