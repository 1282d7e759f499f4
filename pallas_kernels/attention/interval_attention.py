"""Attention of each query of a row to an interval of the row's places that ends at the query, and its gradient.

    s_ij = scale q_i . k_j,   lse_i = ln sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j     start_i <= j <= i

The gradient takes the log-sum-exp and the sum delta_i = out_i . dout_i from its caller. If the caller has merged the
output with that of other keys, they are those of all keys, and the result is the part of these keys (arXiv:2205.14135,
section 3.1):

    p_ij = exp(s_ij - lse_i),   ds_ij = p_ij (dout_i . v_j - delta_i),
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i p_ij dout_i

Products are of the dtype of the queries, and all sums float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.attention import interval_reference
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch

WIDEST = 128  # channels of a head that the kernels support
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
MMA_ROWS = 16  # smallest side of a product on tensor cores


class IntervalTiles(NamedTuple):
    """How a kernel is divided: rows of a tile of queries and of one of keys, and Triton's parameters."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def params(self) -> pltriton.CompilerParams:
        return pltriton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


FORWARD, OF_QUERIES, OF_KEYS = IntervalTiles(128, 64, 8, 3), IntervalTiles(64, 64, 4, 2), IntervalTiles(64, 64, 4, 2)
WIDE = IntervalTiles(32, 32, 4, 2)  # for float32


def _tiles(q: Array, tiles: IntervalTiles) -> IntervalTiles:
    return WIDE if q.dtype == jnp.float32 else tiles


def _dot(a: Array, b: Array, **transposed: bool) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, precision=precision, **transposed)


class _Loader:
    """Loads tiles of rows, inside a kernel; rows after the last one and channels after the last one are 0."""

    def __init__(self, size: int, dim: int, batch: Array):
        self.size, self.dim, self.batch = size, dim, batch
        self.channel = jnp.arange(max(pl.next_power_of_2(dim), MMA_ROWS))[None, :]

    def mask(self, row: Array) -> Array:
        return (row < self.size)[:, None] & (self.channel < self.dim)

    def heads(self, ref: Any, row: Array, head: Array) -> Array:
        """Returns rows of one head [rows, channels] of an array [B, S, heads, D]."""
        return pltriton.load(ref.at[self.batch, row[:, None], head, self.channel], mask=self.mask(row), other=0)

    def values(self, ref: Any, row: Array, other: float, *head: Array) -> Array:
        """Returns a value of each row [rows] of an array [B, S] or [B, heads, S]."""
        return pltriton.load(ref.at[(self.batch, *head, row)], mask=row < self.size, other=other)


def _seen(row: Array, start: Array, column: Array) -> Array:
    """Returns which columns each row sees, [rows, columns]."""
    return (column[None, :] >= start[:, None]) & (column[None, :] <= row[:, None])


