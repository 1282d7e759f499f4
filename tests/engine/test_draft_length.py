"""Test the policy that chooses the draft depth, under a simulated clock and simulated acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jspec import Tree
from jspec.engine.run.stopwatch import Stopwatch
from jspec.engine.schedule.acceptance import Acceptance
from jspec.engine.schedule.draft_length import (
    MAX_TRIES,
    MIN_SAMPLES,
    PROBE_SHARE,
    TIME_ONLY,
    Adaptive,
    DispatchResult,
    Fixed,
    Policy,
)
from jspec.engine.schedule.sizes import BUDGET_ROWS, RoundSize, halvings, round_sizes, sizes_of

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

Cost = Callable[[int, RoundSize], float]
Text = Callable[[int], Sequence[float] | np.ndarray]  # acceptance by position, of all rows or [rows, positions]


class Budgeted(Fixed):
    """A policy that always chooses the same depth and, where rows share a budget, the same number of nodes."""

    def __init__(self, depth: int, nodes: int) -> None:
        self._sizes = [RoundSize(depth), RoundSize(depth, nodes)]

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        return sizes_of(bucket, self._sizes)[-1]


def measured(bucket: int, size: RoundSize) -> float:
    """Return milliseconds; three tenths of what a chain adds go to the draft of its first token and the overhead."""
    plain, chain = MILLISECONDS[bucket]
    if size.depth == 0:
        return plain
    if size.nodes is not None:  # the draft takes four tenths
        return plain + (chain - plain) * (0.4 + 0.6 * size.nodes / 4)
    return plain + (chain - plain) * (0.3 + 0.7 * size.depth / 4)


def verified(shares: np.ndarray, size: RoundSize) -> np.ndarray:
    """Return how many tokens of each row's chain a round verifies: of all rows' chains, the most probable tokens.

    Args:
        shares: probability that each token of a chain is accepted after the one before it, [rows, positions].
    """
    if size.nodes is None:
        return np.full(len(shares), size.depth)
    paths = np.cumprod(shares, axis=1)
    least = np.sort(paths.ravel())[::-1][: len(shares) * size.nodes][-1]
    counts = (paths > least).sum(axis=1)
    for row in np.argsort(counts, kind="stable"):  # tokens of equal probability, the shallow ones first
        more = min(len(shares) * size.nodes - counts.sum(), (paths[row] == least).sum())
        counts[row] += more
    return counts


class SimulatedEngine:
    """A simulated engine whose results are read one dispatch late.

    Times are noisy: one round in a hundred and all rounds of ``burst`` take three times as long. With ``arrivals``, new
    requests delay stretches of about three rounds, a fifth of all, each by 6 ms on average.
    """

    def __init__(
        self,
        policy: Policy,
        cost: Cost = measured,
        *,
        seed: int = 0,
        burst: range = range(0),
        arrivals: bool = False,
    ) -> None:
        self.policy, self.cost, self.burst, self.arrivals = policy, cost, burst, arrivals
        self.rng = np.random.default_rng(seed)
        self.seconds = self.tokens = 0.0
        self.seconds_by_depth: Counter[int] = Counter()
        self.chosen: list[int] = []
        self.sizes: list[RoundSize] = []

    def run(self, bucket: int, text: Text, rounds: int = ROUNDS, caps: Sequence[int] | None = None) -> SimulatedEngine:
        caps = [DEPTHS[-1]] * bucket if caps is None else caps
        unread: list[DispatchResult] = []
        is_delayed = False
        for number in range(rounds):
            size = self.policy.choose(bucket, caps)
            shares = np.broadcast_to(np.array(text(number)), (len(caps), DEPTHS[-1]))
            is_accepted = self.rng.random(shares.shape) < shares
            most = np.minimum(caps, verified(shares, size))
            accepted = np.minimum(np.cumprod(is_accepted, axis=1).sum(axis=1), most)
            slow = 3 if self.rng.random() < 0.01 or number in self.burst else 1
            seconds = self.cost(bucket, size) * (1 + 0.03 * self.rng.exponential()) * slow
            if self.arrivals:
                is_delayed = self.rng.random() < (0.65 if is_delayed else 0.1)
                seconds += is_delayed * self.rng.exponential(6.0)
            self.seconds += seconds
            self.seconds_by_depth[size.depth] += seconds
            self.tokens += len(caps) + accepted.sum()
            self.chosen.append(size.depth)
            self.sizes.append(size)
            unread.append(DispatchResult(bucket, size, caps, accepted[None], seconds))
            if len(unread) > 1:
                self.policy.learn(unread.pop(0))
        return self

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def result(size: RoundSize, accepted: int, seconds: float | None) -> DispatchResult:
    """Return the result of a dispatch of one row with one round."""
    return DispatchResult(1, size, [DEPTHS[-1]], np.array([[accepted]]), seconds)


def fixed_speed(bucket: int, depth: int, share: Sequence[float], cost: Cost = measured) -> float:
    """Return the expected speed of a simulated engine that always drafts at one depth."""
    tokens = bucket * (1 + np.cumprod(share[:depth]).sum())
    return tokens / (cost(bucket, RoundSize(depth)) * 1.03 * 1.02)  # the mean factors of both kinds of noise


def steady(name: str) -> Text:
    return lambda number: TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_adaptive_policy_on_any_text_has_97_percent_of_the_best_speed(bucket: int, name: str) -> None:
    """The time spent on trying other depths counts; in some cases depth 0 is nearly as fast as the best depth."""
    fixed = {depth: fixed_speed(bucket, depth, TEXTS[name]) for depth in DEPTHS}
    assert SimulatedEngine(Adaptive(DEPTHS)).run(bucket, steady(name)).speed > 0.97 * max(fixed.values())
    if name == "hopeless" or (name, bucket) == ("hard", 64):
        assert fixed[4] < 0.9 * fixed[0], "negative control: the full depth must be slower"


@pytest.mark.parametrize("bucket", [1, 64])
def test_adaptive_policy_on_a_changing_text_is_faster_than_every_fixed_depth(bucket: int) -> None:
    """Stretches of text with high acceptance and with none alternate."""

    def text(number: int) -> Sequence[float]:
        return TEXTS["hopeless" if number // 1500 % 2 else "easy"]

    engines = [SimulatedEngine(policy).run(bucket, text, 6000) for policy in (Adaptive(DEPTHS), *map(Fixed, DEPTHS))]
    assert engines[0].speed > max(simulated.speed for simulated in engines[1:])


@pytest.mark.parametrize(
    "name",
    [
        *("easy", "usual", "hopeless", "mixed"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("middling", "hard")),  # between the others
    ],
)
@pytest.mark.parametrize("bucket", [8, pytest.param(32, marks=pytest.mark.long), 64])
def test_adaptive_policy_with_budgets_has_98_percent_of_the_best_speed_and_uses_them_on_mixed_texts(
    bucket: int, name: str
) -> None:
    """In a mixed batch half of the rows accept nearly all of their draft, the others nearly nothing."""
    shares = np.repeat([TEXTS["easy"], TEXTS["hopeless"]], bucket // 2, axis=0)
    text = steady(name) if name in TEXTS else lambda number: shares
    fixed = [Fixed(depth) for depth in DEPTHS] + [Budgeted(4, nodes) for nodes in (1, 2)]
    speeds = [SimulatedEngine(policy, seed=1).run(bucket, text).speed for policy in fixed]
    adaptive = SimulatedEngine(Adaptive(DEPTHS, (1, 2)), seed=1).run(bucket, text)
    assert adaptive.speed > 0.98 * max(speeds)
    if name == "mixed":
        assert Counter(adaptive.sizes).most_common(1)[0][0] == RoundSize(4, 2)
        assert adaptive.speed > 1.01 * max(speeds[: len(DEPTHS)])


def empty_seconds(bucket: int, share: float = 0.93) -> dict[tuple[int, RoundSize], float]:
    """Return the times of rounds whose rows are empty: a share of the measured ones."""
    sizes = sizes_of(bucket, round_sizes(DEPTHS, (1, 2)))
    return {(bucket, size): share * measured(bucket, size) for size in sizes}


def ratios_to_the_best_depth(
    bucket: int, text: Text, rounds: int, *, seeds: int, arrivals: bool = False
) -> list[float]:
    """Return for each seed the speed of a new adaptive policy with budgets, as a share of the best fixed depth's."""

    def speed(policy: Policy, seed: int) -> float:
        return SimulatedEngine(policy, seed=seed, arrivals=arrivals).run(bucket, text, rounds).speed

    policies = [Adaptive(DEPTHS, (1, 2), empty_seconds=empty_seconds(bucket)) for _ in range(seeds)]
    return [speed(own, seed) / max(speed(Fixed(depth), seed) for depth in DEPTHS) for seed, own in enumerate(policies)]


