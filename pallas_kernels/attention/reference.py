"""References of `paged_attention` in jax.numpy: `reference`, and `fixed_reference` for deterministic attention."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.attention.ancestor_bits import WORD, bits_of_chunk, low_ones
from pallas_kernels.attention.kv_range import first_seen
from pallas_kernels.attention.scores import Scores
from pallas_kernels.layers.quantize_rows import FP8
from pallas_kernels.layers.row_by_row import row_by_row

FIXED_TILE = 32  # rows of context that the deterministic reference adds up at once


def _first_rows(
    lengths: Array,
    bits: Array | None,
    queries: int,
    scores: Scores,
    *,
    new_rows: int,
) -> Array:
    """Returns the first row that each query sees [B, T]; the bits are those of `bits_of_chunk`."""
    if not scores.most_rows:
        return jnp.full((len(lengths), queries), scores.start)
    if bits is None:
        count = jnp.arange(1, queries + 1, dtype=jnp.int32)
    else:
        counted = bits
        if queries == new_rows:  # new rows after the query's own are not counted
            own_row = jnp.arange(new_rows, dtype=jnp.int32)[:, None]
            counted = bits & low_ones(own_row + 1 - WORD * jnp.arange(bits.shape[-1], dtype=jnp.int32))
        count = jax.lax.population_count(counted).sum(-1).astype(jnp.int32)  # new rows that the query sees
    first = first_seen(lengths[:, None] + count - 1, scores.window or 0, scores.chunk or 0)
    if bits is not None and scores.chunk is not None:  # without the first new row, the query's chunk begins after it
        first = jnp.where(bits[..., 0] & 1 == 1, first, lengths[:, None])
    return jnp.maximum(first, scores.start)


def _visible(lengths: Array, bits: Array | None, first: Array, rows: int) -> Array:
    """Returns the attention mask, bool [B, T, rows]; element [b, t, r] says whether query t of sequence b sees row r.

    Args:
        lengths, bits: as in `paged_attention`; the bits are those of `bits_of_chunk`.
        first: first row that each query sees [B, T].
        rows: number of rows.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    new = row - lengths[:, None]
    if bits is None:
        sees_new = new[:, None] <= jnp.arange(first.shape[1], dtype=jnp.int32)[:, None]
    else:
        sees_new = jnp.zeros((1, 1, 1), bool)
        for word in range(bits.shape[-1]):
            bit = (bits[:, :, word, None] >> (new[:, None] % WORD).astype(jnp.uint32)) & 1
            sees_new = sees_new | ((new[:, None] // WORD == word) & (bit == 1))
    return (row >= first[..., None]) & ((new < 0)[:, None] | ((new[:, None] >= 0) & sees_new))


def _gather(pool: Array, page_table: Array) -> Array:
    """Returns each sequence's cache rows, in the order of the page table: [batch, KV heads, rows, head dim]."""
    batch, columns = page_table.shape
    _, heads, page, dim = pool.shape
    return pool[page_table].transpose(0, 2, 1, 3, 4).reshape(batch, heads, columns * page, dim)


def _recent(page_table: Array, lengths: Array, page: int, new_rows: int, window: int) -> tuple[Array, Array]:
    """Cuts the page table to the pages of the newest `window` rows up to the first new row, and of the new rows.

    Returns:
        The remaining columns of the page table [B, columns], and the number of the first cache row in these columns
        [B].
    """
    columns = min(pl.cdiv(window + new_rows - 2, page) + 1, page_table.shape[1])
    first = jnp.clip((lengths - window + 1) // page, 0, page_table.shape[1] - columns)
    recent = jnp.take_along_axis(page_table, first[:, None] + jnp.arange(columns, dtype=jnp.int32), axis=1)
    return recent, first * page


def _with_values(keys: Array, values: Array, dim: int) -> Array:
    """Returns keys of `dim` channels: those of the values, then those of the keys, if the keys alone have fewer."""
    return keys if keys.shape[-1] == dim else jnp.concatenate([values, keys], axis=-1)


def _capped(products: Array, scores: Scores) -> Array:
    """Returns the products of queries and keys, scaled and limited by the softcap."""
    if scores.softcap is None:
        return products * scores.scale
    return scores.softcap * jnp.tanh(products * (scores.scale / scores.softcap))


def _with_sinks(top: Array, total: Array, values: Array, sinks: Array | None) -> Array:
    """Divides weighted sums of values [..., D] by the softmax's sum, to which the sinks are added; 0 without any row.

    Args:
        top: score to which the weights refer [...].
        total: sum of the weights [...].
        values: weighted sums of values [..., D].
        sinks: score of each sink, which broadcasts to [...]; None: no sinks.
    """
    if sinks is not None:
        new_top = jnp.maximum(top, sinks)
        fade = jnp.exp(top - new_top)
        total, values = total * fade + jnp.exp(sinks - new_top), values * fade[..., None]
    return values / jnp.where(total == 0, 1.0, total)[..., None]


def reference(q, kv, bits, sinks, *, new_rows, scores):
    """Returns `paged_attention`, of all rows of the cache at once; with limits, of the pages that they allow."""
    k_pool, v_pool, page_table, lengths = kv
    batch, queries, heads, dim = q.shape
    kv_heads, value_dim = k_pool.shape[1], v_pool.shape[3]
    bits = None if bits is None else bits_of_chunk(bits, lengths, scores.chunk)
    first = _first_rows(lengths, bits, queries, scores, new_rows=new_rows)
    if scores.most_rows:
        page_table, skipped = _recent(page_table, lengths, k_pool.shape[2], new_rows, min(scores.most_rows))
        lengths, first = lengths - skipped, first - skipped[:, None]
    group = heads // kv_heads
    keys, values = _gather(k_pool, page_table), _gather(v_pool, page_table)
    keys, values = _with_values(keys, values, dim), values.astype(jnp.float32)
    rows = keys.shape[2]
    visible = _visible(lengths, bits, first, rows)
    # 0 * NaN is NaN, so set the values of rows that no query sees to 0. A padding query sees its own new row, which may
    # hold any value, so set infinities and NaN in new rows to 0 too.
    new = jnp.arange(rows) >= lengths[:, None]
    keep = visible.any(1)[:, None, :, None] & (~new[:, None, :, None] | jnp.isfinite(values))
    values = jnp.where(keep, values, 0)
    packed = q.reshape(batch, queries, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    keys = keys.astype(compute_dtype(q, keys))
    packed = packed.reshape(batch, kv_heads, queries * group, dim)
    seen = jnp.repeat(visible, group, axis=1)[:, None]
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    scored = _capped(jnp.einsum("bkrd,bksd->bkrs", packed, keys, **exact), scores)
    scored = jnp.where(seen, scored, -jnp.inf)
    top = jnp.max(scored, -1, keepdims=True)
    weights = jnp.exp(scored - jnp.where(top == -jnp.inf, 0.0, top))
    out = jnp.einsum("bkrs,bksd->bkrd", weights, values, **exact)
    row_sinks = None if sinks is None else jnp.tile(sinks.reshape(kv_heads, group), queries).astype(jnp.float32)
    out = _with_sinks(top[..., 0], weights.sum(-1), out, row_sinks)
    out = out.reshape(batch, kv_heads, queries, group, value_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, queries, heads, value_dim).astype(q.dtype)


def fixed_reference(q, kv, paths, sinks, *, scores):
    """Returns deterministic attention, computed for each query separately, over fixed tiles of the rows that it sees.

    The arguments are those of `paged_attention`.
    """
    k_pool, v_pool, page_table, lengths = kv
    batch, queries, heads, dim = q.shape
    (_, kv_heads, page, _), value_dim = k_pool.shape, v_pool.shape[3]
    most = page_table.shape[1] * page
    causal = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32)[:, None, None], (batch, queries, 1, 1))[:, :, 0]
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}

    def attend_query(q, table, length, path):
        q, table, length, path = (array[0] for array in (q, table, length, path))
        last = length + 1 + (path[0] if paths is None else jnp.sum(path >= 0) - 1)
        lowest = jnp.asarray(scores.start)
        if scores.most_rows:
            lowest = jnp.maximum(first_seen(last - 1, scores.window or 0, scores.chunk or 0), scores.start)
        last = jnp.minimum(last, most)
        packed = q.reshape(kv_heads, heads // kv_heads, dim)

        def step(index, carry):
            acc, top, total = carry
            row = index * FIXED_TILE + jnp.arange(FIXED_TILE, dtype=jnp.int32)
            new = row - length
            cache_row = row
            if paths is not None:
                cache_row = jnp.where(new < 0, row, length + path[jnp.clip(new, 0, path.shape[0] - 1)])
            cache_row = jnp.clip(cache_row, 0, most - 1)
            k, v = (pool[table[cache_row // page], :, cache_row % page] for pool in (k_pool, v_pool))
            visible = (row >= lowest) & (row < last)
            k, v = _with_values(k, v, dim), v.astype(jnp.float32)
            v = jnp.where(visible[:, None, None] & ((new < 0)[:, None, None] | jnp.isfinite(v)), v, 0)
            products = jnp.einsum("kgd,skd->kgs", packed, k.astype(compute_dtype(q, k)), **exact)
            scored = jnp.where(visible, _capped(products, scores), -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scored, axis=-1))
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights, fade = jnp.exp(scored - base[..., None]), jnp.exp(top - base)
            acc = acc * fade[..., None] + jnp.einsum("kgs,skd->kgd", weights, v, **exact)
            return acc, new_top, total * fade + weights.sum(-1)

        sums = jnp.zeros((*packed.shape[:2],), jnp.float32)
        empty = (jnp.zeros((*sums.shape, value_dim), jnp.float32), jnp.full_like(sums, -jnp.inf), sums)
        acc, top, total = jax.lax.fori_loop(lowest // FIXED_TILE, pl.cdiv(last, FIXED_TILE), step, empty)
        head_sinks = None if sinks is None else sinks.reshape(kv_heads, -1).astype(jnp.float32)
        return _with_sinks(top, total, acc, head_sinks).reshape(1, heads, value_dim).astype(q.dtype)

    per_query = (jnp.repeat(array, queries, axis=0) for array in (page_table, lengths))
    query_paths = (causal if paths is None else paths).reshape(batch * queries, -1)
    out = row_by_row(attend_query, q.reshape(-1, heads, dim), *per_query, query_paths)
    return out.reshape(batch, queries, heads, value_dim)


def compute_dtype(q: Array | jax.ShapeDtypeStruct, pool: Array) -> jnp.dtype:
    """Returns the dtype of the operands of both matrix products: queries with K, and softmax weights with V."""
    if pool.dtype == FP8:
        return q.dtype if q.dtype == jnp.float32 else jnp.dtype(jnp.float16)
    return jnp.promote_types(q.dtype, pool.dtype)
