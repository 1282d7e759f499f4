"""Policies that choose the draft depth of every dispatch, from measured acceptance and time at each depth.

Host only, no jax. A drafted token costs more in a larger batch, and acceptance depends on the text. Therefore an
adaptive engine compiles its round for several depths, 0 included, and asks a `Policy` before each dispatch.
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

MIN_SAMPLES = 3  # timed dispatches of a depth before it is compared with others
MAX_TRIES = 12  # dispatches of a depth without a timing after which it is not tried again: its program may fail
MAX_IDLE_SHARE = 0.25  # a timing is discarded if the host was outside `step` for more than this share of it
WINDOW = 5  # newest timings, whose median is used: a pause of the host makes one too long and the next too short
PROBE_SHARE = 0.01  # share of the time for dispatches of depths that do not look best, to update their estimates
PRIOR = 0.5  # acceptance probability assumed for a position that was never drafted
MEMORY = 128.0  # weight limit of an acceptance estimate, in drafted rows
STALE_MEMORY = 8.0  # weight to which an estimate without new results decays
HALF_LIFE = 256.0  # dispatches in which the weight above STALE_MEMORY halves


@dataclass(frozen=True)
class DispatchResult:
    """Result of one dispatch of rounds.

    Attributes:
        bucket: batch rows of the program.
        depth: draft depth of the rounds.
        caps: the most draft tokens per round that each request accepts.
        accepted: number of draft tokens accepted, [rounds, rows]; -1 where the request had ended in an earlier round.
        seconds: device time of the dispatch; None if unknown, because the host was outside `step` during the dispatch.
    """

    bucket: int
    depth: int
    caps: Sequence[int]
    accepted: Int[np.ndarray, "rounds rows"]
    seconds: float | None


class Policy(abc.ABC):
    """Chooses the draft depth of the next dispatch.

    A policy may use only results of earlier rounds: a choice that depends on a round's own draws would not be lossless.
    """

    @abc.abstractmethod
    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        """The draft depth of the next dispatch.

        Args:
            bucket: batch rows of the program.
            caps: the most draft tokens per round that each request accepts.
        """

    @abc.abstractmethod
    def learn(self, result: DispatchResult) -> None:
        """Update the estimates with a result; results come in dispatch order, with overlap one dispatch late."""


@final
class Fixed(Policy):
    """A policy that always chooses the same draft depth."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        return self._depth

    def learn(self, result: DispatchResult) -> None:
        pass


@final
class Adaptive(Policy):
    """A policy that chooses the draft depth with the highest expected number of tokens per second.

    Every depth is run a few times in every bucket before depths are compared. Later the depths that are not the best
    are run now and then as a probe, the least recently run first, because time changes with the context and acceptance
    with the text.

    Args:
        depths: draft depths to choose from, ascending.
        shared_acceptance: whether a tree cut at a depth accepts as many tokens at each level as the whole tree, so one
            estimate serves all depths; True for trees of a fixed shape.
    """

    def __init__(self, depths: Sequence[int], *, shared_acceptance: bool = True) -> None:
        whole = Acceptance(depths[-1])
        self._depths = tuple(depths)
        self._acceptance = {depth: whole if shared_acceptance else Acceptance(depth) for depth in depths}
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._last_run: dict[tuple[int, int], int] = {}  # dispatch number, by bucket and depth
        self._tries: Counter[tuple[int, int]] = Counter()
        self._num_dispatches = 0
        self._probe_seconds = 0.0  # time saved up for the next probe

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        useful = self._useful(max(caps, default=0))
        untimed = [depth for depth in useful if self._is_untimed(bucket, depth)]
        depth = untimed[-1] if untimed else self._best_or_stalest(bucket, useful, caps)
        self._num_dispatches += 1
        self._last_run[bucket, depth] = self._num_dispatches
        self._tries[bucket, depth] += 1
        return depth

    def learn(self, result: DispatchResult) -> None:
        if result.seconds is not None:
            self._seconds[result.bucket, result.depth].append(result.seconds)
            self._probe_seconds += PROBE_SHARE * result.seconds
        offered = np.minimum(np.array(result.caps), result.depth)
        self._acceptance[result.depth].learn(result.accepted, offered, now=self._num_dispatches)

    def rate(self, bucket: int, depth: int, caps: Sequence[int]) -> float:
        """Expected tokens per second of a batch in rounds of a draft depth; 0 if the depth was never timed."""
        return self._rate(bucket, depth, Counter(caps))

    def _rate(self, bucket: int, depth: int, rows_by_cap: Counter[int]) -> float:
        """Do what `rate` does, given the number of batch rows for each cap."""
        if not self._seconds[bucket, depth]:
            return 0.0
        expected = self._acceptance[depth].expected
        tokens = sum(count * (1 + expected[min(cap, depth)]) for cap, count in rows_by_cap.items())
        return tokens / median(self._seconds[bucket, depth])

    def _useful(self, cap: int) -> tuple[int, ...]:
        """Draft depths that may help: up to the first one that reaches the highest cap."""
        return self._depths[: bisect_left(self._depths, cap) + 1]

    def _is_untimed(self, bucket: int, depth: int) -> bool:
        return len(self._seconds[bucket, depth]) < MIN_SAMPLES and self._tries[bucket, depth] < MAX_TRIES

    def _best_or_stalest(self, bucket: int, depths: Sequence[int], caps: Sequence[int]) -> int:
        """The depth with the highest rate; or, if the saved time allows a probe, the least recently run depth."""
        rows_by_cap = Counter(caps)
        best = max(reversed(depths), key=lambda depth: self._rate(bucket, depth, rows_by_cap))
        others = [depth for depth in depths if depth != best and self._seconds[bucket, depth]]
        if others:
            stalest = min(others, key=lambda depth: self._last_run.get((bucket, depth), 0))
            if self._probe_seconds >= min(self._seconds[bucket, stalest]):
                self._probe_seconds = 0.0
                return stalest
        return best


