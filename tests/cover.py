"""Few cases out of a large product."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np


def pairwise(factors: Mapping[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases in which every two values of two factors meet at least once, chosen greedily among random draws."""
    generator = np.random.default_rng(seed)
    names = list(factors)

    def pairs(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(zip(names, case, strict=True), 2)}

    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(factors[a], factors[b])
    }
    cases = []
    while missing:
        draws = [tuple(options[generator.integers(len(options))] for options in factors.values()) for _ in range(50)]
        best = max(draws, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append(dict(zip(names, best, strict=True)))
    return cases


def product(factors: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """All cases."""
    return [dict(zip(factors, case, strict=True)) for case in itertools.product(*factors.values())]


def label(case: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())
