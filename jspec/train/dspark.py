"""The loss of DSpark heads (arXiv:2607.05147, section 3.3): that of a DFlash head, of corrected logits, in three terms.

    w_k = exp(-(k - 1) / gamma),   sum_k w_k * sum_a m_ak * loss_ak / (rows * anchors)
    loss = 0.1 * ( - log p(x_{a+k}) ) + 0.9 * sum |p - q| + BCE(c, 1 - sum |p - q| / 2)

with p from the logits that the Markov head corrects by the text's own token before, the target's q, and the confidence
c. The label of the confidence has no gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.core.numerics import REFERENCE
from jspec.draft.dflash_head import BoundDFlash, bind_head
from jspec.draft.dspark_head import DSparkHead
from jspec.models.decoder import Model
from jspec.train.blocks import PackedBlocks, run_blocks
from jspec.train.dflash import block_logits
from jspec.train.losses import in_blocks
from jspec.train.observe import Observed, target_logits
from jspec.train.rows import Rows, cast

CROSS_ENTROPY, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0  # weights of the three terms


def predict(
    head: DSparkHead, target: Model, seen: Observed, rows: Rows, blocks: PackedBlocks
) -> tuple[Float[Array, "blocks depth"], Bool[Array, "blocks depth"]]:
    """Return the loss of each token of each block, and the hits; the arguments are those of `jspec.train.dflash`."""
    bound = bind_head(cast(head, seen.features.dtype), target)
    states = run_blocks(bound, head.config, seen.features, rows, blocks)
    at = jnp.arange(len(rows.tokens))[:, None, None]
    teachers = seen.normed[at, blocks.teachers]
    asked = (states, teachers, blocks.before, blocks.labels, blocks.choices)
    parts = [of.reshape(-1, *of.shape[2:]) for of in asked]  # [rows * anchors, depth, ...]
    width = blocks.labels.shape[-1] * target.config.vocab_size
    return in_blocks(partial(_of_blocks, head, bound, target), width, *parts)


def corrected_logits(
    head: DSparkHead, bound: BoundDFlash, states: Float[Array, "blocks depth hidden"], before: Array
) -> Float[Array, "blocks depth vocab"]:
    """Return the logits at each depth, corrected by the token before it.

    Args:
        head: the head, in the dtype of the states.
        bound: the same head, bound to the target.
        states: normed states at each depth.
        before: token before each depth.
    """
    logits, markov = block_logits(bound, states), head.markov
    if markov is None:
        return logits
    state, corrections = markov.start(len(states)), []
    for depth in range(states.shape[1]):
        token = before[:, depth : depth + 1]
        correction, state = markov.correct(token, states[:, depth], state, REFERENCE)
        corrections.append(correction)
    return logits + jnp.concatenate(corrections, axis=1)


def _of_blocks(
    head: DSparkHead,
    bound: BoundDFlash,
    target: Model,
    states: Array,
    teachers: Array,
    before: Array,
    labels: Array,
    choices: Array,
) -> tuple[Float[Array, "blocks depth"], Bool[Array, "blocks depth"]]:
    """Return the loss at each depth of some blocks, and whether the argmax is the target's."""
    head = cast(head, states.dtype)
    logits = corrected_logits(head, bound, states, before)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    q = jax.lax.stop_gradient(jax.nn.softmax(target_logits(target, teachers, None), axis=-1))
    distance = jnp.sum(jnp.abs(jnp.exp(log_p) - q), axis=-1)
    losses = -CROSS_ENTROPY * jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0] + DISTANCE * distance
    if head.confidence is not None:
        depths = jnp.broadcast_to(1 + jnp.arange(states.shape[1]), states.shape[:2])
        embedded = head.markov.embed[before] if head.config.reads_markov and head.markov is not None else None
        confidence = head.confidence.logits(states, depths, embedded)
        label = jax.lax.stop_gradient(1 - distance / 2)
        losses += CONFIDENCE * (jax.nn.softplus(confidence) - label * confidence)  # binary cross entropy
    return losses, jnp.argmax(logits, axis=-1) == choices
