"""Functions of the leaves of a tree in which a leaf may stand several times, such as tied weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls another one once for each object; a leaf that stands twice has one result."""
    made: dict[int, tuple[Any, Any]] = {}  # with the object, so that no other gets its id

    def call(leaf: Any) -> Any:
        if id(leaf) not in made:
            made[id(leaf)] = leaf, function(leaf)
        return made[id(leaf)][1]

    return call
