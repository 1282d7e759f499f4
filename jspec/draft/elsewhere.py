"""What stands for a drafter in the programs of the target's devices if the drafter is on other devices."""

from __future__ import annotations

from typing import Any, NoReturn, final

from jspec.core.records import SlotView
from jspec.core.tree import Tree
from jspec.draft.base import StatelessDrafter
from jspec.models.decoder import Model


@final
class Elsewhere(StatelessDrafter):
    """A drafter without weights and state, whose drafts are inputs of the target's programs (`jspec.step.side`)."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> tuple[()]:
        return ()

    def draft(self, params: Any, state: Any, view: SlotView) -> NoReturn:
        raise NotImplementedError("the drafter is on other devices, whose programs draft")
