"""Policies that choose how much every dispatch drafts and verifies, from measured acceptance and time at each size.

A draft token costs more time in a larger batch, and acceptance depends on the text. Therefore an adaptive engine
compiles its round for several sizes, depth 0 included, and asks a `Policy` before each dispatch. Runs on the host.
"""

from __future__ import annotations

import abc
import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import numpy as np
from jaxtyping import Int

from jspec.engine.schedule.acceptance import Acceptance
from jspec.engine.schedule.sizes import RoundSize, round_sizes, sizes_of

MIN_SAMPLES = 3  # least number of timed dispatches of a size before it is compared with others
MAX_TRIES = 12  # most dispatches of a size to collect MIN_SAMPLES timings, because its program may always fail
MIN_ROWS = 16  # least number of drafted rows before an estimate of acceptance is compared with others
WINDOW = 16  # number of newest timings of a size whose lower quartile is used
PROBE_SHARE = 0.01  # share of the time that may be lost by running sizes that do not look best
LEAST_LOSS = 0.02  # least share of a probe's time that counts as lost
LEAST_SAVING = 0.03  # least share of the whole tree's time that a budget must save
TIME_ONLY = 4.0  # how many times its loss must be saved before a probe that tells nothing but its time


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
    compared. With them, a size that was not timed counts as if it took that time, and a budget of nodes as if it
    accepted what the whole tree does, up to its number of nodes; so a size runs only if it may be the best (optimism
    under uncertainty, as in UCB1, doi:10.1023/A:1013689704352). Later each size that is not the best runs now and then
    as a probe, because time changes with the context and acceptance with the text. A probe loses the share of its time
    by which its rate is below the best, at least LEAST_LOSS; all probes lose at most PROBE_SHARE of the time, and sizes
    that lose less are probed more often. Depths below that of the best one are probed less often if its rounds show
    what they accept. The whole tree counts as accepting at least what a budget does; a budget runs only if it saves at
    least LEAST_SAVING of its time.

    A time that is too short corrects itself, as its size runs; one that is too long would stay. A prefill between two
    rounds or a busy host lengthens some timings. So a size takes the newest of its timings or the lower quartile,
    whichever is less, and no longer than a larger depth.

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
        self._probe_seconds = 0.0  # time that the next probes may lose

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        useful = self._useful(bucket, max(caps, default=0))
        untried = [size for size in useful if self._must_try(bucket, size)]
        size = untried[-1] if untried else self._best_or_probe(bucket, useful, caps)
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
        return self._rates(bucket, [size], caps, self._expected_seconds(bucket)).get(size, 0.0)

    def _rates(
        self, bucket: int, sizes: Sequence[RoundSize], caps: Sequence[int], seconds: Mapping[RoundSize, float]
    ) -> dict[RoundSize, float]:
        """Return the expected tokens per second of each size whose seconds are known."""
        rows_by_cap = Counter(caps)
        return {
            size: self._expected_tokens(bucket, size, rows_by_cap) / seconds[size] for size in sizes if size in seconds
        }

    def _expected_tokens(self, bucket: int, size: RoundSize, rows_by_cap: Counter[int]) -> float:
        """Return the expected number of tokens of a dispatch, from the number of batch rows with each cap."""
        acceptance, rows = self._acceptance[size], sum(rows_by_cap.values())
        is_known = acceptance.rows >= MIN_ROWS or not self._empty_seconds
        known = [(acceptance if is_known else self._whole).expected]
        if size.nodes is None:  # the whole tree accepts no fewer tokens than with a budget, whose results may be newer
            budgets = [other for other in sizes_of(bucket, self._sizes) if other.nodes and other.depth == size.depth]
            known += [self._acceptance[other].expected for other in budgets if self._acceptance[other].rows >= MIN_ROWS]
        accepted = max(
            sum(count * expected[min(cap, size.depth)] for cap, count in rows_by_cap.items()) for expected in known
        )
        if size.nodes is not None and not is_known:
            accepted = min(accepted, bucket * (1 + size.nodes) - rows)  # the nodes that are verified besides roots
        return rows + accepted

    def _expected_seconds(self, bucket: int) -> dict[RoundSize, float]:
        """Return the expected seconds of a dispatch of each size, those with empty rows until the size was timed.

        A depth takes no longer than a larger one, whose timings may be newer.
        """
        timings = {size: self._seconds[bucket, size] for size in self._sizes}
        measured = {size: min(runs[-1], sorted(runs)[(len(runs) - 1) // 4]) for size, runs in timings.items() if runs}
        empty = {size: self._empty_seconds[bucket, size] for size in timings if (bucket, size) in self._empty_seconds}
        untimed = {size for size in empty if self._is_untimed(bucket, size)}
        timed = measured.keys() - untimed
        depths = [size for size in reversed(self._sizes) if size.nodes is None and size in timed]
        measured |= dict(zip(depths, accumulate((measured[size] for size in depths), min), strict=True))
        factor = min([1.0, *(measured[size] / empty[size] for size in empty.keys() & timed)])
        return measured | {size: min([factor * empty[size], *timings[size]]) for size in untimed}

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

    def _saves_time(self, size: RoundSize, seconds: Mapping[RoundSize, float]) -> bool:
        """Return whether a size is no budget, or one that takes less time than the whole tree, which accepts more."""
        whole = seconds.get(RoundSize(size.depth), math.inf)
        return size.nodes is None or seconds.get(size, math.inf) < (1 - LEAST_SAVING) * whole

    def _shows(self, size: RoundSize, other: RoundSize) -> bool:
        """Return whether rounds of a size show what another one accepts, because it is shallower."""
        return other.depth < size.depth and self._acceptance[other] is self._acceptance[size]

    def _is_untimed(self, bucket: int, size: RoundSize) -> bool:
        return len(self._seconds[bucket, size]) < MIN_SAMPLES and self._tries[bucket, size] < MAX_TRIES

    def _best_or_probe(self, bucket: int, sizes: Sequence[RoundSize], caps: Sequence[int]) -> RoundSize:
        """Return the size that may have the highest rate, or another one if the saved time allows a probe."""
        seconds = self._expected_seconds(bucket)
        sizes = [size for size in sizes if self._saves_time(size, seconds)]
        rates = self._rates(bucket, sizes, caps, seconds)
        best = max(reversed(sizes), key=lambda size: rates.get(size, 0.0))
        others = [size for size in rates if size != best]
        saved, self._probe_seconds = self._probe_seconds, 0.0
        if others:
            most = rates[best] or 1.0  # without rows all rates are 0
            losses = {size: seconds[size] * max(1 - rates[size] / most, LEAST_LOSS) for size in others}
            ages = {size: self._num_dispatches - self._last_run.get((bucket, size), 0) for size in others}
            probe = max(others, key=lambda size: ages[size] / losses[size])
            if saved >= losses[probe] * (TIME_ONLY if self._shows(best, probe) else 1):
                return probe  # what was saved beyond it is dropped, so that no stretch of probes follows
            self._probe_seconds = saved
        return best
