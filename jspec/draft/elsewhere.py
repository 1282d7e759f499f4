"""Drafters on other devices than the target: what stands for them with the target, and which refuse this."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, final

from jspec.core.foreign_names import keywords_checked
from jspec.core.records import SlotView
from jspec.core.tree import Tree
from jspec.draft.base import StatelessDrafter
from jspec.models.decoder import Model

READS_FEATURES = (
    "it reads the target's hidden states in every round; leave it out and set tensor_parallel= of the engine, which "
    "divides the drafter too, or take a DraftModel"
)
NO_WEIGHTS = "it has no weights; leave it out"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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


def refuses_device(reason: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator of a drafter's constructor, whose error for ``device=`` says why the drafter has none.

    Other unknown keyword arguments are refused with jspec's names for them.

    Args:
        reason: why the drafter has no devices of its own, and what to do.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        call = keywords_checked(function)

        @wraps(function)
        def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
            if "device" in options:
                owner = args[0] if isinstance(args[0], type) else type(args[0])
                raise TypeError(f"{owner.__name__}: device: expected no such argument, because {reason}")
            return call(*args, **options)

        return checked

    return decorate