def _forward_kernel(
    q_ref,  # [B, S, H, D]
    k_ref,  # [B, S, KH, D]
    v_ref,
    starts_ref,  # [B, S] int32
    out_ref,  # [B, S, H, D]
    lse_ref,  # [B, H, S] float32
    *,
    scale,
    tiles,
):
    """Attends with one tile of queries of one head, in one Pallas program."""
    block, head, batch = (pl.program_id(axis) for axis in range(3))
    size, heads, dim = q_ref.shape[1:]
    load, kv_head = _Loader(size, dim, batch), head // (heads // k_ref.shape[2])
    row = block * tiles.queries + jnp.arange(tiles.queries)
    start = load.values(starts_ref, row, size)
    q = load.heads(q_ref, row, head)

    def step(index, carry):
        top, total, out = carry
        column = index * tiles.keys + jnp.arange(tiles.keys)
        scores = _dot(q, load.heads(k_ref, column, kv_head), trans_b=True) * scale
        scores = jnp.where(_seen(row, start, column), scores, -jnp.inf)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        finite = jnp.where(new == -jnp.inf, 0.0, new)  # of rows that have seen no column yet
        p, factor = jnp.exp(scores - finite[:, None]), jnp.exp(top - finite)
        v = load.heads(v_ref, column, kv_head)
        return new, total * factor + jnp.sum(p, axis=1), out * factor[:, None] + _dot(p.astype(v.dtype), v)

    none = jnp.full(tiles.queries, -jnp.inf), jnp.zeros(tiles.queries), jnp.zeros((tiles.queries, load.channel.size))
    end = jnp.minimum((block + 1) * tiles.queries, size)
    top, total, out = jax.lax.fori_loop(jnp.min(start) // tiles.keys, pl.cdiv(end, tiles.keys), step, none)
    is_seen = total > 0
    out = out / jnp.where(is_seen, total, 1)[:, None]
    lse = jnp.where(is_seen, top + jnp.log(jnp.where(is_seen, total, 1)), -jnp.inf)
    target = out_ref.at[batch, row[:, None], head, load.channel]
    pltriton.store(target, out.astype(out_ref.dtype), mask=load.mask(row))
    pltriton.store(lse_ref.at[batch, head, row], lse, mask=row < size)


def _score_gradient(q, k, v, dout, lse, delta, seen, scale):
    """Returns p and scale * ds of a tile [queries, keys] in the dtype of the queries."""
    p = jnp.where(seen, jnp.exp(_dot(q, k, trans_b=True) * scale - lse[:, None]), 0.0)
    ds = p * (_dot(dout, v, trans_b=True) - delta[:, None]) * scale
    return p.astype(q.dtype), ds.astype(q.dtype)


def _query_kernel(q_ref, k_ref, v_ref, dout_ref, starts_ref, lse_ref, delta_ref, dq_ref, *, scale, tiles):
    """Computes dq [B, S, H, D] of one tile of queries of one head, in one Pallas program."""
    block, head, batch = (pl.program_id(axis) for axis in range(3))
    size, heads, dim = q_ref.shape[1:]
    load, kv_head = _Loader(size, dim, batch), head // (heads // k_ref.shape[2])
    row = block * tiles.queries + jnp.arange(tiles.queries)
    start = load.values(starts_ref, row, size)
    lse, delta = (load.values(ref, row, 0.0, head) for ref in (lse_ref, delta_ref))
    q, dout = load.heads(q_ref, row, head), load.heads(dout_ref, row, head)

    def step(index, dq):
        column = index * tiles.keys + jnp.arange(tiles.keys)
        k, v = load.heads(k_ref, column, kv_head), load.heads(v_ref, column, kv_head)
        _, ds = _score_gradient(q, k, v, dout, lse, delta, _seen(row, start, column), scale)
        return dq + _dot(ds, k)

    end = jnp.minimum((block + 1) * tiles.queries, size)
    none = jnp.zeros((tiles.queries, load.channel.size))
    dq = jax.lax.fori_loop(jnp.min(start) // tiles.keys, pl.cdiv(end, tiles.keys), step, none)
    target = dq_ref.at[batch, row[:, None], head, load.channel]
    pltriton.store(target, dq.astype(dq_ref.dtype), mask=load.mask(row))


def _key_kernel(
    q_ref, k_ref, v_ref, dout_ref, starts_ref, lse_ref, delta_ref, ends_ref, dk_ref, dv_ref, *, scale, tiles
):
    """Computes dk and dv [B, S, KH, D] of one tile of keys of one KV head, in one Pallas program."""
    block, kv_head, batch = (pl.program_id(axis) for axis in range(3))
    size, heads, dim = q_ref.shape[1:]
    load, group = _Loader(size, dim, batch), heads // k_ref.shape[2]
    column = block * tiles.keys + jnp.arange(tiles.keys)
    k, v = load.heads(k_ref, column, kv_head), load.heads(v_ref, column, kv_head)
    first = block * tiles.keys // tiles.queries
    last = pl.cdiv(jnp.max(load.values(ends_ref, column, 0)), tiles.queries)
    gradients = (jnp.zeros((tiles.keys, load.channel.size)),) * 2

    def step(index, carry):
        # All query heads of the group, one after the other, for a tile of queries.
        head = kv_head * group + jax.lax.rem(index, group)
        row = (first + jax.lax.div(index, group)) * tiles.queries + jnp.arange(tiles.queries)
        q, dout = load.heads(q_ref, row, head), load.heads(dout_ref, row, head)
        start = load.values(starts_ref, row, size)
        lse, delta = (load.values(ref, row, 0.0, head) for ref in (lse_ref, delta_ref))
        p, ds = _score_gradient(q, k, v, dout, lse, delta, _seen(row, start, column), scale)
        return carry[0] + _dot(ds, q, trans_a=True), carry[1] + _dot(p, dout, trans_a=True)

    gradients = jax.lax.fori_loop(0, jnp.maximum(last - first, 0) * group, step, gradients)
    for ref, gradient in zip((dk_ref, dv_ref), gradients, strict=True):
        pltriton.store(ref.at[batch, column[:, None], kv_head, load.channel], gradient, mask=load.mask(column))


def _pallas(q, k, v, starts, *, scale, interpret):
    (batch, size, heads, _), tiles = q.shape, _tiles(q, FORWARD)
    return pl.pallas_call(
        functools.partial(_forward_kernel, scale=scale, tiles=tiles),
        grid=(pl.cdiv(size, tiles.queries), heads, batch),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, size), jnp.float32)],
        compiler_params=tiles.params,
        interpret=interpret,
        name="interval_attention",
    )(q, k, v, starts)


