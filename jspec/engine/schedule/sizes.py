"""The sizes that a round may have: how deep it drafts, and how many draft nodes it verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BUDGET_ROWS = 8  # least number of batch rows among which a budget of nodes is shared


class RoundSize(NamedTuple):
    """How much a round drafts and verifies; one program is compiled for each size and bucket.

    Attributes:
        depth: draft depth.
        nodes: number of draft nodes that are verified per batch row, on average (`jspec.step.budget`); None: all.
    """

    depth: int
    nodes: int | None = None


def sizes_of(bucket: int, sizes: Sequence[RoundSize]) -> list[RoundSize]:
    """Return the sizes that rounds of a bucket may have; rounds of few rows always verify all nodes."""
    return [size for size in sizes if size.nodes is None or bucket >= BUDGET_ROWS]


def round_sizes(depths: Sequence[int], nodes: Sequence[int]) -> list[RoundSize]:
    """Return the sizes of an engine's rounds: all nodes at each depth, then each number of nodes at the largest depth.

    Args:
        depths: draft depths, ascending.
        nodes: numbers of verified draft nodes per batch row.
    """
    return [*map(RoundSize, depths), *(RoundSize(depths[-1], count) for count in nodes)]


def halvings(depth: int) -> tuple[int, ...]:
    """Halve a depth, rounding down, until it is 0; return all values, ascending. 5 gives (0, 1, 2, 5)."""
    return tuple(sorted({depth >> shift for shift in range(depth.bit_length() + 1)}))


def portions(nodes: int) -> tuple[int, ...]:
    """Return a quarter and a half of a number of draft nodes, rounded down, without 0. 4 gives (1, 2)."""
    return tuple(sorted({nodes // 4, nodes // 2} - {0}))
