"""References of `interval_attention` and of its gradient, for one block of queries after another."""

import jax
import jax.numpy as jnp

SCORES = 2**28  # most scores that exist at a time


def _einsum(spec, a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def largest_divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` that is at most `most`, or 1."""
    return next((part for part in range(min(size, max(most, 1)), 0, -1) if size % part == 0), 1)


def _by_blocks(q, *rows):
    """Cuts rows [B, S, ...] into blocks [blocks, B, block, ...] whose scores fit, and returns each block's places."""
    batch, size, heads, _ = q.shape
    block = largest_divisor(size, SCORES // (batch * heads * size))
    cut = lambda x: jnp.moveaxis(x.reshape(batch, size // block, block, *x.shape[2:]), 1, 0)  # noqa: E731
    return jnp.arange(size).reshape(-1, block), *map(cut, (q, *rows))


def _joined(blocks):
    """Returns the rows [B, S, ...] of blocks."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def _block_scores(q, k, place, starts, scale):
    """Returns the scores of a block of queries [B, KH, group, block, S]; -inf where a place is not seen."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = _einsum("btkgd,bskd->bkgts", grouped, k) * scale
    column = jnp.arange(k.shape[1])
    seen = (column >= starts[..., None]) & (column <= place[:, None])
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def attend(q, k, v, starts, *, scale):
    """Returns the output and the log-sum-exp, as `interval_attention` does."""

    def of_block(block):
        place, q, starts = block
        scores = _block_scores(q, k, place, starts, scale)
        lse = jax.nn.logsumexp(scores, axis=-1)
        p = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
        out = _einsum("bkgts,bskd->btkgd", p.astype(v.dtype), v).reshape(q.shape).astype(q.dtype)
        return out, jnp.moveaxis(lse.reshape(lse.shape[0], -1, lse.shape[-1]), 1, 2)

    out, lse = jax.lax.map(of_block, _by_blocks(q, starts))
    return _joined(out), jnp.moveaxis(_joined(lse), 1, 2)


def gradient(q, k, v, dout, starts, lse, delta, ends, *, scale):
    """Returns dq, dk and dv in float32, as `interval_attention_gradient` does."""

    def add(carry, block):
        place, q, dout, starts, lse, delta = block
        grouped = [x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1]) for x in (q, dout)]
        per_head = [jnp.moveaxis(x.reshape(*x.shape[:2], k.shape[2], -1), 1, 3)[..., None] for x in (lse, delta)]
        scores = _block_scores(q, k, place, starts, scale)
        p = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - per_head[0]))
        ds = p * (_einsum("btkgd,bskd->bkgts", grouped[1], v) - per_head[1]) * scale
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        dk, dv = (_einsum("bkgts,btkgd->bskd", *of) for of in ((ds, grouped[0]), (p, grouped[1])))
        dq = _einsum("bkgts,bskd->btkgd", ds, k).reshape(q.shape)
        return (carry[0] + dk, carry[1] + dv), dq

    rows = [jnp.moveaxis(x, 1, 2) for x in (lse, delta)]
    none = (jnp.zeros(k.shape, jnp.float32),) * 2
    (dk, dv), dq = jax.lax.scan(add, none, _by_blocks(q, dout, starts, *rows))
    return _joined(dq), dk, dv
