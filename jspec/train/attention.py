"""Attention of the training-time test (EAGLE-3, arXiv:2503.01840, section 3.2): causal rows and diagonals.

Column i of step j is a pair whose feature is the head's own output of step j - 1 for column i; at step 0, features are
the target's. It sees what it would see in a round whose root is column i: the rows of step 0 up to column i, which a
round has in its cache, and column i of the steps 1 to j, the draft tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.models.block import LayerWeights
from jspec.models.layer_config import LayerConfig
from jspec.models.rope import tables
from jspec.train.products import einsum32
from pallas_kernels.attention.rope_append import HeadTransform, split_qkv
from pallas_kernels.layers.quantized import PartialSums

SCORES = 2**28  # most scores of one step that exist at a time


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
    """Split a fused QKV projection and rotate queries and keys, as `jspec.models.block.attention_part` does.

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
    transform = HeadTransform(cos_sin, layer.qkv_bias, layer.q_norm, layer.k_norm, eps)
    sizes = {"heads": attention.heads, "kv_heads": attention.kv_heads}
    q, *own = split_qkv(qkv, cos_sin, transform, **sizes, dtype=dtype)
    return q, Keys(*own)


def attend(
    config: LayerConfig,
    q: Float[Array, "rows size heads head_dim"],
    steps: Sequence[Keys],
    segments: Int[Array, "rows size"],
) -> Float[Array, "rows size width"]:
    """Attend with the queries of the last step to the rows of step 0 and to the same column of later steps.

    Args:
        config: config of the layer.
        q: rotated queries of the last step.
        steps: keys and values of each step so far, step 0 first.
        segments: document of each column; a column sees columns of its own document only.

    Returns:
        The attended values of all heads, concatenated. Scores and softmax are computed in float32.
    """
    attention = config.gqa
    rows, size, heads, dim = q.shape
    groups = rows, size, attention.kv_heads, heads // attention.kv_heads, dim
    scale = 1 / math.sqrt(dim) if attention.scale is None else attention.scale
    block = largest_divisor(size, SCORES // (rows * heads * size))
    own = [jnp.stack(of, axis=2) for of in ([s.k for s in steps[1:]], [s.v for s in steps[1:]]) if of]
    options: dict[str, Any] = {"ahead": len(steps) - 1, "scale": scale}
    options |= {"softcap": attention.softcap, "window": attention.window}
    run = jax.checkpoint(partial(_attend_block, steps[0].k, steps[0].v, segments, **options))

    def cut(values: Array) -> Array:
        return jnp.moveaxis(values.reshape(rows, size // block, block, *values.shape[2:]), 1, 0)

    blocks = (jnp.arange(0, size, block), cut(q.reshape(groups)), *map(cut, own))
    out = jax.lax.map(lambda of: run(*of), blocks)
    return jnp.moveaxis(out, 0, 1).reshape(rows, size, heads * dim)


def _attend_block(
    k: Float[Array, "rows size kv_heads dim"],
    v: Float[Array, "rows size kv_heads dim"],
    segments: Int[Array, "rows size"],
    first: Int[Array, ""],
    q: Float[Array, "rows block kv_heads group dim"],
    own_k: Float[Array, "rows block ahead kv_heads dim"] | None = None,
    own_v: Float[Array, "rows block ahead kv_heads dim"] | None = None,
    *,
    ahead: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Float[Array, "rows block kv_heads group dim"]:
    """Attend with a block of queries.

    Args:
        k, v: keys and values of step 0.
        segments: document of each column.
        first: first column of the block.
        q: queries.
        own_k, own_v: keys and values of the same columns at later steps; None: the step is step 0.
        ahead: number of later steps.
        scale, softcap, window: how scores are computed.
    """

    def limit(scores: Array) -> Array:
        scores = scores * scale
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    columns, places = first + jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    documents = jax.lax.dynamic_slice_in_dim(segments, first, q.shape[1], axis=1)
    visible = (columns[:, None] >= places) & (documents[:, :, None] == segments[:, None])
    if window is not None:
        visible &= columns[:, None] + ahead - places < window
    scores = limit(einsum32("btkgd,bskd->bkgts", q, k))
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if own_k is None or own_v is None:
        weights = jnp.exp(scores - jax.lax.stop_gradient(top))
        total = jnp.sum(weights, axis=-1)
        out = einsum32("bkgts,bskd->btkgd", weights.astype(v.dtype), v)
    else:
        own = limit(einsum32("btkgd,btnkd->bkgtn", q, own_k))
        top = jax.lax.stop_gradient(jnp.maximum(top, jnp.max(own, axis=-1, keepdims=True)))
        weights, own = jnp.exp(scores - top), jnp.exp(own - top)
        total = jnp.sum(weights, axis=-1) + jnp.sum(own, axis=-1)
        out = einsum32("bkgts,bskd->btkgd", weights.astype(v.dtype), v)
        out += einsum32("bkgtn,btnkd->btkgd", own.astype(v.dtype), own_v)
    return (out / jnp.moveaxis(total, 3, 1)[..., None]).astype(q.dtype)


def largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` that is at most ``most``, or 1."""
    return next((part for part in range(min(size, max(most, 1)), 0, -1) if size % part == 0), 1)