@pytest.mark.parametrize("bucket", [8, 32])
def test_adaptive_policy_whose_rounds_are_delayed_by_new_requests_is_as_fast_as_the_best_depth(bucket: int) -> None:
    """Three delayed rounds of a size must not make another size look better for good."""
    shares = np.repeat([TEXTS["easy"], TEXTS["middling"]], bucket // 2, axis=0)
    ratios = ratios_to_the_best_depth(bucket, lambda number: shares, 300, seeds=12, arrivals=True)
    assert np.mean(ratios) > 0.98 and min(ratios) > 0.94


def test_adaptive_policy_without_shared_acceptance_returns_to_drafting_when_texts_become_easy() -> None:
    """Results of short drafts say nothing about deep trees then, so only probes find out."""
    change = 1500

    def text(number: int) -> Sequence[float]:
        return TEXTS["hopeless" if number < change else "easy"]

    chosen = SimulatedEngine(Adaptive(DEPTHS, shared_acceptance=False)).run(64, text, 4000).chosen
    assert Counter(chosen[change - 500 : change])[0] > 480 and Counter(chosen[-1000:])[4] > 900


def test_adaptive_policy_never_tries_a_budget_that_has_fewer_nodes_than_easy_texts_need() -> None:
    policy = Adaptive(DEPTHS, (1, 2), empty_seconds=empty_seconds(8))
    assert RoundSize(4, 1) not in SimulatedEngine(policy).run(8, steady("easy"), 50).sizes


@pytest.mark.parametrize(("saving", "runs"), [(0.005, False), (0.06, True)])
def test_adaptive_policy_runs_a_budget_only_if_it_saves_time(saving: float, runs: bool) -> None:
    """Texts that become easy make the results of a budget newer than those of the whole tree, and better."""

    def cost(bucket: int, size: RoundSize) -> float:
        return measured(bucket, RoundSize(size.depth)) * (1 if size.nodes is None else 1 - saving)

    sizes = sizes_of(8, round_sizes(DEPTHS, (2,)))
    policy = Adaptive(DEPTHS, (2,), empty_seconds={(8, size): cost(8, size) for size in sizes})
    engine = SimulatedEngine(policy, cost).run(8, lambda number: TEXTS["hard" if number < 30 else "easy"], 300)
    assert (RoundSize(4, 2) in engine.sizes) is runs


def test_adaptive_policy_in_a_bucket_with_empty_rows_counts_all_tokens_of_a_budget() -> None:
    """Two requests have the nodes of eight rows, so four drafts of each can be accepted."""
    policy = Adaptive((0, 4), (1,), empty_seconds={(8, RoundSize(0)): 1.0})
    for _ in range(40):
        policy.learn(DispatchResult(8, RoundSize(4, 1), [4, 4], np.array([[4, 4]]), 1.0))
    assert policy.rate(8, RoundSize(4, 1), [4, 4]) == pytest.approx(10, rel=0.02)


def test_adaptive_policy_without_requests_that_draft_chooses_some_size() -> None:
    policy = Adaptive((4,), (1, 2))
    for number in range(40):
        size = policy.choose(8, [])
        policy.learn(DispatchResult(8, size, [4], np.array([[number % 5]]), 1.0))
        assert size in sizes_of(8, round_sizes((4,), (1, 2)))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_adaptive_policy_with_times_of_empty_rounds_never_runs_a_depth_that_cannot_be_the_best(bucket: int) -> None:
    """On easy texts plain rounds are slower than chains even if they take no longer than those with empty rows."""
    informed = SimulatedEngine(Adaptive(DEPTHS, empty_seconds=empty_seconds(bucket))).run(bucket, steady("easy"), 50)
    forced = SimulatedEngine(Adaptive(DEPTHS)).run(bucket, steady("easy"), 50)
    assert 0 not in informed.chosen and informed.speed > 1.02 * forced.speed
    assert 0 in forced.chosen, "negative control: without them every depth runs"


@pytest.mark.parametrize("share", [0.3, 0.93, 1.4])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_adaptive_policy_with_times_of_empty_rounds_on_any_text_has_97_percent_of_the_best_speed(
    bucket: int, name: str, share: float
) -> None:
    """Times far below the real ones (experts that empty rows do not choose, say) only cost more trials."""
    adaptive = Adaptive(DEPTHS, empty_seconds=empty_seconds(bucket, share))
    speeds = [SimulatedEngine(one).run(bucket, steady(name), 600).speed for one in (adaptive, *map(Fixed, DEPTHS))]
    assert speeds[0] > 0.97 * max(speeds[1:])


def test_adaptive_policy_whose_timings_fail_leaves_a_size_that_only_its_empty_time_favours() -> None:
    """A size without timings is chosen at most MAX_TRIES times, however short its time with empty rows."""
    policy, chosen = Adaptive((0, 2), empty_seconds={(1, RoundSize(0)): 1.0, (1, RoundSize(2)): 0.001}), []
    for _ in range(100):
        chosen.append(policy.choose(1, [2]))
        seconds = 1.0 if chosen[-1].depth == 0 else None
        policy.learn(result(chosen[-1], 0, seconds))
    assert chosen.count(RoundSize(2)) == MAX_TRIES


def test_policies_in_a_batch_of_few_rows_verify_all_nodes() -> None:
    for bucket in (1, BUDGET_ROWS - 1):
        assert sizes_of(bucket, [RoundSize(4), RoundSize(4, 2)]) == [RoundSize(4)]
        sizes = (
            SimulatedEngine(Adaptive(DEPTHS, (1, 2)), lambda bucket, size: 1.0).run(bucket, steady("easy"), 50).sizes
        )
        assert {size.nodes for size in sizes} == {None} and {size.depth for size in sizes} == set(DEPTHS)
    assert sizes_of(BUDGET_ROWS, [RoundSize(4), RoundSize(4, 2)]) == [RoundSize(4), RoundSize(4, 2)]


def test_adaptive_policy_with_expensive_drafts_chooses_depth_0() -> None:
    simulated = SimulatedEngine(Adaptive(DEPTHS), lambda bucket, size: 1.0 + size.depth).run(1, steady("usual"))
    assert Counter(simulated.chosen)[0] > 0.96 * ROUNDS
    assert simulated.speed > 0.97 * fixed_speed(1, 0, (), lambda bucket, size: 1.0)
    assert set(simulated.chosen[: (MIN_SAMPLES + 1) * len(DEPTHS)]) == set(DEPTHS)  # at first all depths are tried


@pytest.mark.parametrize(
    ("bucket", "name", "best", "share"), [(64, "hopeless", 0, PROBE_SHARE), (1, "easy", 4, PROBE_SHARE / TIME_ONLY)]
)
def test_adaptive_policy_on_a_long_text_loses_the_share_of_the_time_that_probes_may(
    bucket: int, name: str, best: int, share: float
) -> None:
    """Where the largest depth is the best one, its rounds show what the others accept, so probes are fewer."""
    first = (MIN_SAMPLES + 1) * len(DEPTHS)
    simulated = SimulatedEngine(Adaptive(DEPTHS)).run(bucket, steady(name), first)
    simulated.seconds_by_depth.clear()
    simulated.run(bucket, steady(name), 8000)
    spent, speeds = simulated.seconds_by_depth, {d: fixed_speed(bucket, d, TEXTS[name]) for d in DEPTHS}
    assert max(speeds, key=lambda depth: speeds[depth]) == best
    lost = sum(spent[depth] * (1 - speeds[depth] / speeds[best]) for depth in DEPTHS)
    assert 0.5 * share < lost / sum(spent.values()) < 1.15 * share
    assert min(Counter(simulated.chosen[-6000:])[depth] for depth in DEPTHS) > 3


def test_adaptive_policy_expects_a_depth_to_take_no_longer_than_a_larger_one() -> None:
    policy = Adaptive((0, 2, 4), (1,))
    for size, seconds in ((RoundSize(0), 9.0), (RoundSize(2), 1.0), (RoundSize(4), 3.0), (RoundSize(4, 1), 8.0)):
        policy.learn(DispatchResult(8, size, [0] * 8, np.zeros((1, 8), int), seconds))
    rates = [policy.rate(8, size, [0] * 8) for size in round_sizes((0, 2, 4), (1,))]
    assert rates == [8 / 1.0, 8 / 1.0, 8 / 3.0, 8 / 8.0]


def test_adaptive_policy_after_a_slow_stretch_chooses_the_best_depth_again() -> None:
    simulated = SimulatedEngine(Adaptive(DEPTHS), burst=range(1000, 1020)).run(64, steady("hopeless"), 4000)
    assert Counter(simulated.chosen[-1000:])[0] > 980


@pytest.mark.parametrize(("cap", "deepest"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4)])
def test_adaptive_policy_with_draft_caps_chooses_the_least_depth_that_reaches_the_cap(cap: int, deepest: int) -> None:
    chosen = SimulatedEngine(Adaptive(DEPTHS)).run(8, steady("easy"), 200, caps=[0, cap]).chosen
    assert max(chosen) == deepest and Counter(chosen).most_common(1)[0][0] == deepest


