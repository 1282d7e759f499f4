"""Writes latent vectors and rotated keys to the cache of latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1).

The same kernel computes the queries: the product of x[r, h, :K] with a head's matrix W_h, and the rotated channels. The
rotary embedding is that of `rope_append`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention.head_products import grid_of, multiply, product_reference, unsupported
from pallas_kernels.attention.kv_pages import POOL_DTYPES, Pool, VPool, append, cast_to_pool, check_pools
from pallas_kernels.attention.rope_append import KEYS, QUERIES, load_cos_sin, rotate, rotate_halves, written_rows
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.row_by_row import row_by_row


def _append_reference(k_pool, v_pool, queries, weight, rows, tables, page_table, first_row, valid, *, starts, **fixed):
    (heads, inner, _), rotated, size = weight.shape, k_pool.shape[3], v_pool.shape[3]
    first_query, first = starts

    def rotate_rows(x, tables):
        return rotate(x[None], tables.swapaxes(0, 1)[:, None])[0]

    def split(queries, rows, tables):
        q = queries[:, first_query : first_query + heads * (inner + rotated)].reshape(-1, heads, inner + rotated)
        products = product_reference(q[..., :inner], weight, "rhk,hkn->rhn")
        q = jnp.concatenate([products, rotate_rows(q[..., inner:], tables[:, QUERIES])], axis=-1)
        key = rotate_rows(rows[:, None, first + size : first + size + rotated], tables[:, KEYS])
        return q, key, rows[:, None, first : first + size]

    arrays = queries, rows, tables.swapaxes(0, 1)
    outputs = row_by_row(split, *arrays) if fixed["deterministic"] else split(*arrays)
    q, key, latent = (array.reshape(*valid.shape, *array.shape[1:]) for array in outputs)
    return q, *append(k_pool, v_pool, key, latent, page_table, first_row, valid, implementation="reference")


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
    """Computes a part of the queries of one head, or writes some rows to the cache, in one Pallas program.

    Of the programs of a block of rows and a head, the last but one rotates the head's other channels, those before it
    multiply its first channels by a block of columns each, and the last writes every `heads`-th row of the block.
    """
    program, (first_query, first) = tuple(pl.program_id(axis) for axis in range(3)), starts
    block, head, column_block = program
    (heads, inner, out), (count, half) = weight_ref.shape, tables_ref.shape[1:]
    first_query += head * (inner + 2 * half)
    products = pl.cdiv(out, blocks.width)
    channel, column = (jnp.arange(pl.next_power_of_2(size))[None, :] for size in (half, v_ref.shape[3]))

    def rotate_queries():
        row, is_row, loaded_row = blocks.own_rows(block, count)
        rotated = _load_rotated(queries_ref, loaded_row, first_query + inner, channel, tables_ref, QUERIES)
        for part, values in enumerate(rotated):
            ref = out_ref.at[row, head, out + part * half + channel]
            pltriton.store(ref, values, mask=is_row & (channel < half))

    def write(index, carry):
        block_row = index * heads + head
        row = jnp.full((1, 1), block * blocks.rows + block_row)
        exists, row = (row < count) & (block_row < blocks.rows), jnp.minimum(row, count - 1)
        pool_row = jnp.where(exists, pltriton.load(pool_row_ref.at[row]), -1)
        _write_row(rows_ref, row, first, (column, channel), tables_ref, pool_row, k_ref, v_ref)
        return carry

    pl.when(column_block < products)(lambda: multiply(queries_ref, weight_ref, out_ref, first_query, program, blocks))
    pl.when(column_block == products)(rotate_queries)
    pl.when(column_block > products)(lambda: jax.lax.fori_loop(0, pl.cdiv(blocks.rows, heads), write, None))


def _load_rotated(ref, row, start, channel, tables_ref, tables):
    """Loads and rotates channels of rows, inside a kernel; returns both halves [rows, half and padding].

    Args:
        ref: [rows, columns], from `start` on the channels.
        row: indices of the rows [rows, 1].
        start: first column of the channels.
        channel: indices of half of the channels and of padding [1, half and padding].
        tables_ref: [tables, rows, half].
        tables: the tables of the rotation, `KEYS` or `QUERIES`.
    """
    half = tables_ref.shape[2]
    mask: dict[str, Any] = {"mask": jnp.broadcast_to(channel < half, (row.shape[0], channel.size)), "other": 0}
    columns = (start + part * half + channel for part in (0, 1))
    halves = [pltriton.load(ref.at[row, column], **mask).astype(jnp.float32) for column in columns]
    rotated = rotate_halves(halves, load_cos_sin(tables_ref, (row,), channel, mask, tables))
    return [values.astype(ref.dtype) for values in rotated]


def _write_row(rows_ref, row, first, channels, tables_ref, pool_row, k_ref, v_ref):
    """Writes the latent vector of a row and its rotated key to the pools, inside a kernel.

    Args:
        rows_ref: [rows, columns], from `first` on latent vector and key of each row.
        row: index of the row [1, 1].
        first: first column of the latent vector.
        channels: indices of the channels of a latent vector, and of half of those of a key, with padding [1, _] each.
        tables_ref: [tables, rows, half].
        pool_row: row of the pools to write [1, 1]; -1: none.
        k_ref, v_ref: the pools.
    """
    half, (page, size), (column, channel) = tables_ref.shape[2], v_ref.shape[2:], channels
    mask = (pool_row >= 0) & (column < size)
    latent = pltriton.load(rows_ref.at[row, first + column], mask=mask, other=0)
    ref = v_ref.at[pool_row // page, 0, pool_row % page, column]
    pltriton.store(ref, cast_to_pool(latent, v_ref.dtype), mask=mask)
    for part, values in enumerate(_load_rotated(rows_ref, row, first + size, channel, tables_ref, KEYS)):
        ref = k_ref.at[pool_row // page, 0, pool_row % page, part * half + channel]
        pltriton.store(ref, cast_to_pool(values, k_ref.dtype), mask=(pool_row >= 0) & (channel < half))


def _append_pallas(
    k_pool, v_pool, queries, weight, rows, tables, page_table, first_row, valid, *, starts, deterministic, interpret
):
    blocks, (*grid, products) = grid_of(
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


def _check_sizes(k_pool, v_pool, queries, weight, rows, cos_sin, valid, *, first_query, first):
    check_pools(k_pool, v_pool)
    rotated, size = k_pool.shape[3], v_pool.shape[3]
    if first + rotated + size > rows.shape[-1] or k_pool.shape[1] != 1:
        expected = f"[pages, 1, page, _] of at most {rows.shape[-1] - first} channels together"
        raise ValueError(f"pools must be {expected}, got {k_pool.shape} and {v_pool.shape}")
    heads, inner, out = weight.shape
    if out != size:
        raise ValueError(f"weight must be [H, K, {size}], as wide as v_pool, got {weight.shape}")
    if queries.shape[-1] < (columns := first_query + heads * (inner + rotated)):
        expected = f"at least {columns} wide, {heads} heads of {inner} + {rotated} columns from {first_query} on"
        raise ValueError(f"queries must be {expected}, got {queries.shape[-1]}")
    if queries.shape[:2] != valid.shape or rows.shape[:2] != valid.shape:
        raise ValueError(f"queries and rows must begin with {valid.shape}, got {queries.shape} and {rows.shape}")
    wanted = (*valid.shape, rotated // 2)
    if cos_sin.shape[0] not in (2, 4) or cos_sin.shape[1:] != wanted:
        raise ValueError(f"cos_sin must be {(2, *wanted)}, or 4 tables, got {cos_sin.shape}")


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
        ValueError: sizes do not fit each other.
        NotImplementedError: implementation is "pallas", and the kernel does not support the sizes or dtypes.
    """
    _check_sizes(k_pool, v_pool, queries, weight, rows, cos_sin, valid, first_query=first_query, first=first)
    options = {"starts": (first_query, first), "deterministic": deterministic}
    kernel, reference = (functools.partial(run, **options) for run in (_append_pallas, _append_reference))
    reason = unsupported(queries, weight)
    if k_pool.dtype not in POOL_DTYPES:
        reason = f"the pool's dtype must not be {k_pool.dtype}"
    by_row = (array.reshape(*array.shape[:-3], -1, array.shape[-1]) for array in (queries, rows, cos_sin))
    flat_queries, flat_rows, tables = by_row
    arguments = (k_pool, v_pool, flat_queries, weight, flat_rows, tables, page_table, first_row, valid)
    return dispatch(implementation, [Kernel(TRITON, kernel, reason)], reference, *arguments)
