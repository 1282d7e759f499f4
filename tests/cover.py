"""Few cases out of a large product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Factors = Mapping[str, tuple[Any, ...]]
Allowed = Callable[[dict[str, Any]], bool]


def pairwise(factors: Factors, allowed: Allowed = lambda case: True, seed: int = 0) -> list[dict[str, Any]]:
    """Allowed cases in which every two values of two factors that can meet do so at least once, chosen greedily."""
    cases = [case for case in product(factors) if allowed(case)]
    np.random.default_rng(seed).shuffle(cases)
    missing = set().union(*(_pairs(case) for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def product(factors: Factors) -> list[dict[str, Any]]:
    """All cases."""
    return [dict(zip(factors, case, strict=True)) for case in itertools.product(*factors.values())]


def label(case: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())
