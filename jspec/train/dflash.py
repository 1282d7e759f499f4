"""The loss of DFlash heads (arXiv:2602.06036): cross entropy with the text's own tokens, early ones weighted more.

    sum_k exp(-(k - 1) / gamma) * sum_a m_ak * ( - log p_ak(x_{a+k}) ) / (rows * anchors)

over anchors a and depths k, where m_ak is 1 if token a + k belongs to the anchor's document and counts, else 0. The
embedding and the output head are the target's, and have no gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.draft.dflash_head import BoundDFlash, DFlashHead, bind_head
from jspec.models.decoder import Model
from jspec.models.parts.layers import limited
from jspec.train.blocks import PackedBlocks, depth_weights, run_blocks
from jspec.train.losses import in_blocks
from jspec.train.measured import Measured
from jspec.train.observe import Observed
from jspec.train.products import einsum32
from jspec.train.rows import Rows, cast
from pallas_kernels.layers.dense.grouped_matmul import widened
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.weights import Quantized


def predict(
    head: DFlashHead, target: Model, seen: Observed, rows: Rows, blocks: PackedBlocks
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"]]:
    """Return the loss of each token of each block, and whether the head's argmax is the target's.

    Args:
        head: the head; it is cast to the dtype of the target's states.
        target: the target.
        seen: the target's outputs.
        rows: packed rows.
        blocks: the blocks.
    """
    bound = bind_head(cast(head, seen.features.dtype), target)
    states = run_blocks(bound, head.config, seen.features, rows, blocks)
    asked = states, blocks.labels, blocks.choices
    flat = [of.reshape(-1, *of.shape[3:]) for of in asked]
    return in_blocks(partial(_of_block, bound), bound.model.config.vocab_size, *flat)


def weighted(lost: Array, hits: Array, blocks: PackedBlocks, gamma: float) -> tuple[Float[Array, ""], Measured]:
    """Return the loss of blocks times their number, and what was measured.

    Args:
        lost, hits: results of `predict`.
        blocks: the blocks.
        gamma: number of depths over which the weight falls by e.
    """
    shape = blocks.counts.shape
    losses, right, counts = (jnp.moveaxis(of.reshape(shape), -1, 0) for of in (lost, hits, blocks.counts))
    losses = losses * counts
    total = jnp.sum(depth_weights(shape[-1], gamma) * jnp.sum(losses, axis=(1, 2)))
    return total, Measured.of(losses, right, counts)


def block_logits(head: BoundDFlash, states: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens vocab"]:
    """Return the logits of normed states in float32; the output head has no gradient."""
    weight, config = head.model.output_head, head.model.config
    wide = widened(weight) if isinstance(weight, Quantized) else weight
    rows = states.reshape(-1, states.shape[-1])
    product = einsum32("th,vh->tv", rows, jax.lax.stop_gradient(wide))
    sums = limited(product[None], config.logit_divisor, config.logit_softcap)
    return reduce_partials(sums, jnp.float32).reshape(*states.shape[:-1], -1)


def _of_block(
    head: BoundDFlash, states: Array, labels: Array, choices: Array
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"]]:
    """Return the cross entropy of each token of a block of tokens, and whether the argmax is the target's."""
    logits = block_logits(head, states)
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    chosen = jnp.argmax(logits, axis=-1)
    chosen = chosen if head.draft_to_target is None else head.draft_to_target[chosen]
    return jax.nn.logsumexp(logits, axis=-1) - of_label, chosen == choices
