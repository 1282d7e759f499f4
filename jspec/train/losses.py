"""Losses of a draft distribution against the target's own, computed for one block of tokens after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.models.decoder import Model
from jspec.train.config import LOSS_KINDS
from jspec.train.observe import LOGITS, target_logits
from pallas_kernels.attention.interval_reference import largest_divisor

ETA = 3.0  # how fast the "lk" loss turns from divergence to distance as the overlap grows

# Function of draft logits and target probabilities that returns each token's loss.
Loss = Callable[[Float[Array, "tokens vocab"], Float[Array, "tokens vocab"]], Float[Array, "tokens"]]


def cross_entropy(logits: Array, teacher: Array) -> Array:
    """Return the cross entropy - sum q log p of each token.

    The sum of rounded probabilities q is not 1; with it as a factor, the gradient of the logits still has the sum 0.
    """
    total = jnp.sum(teacher, axis=-1)
    return total * jax.nn.logsumexp(logits, axis=-1) - jnp.sum(teacher * logits, axis=-1)


def lk(logits: Array, teacher: Array) -> Array:
    """Return w KL(q, p) + (1 - w) TV(q, p) with w = exp(-ETA * overlap) (arXiv:2602.23881).

    The overlap, sum min(p, q) = 1 - TV, is the probability that a draft token is accepted. The weight w has no
    gradient.
    """
    overlap = jnp.sum(jnp.minimum(jax.nn.softmax(logits, axis=-1), teacher), axis=-1)
    entropy = -jnp.sum(jnp.where(teacher > 0, teacher * jnp.log(jnp.where(teacher > 0, teacher, 1)), 0), axis=-1)
    weight = jax.lax.stop_gradient(jnp.exp(-ETA * overlap))
    return weight * (cross_entropy(logits, teacher) - entropy) + (1 - weight) * (1 - overlap)


LOSSES: Mapping[str, Loss] = dict(zip(LOSS_KINDS, (cross_entropy, lk), strict=True))


def in_blocks(function: Callable[..., Any], width: int, *values: Array) -> Any:
    """Map a function over blocks of tokens, so that few of its intermediate values exist at a time.

    The gradient computes each block again.

    Args:
        function: function of a block of each of the values.
        width: number of the function's largest intermediate values for a token.
        values: arrays whose first axis is tokens.

    Returns:
        The function's arrays for all tokens, whose first axis is tokens too.
    """
    tokens = len(values[0])
    size = largest_divisor(tokens, LOGITS // width)
    blocks = [value.reshape(tokens // size, size, *value.shape[1:]) for value in values]
    out = jax.lax.map(lambda block: jax.checkpoint(function)(*block), blocks)
    return jax.tree.map(lambda value: value.reshape(tokens, *value.shape[2:]), out)


def teacher_of(
    target: Model, normed: Float[Array, "rows size hidden"], ids: Int[Array, "draft_vocab"] | None
) -> Float[Array, "rows size draft_vocab"]:
    """Return the target's probabilities after each place, restricted to the draft vocabulary and renormalised.

    They have the dtype of the target's states.

    Args:
        target: the target.
        normed: hidden states after the final norm.
        ids: target ids of the draft vocabulary; None: the whole vocabulary.
    """
    width = target.config.vocab_size if ids is None else len(ids)

    def of_block(x: Array) -> Array:
        return jax.nn.softmax(target_logits(target, x, ids), axis=-1).astype(x.dtype)

    flat = normed.reshape(-1, normed.shape[-1])
    return jax.lax.stop_gradient(in_blocks(of_block, width, flat).reshape(*normed.shape[:2], width))


def is_drafted(
    choices: Int[Array, "rows size"], ids: Int[Array, "draft_vocab"] | None, vocab: int
) -> Bool[Array, "rows size"]:
    """Return whether each token is one of the draft vocabulary.

    Args:
        choices: target ids.
        ids: target ids of the draft vocabulary; None: the whole vocabulary.
        vocab: size of the target's vocabulary.
    """
    if ids is None:
        return jnp.ones(choices.shape, bool)
    return jnp.zeros(vocab, bool).at[ids].set(True)[choices]
