"""GRPO (arXiv:2402.03300) in plain JAX with the engine's own log-probabilities: a pattern for a trainer of one's own.

Trainers such as Tunix have more: a reference model, several updates of a batch, parts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.shorten import short
from jspec.engine.request.request import Completion
from jspec.models.decoder import Model
from jspec.train.scoring import log_probs


@struct.dataclass
class Rollouts:
    """Prompts with their completions, as rows of one size.

    Attributes:
        tokens: token ids, prompt first; 0 after the last token.
        lengths: number of tokens of each row.
        starts: number of the prompt's tokens.
        log_probs: log-probability with which the engine sampled each token of the completion; 0 elsewhere.
        advantages: how much better than its group each completion is (`advantages`).
    """

    tokens: Int[Array, "rows size"]
    lengths: Int[Array, "rows"]
    starts: Int[Array, "rows"]
    log_probs: Float[Array, "rows size"]
    advantages: Float[Array, "rows"]

    @classmethod
    def of(cls, completions: Sequence[Completion], rewards: Sequence[float], group: int, size: int) -> Rollouts:
        """Make rollouts.

        Args:
            completions: completions with ``logprobs``, those of a prompt one after another; with ``n`` > 1 all of
                `Completion.samples`.
            rewards: reward of each.
            group: number of completions of a prompt.
            size: tokens of a row; rows of one size need one program.

        Raises:
            ValueError: a completion has no log-probabilities, or more tokens than a row, or rewards are not of whole
                groups of completions.
        """
        if len(rewards) != len(completions) or len(rewards) % group:
            raise ValueError(
                f"grpo: expected a reward of each completion and groups of {group}, got {len(completions)} completions "
                f"and {len(rewards)} rewards; with n > 1 pass all samples of each completion"
            )
        tokens, scores = np.zeros((len(completions), size), np.int32), np.zeros((len(completions), size), np.float32)
        starts, lengths = [], []
        for index, completion in enumerate(completions):
            text, start = completion.prompt_token_ids + completion.token_ids, len(completion.prompt_token_ids)
            if completion.logprobs is None or len(text) > size:
                raise ValueError(
                    f"grpo: expected completions with log-probabilities (logprobs=0) of at most {size} tokens, prompt "
                    f"included, got {len(text)} tokens and logprobs {short(completion.logprobs)}"
                )
            tokens[index, : len(text)] = text
            scores[index, start : len(text)] = [record.logprob for record in completion.logprobs]
            starts.append(start)
            lengths.append(len(text))
        return cls(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
            log_probs=jnp.asarray(scores),
            advantages=jnp.asarray(advantages(rewards, group)),
        )


def advantages(rewards: Sequence[float], group: int) -> Float[np.ndarray, "rows"]:
    """Return each reward minus the mean of its group, divided by the group's standard deviation (equation 3)."""
    of_group = np.asarray(rewards, np.float32).reshape(-1, group)
    centred = of_group - of_group.mean(axis=1, keepdims=True)
    return (centred / (of_group.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)


def loss(model: Model, rollouts: Rollouts, clip: float = 0.2) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the loss of a policy, and the largest difference of its log-probabilities and the engine's.

    The loss is - min(r A, clip(r, 1 - clip, 1 + clip) A), the mean over the tokens of a completion and then over
    completions (equation 3 without the reference model), with the ratio r of the policy's probability and the engine's.

    Args:
        model: the policy.
        rollouts: what the engine made.
        clip: how far a ratio counts from 1.
    """
    places = jnp.arange(rollouts.tokens.shape[1])
    is_drawn = (places >= rollouts.starts[:, None]) & (places < rollouts.lengths[:, None])
    differences = jnp.where(is_drawn, log_probs(model, rollouts.tokens, rollouts.lengths) - rollouts.log_probs, 0.0)
    ratios, gains = jnp.exp(differences), rollouts.advantages[:, None]
    least = jnp.minimum(ratios * gains, jnp.clip(ratios, 1 - clip, 1 + clip) * gains)
    counts = jnp.maximum(rollouts.lengths - rollouts.starts, 1)
    return -jnp.mean(jnp.sum(least * is_drawn, axis=1) / counts), jnp.max(jnp.abs(differences))


def step(optimizer: Any, model: Model, state: Any, rollouts: Rollouts) -> tuple[Model, Any, Float[Array, ""]]:
    """Make one update; compile it with ``compiler_options=jspec.train.OPTIONS``.

    Args:
        optimizer: an optax optimiser.
        model: the policy.
        state: the optimiser's state, at first ``optimizer.init(model)``.
        rollouts: what the engine made with this policy.

    Returns:
        The new policy and state, and the largest mismatch of log-probabilities.
    """
    (_, mismatch), gradient = jax.value_and_grad(loss, has_aux=True)(model, rollouts)
    changes, state = optimizer.update(gradient, state, model)
    model = jax.tree.map(lambda weight, change: (weight + change).astype(weight.dtype), model, changes)
    return model, state, mismatch
