"""How deep to draft: chosen before every dispatch, by what was accepted at each depth and by how long each one took.

Host only, no jax. The more rows a batch has, the dearer are the tokens that a draft adds to it, and how many of them
are accepted depends on the text. So an engine compiles its round for several depths, 0 too, and asks a `Policy`.
"""

from __future__ import annotations

import abc
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median
from typing import final

import numpy as np
from jaxtyping import Int

SAMPLES = 3  # dispatches of a depth that are timed before it is compared with others
TRIES = 12  # dispatches of a depth after which it is given up if nothing was heard of any: it may have failed each time
AWAY = 0.25  # share of a dispatch's time that the host may be away without making it worthless
WINDOW = 5  # of the newest of them the median counts: a pause of the host spoils one, and makes the next too short
PROBE_SHARE = 0.01  # of the time may go into dispatches of a depth that does not look best, to look again
PRIOR = 0.5  # share of the drafts that a depth never tried is taken to accept
MEMORY = 128.0  # drafted rows that an estimate of acceptance remembers
STALE_MEMORY = 8.0  # and those that it remembers when nothing new was heard for long
HALF_LIFE = 256.0  # dispatches in which the difference between the two halves


@dataclass(frozen=True)
class Reading:
    """What a dispatch came to.

    Attributes:
        bucket: rows of its program.
        depth: that it drafted.
        caps: draft tokens that each request allows.
        accepted: draft tokens that each round accepted; -1 where a request had ended before.
        seconds: that it took; None: not known, for the host was away while it ran.
    """

    bucket: int
    depth: int
    caps: Sequence[int]
    accepted: Int[np.ndarray, "rounds rows"]
    seconds: float | None


class Policy(abc.ABC):
    """Chooses the depth of the next dispatch.

    It knows nothing but results that were read before: a choice by a round's own draws would not be lossless.
    """

    @abc.abstractmethod
    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        """The depth for a bucket of rows with these requests' caps."""

    @abc.abstractmethod
    def learn(self, reading: Reading) -> None:
        """Take a result into account; they come in the order of the dispatches, with overlap one behind."""


