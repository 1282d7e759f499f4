"""Typical acceptance, the only lossy rule (Medusa, arXiv:2401.10774).

A draft token x is accepted if its target probability p(x) exceeds min(threshold, alpha * exp(-H)), where H is the
entropy of p. So the less certain the target is, the lower the required probability. The rule draws no random numbers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.accept_rule import DraftSampling
from jspec.core.ancestors import depths, longest_accepted_path
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.sampling import sampler
from jspec.verify.sampled_rule import SampledRule, no_token_if_nan
from jspec.verify.tree_walk import at_node, candidates, child_probs

LOG_GUARD = 1e-5  # added to probabilities before the log, as the authors do; it changes the required probability


@final
@dataclass(frozen=True)
class Typical(SampledRule):
    """Typical acceptance, which accepts tokens above a probability; the drafter proposes its most likely tokens.

    Args:
        threshold: upper limit of the required probability.
        alpha: factor of exp(-entropy) in the required probability.

    Raises:
        ValueError: an option is not a number above 0.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    name = "typical"
    draft_sampling = DraftSampling.MOST_LIKELY
    is_lossless = False

    def __post_init__(self) -> None:
        for option in ("threshold", "alpha"):
            value = getattr(self, option)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"Typical: {option}: expected a number > 0, got {value!r}")

    def check(self, tree: Tree) -> None:
        """Allow every tree, and warn that the rule is lossy."""
        warnings.warn(
            'accept="typical" does not keep the target\'s distribution; every other rule does',
            UserWarning,
            stacklevel=4,  # the caller of `Engine`, whose constructor calls `build_core`, which calls this
        )

    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        """Accept the longest path whose tokens all have the required probability.

        Among equally long paths, the most likely path is accepted.
        Greedy rows accept only the target's argmax.

        Args:
            logits: the target's edited logits; p is their softmax after temperature, top-k, top-p and min-p.

        Returns:
            The last accepted node [batch], and the most likely token after that node [batch].
        """
        probs = sampler.processed_probs(logits, view.sampling, view.implementation)
        entropy = -jnp.sum(probs * jnp.log(probs + LOG_GUARD), axis=-1)
        bound = jnp.minimum(self.threshold, self.alpha * jnp.exp(-entropy))
        bound = jnp.where(view.sampling.temperature[:, None] > 0, bound, 0.5)  # greedy rows have one-hot probabilities
        node_probs = child_probs(probs, draft)
        is_plausible = node_probs > jnp.take_along_axis(bound, jnp.maximum(draft.parents, 0), axis=1)
        accepted, deepest = longest_accepted_path(is_plausible & candidates(draft), draft, ancestor_mask)
        depth = depths(ancestor_mask)
        is_longest = accepted & (depth == at_node(depth, deepest)[:, None])
        log_probs = jnp.where(accepted & candidates(draft), jnp.log(node_probs), 0.0)
        path_log_prob = jnp.sum(jnp.where(ancestor_mask, log_probs[:, None], 0.0), axis=-1)
        last_node = jnp.argmax(jnp.where(is_longest, path_log_prob, -jnp.inf), axis=-1).astype(jnp.int32)
        token = jnp.argmax(at_node(logits, last_node), axis=-1).astype(jnp.int32)
        return last_node, no_token_if_nan(token, probs, last_node, ancestor_mask)
