"""Attention of the training-time test (EAGLE-3, arXiv:2503.01840, section 3.2): causal rows and diagonals.

Column i of step j is a pair whose feature is the head's own output of step j - 1 for column i; at step 0, features are
the target's. It sees what it would see in a round whose root is column i: the rows of step 0 up to column i, which a
round has in its cache, and column i of the steps 1 to j, the draft tokens before it.

The rows of step 0 are an attention by themselves, with output o and log-sum-exp l (`interval_attention`). The diagonals
are one score s_n a step. With the log-sum-exp L of l and all s_n, the result is o exp(l - L) + sum_n exp(s_n - L) v_n.
Its gradient is that of an attention to all these keys at once, so the gradient of the rows takes L, not l.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jspec.models.config.layer_config import LayerConfig
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.rope import tables
from jspec.train.rows import Rows
from pallas_kernels.attention.interval_attention import interval_attention, interval_attention_gradient
from pallas_kernels.attention.rope_append import HeadTransform, split_qkv
from pallas_kernels.layers.partial_sums import PartialSums

ATTENDED = "attended"  # name of what a step keeps for its gradient, so that it attends once


class Keys(NamedTuple):
    """Rotated keys, and values, of every column of one step in one layer."""

    k: Float[Array, "rows size kv_heads head_dim"]
    v: Float[Array, "rows size kv_heads head_dim"]


def split_heads(
    layer: LayerWeights,
    config: LayerConfig,
    qkv: PartialSums,
    positions: Int[Array, "rows size"],
    eps: float,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "rows size heads head_dim"], Keys]:
    """Split a fused QKV projection and rotate queries and keys, as `jspec.models.mixers.gqa.GQA` does.

    Args:
        layer: weights of the layer, whose biases and norms of heads are applied.
        config: config of the layer.
        qkv: partial sums of the projection.
        positions: rotary position of each column.
        eps: epsilon of the norms.
        dtype: dtype of the model.
    """
    attention = config.gqa
    cos_sin = tables(attention.rope, attention.head_dim, positions)
    transform = HeadTransform(cos_sin, layer.qkv_bias, layer.q_norm, layer.k_norm, eps=eps)
    sizes = {"heads": attention.heads, "kv_heads": attention.kv_heads}
    q, *kv = split_qkv(qkv, cos_sin, transform, **sizes, dtype=dtype)
    return q, Keys(*kv)


def attend(
    config: LayerConfig, q: Float[Array, "rows size heads head_dim"], steps: Sequence[Keys], rows: Rows
) -> Float[Array, "rows size width"]:
    """Attend with the queries of the last step to the rows of step 0 and to the same column of later steps.

    Args:
        config: config of the layer, which limits no scores and has no sinks.
        q: rotated queries of the last step.
        steps: keys and values of each step so far, step 0 first.
        rows: packed rows; a column sees columns of its own document only.

    Returns:
        The attended values of all heads, concatenated. Scores and softmax are computed in float32.
    """
    attention, ahead = config.gqa, len(steps) - 1
    assert attention.softcap is None and not attention.sinks, "no family of heads has them"
    starts = rows.starts
    if attention.window is not None:
        starts = jnp.maximum(starts, jnp.arange(q.shape[1]) + ahead - attention.window + 1)
    scale = 1 / math.sqrt(q.shape[-1]) if attention.scale is None else attention.scale
    out = _attend(scale, q, steps[0], list(steps[1:]), starts, rows.ends)
    return out.reshape(*q.shape[:2], -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale: float, q: Array, rows: Keys, later: list[Keys], starts: Array, ends: Array) -> Array:
    """Attend to the rows of step 0 from ``starts`` on, and to one's own column of later steps.

    Args:
        scale: factor of the scores.
        q: queries.
        rows: keys and values of step 0.
        later: keys and values of later steps.
        starts: first row that each column sees.
        ends: a place after all columns that see each row.
    """
    return _forward(scale, q, rows, later, starts, ends)[0]


def _forward(scale: float, q: Array, rows: Keys, later: list[Keys], starts: Array, ends: Array) -> tuple[Array, Any]:
    attended, lse = interval_attention(q, rows.k, rows.v, starts, scale=scale)
    scores = _diagonals(scale, q, later)
    total = jnp.moveaxis(lse, 1, 2)
    for score in scores:
        total = jnp.logaddexp(total, score)
    out = attended.astype(jnp.float32) * jnp.exp(jnp.moveaxis(lse, 1, 2) - total)[..., None]
    for score, step in zip(scores, later, strict=True):
        out += jnp.exp(score - total)[..., None] * _of_queries(step.v, q)
    out, total = checkpoint_name(out.astype(q.dtype), ATTENDED), checkpoint_name(total, ATTENDED)
    return out, (q, rows, later, starts, ends, out, total)


def _backward(scale: float, kept: Any, gradient: Array) -> tuple[Any, ...]:
    q, rows, later, starts, ends, out, total = kept
    dout = gradient.astype(jnp.float32)
    delta = jnp.sum(out.astype(jnp.float32) * dout, axis=-1)
    sums = jnp.moveaxis(total, 2, 1), jnp.moveaxis(delta, 2, 1)
    dq, dk, dv = interval_attention_gradient(q, rows.k, rows.v, gradient, starts, ends, *sums, scale=scale)
    of_own = []
    for score, step in zip(_diagonals(scale, q, later), later, strict=True):
        p = jnp.exp(score - total)
        ds = p * (jnp.sum(dout * _of_queries(step.v, q), axis=-1) - delta) * scale
        dq += ds[..., None] * _of_queries(step.k, q)
        weighted = ds[..., None] * q.astype(jnp.float32), p[..., None] * dout
        of_own.append(Keys(*(_of_keys(of, step.k) for of in weighted)))
    return dq.astype(q.dtype), Keys(dk.astype(rows.k.dtype), dv.astype(rows.v.dtype)), of_own, None, None


_attend.defvjp(_forward, _backward)


def _diagonals(scale: float, q: Array, later: list[Keys]) -> list[Float[Array, "rows size heads"]]:
    """Return the score of each column with itself at each later step, in float32."""
    return [scale * jnp.sum(q.astype(jnp.float32) * _of_queries(step.k, q), axis=-1) for step in later]


def _of_queries(keys: Array, q: Array) -> Float[Array, "rows size heads head_dim"]:
    """Return the key or value of each query head, in float32."""
    return jnp.repeat(keys.astype(jnp.float32), q.shape[2] // keys.shape[2], axis=2)


def _of_keys(values: Array, keys: Array) -> Array:
    """Add up the values of the query heads that share a key, in the dtype of the keys."""
    grouped = values.reshape(*keys.shape[:3], -1, keys.shape[3])
    return jnp.sum(grouped, axis=3).astype(keys.dtype)
