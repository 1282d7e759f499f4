"""References of `interval_attention` and of its gradient, for one tile of queries and of keys after another.

A tile of queries is multiplied with the tiles of keys from the first one that any of its queries sees: with few of them
in a row of short documents.
"""

import jax
import jax.numpy as jnp

TILE = 32  # queries or keys of a tile
WIDE, WIDE_TILE = 128, 256  # wider heads have larger tiles: GPUs have no kernel for them, and loops of theirs are slow


def largest_divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` that is at most `most`, or 1."""
    return next((part for part in range(min(size, max(most, 1)), 0, -1) if size % part == 0), 1)


def _einsum(spec, a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _cut(rows, like, fill=0):
    """Cuts rows [B, S, ...] into tiles [tiles, B, tile, ...] for queries; the last tile is filled up."""
    tile = TILE if like.shape[-1] <= WIDE else WIDE_TILE
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % tile), *[(0, 0)] * (rows.ndim - 2)), constant_values=fill)
    return jnp.moveaxis(rows.reshape(rows.shape[0], -1, tile, *rows.shape[2:]), 1, 0)


def _joined(tiles, size):
    """Returns the first rows [B, size, ...] of tiles."""
    rows = jnp.moveaxis(tiles, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :size]


def _cut_queries(q, k, starts, *others):
    """Cuts queries and other values of each head into tiles; returns the index of each tile's first query before them.

    The heads are grouped by the KV head that they share: [tiles, B, tile, KH, group, ...]. Queries that fill up the
    last tile see nothing.
    """
    grouped = [x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:]) for x in (q, *others)]
    tiles = _cut(starts, q, fill=q.shape[1]), *(_cut(x, q) for x in grouped)
    return jnp.arange(len(tiles[0])) * tiles[0].shape[2], *tiles


def _over_keys(add, first_query, starts, carry):
    """Calls `add` with the number of each tile of keys that some query of a tile sees, one after the other."""
    tile = starts.shape[1]
    return jax.lax.fori_loop(jnp.min(starts) // tile, first_query // tile + 1, add, carry)


def _scores(q, k, column, first_query, starts, scale):
    """Returns the scores of a tile of queries and one of keys [B, KH, group, tile, tile]; -inf: unseen."""
    tile = jnp.arange(starts.shape[1])
    key, query = column * len(tile) + tile, first_query + tile
    seen = (key >= starts[..., None]) & (key <= query[:, None])
    return jnp.where(seen[:, None, None], _einsum("btkgd,bskd->bkgts", q, k) * scale, -jnp.inf)


def attend(q, k, v, starts, *, scale):
    """Returns the output and the log-sum-exp, as `interval_attention` does."""
    keys, values = _cut(k, q), _cut(v, q)

    def of_tile(tile):
        first_query, starts, q = tile

        def add(column, carry):
            most, total, out = carry
            scores = _scores(q, keys[column], column, first_query, starts, scale)
            new = jnp.maximum(most, jnp.max(scores, axis=-1))
            base = jnp.where(new == -jnp.inf, 0.0, new)
            p, factor = jnp.exp(scores - base[..., None]), jnp.exp(most - base)
            weighted = _einsum("bkgts,bskd->bkgtd", p.astype(v.dtype), values[column])
            return new, total * factor + jnp.sum(p, axis=-1), out * factor[..., None] + weighted

        shape = (q.shape[0], *q.shape[2:4], q.shape[1])
        none = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1]))
        most, total, out = _over_keys(add, first_query, starts, none)
        out = out / jnp.where(total == 0, 1.0, total)[..., None]
        return tuple(jnp.moveaxis(array, 3, 1) for array in (out.astype(q.dtype), most + jnp.log(total)))

    out, lse = (_joined(array, q.shape[1]) for array in jax.lax.map(of_tile, _cut_queries(q, k, starts)))
    return out.reshape(q.shape), jnp.moveaxis(lse.reshape(q.shape[:3]), 1, 2)


def gradient(q, k, v, dout, starts, lse, delta, ends, *, scale):
    """Returns dq, dk and dv in float32, as `interval_attention_gradient` does."""
    keys, values, size = _cut(k, q), _cut(v, q), q.shape[1]

    def of_tile(of_keys, tile):
        first_query, starts, q, dout, *sums = tile
        lse, delta = (jnp.moveaxis(array, 1, 3)[..., None] for array in sums)

        def add(column, carry):
            dk, dv, dq = carry
            scores = _scores(q, keys[column], column, first_query, starts, scale)
            p = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - lse))
            ds = p * (_einsum("btkgd,bskd->bkgts", dout, values[column]) - delta) * scale
            p, ds = p.astype(q.dtype), ds.astype(q.dtype)
            dk = dk.at[column].add(_einsum("bkgts,btkgd->bskd", ds, q))
            dv = dv.at[column].add(_einsum("bkgts,btkgd->bskd", p, dout))
            return dk, dv, dq + _einsum("bkgts,bskd->btkgd", ds, keys[column])

        dk, dv, dq = _over_keys(add, first_query, starts, (*of_keys, jnp.zeros(q.shape, jnp.float32)))
        return (dk, dv), dq

    none = (jnp.zeros(keys.shape, jnp.float32),) * 2
    sums = (jnp.moveaxis(array, 1, 2) for array in (lse, delta))
    (dk, dv), dq = jax.lax.scan(of_tile, none, _cut_queries(q, k, starts, dout, *sums))
    return _joined(dq, size).reshape(q.shape), _joined(dk, size), _joined(dv, size)
