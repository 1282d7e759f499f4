"""Block verification, which verifies a sampled chain as a whole (arXiv:2403.10444, algorithm 2).

The paper proves that the rule keeps the target's joint distribution, and that no other lossless rule accepts more
tokens of a chain on average. Traversal verification equals it on a chain; this rule refuses other trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxtyping import Array, Float, Int

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.verify.rejection import check_no_rank_gaps
from jspec.verify.sampled_rule import SampledRule
from jspec.verify.traversal import verify_leaf_to_root


@final
@dataclass(frozen=True)
class Block(SampledRule):
    """Block verification, which verifies a chain as a whole. The drafter samples tokens from its own distribution."""

    name = "block"
    draft_sampling = DraftSampling.OWN_DISTRIBUTION

    def check(self, tree: Tree) -> None:
        if not tree.is_chain:
            chain = "" if tree.base is not None and tree.base.is_chain else "Tree.chain(length)"
            chain += "" if tree.base is None else f'{" and " if chain else ""}join="replace"'
            raise ValueError(f'accept="block" expects a chain, got {tree}; use {chain} or accept="traversal"')
        check_no_rank_gaps(self.name, tree)

    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        return verify_leaf_to_root(logits, draft, ancestor_mask, view)