def _pallas_gradient(q, k, v, dout, starts, lse, delta, ends, *, scale, interpret):
    batch, size, heads, _ = q.shape
    tiles, inputs = _tiles(q, OF_QUERIES), (q, k, v, dout, starts, lse, delta)
    (dq,) = pl.pallas_call(
        functools.partial(_query_kernel, scale=scale, tiles=tiles),
        grid=(pl.cdiv(size, tiles.queries), heads, batch),
        out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        compiler_params=tiles.params,
        interpret=interpret,
        name="interval_attention_dq",
    )(*inputs)
    tiles = _tiles(q, OF_KEYS)
    dk, dv = pl.pallas_call(
        functools.partial(_key_kernel, scale=scale, tiles=tiles),
        grid=(pl.cdiv(size, tiles.keys), k.shape[2], batch),
        out_shape=[jax.ShapeDtypeStruct(k.shape, jnp.float32)] * 2,
        compiler_params=tiles.params,
        interpret=interpret,
        name="interval_attention_dkv",
    )(*inputs, ends)
    return dq, dk, dv


def _unsupported(q: Array) -> str | None:
    """Returns a text that says which limit of the kernels a call exceeds; None if the call is supported."""
    if q.shape[-1] > WIDEST or q.shape[-1] % MMA_ROWS:
        return f"head_dim must be a multiple of {MMA_ROWS} up to {WIDEST}, got {q.shape[-1]}"
    return None if q.dtype in DTYPES else f"dtype must be one of {', '.join(map(str, DTYPES))}, got {q.dtype}"


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def interval_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B S KH D"],
    v: Float[Array, "B S KH D"],
    starts: Int32[Array, "B S"],
    *,
    scale: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B S H D"], Float[Array, "B H S"]]:
    """Returns the attention of each query i to the places starts[i] to i, and the log-sum-exp of its scores.

    A query that sees nothing has the output 0 and the log-sum-exp -inf.

    Args:
        q: queries.
        k, v: keys and values; KH divides H.
        starts: first place that each query sees; later ones than the query's own: it sees nothing.
        scale: factor of the scores.
        implementation: as in `paged_attention`.
    """
    kernel, reference = (functools.partial(of, scale=scale) for of in (_pallas, interval_reference.attend))
    return dispatch(implementation, [Kernel(TRITON, kernel, _unsupported(q))], reference, q, k, v, starts)


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def interval_attention_gradient(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B S KH D"],
    v: Float[Array, "B S KH D"],
    dout: Float[Array, "B S H D"],
    starts: Int32[Array, "B S"],
    ends: Int32[Array, "B S"],
    lse: Float[Array, "B H S"],
    delta: Float[Array, "B H S"],
    *,
    scale: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S KH D"], Float[Array, "B S KH D"]]:
    """Returns the gradients dq, dk and dv of `interval_attention` in float32.

    Args:
        q, k, v, starts, scale, implementation: arguments of `interval_attention`.
        dout: gradient of the output, which may be merged with that of other keys, in q's dtype.
        ends: a place after all queries that see each place.
        lse: log-sum-exp of the scores of all keys of a query.
        delta: sum of the products of the merged output and its gradient.
    """
    arrays = (q, k, v, dout, starts, lse, delta, ends)
    kernel, reference = (functools.partial(of, scale=scale) for of in (_pallas_gradient, interval_reference.gradient))
    return dispatch(implementation, [Kernel(TRITON, kernel, _unsupported(q))], reference, *arrays)
