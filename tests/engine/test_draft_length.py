"""Test the policy that chooses the draft depth, under a simulated clock and simulated acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jspec import Tree
from jspec.engine.draft_length import (
    MAX_TRIES,
    MIN_SAMPLES,
    PROBE_SHARE,
    Acceptance,
    Adaptive,
    DispatchResult,
    Fixed,
    Policy,
    Stopwatch,
    halvings,
)

pytestmark = pytest.mark.once

DEPTHS = (0, 1, 2, 4)
BUCKETS = (1, 32, 64)
MILLISECONDS = {
    1: (4.45, 5.24),
    8: (4.72, 5.89),
    32: (5.54, 7.80),
    64: (6.74, 12.49),
}  # plain and chain of 4, on an H200
ROUNDS = 2000
TEXTS = {
    "easy": (0.95, 0.95, 0.95, 0.95),
    "usual": (0.75, 0.73, 0.76, 0.74),
    "middling": (0.5, 0.4, 0.4, 0.4),
    "hard": (0.2, 0.2, 0.2, 0.2),
    "hopeless": (0.0, 0.0, 0.0, 0.0),
}
Cost = Callable[[int, int], float]
Text = Callable[[int], Sequence[float]]


def measured(bucket: int, depth: int) -> float:
    plain, chain = MILLISECONDS[bucket]
    return plain if depth == 0 else plain + (chain - plain) * (0.3 + 0.7 * depth / 4)


class SimulatedEngine:
    """A simulated engine whose results are read one dispatch late.

    Times are noisy: one round in a hundred and all rounds of ``burst`` take three times as long.
    """

    def __init__(self, policy: Policy, cost: Cost = measured, *, seed: int = 0, burst: range = range(0)) -> None:
        self.policy, self.cost, self.burst = policy, cost, burst
        self.rng = np.random.default_rng(seed)
        self.seconds = self.tokens = 0.0
        self.seconds_by_depth: Counter[int] = Counter()
        self.chosen: list[int] = []

    def run(self, bucket: int, text: Text, rounds: int = ROUNDS, caps: Sequence[int] | None = None) -> SimulatedEngine:
        caps = [DEPTHS[-1]] * bucket if caps is None else caps
        unread: list[DispatchResult] = []
        for number in range(rounds):
            depth = self.policy.choose(bucket, caps)
            is_accepted = self.rng.random((len(caps), DEPTHS[-1])) < np.array(text(number))
            accepted = np.minimum(np.cumprod(is_accepted, axis=1).sum(axis=1), np.minimum(caps, depth))
            slow = 3 if self.rng.random() < 0.01 or number in self.burst else 1
            seconds = self.cost(bucket, depth) * (1 + 0.03 * self.rng.exponential()) * slow
            self.seconds += seconds
            self.seconds_by_depth[depth] += seconds
            self.tokens += len(caps) + accepted.sum()
            self.chosen.append(depth)
            unread.append(DispatchResult(bucket, depth, caps, accepted[None], seconds))
            if len(unread) > 1:
                self.policy.learn(unread.pop(0))
        return self

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def fixed_speed(bucket: int, depth: int, share: Sequence[float], cost: Cost = measured) -> float:
    """Return the expected speed of a simulated engine that always drafts at one depth."""
    tokens = bucket * (1 + np.cumprod(share[:depth]).sum())
    return tokens / (cost(bucket, depth) * 1.03 * 1.02)  # the mean factors of both kinds of noise


def steady(name: str) -> Text:
    return lambda number: TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_adaptive_policy_on_any_text_has_98_percent_of_the_best_speed(bucket: int, name: str) -> None:
    """The time spent on trying other depths counts; in some cases depth 0 is nearly as fast as the best depth."""
    fixed = {depth: fixed_speed(bucket, depth, TEXTS[name]) for depth in DEPTHS}
    assert SimulatedEngine(Adaptive(DEPTHS)).run(bucket, steady(name)).speed > 0.98 * max(fixed.values())
    if name == "hopeless" or (name, bucket) == ("hard", 64):
        assert fixed[4] < 0.9 * fixed[0], "negative control: the full depth must be slower"


@pytest.mark.parametrize("bucket", [1, 64])
def test_adaptive_policy_on_a_changing_text_is_faster_than_every_fixed_depth(bucket: int) -> None:
    """Stretches of text with high acceptance and with none alternate."""

    def text(number: int) -> Sequence[float]:
        return TEXTS["hopeless" if number // 1500 % 2 else "easy"]

    engines = [SimulatedEngine(policy).run(bucket, text, 6000) for policy in (Adaptive(DEPTHS), *map(Fixed, DEPTHS))]
    assert engines[0].speed > max(simulated.speed for simulated in engines[1:])


def test_adaptive_policy_with_expensive_drafts_chooses_depth_0() -> None:
    simulated = SimulatedEngine(Adaptive(DEPTHS), lambda bucket, depth: 1.0 + depth).run(1, steady("usual"))
    assert Counter(simulated.chosen)[0] > 0.98 * ROUNDS
    assert set(simulated.chosen[: (MIN_SAMPLES + 1) * len(DEPTHS)]) == set(DEPTHS)  # at first all depths are tried


def test_adaptive_policy_on_a_long_text_probes_for_a_hundredth_of_the_time() -> None:
    first = (MIN_SAMPLES + 1) * len(DEPTHS)
    simulated = SimulatedEngine(Adaptive(DEPTHS)).run(64, steady("hopeless"), first)
    simulated.seconds_by_depth.clear()
    simulated.run(64, steady("hopeless"), 8000)
    probes = 1 - simulated.seconds_by_depth[0] / sum(simulated.seconds_by_depth.values())
    assert 0.5 * PROBE_SHARE < probes < 1.15 * PROBE_SHARE  # the mean time of a round is above the median
    assert min(Counter(simulated.chosen[-6000:])[depth] for depth in DEPTHS) > 3


def test_adaptive_policy_after_a_slow_stretch_chooses_the_best_depth_again() -> None:
    simulated = SimulatedEngine(Adaptive(DEPTHS), burst=range(1000, 1020)).run(64, steady("hopeless"), 4000)
    assert Counter(simulated.chosen[-1000:])[0] > 980


@pytest.mark.parametrize(("cap", "deepest"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4)])
def test_adaptive_policy_with_draft_caps_chooses_the_least_depth_that_reaches_the_cap(cap: int, deepest: int) -> None:
    chosen = SimulatedEngine(Adaptive(DEPTHS)).run(8, steady("easy"), 200, caps=[0, cap]).chosen
    assert max(chosen) == deepest and Counter(chosen).most_common(1)[0][0] == deepest


def test_adaptive_policy_with_one_drafting_row_of_64_chooses_depth_0() -> None:
    """The gain of one row does not make up for the slower round of all 64 rows."""
    assert SimulatedEngine(Adaptive(DEPTHS)).run(64, steady("easy"), 500, caps=[4] + [0] * 63).chosen[-1] == 0
    assert SimulatedEngine(Adaptive(DEPTHS)).run(64, steady("easy"), 500, caps=[4] * 64).chosen[-1] == 4


def test_acceptance_shares_of_eight_rows_equal_those_computed_by_hand() -> None:
    """Each row drafted up to three tokens; an ended row does not count, and a row capped to 1 only at position 1."""
    acceptance = Acceptance(3)
    accepted = np.array([[0, 1, 1, 2, 3, 3, -1, 1]])
    acceptance.learn(accepted, np.array([3, 3, 3, 3, 3, 3, 3, 1]), now=1)
    expected = [(0.5 + 6) / (1 + 7), (0.5 + 3) / (1 + 5), (0.5 + 2) / (1 + 3)]  # the prior counts as one row
    np.testing.assert_allclose(acceptance.shares, expected)
    assert acceptance.expected[2] == pytest.approx(expected[0] * (1 + expected[1]))
    assert acceptance.expected[0] == 0


def test_acceptance_shares_after_shallow_rounds_are_unchanged_at_deep_positions() -> None:
    acceptance = Acceptance(3)
    for now in range(100):
        acceptance.learn(np.full((1, 4), 3), np.full(4, 3), now=now)
    before = list(acceptance.shares)
    for now in range(100, 5000):
        acceptance.learn(np.full((1, 4), 0), np.full(4, 1), now=now)
    assert acceptance.shares[1:] == before[1:] and acceptance.shares[0] < 0.01
    for now in range(5000, 5008):  # the weight of old rows is small by now
        acceptance.learn(np.full((1, 1), 1), np.full(1, 3), now=now)
    assert acceptance.shares[1] < 0.6


def test_adaptive_policy_without_shared_acceptance_learns_each_depth_separately() -> None:
    for shares in (True, False):
        policy = Adaptive((0, 1, 2), shared_acceptance=shares)
        for depth in (0, 1, 2):
            for _ in range(MIN_SAMPLES):
                policy.learn(DispatchResult(1, depth, [2], np.array([[depth]]), 1.0))
        before = policy.rate(1, 2, [2])
        for _ in range(20):
            policy.learn(DispatchResult(1, 1, [2], np.array([[0]]), 1.0))
        assert (policy.rate(1, 2, [2]) < before) == shares


def test_halvings_of_a_depth_are_its_repeated_halves_and_zero() -> None:
    assert [halvings(depth) for depth in (1, 3, 4, 10)] == [(0, 1), (0, 1, 3), (0, 1, 2, 4), (0, 1, 2, 5, 10)]


def test_stopwatch_with_overlapping_dispatches_times_each_separately() -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 9.0, 20.0, 23.0])
    watch = Stopwatch(lambda: next(now))
    watch.start()  # at 0 s
    watch.start()  # at 1 s: waits for the first dispatch
    assert watch.stop() == 4.0
    watch.start()  # at 5 s
    assert watch.stop() == 5.0  # from 4 s, when the first dispatch was done, to 9 s
    watch.reset()
    watch.start()  # at 20 s: the pause does not count
    assert watch.stop() == 3.0


@pytest.mark.parametrize(("away", "seconds"), [(2.0, 12.0), (6.0, None)])
def test_stopwatch_after_a_long_absence_of_the_host_returns_no_time(away: float, seconds: float | None) -> None:
    now = iter([0.0, 1.0, 1.0 + away, 12.0, 12.0, 20.0, 21.0, 22.0])
    watch = Stopwatch(lambda: next(now))
    watch.start()
    watch.leave()  # at 1 s
    watch.come_back()
    assert watch.stop() == seconds
    watch.leave()  # at 12 s, when nothing is in flight
    watch.come_back()
    watch.start()  # at 20 s
    assert watch.stop() == 1.0


def test_adaptive_policy_with_a_depth_without_results_stops_choosing_it() -> None:
    """Depth 4 never has a result, as if its program failed every time."""
    policy, chosen = Adaptive(DEPTHS), []
    for _ in range(200):
        chosen.append(policy.choose(1, [4]))
        if chosen[-1] != 4:
            policy.learn(DispatchResult(1, chosen[-1], [4], np.array([[chosen[-1]]]), 1.0))
    assert chosen[:MAX_TRIES] == [4] * MAX_TRIES and 4 not in chosen[MAX_TRIES:]
    assert chosen[-50:].count(2) >= 45  # the best depth among those with results


# -- trees


@pytest.mark.parametrize(
    ("tree", "depth", "cut"),
    [
        ("chain:4", 2, "chain:2"),
        ("chain:4", 4, "chain:4"),
        ("chain:4", 0, "none"),
        ("static:0,1,0.0,0.1,0.0.1", 1, "static:0,1"),
        ("static:0,1,0.0,0.1,0.0.1", 2, "static:0,1,0.0,0.1"),
        ("topk:60,8,10", 4, "topk:31,4,10"),
        ("topk:60,8,10", 1, "topk:9,1,10"),
        ("topk:9,2,4", 1, "topk:5,1,4"),  # the tree has no more candidates
    ],
)
def test_tree_cut_at_a_depth_has_only_the_levels_up_to_it(tree: str, depth: int, cut: str) -> None:
    whole = Tree.parse(tree)
    found = whole.cut(depth)
    assert str(found) == cut and found.depth == depth
    assert found.scratch_rows <= whole.scratch_rows
    with pytest.raises(ValueError, match="expected a depth from 0 to"):
        whole.cut(whole.depth + 1)
