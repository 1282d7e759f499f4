"""The rule "coupled" (sample and match): accept a draft token if the target draws the same token at its position.

The target's noise depends on seed and position alone. Therefore every drafter and every tree emit the tokens that plain
decoding emits with the same seed. At temperature 0 the rule is greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.accept_rule import AcceptRule, DraftSampling
from jspec.core.ancestors import depths, longest_accepted_path
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.sampling import sampler
from jspec.verify.tree_walk import at_node
from pallas_kernels.layers.partial_sums import PartialSums


@final
@dataclass(frozen=True)
class Coupled(AcceptRule):
    """The rule "coupled", which accepts a draft token if the target draws the same token with the same noise."""

    name = "coupled"
    draft_sampling = DraftSampling.TARGET_NOISE
    is_draft_independent = True

    def check(self, tree: Tree) -> None:
        """Allow every tree."""

    def reads_probabilities(self, *, is_sampled: bool) -> bool:
        return False

    def decide(
        self, logits: PartialSums, draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        return match_target_tokens(logits, draft, ancestor_mask, view)


def match_target_tokens(
    logits: PartialSums, draft: Draft, ancestor_mask: AncestorMask, view: SlotView
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """Accept a node if the target draws the token of the node and the tokens of all its ancestors.

    One kernel launch samples the target's tokens for greedy and sampled rows.

    Args:
        logits: the target's edited logits after every node, [1, batch, nodes, vocab].

    Returns:
        The deepest accepted node [batch], and the target's token after that node [batch].
    """
    target_tokens = sampler.target_tokens(logits, view, depths(ancestor_mask) + 1)
    matches = draft.tokens == jnp.take_along_axis(target_tokens, jnp.maximum(draft.parents, 0), axis=1)
    _, last_node = longest_accepted_path(matches & draft.valid, draft, ancestor_mask)
    return last_node, at_node(target_tokens, last_node)