def test_adaptive_policy_with_one_drafting_row_of_64_chooses_depth_0() -> None:
    """The gain of one row does not make up for the slower round of all 64 rows."""
    for caps, depth in (([4] + [0] * 63, 0), ([4] * 64, 4)):
        chosen = SimulatedEngine(Adaptive(DEPTHS)).run(64, steady("easy"), 500, caps=caps).chosen
        assert Counter(chosen[-100:])[depth] > 90  # the others are probes


def test_acceptance_shares_of_eight_rows_equal_those_computed_by_hand() -> None:
    """Each row drafted up to three tokens; an ended row does not count, and a row capped to 1 only at position 1."""
    acceptance = Acceptance(3)
    accepted = np.array([[0, 1, 1, 2, 3, 3, -1, 1]])
    acceptance.learn(accepted, np.array([3, 3, 3, 3, 3, 3, 3, 1]), now=1)
    first = (0.5 + 6) / (1 + 7)  # the prior counts as one row
    second = (16 * first + 3) / (16 + 5)  # the position before counts as 16 rows
    expected = [first, second, (16 * second + 2) / (16 + 3)]
    np.testing.assert_allclose(acceptance.shares, expected)
    assert acceptance.expected[2] == pytest.approx(expected[0] * (1 + expected[1]))
    assert acceptance.expected[0] == 0


