"""Counts tokens by second, for the speed that the server reports."""

from __future__ import annotations

import time
from collections import Counter

SECONDS = 10  # the speed is the mean over so many whole seconds


class Rate:
    """The number of tokens a second, as a mean over the last `SECONDS` whole seconds."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, tokens: int) -> None:
        """Count tokens that were emitted now."""
        now = int(time.monotonic())
        if now not in self._counts:
            self._counts = Counter({second: n for second, n in self._counts.items() if second >= now - SECONDS})
        self._counts[now] += tokens

    def tokens_per_second(self) -> float:
        now = int(time.monotonic())
        return sum(n for second, n in self._counts.items() if now - SECONDS <= second < now) / SECONDS
