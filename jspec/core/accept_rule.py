"""The interface of an accept rule, which decides which draft tokens are accepted.

The accept rules are in `jspec.verify`, one per file.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jspec.core.tree import Tree

if TYPE_CHECKING:
    from jspec.core.records import AncestorMask, Draft, SlotView


class DraftSampling(enum.Enum):
    """The ways in which a drafter can choose a node's children from the node's draft logits."""

    TARGET_NOISE = enum.auto()  # take the tokens with the largest sum of draft logit and target's noise
    OWN_DISTRIBUTION = enum.auto()  # draw tokens from the draft's processed probabilities, without replacement
    MOST_LIKELY = enum.auto()  # take the tokens with the largest draft logits


@dataclass(frozen=True)
class AcceptRule(abc.ABC):
    """An accept rule with its options. It is hashable, because compiled programs depend on it.

    Attributes:
        name: name of the rule in `EngineConfig.accept`, which selects the rule with default options.
        draft_sampling: how the drafter chooses draft tokens under this rule.
        is_lossless: whether the emitted tokens have the target's distribution.
        is_draft_independent: whether a seed gives the same emitted tokens for every draft.
    """

    name: ClassVar[str]
    draft_sampling: ClassVar[DraftSampling]
    is_lossless: ClassVar[bool] = True
    is_draft_independent: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, tree: Tree) -> None:
        """Check that the rule can verify drafts of this tree's shape.

        Raises:
            ValueError: the rule cannot verify drafts of this shape.
        """

    def reads_probabilities(self, *, is_sampled: bool) -> bool:
        """Return whether a row's decision needs more than the target's token after each node; by default it does.

        Args:
            is_sampled: whether the row's temperature is above 0.
        """
        return True

    @abc.abstractmethod
    def decide(self, logits: Any, draft: Draft, ancestor_mask: AncestorMask, view: SlotView) -> tuple[Any, Any]:
        """Choose the last accepted node of each row, and the token that follows this node.

        Args:
            logits: the target's logits after every node, edited by penalties and grammar; `PartialSums` of shape
                [1, batch, nodes, vocab].
            draft: the drafted trees, one per row.
            ancestor_mask: ancestors of each node (`jspec.core.ancestors.ancestors`).
            view: state and sampling parameters of each row.

        Returns:
            The last accepted node [batch] and the token that follows this node [batch], both int32.
        """
