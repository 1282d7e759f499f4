"""How measured times lie: the figures that reports give of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from jspec.tools.table import table


@dataclass(frozen=True)
class Spread:
    """Of some values, in their unit; quantiles are interpolated linearly, and nan stands for no value."""

    count: int
    min: float
    max: float
    mean: float
    std: float  # of the values themselves
    q25: float
    median: float
    q75: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Spread:
        """The values times a scale."""
        found = np.array(list(values), np.float64) * scale
        if not found.size:
            return cls(0, *[float("nan")] * 8)
        quantiles = np.quantile(found, (0.25, 0.5, 0.75, 0.99))
        return cls(found.size, *map(float, (found.min(), found.max(), found.mean(), found.std(), *quantiles)))

    def fields(self) -> dict[str, float | None]:
        """As JSON has it, which knows no nan."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


def text(spreads: Mapping[str, Spread]) -> str:
    """One line each: min, max, mean, std and the quartiles."""
    names = ("min", "max", "mean", "std", "q25", "median", "q75")
    rows = [["", "min", "max", "mean", "std", ".25", ".5", ".75"]]
    rows += [[name, *(f"{getattr(spread, one):.3f}" for one in names)] for name, spread in spreads.items()]
    return table(rows)