def test_acceptance_shares_of_deep_positions_approach_the_position_before_as_their_results_age() -> None:
    acceptance = Acceptance(3)
    for now in range(100):
        acceptance.learn(np.full((1, 4), 1), np.full(4, 3), now=now)  # the second draft token is always rejected
    assert acceptance.shares[0] > 0.99 and acceptance.shares[1] < 0.15
    for now in range(100, 200):
        acceptance.learn(np.full((1, 4), 1), np.full(4, 1), now=now)
    assert acceptance.shares[1] < 0.2
    for now in range(200, 5000):
        acceptance.learn(np.full((1, 4), 1), np.full(4, 1), now=now)
    assert acceptance.shares[1] > 0.99
    acceptance.learn(np.full((1, 32), 1), np.full(32, 3), now=5000)
    assert acceptance.shares[1] < 0.4


@pytest.mark.parametrize("bucket", [8, 32])
def test_adaptive_policy_on_texts_that_become_easy_drafts_deep_soon(bucket: int) -> None:
    """Early rounds, whose drafts are poor, must not leave the policy at short drafts or at a budget."""

    def text(number: int) -> np.ndarray:
        later = np.repeat([TEXTS["easy"], TEXTS["usual"]], bucket // 2, axis=0)
        return later if number >= 15 else np.broadcast_to(TEXTS["middling"], later.shape)

    ratios = ratios_to_the_best_depth(bucket, text, 200, seeds=8)
    assert np.mean(ratios) > 0.96 and min(ratios) > 0.92


def test_adaptive_policy_expects_the_whole_tree_to_accept_what_a_budget_accepts_at_least() -> None:
    sizes = RoundSize(4), RoundSize(4, 2)
    policy = Adaptive((0, 4), (2,), empty_seconds={(8, size): 1.0 for size in sizes})
    for size, accepted in zip(sizes, (0, 2), strict=True):  # first on a hard text, then on an easy one
        for _ in range(20):
            policy.learn(DispatchResult(8, size, [4] * 8, np.full((1, 8), accepted), 1.0))
    assert policy.rate(8, sizes[0], [4] * 8) >= policy.rate(8, sizes[1], [4] * 8) > 20


@pytest.mark.parametrize("informed", [True, False])
def test_adaptive_policy_in_a_bucket_without_budgets_ignores_their_acceptance(informed: bool) -> None:
    """With few rows no budget runs, so an estimate of one, or one that was never learned, could not fall again."""
    seconds = empty_seconds(32) | empty_seconds(1) if informed else None
    policy = Adaptive(DEPTHS, (1, 2), empty_seconds=seconds)
    if informed:
        SimulatedEngine(policy).run(32, steady("easy"), 300)
    chosen = SimulatedEngine(policy).run(1, steady("hopeless"), 3000).chosen
    assert Counter(chosen[-1000:])[0] > 850


def test_adaptive_policy_after_a_stretch_without_drafts_does_not_catch_up_on_probes() -> None:
    policy = Adaptive(DEPTHS)
    SimulatedEngine(policy).run(32, steady("easy"), 200)
    SimulatedEngine(policy).run(32, steady("easy"), 5000, caps=[0] * 32)
    chosen = SimulatedEngine(policy).run(32, steady("easy"), 300).chosen
    assert Counter(chosen)[4] > 250


def test_adaptive_policy_without_shared_acceptance_learns_each_depth_separately() -> None:
    for shares in (True, False):
        policy = Adaptive((0, 1, 2), shared_acceptance=shares)
        for depth in (0, 1, 2):
            for _ in range(MIN_SAMPLES):
                policy.learn(result(RoundSize(depth), depth, 1.0))
        before = policy.rate(1, RoundSize(2), [2])
        for _ in range(20):
            policy.learn(result(RoundSize(1), 0, 1.0))
        assert (policy.rate(1, RoundSize(2), [2]) < before) == shares


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
        size = policy.choose(1, [4])
        chosen.append(size.depth)
        if size.depth != 4:
            policy.learn(result(size, size.depth, 1.0))
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
