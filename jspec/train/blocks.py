"""Blocks of DFlash and DSpark heads (arXiv:2602.06036, 2607.05147): many anchors of a row in one masked pass.

An anchor is a token that is taken as the root of a round. Its block is the anchor and mask tokens. A block sees what it
would see in a round: the target's states at the tokens of its document before the anchor, and itself.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jspec.core.numerics import REFERENCE
from jspec.draft.dflash_head import BoundDFlash, context_keys
from jspec.draft.head_config import DFlashConfig
from jspec.models.decoder import run_layers
from jspec.models.mixers.gqa import GQA
from jspec.train.attention import Keys, split_heads
from jspec.train.products import einsum32
from jspec.train.rows import Rows, ahead
from pallas_kernels.attention.interval_reference import largest_divisor
from pallas_kernels.layers.residual_norm import rms_norm
from pallas_kernels.layers.split_matmul import split_matmul

SCORES = 2**28  # most scores that exist at a time


@struct.dataclass
class PackedBlocks:
    """The blocks of packed rows, and what they are to predict, depth by depth.

    Attributes:
        anchors: place of each anchor.
        before: token before each depth; that of depth 1 is the anchor.
        labels: token at each depth.
        choices: the target's argmax for it.
        teachers: place behind whose token the target predicts it.
        counts: whether the token belongs to the document and counts.
    """

    anchors: Int[Array, "rows anchors"]
    before: Int[Array, "rows anchors depth"]
    labels: Int[Array, "rows anchors depth"]
    choices: Int[Array, "rows anchors depth"]
    teachers: Int[Array, "rows anchors depth"]
    counts: Bool[Array, "rows anchors depth"]


def choose_blocks(rows: Rows, choices: Int[Array, "rows size"], keys: Array, count: int, depth: int) -> PackedBlocks:
    """Draw anchors from the tokens that count, behind which another token counts; no anchor is drawn twice.

    Args:
        rows: packed rows.
        choices: the target's argmax for the token after each place.
        keys: key of each row's random numbers.
        count: anchors of a row; in rows with fewer tokens to draw, the tokens of the others do not count.
        depth: tokens that a block drafts.
    """
    size = rows.tokens.shape[1]
    fits = (rows.positions > 0) & rows.counted & rows.reaches(1) & ahead(rows.counted, 1)
    draws = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(keys)
    drawn, anchors = jax.lax.top_k(jnp.where(fits, draws, -1.0), count)
    places = anchors[..., None] + jnp.arange(depth + 1)
    index = jnp.minimum(places, size - 1)

    def at(values: Array) -> Array:
        return jnp.take_along_axis(values[:, None], index, axis=2)

    segments, tokens = at(rows.segments), at(rows.tokens)
    is_own = (segments == segments[..., :1]) & (places < size) & (drawn >= 0)[..., None]
    return PackedBlocks(
        anchors=anchors,
        before=tokens[..., :-1],
        labels=tokens[..., 1:],
        choices=at(choices)[..., :-1],
        teachers=index[..., :-1],
        counts=(is_own & at(rows.counted))[..., 1:],
    )


def run_blocks(
    head: BoundDFlash,
    config: DFlashConfig,
    features: Float[Array, "rows size features"],
    rows: Rows,
    blocks: PackedBlocks,
) -> Float[Array, "rows anchors depth hidden"]:
    """Run a head on all blocks; return the normed states from which the logits at each depth are computed.

    Args:
        head: the head, bound to the target.
        config: config of the head.
        features: the target's hidden states that the head reads.
        rows: packed rows.
        blocks: the blocks.
    """
    model, (count, anchors, depth) = head.model, blocks.labels.shape
    context = [Keys(*pair) for pair in context_keys(head, rows.positions, features)]
    first = 0 if config.sample_from_anchor else 1
    size = depth + first
    mask = jnp.full((count, anchors, size - 1), config.mask_token_id, jnp.int32)
    tokens = jnp.concatenate([blocks.before[..., :1], mask], axis=-1).reshape(count, -1)
    start = jnp.take_along_axis(rows.positions, blocks.anchors, axis=1)
    positions = (start[..., None] + jnp.arange(size)).reshape(count, -1)

    def attend(index: int, normed: Array) -> Array:
        layer, layer_config = model.layers[index], model.config.layers[index]
        qkv = split_matmul(normed, layer.qkv, implementation=REFERENCE.implementation)
        q, keys = split_heads(layer, layer_config, qkv, positions, model.config.norm_eps, features.dtype)
        return attend_blocks(layer_config.gqa, q, keys, context[index], rows, blocks.anchors)

    x = model.embedded(tokens).astype(features.dtype)
    first_norm = model.layers[0].attn_norm
    assert first_norm is not None
    normed = rms_norm(x, first_norm, model.config.norm_eps)
    *_, normed = run_layers(model, x, normed, attend, numerics=REFERENCE)
    return normed.reshape(count, anchors, size, -1)[:, :, first:]


def attend_blocks(
    config: GQA,
    q: Float[Array, "rows tokens heads head_dim"],
    keys: Keys,
    context: Keys,
    rows: Rows,
    anchors: Int[Array, "rows anchors"],
) -> Float[Array, "rows tokens width"]:
    """Attend with the tokens of each block to the block, and to the context of its document before the anchor.

    Args:
        config: config of the layer's attention.
        q, keys: queries, keys and values of the tokens of all blocks.
        context: keys and values of the target's states at each place.
        rows: packed rows.
        anchors: place of each anchor.

    Returns:
        The attended values of all heads, concatenated. Scores and softmax are computed in float32.
    """
    count, tokens, heads, dim = q.shape
    blocks, kv = anchors.shape[1], config.kv_heads
    size = tokens // blocks
    part = largest_divisor(blocks, SCORES // (count * heads * size * rows.tokens.shape[1]))

    def cut(values: Array, *shape: int) -> Array:
        return jnp.moveaxis(values.reshape(count, blocks // part, part, *shape), 1, 0)

    parts = cut(q, size, kv, heads // kv, dim), cut(keys.k, size, kv, dim), cut(keys.v, size, kv, dim), cut(anchors)
    run = jax.checkpoint(partial(_attend_part, config, context, rows.segments))
    out = jax.lax.map(lambda of: run(*of), parts)
    return jnp.moveaxis(out, 0, 1).reshape(count, tokens, heads * dim)


def _attend_part(
    config: GQA,
    context: Keys,
    segments: Int[Array, "rows size"],
    q: Float[Array, "rows part block kv_heads group dim"],
    k: Float[Array, "rows part block kv_heads dim"],
    v: Float[Array, "rows part block kv_heads dim"],
    anchors: Int[Array, "rows part"],
) -> Float[Array, "rows part block kv_heads group dim"]:
    """Attend with some blocks; the arguments are those of `attend_blocks`."""
    scale = 1 / math.sqrt(q.shape[-1]) if config.scale is None else config.scale
    places, steps = jnp.arange(segments.shape[1]), jnp.arange(q.shape[2])
    documents = jnp.take_along_axis(segments, anchors, axis=1)
    seen = (places < anchors[..., None]) & (segments[:, None] == documents[..., None])  # [rows, part, size]
    distance = anchors[..., None, None] + steps[:, None] - places  # [rows, part, block, size]
    ahead = steps[:, None] - steps  # [block, block]
    window = distance.shape[-1] + len(steps) if config.window is None else config.window
    seen = seen[:, :, None] & (distance < window)
    inside = (ahead < window) & (ahead >= 0) if config.causal else ahead < window

    def limit(scores: Array, visible: Array) -> Array:
        scores = scores * scale
        scores = scores if config.softcap is None else config.softcap * jnp.tanh(scores / config.softcap)
        return jnp.where(visible, scores, -jnp.inf)

    before = limit(einsum32("batkgd,bskd->bakgts", q, context.k), seen[:, :, None, None])
    within = limit(einsum32("batkgd,baukd->bakgtu", q, k), inside)
    top = jnp.maximum(jnp.max(before, axis=-1, keepdims=True), jnp.max(within, axis=-1, keepdims=True))
    before, within = (jnp.exp(scores - jax.lax.stop_gradient(top)) for scores in (before, within))
    total = jnp.sum(before, axis=-1) + jnp.sum(within, axis=-1)
    out = einsum32("bakgts,bskd->batkgd", before.astype(v.dtype), context.v)
    out += einsum32("bakgtu,baukd->batkgd", within.astype(v.dtype), v)
    return (out / jnp.moveaxis(total, 4, 2)[..., None]).astype(q.dtype)


def depth_weights(depth: int, gamma: float) -> Float[Array, "depth"]:
    """Return exp(-(k - 1) / gamma) for the depths k = 1, 2, ...: early tokens are accepted more often."""
    return jnp.exp(-jnp.arange(depth) / gamma)


def spread_states(layers: int, count: int) -> tuple[int, ...]:
    """Return the target's states that a head reads by default: evenly spaced from 2 to N - 2, at most ``count``.

    Of two layers it reads the output of the first, of one layer the state after the final norm.
    """
    if layers < 3:
        return (3 - layers,)
    last = layers - 2
    states = [2 + round(index * (last - 2) / max(count - 1, 1)) for index in range(count)]
    return tuple(sorted(set(states)))