class Acceptance:
    """Acceptance probability of each draft position, given that all positions before it were accepted.

    A round counts for a position only if the round drafted that far and accepted all earlier positions, so the
    estimates of deep positions keep their values while rounds are shallow. An estimate without new results loses
    weight.

    Attributes:
        shares: estimated acceptance probability, by draft position.
        expected: expected number of accepted draft tokens, by depth from 0.
    """

    def __init__(self, depth: int) -> None:
        self.shares = [PRIOR] * depth
        self.expected = self._expected()
        self._weights = [1.0] * depth
        self._last_update = [0] * depth

    def learn(self, accepted: Int[np.ndarray, "rounds rows"], offered: Int[np.ndarray, "rows"], *, now: int) -> None:
        """Update the estimates with the rounds of a dispatch.

        Args:
            accepted: number of draft tokens accepted; -1: the round does not count.
            offered: number of draft tokens that could be accepted.
            now: number of dispatches so far.
        """
        for position, (tried, successes) in enumerate(self._count(accepted, offered)):
            if tried == 0:
                break
            stale = 0.5 ** ((now - self._last_update[position]) / HALF_LIFE)
            weight = self._weights[position]
            weight = min(weight, STALE_MEMORY + (weight - STALE_MEMORY) * stale)
            self.shares[position] += tried / (weight + tried) * (successes / tried - self.shares[position])
            self._weights[position] = min(weight + tried, MEMORY)
            self._last_update[position] = now
        self.expected = self._expected()

    def _count(self, accepted: np.ndarray, offered: np.ndarray) -> list[tuple[int, int]]:
        """For each draft position: (number of draft tokens tried there, number of draft tokens accepted there).

        One table of cumulative counts serves all positions, which is faster than comparing all rows at each position.
        """
        size = len(self.shares) + 2
        table = np.bincount(((accepted + 1) + size * offered).ravel(), minlength=size * size).reshape(size, size)
        # at_least[i][j]: number of rows with offered >= i and accepted + 1 >= j
        at_least = table[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1].tolist()
        return [(at_least[i][i], at_least[i][i + 1]) for i in range(1, size - 1)]

    def _expected(self) -> list[float]:
        return list(accumulate(accumulate(self.shares, mul), initial=0.0))


class Stopwatch:
    """Measures how long each dispatch occupied the device, which runs dispatches in order.

    The time of a dispatch starts when it is dispatched, or when the previous dispatch ends if that is later. If the
    host is the bottleneck, this measures the host's time. If the host was outside `step` meanwhile (between two
    requests, or while the reader of a stream was busy), the end of the dispatch is unknown.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_times: deque[float] = deque()
        self._last_end = 0.0
        self._left_at = 0.0
        self._idle = 0.0  # seconds outside `step` since the oldest dispatch in flight became the oldest

    def start(self) -> None:
        """Note that a dispatch starts now."""
        self._start_times.append(self._clock())

    def stop(self) -> float | None:
        """Note that the oldest dispatch is done; return its time in seconds, None if unknown."""
        began = max(self._start_times.popleft(), self._last_end)
        self._last_end, idle = self._clock(), self._idle
        seconds, self._idle = self._last_end - began, 0.0
        return seconds if idle <= MAX_IDLE_SHARE * seconds else None

    def leave(self) -> None:
        """Note that the host leaves `step`."""
        self._left_at = self._clock()

    def come_back(self) -> None:
        """Note that the host enters `step` again."""
        if self._start_times:
            self._idle += self._clock() - max(self._left_at, self._start_times[0])

    def reset(self) -> None:
        """Note that no dispatch is in flight any more."""
        self._start_times.clear()
        self._idle = 0.0


def halvings(depth: int) -> tuple[int, ...]:
    """A depth halved (rounded down) again and again until 0, ascending: 5 gives (0, 1, 2, 5)."""
    return tuple(sorted({depth >> shift for shift in range(depth.bit_length() + 1)}))
