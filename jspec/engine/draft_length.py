"""Policies that choose how much every dispatch drafts and verifies, from measured acceptance and time at each size.

A draft token costs more time in a larger batch, and acceptance depends on the text. Therefore an adaptive engine
compiles its round for several sizes, depth 0 included, and asks a `Policy` before each dispatch. Runs on the host.
"""

from __future__ import annotations

import abc
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Int

MIN_SAMPLES = 3  # least number of timed dispatches of a depth before it is compared with others
MAX_TRIES = 12  # most dispatches of a depth to collect MIN_SAMPLES timings, because its program may always fail
MIN_ROWS = 16  # least number of drafted rows before an estimate of acceptance is compared with others
MAX_IDLE_SHARE = 0.25  # a timing is discarded if the host spent a larger share of it outside `step`
WINDOW = 32  # number of newest timings of a size whose lower quartile is used
PROBE_SHARE = 0.01  # share of the time to spend on depths that do not look best, to update their estimates
PROMISE = 4  # exponent by which a probe prefers sizes of a high rate to those that ran least recently
OPTIMISM = 0.2  # standard deviation of a row's tokens per round, as a share of their mean, times the errors allowed for
PRIOR = 0.5  # acceptance probability assumed for a position that was never drafted
MEMORY = 128.0  # weight limit of an acceptance estimate, in drafted rows
STALE_MEMORY = 8.0  # weight to which an estimate without new results decays, in drafted rows
HALF_LIFE = 256.0  # number of dispatches in which the weight above STALE_MEMORY halves
BUDGET_ROWS = 8  # least number of batch rows among which a budget of nodes is shared


class RoundSize(NamedTuple):
    """How much a round drafts and verifies; one program is compiled for each size and bucket.

    Attributes:
        depth: draft depth.
        nodes: number of draft nodes that are verified per batch row, on average (`jspec.step.budget`); None: all.
    """

    depth: int
    nodes: int | None = None


def sizes_of(bucket: int, sizes: Sequence[RoundSize]) -> list[RoundSize]:
    """Return the sizes that rounds of a bucket may have; rounds of few rows always verify all nodes."""
    return [size for size in sizes if size.nodes is None or bucket >= BUDGET_ROWS]


@dataclass(frozen=True)
class DispatchResult:
    """The result of one dispatch of rounds.

    Attributes:
        bucket: number of batch rows of the program.
        size: draft depth and number of verified nodes of the rounds.
        caps: for each request, the largest number of draft tokens that it accepts per round.
        accepted: number of accepted draft tokens, [rounds, rows]; -1 where the request had ended in an earlier round.
        seconds: device time of the dispatch in seconds; None if the host was outside `step` too long to know it.
    """

    bucket: int
    size: RoundSize
    caps: Sequence[int]
    accepted: Int[np.ndarray, "rounds rows"]
    seconds: float | None


class Policy(abc.ABC):
    """Chooses the size of the next dispatch's rounds.

    A policy may use only results of earlier rounds. If the choice depended on random draws of the same round, decoding
    would not be lossless.
    """

    @abc.abstractmethod
    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        """Choose the size of the next dispatch's rounds.

        Args:
            bucket: number of batch rows of the program.
            caps: for each request, the largest number of draft tokens that it accepts per round.
        """

    @abc.abstractmethod
    def learn(self, result: DispatchResult) -> None:
        """Update the estimates with the result of a dispatch; results come in the order of dispatches."""


@final
class Fixed(Policy):
    """A policy that always chooses the same draft depth, and verifies all nodes."""

    def __init__(self, depth: int) -> None:
        self._size = RoundSize(depth)

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        return self._size

    def learn(self, result: DispatchResult) -> None:
        pass


