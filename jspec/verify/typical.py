"""Typical acceptance (Medusa, arXiv:2401.10774): lossy, and the only rule that is.

A child stands if the target finds it plausible, the less certain the target the less is asked: p(x) must exceed
min(threshold, alpha * exp(-H)) with H the entropy of p. Nothing is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.ancestors import depths
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.sampling import sampler
from jspec.verify.tree_walk import at_node, candidates, child_probs, longest_accepted_path

INSIDE_LOG = 1e-5  # the authors' guard against log(0); part of the rule, as it moves the threshold


class Typical(NamedTuple):
    """The rule's options."""

    threshold: float = 0.09
    alpha: float = 0.3


def typical_acceptance(
    logits: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
    options: Typical,
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """The longest path that stands; among equally long ones the likeliest. Greedy rows follow the argmax exactly.

    Args:
        logits: the target's, as `jspec.sampling.penalties` leaves them; p is their law after temperature and the cuts.

    Returns:
        The last accepted node, and the argmax behind it.
    """
    law = sampler.law(logits, view.sampling, view.implementation)
    entropy = -jnp.sum(law * jnp.log(law + INSIDE_LOG), axis=-1)
    bound = jnp.minimum(options.threshold, options.alpha * jnp.exp(-entropy))
    bound = jnp.where(view.sampling.temperature[:, None] > 0, bound, 0.5)  # greedy laws are one-hot
    own = child_probs(law, draft)
    stands = own > jnp.take_along_axis(bound, jnp.maximum(draft.parents, 0), axis=1)
    accepted, deepest = longest_accepted_path(stands & candidates(draft), draft, ancestor_mask)
    depth = depths(ancestor_mask)
    is_longest = accepted & (depth == at_node(depth, deepest)[:, None])
    steps = jnp.where(accepted & candidates(draft), jnp.log(own), 0.0)
    path_log_prob = jnp.sum(jnp.where(ancestor_mask, steps[:, None], 0.0), axis=-1)
    best = jnp.argmax(jnp.where(is_longest, path_log_prob, -jnp.inf), axis=-1).astype(jnp.int32)
    return best, jnp.argmax(at_node(logits, best), axis=-1).astype(jnp.int32)
