"""Policies that choose the draft depth of every dispatch, from measured acceptance and time at each depth.

A draft token costs more time in a larger batch, and acceptance depends on the text. Therefore an adaptive engine
compiles its round for several depths, 0 included, and asks a `Policy` before each dispatch. Runs on the host.
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

MIN_SAMPLES = 3  # least number of timed dispatches of a depth before it is compared with others
MAX_TRIES = 12  # most dispatches of a depth to collect MIN_SAMPLES timings, because its program may always fail
MAX_IDLE_SHARE = 0.25  # a timing is discarded if the host spent a larger share of it outside `step`
WINDOW = 5  # number of newest timings whose median is used, so that a pause of the host spoils none
PROBE_SHARE = 0.01  # share of the time to spend on depths that do not look best, to update their estimates
PRIOR = 0.5  # acceptance probability assumed for a position that was never drafted
MEMORY = 128.0  # weight limit of an acceptance estimate, in drafted rows
STALE_MEMORY = 8.0  # weight to which an estimate without new results decays, in drafted rows
HALF_LIFE = 256.0  # number of dispatches in which the weight above STALE_MEMORY halves


@dataclass(frozen=True)
class DispatchResult:
    """The result of one dispatch of rounds.

    Attributes:
        bucket: number of batch rows of the program.
        depth: draft depth of the rounds.
        caps: for each request, the largest number of draft tokens that it accepts per round.
        accepted: number of accepted draft tokens, [rounds, rows]; -1 where the request had ended in an earlier round.
        seconds: device time of the dispatch in seconds; None if the host was outside `step` too long to know it.
    """

    bucket: int
    depth: int
    caps: Sequence[int]
    accepted: Int[np.ndarray, "rounds rows"]
    seconds: float | None


class Policy(abc.ABC):
    """Chooses the draft depth of the next dispatch.

    A policy may use only results of earlier rounds. If the choice depended on random draws of the same round, decoding
    would not be lossless.
    """

    @abc.abstractmethod
    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        """Choose the draft depth of the next dispatch.

        Args:
            bucket: number of batch rows of the program.
            caps: for each request, the largest number of draft tokens that it accepts per round.
        """

    @abc.abstractmethod
    def learn(self, result: DispatchResult) -> None:
        """Update the estimates with the result of a dispatch; results come in the order of dispatches."""


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

    Every depth runs a few times in every bucket (compiled batch size) before depths are compared. Later each depth that
    is not the best runs now and then as a probe, the least recently run depth first. Probes are needed because time
    changes with the context and acceptance with the text.

    Args:
        depths: draft depths to choose from, ascending.
        shared_acceptance: whether all depths share one estimate of acceptance, because each level of a cut tree accepts
            like that of the whole tree. True for trees of a fixed shape.
    """

    def __init__(self, depths: Sequence[int], *, shared_acceptance: bool = True) -> None:
        whole = Acceptance(depths[-1])
        self._depths = tuple(depths)
        self._acceptance = {depth: whole if shared_acceptance else Acceptance(depth) for depth in depths}
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._last_run: dict[tuple[int, int], int] = {}  # number of the last dispatch, by bucket and depth
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
        """Return the expected tokens per second of a batch at a draft depth; 0 if the depth was never timed."""
        return self._rate(bucket, depth, Counter(caps))

    def _rate(self, bucket: int, depth: int, rows_by_cap: Counter[int]) -> float:
        """Return the expected tokens per second, as `rate`, from the number of batch rows with each cap."""
        if not self._seconds[bucket, depth]:
            return 0.0
        expected = self._acceptance[depth].expected
        tokens = sum(count * (1 + expected[min(cap, depth)]) for cap, count in rows_by_cap.items())
        return tokens / median(self._seconds[bucket, depth])

    def _useful(self, cap: int) -> tuple[int, ...]:
        """Return the draft depths that help a request in which at most ``cap`` draft tokens can be accepted.

        These are the depths up to the first one that is at least ``cap``.
        """
        return self._depths[: bisect_left(self._depths, cap) + 1]

    def _is_untimed(self, bucket: int, depth: int) -> bool:
        return len(self._seconds[bucket, depth]) < MIN_SAMPLES and self._tries[bucket, depth] < MAX_TRIES

    def _best_or_stalest(self, bucket: int, depths: Sequence[int], caps: Sequence[int]) -> int:
        """Return the depth of highest rate, or the least recently run depth if the saved time allows a probe."""
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
    """Estimates the acceptance probability of each draft position, given that all earlier positions were accepted.

    A round counts for a position only if it drafted this position and accepted all earlier ones. So the estimates of
    deep positions keep their values while rounds are shallow. An estimate without new results loses weight.

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
            accepted: number of accepted draft tokens, [rounds, rows]; -1: the round does not count.
            offered: largest number of draft tokens that each row could accept, [rows].
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


class Stopwatch:
    """Measures how long each dispatch occupied the device, which runs dispatches in order.

    The time of a dispatch begins when it is dispatched or when the previous dispatch ends, whichever is later. It ends
    when the host has read the result. If the host is slower than the device, this measures the host. If the host was
    outside `step` for long (between two requests, or in the reader of a stream), the time is unknown.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_times: deque[float] = deque()
        self._last_end = 0.0
        self._left_at = 0.0
        self._idle = 0.0  # seconds outside `step` with a dispatch in flight, since the last `stop`

    def start(self) -> None:
        """Record that a dispatch starts now."""
        self._start_times.append(self._clock())

    def stop(self) -> float | None:
        """Record that the oldest dispatch is done; return its time in seconds, or None if unknown."""
        began = max(self._start_times.popleft(), self._last_end)
        self._last_end, idle = self._clock(), self._idle
        seconds, self._idle = self._last_end - began, 0.0
        return seconds if idle <= MAX_IDLE_SHARE * seconds else None

    def leave(self) -> None:
        """Record that the host leaves `EngineCore.step`."""
        self._left_at = self._clock()

    def come_back(self) -> None:
        """Record that the host enters `EngineCore.step` again."""
        if self._start_times:
            self._idle += self._clock() - max(self._left_at, self._start_times[0])

    def reset(self) -> None:
        """Forget all dispatches that have started and not stopped."""
        self._start_times.clear()
        self._idle = 0.0


def halvings(depth: int) -> tuple[int, ...]:
    """Halve a depth, rounding down, until it is 0; return all values, ascending. 5 gives (0, 1, 2, 5)."""
    return tuple(sorted({depth >> shift for shift in range(depth.bit_length() + 1)}))
