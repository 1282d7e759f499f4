"""Functions that select a few cases from a large product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

Factors = Mapping[str, tuple[Any, ...]]


def pairwise(factors: Factors, *, seed: int = 0) -> list[dict[str, Any]]:
    """Choose cases greedily until each pair of values of two factors occurs in at least one case."""
    cases = product(factors)
    np.random.default_rng(seed).shuffle(cases)
    pairs = [_pairs(case) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best, met = max(zip(cases, pairs, strict=True), key=lambda candidate: len(candidate[1] & missing))
        missing -= met
        chosen.append(best)
    return chosen


def _pairs(case: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def product(factors: Factors) -> list[dict[str, Any]]:
    """Return all combinations of the factors' values."""
    return [dict(zip(factors, case, strict=True)) for case in itertools.product(*factors.values())]


def thinned(cases: Iterable[Any], *, every: int, name: Callable[[Any], str], is_halved: bool = False) -> list[Any]:
    """Return cases as parameters of a test; every ``every``-th case runs in both environments, the others in one.

    Args:
        is_halved: whether every second of the other cases is marked long.
    """

    def marks(index: int) -> list[pytest.MarkDecorator]:
        if index % every == 0:
            return []
        return [pytest.mark.long if is_halved and index % 2 else pytest.mark.once]

    return [pytest.param(case, marks=marks(index), id=name(case)) for index, case in enumerate(cases)]


def checkerboard(names: Iterable[str], options: Iterable[Any], labels: Iterable[str] | None = None) -> list[Any]:
    """Return all pairs as parameters of a test; every second pair of a name is marked long.

    Args:
        labels: names of the options in the test's id; None: the options themselves.
    """
    named = list(zip(options, options if labels is None else labels, strict=True))
    return [
        pytest.param(name, option, id=f"{name}-{text}", marks=[pytest.mark.long] * ((row + column) % 2))
        for row, name in enumerate(names)
        for column, (option, text) in enumerate(named)
    ]


def marks_of(case: Any, default: Collection[Any], long: Collection[Any]) -> Any:
    """Return the marks of a case of a product: none in the default run, else long or matrix."""
    return () if case in default else pytest.mark.long if case in long else pytest.mark.matrix


def label(case: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())