@final
class Adaptive(Policy):
    """A policy that chooses the size with the highest expected number of tokens per second.

    Without ``empty_seconds``, every size runs a few times in every bucket (compiled batch size) before sizes are
    compared. With them, a size that was not timed counts as if it took that time, and as if a budget of nodes lost no
    accepted token while there are nodes; so it runs only if it may be the best (optimism under uncertainty, as in UCB1,
    doi:10.1023/A:1013689704352). Later each size that is not the best runs now and then as a probe, mostly those that
    are nearly as good or ran long ago. Probes are needed because time changes with the context and acceptance with the
    text.

    An estimate that is too good corrects itself, as its size runs; one that is too bad would stay. So a size takes the
    lower quartile of its newest timings, as a prefill between two rounds or a busy host lengthens some of them, and its
    tokens count for more the fewer rows they were learned from.

    Args:
        depths: draft depths to choose from, ascending.
        nodes: numbers of verified nodes per batch row to choose from at the largest depth, besides all nodes.
        shared_acceptance: whether all depths share one estimate of acceptance, because each level of a cut tree accepts
            like that of the whole tree. True for trees of a fixed shape.
        empty_seconds: seconds of a dispatch whose rows are all empty, by bucket and size. Where rounds with requests
            are found to take less, these times are reduced by the same factor.
    """

    def __init__(
        self,
        depths: Sequence[int],
        nodes: Sequence[int] = (),
        *,
        shared_acceptance: bool = True,
        empty_seconds: Mapping[tuple[int, RoundSize], float] | None = None,
    ) -> None:
        self._whole = whole = Acceptance(depths[-1])
        self._sizes = round_sizes(depths, nodes)
        sharing = map(RoundSize, depths if shared_acceptance else depths[-1:])
        self._acceptance = {size: Acceptance(size.depth) for size in self._sizes} | dict.fromkeys(sharing, whole)
        self._empty_seconds = dict(empty_seconds or {})
        self._seconds: dict[tuple[int, RoundSize], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._last_run: dict[tuple[int, RoundSize], int] = {}  # number of the last dispatch, by bucket and size
        self._tries: Counter[tuple[int, RoundSize]] = Counter()
        self._num_dispatches = 0
        self._probe_seconds = 0.0  # time saved up for the next probe

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        useful = self._useful(bucket, max(caps, default=0))
        untried = [size for size in useful if self._must_try(bucket, size)]
        size = untried[-1] if untried else self._best_or_stalest(bucket, useful, caps)
        self._num_dispatches += 1
        self._last_run[bucket, size] = self._num_dispatches
        self._tries[bucket, size] += 1
        return size

    def learn(self, result: DispatchResult) -> None:
        if result.seconds is not None:
            self._seconds[result.bucket, result.size].append(result.seconds)
            self._probe_seconds += PROBE_SHARE * result.seconds
        offered = np.minimum(np.array(result.caps), result.size.depth)
        self._acceptance[result.size].learn(result.accepted, offered, now=self._num_dispatches)

    def rate(self, bucket: int, size: RoundSize, caps: Sequence[int]) -> float:
        """Return the expected tokens per second of a batch with rounds of a size; 0 if its time is unknown."""
        seconds = self._expected_seconds(bucket)
        return self._expected_tokens(size, Counter(caps)) / seconds[size] if size in seconds else 0.0

    def _expected_tokens(self, size: RoundSize, rows_by_cap: Counter[int]) -> float:
        """Return the expected number of tokens of a dispatch, from the number of batch rows with each cap."""
        own = self._acceptance[size]
        expected = own.expected if own.rows >= MIN_ROWS or not self._empty_seconds else self._whole.expected
        rows = sum(rows_by_cap.values())
        accepted = sum(count * expected[min(cap, size.depth)] for cap, count in rows_by_cap.items())
        return rows + (accepted if size.nodes is None else min(accepted, size.nodes * rows))

    def _expected_seconds(self, bucket: int) -> dict[RoundSize, float]:
        """Return the expected seconds of a dispatch of each size, those with empty rows until the size was timed."""
        timings = {size: self._seconds[bucket, size] for size in self._sizes}
        measured = {size: sorted(own)[(len(own) - 1) // 4] for size, own in timings.items() if own}
        empty = {size: self._empty_seconds[bucket, size] for size in timings if (bucket, size) in self._empty_seconds}
        untimed = {size for size in empty if self._is_untimed(bucket, size)}
        factor = min([1.0, *(measured[size] / empty[size] for size in empty.keys() & measured.keys() - untimed)])
        return measured | {size: min([factor * empty[size], *timings[size]]) for size in untimed}

    def _doubt(self, size: RoundSize) -> float:
        """Return by which share the expected number of tokens may be too low."""
        return 0.0 if size.depth == 0 else OPTIMISM / math.sqrt(self._acceptance[size].weight(0, self._num_dispatches))

    def _must_try(self, bucket: int, size: RoundSize) -> bool:
        """Return whether a size must run before sizes are compared, because no bound of its speed is known."""
        if (bucket, size) not in self._empty_seconds:
            return self._is_untimed(bucket, size)
        is_bounded = size.nodes is not None  # the whole tree accepts no fewer tokens
        is_known = size.depth == 0 or is_bounded or self._acceptance[size].rows >= MIN_ROWS
        return not is_known and self._tries[bucket, size] < MAX_TRIES

    def _useful(self, bucket: int, cap: int) -> list[RoundSize]:
        """Return the sizes of a bucket that help a request in which at most ``cap`` draft tokens can be accepted.

        These are the depths up to the first one that is at least ``cap``.
        """
        sizes = sizes_of(bucket, self._sizes)
        depths = [size.depth for size in sizes if size.nodes is None]
        deepest = depths[min(bisect_left(depths, cap), len(depths) - 1)]
        return [size for size in sizes if size.depth <= deepest]

    def _is_untimed(self, bucket: int, size: RoundSize) -> bool:
        return len(self._seconds[bucket, size]) < MIN_SAMPLES and self._tries[bucket, size] < MAX_TRIES

    def _best_or_stalest(self, bucket: int, sizes: Sequence[RoundSize], caps: Sequence[int]) -> RoundSize:
        """Return the size that may have the highest rate, or another one if the saved time allows a probe."""
        rows_by_cap, seconds = Counter(caps), self._expected_seconds(bucket)
        rates = {size: self._expected_tokens(size, rows_by_cap) / seconds[size] for size in sizes if size in seconds}
        optimistic = {size: rate * (1 + self._doubt(size)) for size, rate in rates.items()}
        best = max(reversed(sizes), key=lambda size: optimistic.get(size, 0.0))
        others = [size for size in rates if size != best]
        if others:
            ages = {size: self._num_dispatches - self._last_run.get((bucket, size), 0) for size in others}
            probe = max(others, key=lambda size: ages[size] * (rates[size] / rates[best]) ** PROMISE)
            if self._probe_seconds >= seconds[probe]:
                self._probe_seconds = 0.0
                return probe
        return best


class Acceptance:
    """Estimates the acceptance probability of each draft position, given that all earlier positions were accepted.

    A round counts for a position only if it drafted this position and accepted all earlier ones. So the estimates of
    deep positions keep their values while rounds are shallow. An estimate without new results loses weight.

    Attributes:
        shares: estimated acceptance probability, by draft position.
        expected: expected number of accepted draft tokens, by depth from 0.
        rows: number of drafted rows that were learned from.
    """

    def __init__(self, depth: int) -> None:
        self.shares = [PRIOR] * depth
        self.expected = self._expected()
        self.rows = 0
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
            self.rows += tried if position == 0 else 0
            weight = self.weight(position, now)
            self.shares[position] += tried / (weight + tried) * (successes / tried - self.shares[position])
            self._weights[position] = min(weight + tried, MEMORY)
            self._last_update[position] = now
        self.expected = self._expected()

    def weight(self, position: int, now: int) -> float:
        """Return the weight of the estimate of a position, in drafted rows; a part is lost since its last update."""
        stale = 0.5 ** ((now - self._last_update[position]) / HALF_LIFE)
        weight = self._weights[position]
        return min(weight, STALE_MEMORY + (weight - STALE_MEMORY) * stale)

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


def round_sizes(depths: Sequence[int], nodes: Sequence[int]) -> list[RoundSize]:
    """Return the sizes of an engine's rounds: all nodes at each depth, then each number of nodes at the largest depth.

    Args:
        depths: draft depths, ascending.
        nodes: numbers of verified draft nodes per batch row.
    """
    return [*map(RoundSize, depths), *(RoundSize(depths[-1], count) for count in nodes)]


def halvings(depth: int) -> tuple[int, ...]:
    """Halve a depth, rounding down, until it is 0; return all values, ascending. 5 gives (0, 1, 2, 5)."""
    return tuple(sorted({depth >> shift for shift in range(depth.bit_length() + 1)}))


def portions(nodes: int) -> tuple[int, ...]:
    """Return a quarter and a half of a number of draft nodes, rounded down, without 0. 4 gives (1, 2)."""
    return tuple(sorted({nodes // 4, nodes // 2} - {0}))