@final
class Fixed(Policy):
    """Always the same depth."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        return self._depth

    def learn(self, reading: Reading) -> None:
        pass


@final
class Adaptive(Policy):
    """The depth at which most tokens a second are to be expected.

    Every depth is run a few times in every bucket before any are compared. Later those that do not look best are run
    now and then, the one first that was not for longest: costs change with the context, acceptance with the text.

    Args:
        depths: to choose from, ascending.
        shares: a tree cut at a depth accepts as much at each level as the whole one, so what is learnt of one depth
            holds for all. That is so if the tree's shape is fixed.
    """

    def __init__(self, depths: Sequence[int], *, shares: bool = True) -> None:
        whole = Acceptance(depths[-1])
        self._depths = tuple(depths)
        self._acceptance = {depth: whole if shares else Acceptance(depth) for depth in depths}
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._ran: dict[tuple[int, int], int] = {}  # when a depth was last chosen for a bucket
        self._tries: Counter[tuple[int, int]] = Counter()
        self._dispatches = 0
        self._credit = 0.0  # seconds saved up for the next look at another depth

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        useful = self._useful(max(caps, default=0))
        untimed = [depth for depth in useful if self._is_untimed(bucket, depth)]
        depth = untimed[-1] if untimed else self._best_or_stalest(bucket, useful, caps)
        self._dispatches += 1
        self._ran[bucket, depth] = self._dispatches
        self._tries[bucket, depth] += 1
        return depth

    def learn(self, reading: Reading) -> None:
        if reading.seconds is not None:
            self._seconds[reading.bucket, reading.depth].append(reading.seconds)
            self._credit += PROBE_SHARE * reading.seconds
        offered = np.minimum(np.array(reading.caps), reading.depth)
        self._acceptance[reading.depth].learn(reading.accepted, offered, now=self._dispatches)

    def rate(self, bucket: int, depth: int, caps: Sequence[int]) -> float:
        """Tokens a second to be expected of rounds of a depth; 0 if nothing was heard of it."""
        return self._rate(bucket, depth, Counter(caps))

    def _rate(self, bucket: int, depth: int, rows: Counter[int]) -> float:
        """Likewise, of so many rows with each cap."""
        if not self._seconds[bucket, depth]:
            return 0.0
        expected = self._acceptance[depth].expected
        tokens = sum(count * (1 + expected[min(cap, depth)]) for cap, count in rows.items())
        return tokens / median(self._seconds[bucket, depth])

    def _useful(self, cap: int) -> tuple[int, ...]:
        """The depths up to the first that drafts all that any request allows."""
        return self._depths[: bisect_left(self._depths, cap) + 1]

    def _is_untimed(self, bucket: int, depth: int) -> bool:
        return len(self._seconds[bucket, depth]) < SAMPLES and self._tries[bucket, depth] < TRIES

    def _best_or_stalest(self, bucket: int, depths: Sequence[int], caps: Sequence[int]) -> int:
        rows = Counter(caps)
        best = max(reversed(depths), key=lambda depth: self._rate(bucket, depth, rows))
        others = [depth for depth in depths if depth != best and self._seconds[bucket, depth]]
        if others:
            stalest = min(others, key=lambda depth: self._ran.get((bucket, depth), 0))
            if self._credit >= min(self._seconds[bucket, stalest]):
                self._credit = 0.0
                return stalest
        return best


class Acceptance:
    """Of the drafts whose first i tokens were accepted, the share whose next one was too, for each i.

    So a round tells of a position only if it drafted that far and came that far: what is known of deep positions stays
    while rounds are shallow. An estimate of which nothing was heard for long keeps its value and loses weight.
    """

    def __init__(self, depth: int) -> None:
        self.shares = [PRIOR] * depth
        self.expected = self._expected()
        self._weights = [1.0] * depth
        self._heard = [0] * depth

    def learn(self, accepted: Int[np.ndarray, "rounds rows"], offered: Int[np.ndarray, "rows"], *, now: int) -> None:
        """Take rounds into account.

        Args:
            accepted: draft tokens accepted; -1: none of this round counts.
            offered: draft tokens that could have been.
            now: the number of dispatches so far.
        """
        for position, (tried, successes) in enumerate(self._count(accepted, offered)):
            if tried == 0:
                break
            stale = 0.5 ** ((now - self._heard[position]) / HALF_LIFE)
            weight = self._weights[position]
            weight = min(weight, STALE_MEMORY + (weight - STALE_MEMORY) * stale)
            self.shares[position] += tried / (weight + tried) * (successes / tried - self.shares[position])
            self._weights[position] = min(weight + tried, MEMORY)
            self._heard[position] = now
        self.expected = self._expected()

    def _count(self, accepted: np.ndarray, offered: np.ndarray) -> list[tuple[int, int]]:
        """For each position the drafts that came that far, and those of them whose token there was accepted.

        One table for all positions: the host has better to do than to compare every row with each of them.
        """
        size = len(self.shares) + 2
        table = np.bincount(((accepted + 1) + size * offered).ravel(), minlength=size * size).reshape(size, size)
        least = table[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1].tolist()  # offered and accepted + 1, at least so many
        return [(least[place][place], least[place][place + 1]) for place in range(1, size - 1)]

    def _expected(self) -> list[float]:
        """Draft tokens that a round accepts on average, by its depth."""
        return list(accumulate(accumulate(self.shares, mul), initial=0.0))


class Stopwatch:
    """Tells how long each dispatch took the device, which works in order: from its start, or from the end of the last.

    Where the host is what others wait for, it is the host's time; not so where the host was away between two steps, as
    between two requests or while the reader of a stream was busy: nobody knows when the device was done then.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: deque[float] = deque()
        self._ended = 0.0
        self._left = 0.0
        self._away = 0.0  # seconds of the oldest dispatch under way

    def start(self) -> None:
        """Something is about to be dispatched."""
        self._started.append(self._clock())

    def stop(self) -> float | None:
        """The oldest that was started is done; the seconds it took, if that can be told."""
        began = max(self._started.popleft(), self._ended)
        self._ended, away = self._clock(), self._away
        seconds, self._away = self._ended - began, 0.0
        return seconds if away <= AWAY * seconds else None

    def leave(self) -> None:
        """A step ends: nobody watches."""
        self._left = self._clock()

    def come_back(self) -> None:
        """A step begins."""
        if self._started:
            self._away += self._clock() - max(self._left, self._started[0])

    def reset(self) -> None:
        """Nothing is under way any more."""
        self._started.clear()
        self._away = 0.0


def halvings(depth: int) -> tuple[int, ...]:
    """A depth, its half, and so on down to 1 and 0; ascending."""
    return tuple(sorted({depth >> shift for shift in range(depth.bit_length() + 1)}))
