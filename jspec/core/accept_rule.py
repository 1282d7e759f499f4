"""The interface of an accept rule: how drafts are sampled for it, which trees it fits, which tokens it accepts.

The rules themselves are in `jspec.verify`, one per file.
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
    """How a drafter chooses the children of a node from its logits."""

    TARGET_NOISE = enum.auto()  # the tokens with the largest sum of logit and the target's noise at that position
    OWN_DISTRIBUTION = enum.auto()  # tokens drawn from the draft's processed probabilities without replacement
    MOST_LIKELY = enum.auto()  # the tokens with the largest logits


@dataclass(frozen=True)
class AcceptRule(abc.ABC):
    """An accept rule with its options; hashable, because compiled programs depend on the rule.

    Attributes:
        name: the text that `EngineConfig.accept` takes for the rule with its default options.
        draft_sampling: how a draft is sampled under this rule.
        is_lossless: whether the emitted tokens have the target's distribution.
        is_draft_independent: whether the tokens emitted with a seed are the same for every draft.
    """

    name: ClassVar[str]
    draft_sampling: ClassVar[DraftSampling]
    is_lossless: ClassVar[bool] = True
    is_draft_independent: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, tree: Tree) -> None:
        """Check that the rule fits the drafter's tree.

        Raises:
            ValueError: the rule does not fit the tree.
        """

    @abc.abstractmethod
    def decide(self, logits: Any, draft: Draft, ancestor_mask: AncestorMask, view: SlotView) -> tuple[Any, Any]:
        """Choose the last accepted node of each row, and the token that follows it.

        Args:
            logits: the target's edited logits at every node, as `PartialSums` [1, batch, nodes, vocab].
            ancestor_mask: ancestors of each node (`jspec.core.ancestors.ancestors`).

        Returns:
            The last accepted node [batch] and the token that follows it [batch], both int32.
        """
