"""Estimates how likely each draft position is accepted, from the results of rounds."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np
from jaxtyping import Int

PRIOR = 0.5  # acceptance probability assumed for the first position, with the weight of one drafted row
PRIOR_WEIGHT = 16.0  # weight, in drafted rows, of the assumption that a position accepts like the one before it
MEMORY = 128.0  # weight limit of a position's own results, in drafted rows
HALF_LIFE = 256.0  # number of dispatches in which the weight of own results halves


class Acceptance:
    """Estimates the acceptance probability of each draft position, given that all earlier positions were accepted.

    A round counts for a position only if it drafted this position and accepted all earlier ones. So the results of deep
    positions get old while rounds are shallow. The older or fewer they are, the nearer is the estimate to that of the
    position before, because the texts that made an early position easier or harder did so to the later ones.

    Attributes:
        shares: estimated acceptance probability, by draft position.
        expected: expected number of accepted draft tokens, by depth from 0.
        rows: number of drafted rows that were learned from.
    """

    def __init__(self, depth: int) -> None:
        self.shares = [PRIOR] * depth
        self.expected = self._expected()
        self.rows = 0
        self._measured = [PRIOR] * depth  # share of accepted tokens among a position's own results
        self._weights = [0.0] * depth
        self._last_update = [0] * depth

    def learn(self, accepted: Int[np.ndarray, "rounds rows"], offered: Int[np.ndarray, "rows"], *, now: int) -> None:
        """Update the estimates with the rounds of a dispatch.

        Args:
            accepted: number of accepted draft tokens, [rounds, rows]; -1: the round does not count.
            offered: largest number of draft tokens that each row could accept, [rows].
            now: number of dispatches so far.
        """
        likely, likely_weight = PRIOR, 1.0
        for position, (tried, successes) in enumerate(self._count(accepted, offered)):
            weight = self._weights[position] * 0.5 ** ((now - self._last_update[position]) / HALF_LIFE)
            if tried > 0:
                self.rows += tried if position == 0 else 0
                self._measured[position] += tried / (weight + tried) * (successes / tried - self._measured[position])
                self._weights[position] = weight = min(weight + tried, MEMORY)
                self._last_update[position] = now
            likely += weight / (weight + likely_weight) * (self._measured[position] - likely)
            self.shares[position], likely_weight = likely, PRIOR_WEIGHT
        self.expected = self._expected()

    def _count(self, accepted: np.ndarray, offered: np.ndarray) -> list[tuple[int, int]]:
        """Return (number of draft tokens tried, number of draft tokens accepted) for each draft position.

        One table of cumulative counts serves all positions; this is faster than comparing all rows at each position.
        """
        size = len(self.shares) + 2
        table = np.bincount(((accepted + 1) + size * offered).ravel(), minlength=size * size).reshape(size, size)
        # at_least[i][j]: number of rows with offered >= i and accepted + 1 >= j
        at_least = table[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1].tolist()
        return [(at_least[i][i], at_least[i][i + 1]) for i in range(1, size - 1)]

    def _expected(self) -> list[float]:
        return list(accumulate(accumulate(self.shares, mul), initial=0.0))
