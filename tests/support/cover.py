"""Functions that select a few cases from a large product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def diagonal(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the factors' values, beginning with few in which each value occurs.

    They are as many as the longest factor has values. Values that are tuples are joined: a combination is flat.
    """
    longest = max(map(len, factors))
    first = [tuple(values[index % len(values)] for values in factors) for index in range(longest)]
    ordered = [*first, *(case for case in itertools.product(*factors) if case not in first)]
    return [tuple(itertools.chain.from_iterable(map(_values, case))) for case in ordered]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)  # a record stays one value


def with_kernel(
    cases: Sequence[Any],
    count: int,
    *,
    long: Sequence[Any] = (),
    name: Callable[[Any], str] | None = None,
    is_thinned: bool = False,
) -> list[Any]:
    """Return cases with the implementations "reference" and "pallas" as parameters of a test.

    The interpreter is slow: the default run interprets the first ``count`` cases, the one with the newest jax all.

    Args:
        cases: the cases, each one parameter or a tuple of several; the first take each path through the kernel.
        count: how many cases the default run interprets.
        long: more cases, which are marked long.
        name: returns the name of a case in the test's id; None: its parameters.
        is_thinned: whether of the other cases every second is marked long, and one environment runs their references.
    """

    def marks(index: int, implementation: str) -> list[pytest.MarkDecorator]:
        if index < count:
            return []
        if index >= len(cases) or (is_thinned and index % 2):
            return [pytest.mark.long]
        if implementation == "pallas":
            return [pytest.mark.newest]
        return [pytest.mark.once] if is_thinned else []

    return [
        pytest.param(
            *_values(case),
            implementation,
            marks=marks(index, implementation),
            id=f"{name(case) if name else '-'.join(map(str, _values(case)))}-{implementation}",
        )
        for implementation in ("reference", "pallas")
        for index, case in enumerate([*cases, *long])
    ]


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
