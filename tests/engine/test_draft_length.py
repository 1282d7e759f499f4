"""The depth of drafts: chosen well, never at the price of plain decoding's speed, and never seen in the tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Drafter, DraftModel, Eagle3, Engine, Medusa, Model, NGram, SamplingParams, Suffix, Tree
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
from jspec.engine.prometheus import Gauges, Latencies, exposition
from jspec.step.decode import spec_step
from jspec.tools import demo
from tests.support import small, tiny

pytestmark = pytest.mark.once

# -- the policy, by a simulated clock and simulated acceptance

DEPTHS = (0, 1, 2, 4)
BUCKETS = (1, 32, 64)
MILLISECONDS = {1: (4.45, 5.24), 8: (4.72, 5.89), 32: (5.54, 7.80), 64: (6.74, 12.49)}  # plain and chain of 4, an H200
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


class World:
    """Rounds of a simulated engine, whose results are read one behind.

    Timings are noisy: now and then one takes three times as long, and for a while (``burst``) all do.
    """

    def __init__(self, policy: Policy, cost: Cost = measured, *, seed: int = 0, burst: range = range(0)) -> None:
        self.policy, self.cost, self.burst = policy, cost, burst
        self.rng = np.random.default_rng(seed)
        self.seconds = self.tokens = 0.0
        self.seconds_at: Counter[int] = Counter()
        self.chosen: list[int] = []

    def run(self, bucket: int, text: Text, rounds: int = ROUNDS, caps: Sequence[int] | None = None) -> World:
        caps = [DEPTHS[-1]] * bucket if caps is None else caps
        unread: list[DispatchResult] = []
        for number in range(rounds):
            depth = self.policy.choose(bucket, caps)
            stands = self.rng.random((len(caps), DEPTHS[-1])) < np.array(text(number))
            accepted = np.minimum(np.cumprod(stands, axis=1).sum(axis=1), np.minimum(caps, depth))
            slow = 3 if self.rng.random() < 0.01 or number in self.burst else 1
            seconds = self.cost(bucket, depth) * (1 + 0.03 * self.rng.exponential()) * slow
            self.seconds += seconds
            self.seconds_at[depth] += seconds
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
    """What a world comes to that always drafts so deep."""
    tokens = bucket * (1 + np.cumprod(share[:depth]).sum())
    return tokens / (cost(bucket, depth) * 1.03 * 1.02)  # the means of both noises


def steady(name: str) -> Text:
    return lambda number: TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_as_fast_as_the_best_depth_and_never_slower_than_plain_decoding(bucket: int, name: str) -> None:
    """Within a hundredth, what was spent on finding out included: no cliff on either side of the crossing to 0."""
    fixed = {depth: fixed_speed(bucket, depth, TEXTS[name]) for depth in DEPTHS}
    assert World(Adaptive(DEPTHS)).run(bucket, steady(name)).speed > 0.98 * max(fixed.values())
    if name == "hopeless" or (name, bucket) == ("hard", 64):
        assert fixed[4] < 0.9 * fixed[0], "negative control: a fixed depth would be the slower one"


@pytest.mark.parametrize("bucket", [1, 64])
def test_it_follows_the_text(bucket: int) -> None:
    """Where easy and hopeless stretches take turns, it beats every fixed depth."""

    def text(number: int) -> Sequence[float]:
        return TEXTS["hopeless" if number // 1500 % 2 else "easy"]

    worlds = [World(policy).run(bucket, text, 6000) for policy in (Adaptive(DEPTHS), *map(Fixed, DEPTHS))]
    assert worlds[0].speed > max(world.speed for world in worlds[1:])


def test_where_drafting_is_dear_it_stops() -> None:
    world = World(Adaptive(DEPTHS), lambda bucket, depth: 1.0 + depth).run(1, steady("usual"))
    assert Counter(world.chosen)[0] > 0.98 * ROUNDS
    assert set(world.chosen[: (MIN_SAMPLES + 1) * len(DEPTHS)]) == set(DEPTHS)  # everything is tried at first


def test_looking_again_costs_a_hundredth_of_the_time() -> None:
    first = (MIN_SAMPLES + 1) * len(DEPTHS)
    world = World(Adaptive(DEPTHS)).run(64, steady("hopeless"), first)
    world.seconds_at.clear()
    world.run(64, steady("hopeless"), 8000)
    probes = 1 - world.seconds_at[0] / sum(world.seconds_at.values())
    assert 0.5 * PROBE_SHARE < probes < 1.15 * PROBE_SHARE  # the mean of what it costs is above the median
    assert min(Counter(world.chosen[-6000:])[depth] for depth in DEPTHS) > 3


def test_a_slow_stretch_of_the_host_is_forgotten() -> None:
    world = World(Adaptive(DEPTHS), burst=range(1000, 1020)).run(64, steady("hopeless"), 4000)
    assert Counter(world.chosen[-1000:])[0] > 980


@pytest.mark.parametrize(("cap", "deepest"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4)])
def test_no_deeper_than_any_request_allows(cap: int, deepest: int) -> None:
    chosen = World(Adaptive(DEPTHS)).run(8, steady("easy"), 200, caps=[0, cap]).chosen
    assert max(chosen) == deepest and Counter(chosen).most_common(1)[0][0] == deepest


def test_rows_that_may_not_draft_weigh_against_it() -> None:
    """One of 64 rows drafts: its tokens do not pay for the round of all."""
    assert World(Adaptive(DEPTHS)).run(64, steady("easy"), 500, caps=[4] + [0] * 63).chosen[-1] == 0
    assert World(Adaptive(DEPTHS)).run(64, steady("easy"), 500, caps=[4] * 64).chosen[-1] == 4


def test_acceptance_by_hand() -> None:
    """Of 8 rows that drafted three tokens; a row that had ended and one capped to 1 tell nothing of the deeper ones."""
    acceptance = Acceptance(3)
    accepted = np.array([[0, 1, 1, 2, 3, 3, -1, 1]])
    acceptance.learn(accepted, np.array([3, 3, 3, 3, 3, 3, 3, 1]), now=1)
    expected = [(0.5 + 6) / (1 + 7), (0.5 + 3) / (1 + 5), (0.5 + 2) / (1 + 3)]  # the prior counts as one row
    np.testing.assert_allclose(acceptance.shares, expected)
    assert acceptance.expected[2] == pytest.approx(expected[0] * (1 + expected[1]))
    assert acceptance.expected[0] == 0


def test_what_is_known_of_deep_positions_outlives_shallow_rounds() -> None:
    acceptance = Acceptance(3)
    for now in range(100):
        acceptance.learn(np.full((1, 4), 3), np.full(4, 3), now=now)
    before = list(acceptance.shares)
    for now in range(100, 5000):
        acceptance.learn(np.full((1, 4), 0), np.full(4, 1), now=now)
    assert acceptance.shares[1:] == before[1:] and acceptance.shares[0] < 0.01
    for now in range(5000, 5008):  # of the old rows few still count
        acceptance.learn(np.full((1, 1), 1), np.full(1, 3), now=now)
    assert acceptance.shares[1] < 0.6


def test_depths_of_a_dynamic_tree_do_not_speak_for_each_other() -> None:
    for shares in (True, False):
        policy = Adaptive((0, 1, 2), shared_acceptance=shares)
        for depth in (0, 1, 2):
            for _ in range(MIN_SAMPLES):
                policy.learn(DispatchResult(1, depth, [2], np.array([[depth]]), 1.0))
        before = policy.rate(1, 2, [2])
        for _ in range(20):
            policy.learn(DispatchResult(1, 1, [2], np.array([[0]]), 1.0))
        assert (policy.rate(1, 2, [2]) < before) == shares


def test_halvings() -> None:
    assert [halvings(depth) for depth in (1, 3, 4, 10)] == [(0, 1), (0, 1, 3), (0, 1, 2, 4), (0, 1, 2, 5, 10)]


def test_a_dispatch_takes_from_its_start_or_from_the_end_of_the_one_before() -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 9.0, 20.0, 23.0])
    watch = Stopwatch(lambda: next(now))
    watch.start()  # 0
    watch.start()  # 1, behind it
    assert watch.stop() == 4.0
    watch.start()  # 5
    assert watch.stop() == 5.0  # from 4, when the first was done, to 9
    watch.reset()
    watch.start()  # 20: the pause is nobody's
    assert watch.stop() == 3.0


@pytest.mark.parametrize(("away", "seconds"), [(2.0, 12.0), (6.0, None)])
def test_nobody_knows_when_a_dispatch_was_done_while_the_host_was_away(away: float, seconds: float | None) -> None:
    now = iter([0.0, 1.0, 1.0 + away, 12.0, 12.0, 20.0, 21.0, 22.0])
    watch = Stopwatch(lambda: next(now))
    watch.start()
    watch.leave()  # 1
    watch.come_back()
    assert watch.stop() == seconds
    watch.leave()  # 12; nothing is under way
    watch.come_back()
    watch.start()  # 20
    assert watch.stop() == 1.0


def test_a_depth_of_which_nothing_is_heard_is_given_up() -> None:
    """As where its program fails every time."""
    policy, chosen = Adaptive(DEPTHS), []
    for _ in range(200):
        chosen.append(policy.choose(1, [4]))
        if chosen[-1] != 4:
            policy.learn(DispatchResult(1, chosen[-1], [4], np.array([[chosen[-1]]]), 1.0))
    assert chosen[:MAX_TRIES] == [4] * MAX_TRIES and 4 not in chosen[MAX_TRIES:]
    assert chosen[-50:].count(2) >= 45  # the best of those that answer


def test_a_pause_of_a_streams_reader_is_no_cost_of_a_depth() -> None:
    """What is under way then is read an hour later."""
    policy, passed = Listening(), [0.0]
    drafter = DraftModel(small.target(), Tree.chain(2))
    options: dict[str, Any] = dict(slots=1, max_len=64, prefill_buckets=(8,), prefix_cache=False, controls=False)
    with Engine(small.target(), drafter=drafter, **options) as engine:
        engine.policy = policy
        engine.core.stopwatch = Stopwatch(lambda: time.perf_counter() + passed[0])
        for pause in (0.0, 3600.0):
            for _ in engine.stream([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0)):
                passed[0] += pause
    assert passed[0] >= 3 * 3600.0 and None in policy.heard
    told = [seconds for seconds in policy.heard if seconds is not None]
    assert told and max(told) < 3600.0


class Listening(Policy):
    """Always the whole tree; remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[float | None] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        return 2

    def learn(self, reading: DispatchResult) -> None:
        self.heard.append(reading.seconds)


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
        ("topk:9,2,4", 1, "topk:5,1,4"),  # there are no more candidates
    ],
)
def test_a_tree_is_cut_at_a_depth(tree: str, depth: int, cut: str) -> None:
    whole = Tree.parse(tree)
    found = whole.cut(depth)
    assert str(found) == cut and found.depth == depth
    assert found.scratch_rows <= whole.scratch_rows
    with pytest.raises(ValueError, match="expected a depth from 0 to"):
        whole.cut(whole.depth + 1)


# -- engines

MAX_LEN = small.MAX_LEN
STATIC = Tree.static([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0)])
PAUSE = 6  # rounds
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8]]


class Forced(Policy):
    """Takes its depths from a list, then from a default; keeps what it is told."""

    def __init__(self, depths: Sequence[int], default: int) -> None:
        self._depths, self._default = iter(depths), default
        self.readings: list[DispatchResult] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        return next(self._depths, self._default)

    def learn(self, reading: DispatchResult) -> None:
        self.readings.append(reading)

    def accepted(self, row: int) -> list[int]:
        """Of each round of a row, while it ran."""
        return [int(n) for reading in self.readings for n in reading.accepted[:, row] if n >= 0]


def head(target: Model) -> Any:
    return tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))


DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "eagle3": lambda target: Eagle3(head(target), Tree.topk(12, 3, 4)),
    "medusa": lambda target: Medusa(tiny.medusa_heads(target, 3), STATIC),
    "draft model": lambda target: DraftModel(target, STATIC),  # it is right wherever its cache is
    "n-gram": lambda target: NGram(Tree.chain(3)),
    "suffix": lambda target: Suffix(Tree.topk(6, 3, 2), max_n=4, scope="engine", corpus_tokens=64),
}


DEPTHS_OF = {"eagle3": (0, 2, 3), "draft model": (0, 1, 3)}
LOOK_UP = ("n-gram", "suffix")
ALL = [pytest.param(name, marks=[pytest.mark.matrix] * (name == "suffix")) for name in DRAFTERS]


@cache
def engine(name: str) -> Engine:
    """Two slots; the n-gram's runs two rounds a dispatch."""
    return Engine(
        small.target(),
        drafter=DRAFTERS[name](small.target()),
        slots=2,
        max_len=MAX_LEN,
        page_size=4,
        buckets=(2,),
        prefill_buckets=(16,),
        prefix_cache=name not in LOOK_UP,
        adaptive=True,
        draft_depths=DEPTHS_OF.get(name, (0, 3)),
        rounds_per_dispatch=2 if name == "n-gram" else 1,
    )


def generate(one: Engine, policy: Policy, temperature: float, prompts: Sequence[list[int]] = PROMPTS) -> Any:
    one.policy = policy
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    return [done.raise_for_error() for done in one.generate(list(prompts), params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ALL)
def test_tokens_do_not_depend_on_what_is_chosen(name: str, temperature: float, compilations: list[str]) -> None:
    expected = [done.token_ids for done in generate(small.plain(), Fixed(0), temperature)]
    one, depths = engine(name), DEPTHS_OF.get(name, (0, 3))
    generate(one, Fixed(3), temperature)
    compilations.clear()
    for seed in range(2):
        choices = np.random.default_rng(seed).choice(depths, 100).tolist()
        done = generate(one, Forced(choices, 3), temperature)
        assert [one.token_ids for one in done] == expected
        ran = sum((one.metrics for one in done), start=type(done[0].metrics)()).num_rounds_per_depth
        assert set(ran) == set(depths) and sum(ran.values()) == sum(one.metrics.num_drafts for one in done)
    assert compilations == []


def wipe(one: Engine) -> None:
    """Forget what the draft's caches hold: a request that comes again may get the same pages."""
    one.scheduler.pages.clear()
    state = one.core.runner.state
    if hasattr(state.draft, "cache"):
        draft = replace(state.draft, cache=jax.tree.map(jnp.zeros_like, state.draft.cache))
        one.core.runner.state = replace(state, draft=draft)


def resumed(one: Engine, prompt: list[int], pause: int, temperature: float) -> tuple[list[int], list[int]]:
    """What rounds accept behind the first ``pause`` ones, and what they do where those drafted nothing."""
    always, paused = Forced([], 3), Forced([], 3)
    generate(one, always, temperature, [prompt])
    accepted = always.accepted(0)
    tokens = sum(accepted[:pause]) + pause  # a plain round emits one
    wipe(one)
    paused = Forced([0] * (tokens // one.config.rounds_per_dispatch), 3)
    assert tokens % one.config.rounds_per_dispatch == 0
    generate(one, paused, temperature, [prompt])
    assert not any(paused.accepted(0)[:tokens])
    return accepted[pause:], paused.accepted(0)[tokens:]


@pytest.mark.parametrize("name", ALL)
def test_drafting_resumes_as_if_it_had_never_stopped(name: str) -> None:
    always, after = resumed(engine(name), PROMPTS[0], PAUSE, temperature=float(name not in LOOK_UP))
    assert after == always and len(always) >= 4
    assert sum(always) > 2


@pytest.mark.parametrize("name", ["eagle3", "draft model"])
def test_pages_that_plain_rounds_filled_serve_those_who_draft(name: str) -> None:
    one = engine(name)
    wipe(one)
    (first,) = generate(one, Fixed(0), 1.0, PROMPTS[:1])
    said, accepted = PROMPTS[0] + first.token_ids[:22], []
    for cached in (True, False):
        policy = Forced([], 3)
        (done,) = generate(one, policy, 1.0, [said])
        assert (done.metrics.num_cached_tokens >= 28) == cached
        accepted.append(policy.accepted(0))
        wipe(one)
    assert accepted[0] == accepted[1] and sum(accepted[0]) > 0


@pytest.mark.parametrize("name", ["n-gram", pytest.param("suffix", marks=pytest.mark.matrix)])
def test_a_text_is_kept_while_nothing_is_drafted(name: str) -> None:
    (done,) = generate(engine(name), Fixed(0), 1.0, PROMPTS[:1])
    state = engine(name).core.runner.state.draft
    history = np.asarray(state.history if name == "suffix" else state)
    text = [*done.prompt_token_ids, *done.token_ids]
    assert text in [row[: len(text)].tolist() for row in history]


def without_draft_rows(one: Engine) -> Any:
    """A round of depth 0 that does all it should but write them."""
    program, slots = replace(one.core.runner.program, drafter=one.core.runner.program.drafter.cut(0)), one.config.slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(program.drafter), "write_pending_rows", lambda self, params, state, view: state)
        return one.core.runner.programs._lower("broken", partial(spec_step, program), slots).compile()


def rows_of_both_caches(one: Engine) -> tuple[np.ndarray, np.ndarray]:
    """What draft model and target hold of the first layer's keys, all rows of slot 0 as far as they are committed."""
    state = one.core.runner.state
    rows = np.arange(int(state.lengths[0]))
    pages = np.asarray(state.page_table)[0, rows // one.config.page_size]
    draft, target = (
        np.asarray(cache.k[0])[pages, :, rows % one.config.page_size] for cache in (state.draft.cache, state.target)
    )
    return draft, target


@pytest.mark.parametrize("spoilt", [False, True])
def test_plain_rounds_write_the_draft_s_rows(spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is the target, so its rows are the target's; with a negative control."""
    one = engine("draft model")
    wipe(one)
    if spoilt:
        monkeypatch.setitem(one.core.runner.programs.rounds, (2, 0, False), without_draft_rows(one))
    generate(one, Fixed(0), 0.0)
    draft, target = rows_of_both_caches(one)
    assert len(target) > 40
    assert np.allclose(draft, target, atol=1e-5) != spoilt
    wipe(one)


# -- the embedded pair


@cache
def pair() -> Engine:
    return Engine(
        Model.from_pretrained(demo.TARGET, dtype="float32"),
        drafter=Eagle3.from_pretrained(demo.HEAD, tree=Tree.chain(3), dtype="float32"),
        tokenizer="bytes",
        slots=1,
        max_len=384,
        prefill_buckets=(128,),
        prefix_cache=False,
        adaptive=True,
        draft_depths=(0, 3),
    )


@cache
def broken_pair() -> Any:
    return without_draft_rows(pair())


@cache
def always_drafting() -> tuple[list[int], list[int]]:
    """Tokens, and what each round accepted."""
    return decode(Forced([], 3))


def decode(policy: Forced) -> tuple[list[int], list[int]]:
    pair().policy = policy
    (done,) = pair().generate(demo.PROMPT, SamplingParams(max_tokens=300, temperature=0))
    return done.raise_for_error().token_ids, policy.accepted(0)


def after_a_pause(rounds: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, what rounds accept behind so many plain ones or a few more, and what they do where all draft."""
    _, accepted = always_drafting()
    ends = np.cumsum(np.array(accepted) + 1)
    first = int(np.searchsorted(ends, rounds))
    pause = int(ends[first])
    wipe(pair())
    tokens, own = decode(Forced([0] * pause, 3))
    return tokens, own[pause:], accepted[first + 1 :]


@pytest.mark.long
@pytest.mark.parametrize("rounds", [30, 200])
def test_behind_plain_rounds_as_much_is_accepted_as_if_there_had_been_none(rounds: int) -> None:
    tokens, after, always = after_a_pause(rounds)
    assert tokens == always_drafting()[0]
    assert after == always and len(always) > 50
    assert np.mean(always) > (0.7 if rounds == 30 else 0.3)  # this head drafts worse far behind its prompt


@pytest.mark.long
@pytest.mark.parametrize("rounds", [30, 200])
def test_if_those_rounds_wrote_no_draft_rows_it_would_show(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is accepted differs, though a head that sees less of a long text may even do better."""
    monkeypatch.setitem(pair().core.runner.programs.rounds, (1, 0, False), broken_pair())
    tokens, after, always = after_a_pause(rounds)
    assert tokens == always_drafting()[0], "the tokens are the target's all the same"
    assert after != always


class Priced(Policy):
    """An adaptive policy that is told what each depth costs, not what it took."""

    def __init__(self, policy: Policy, cost: Callable[[int], float]) -> None:
        self._policy, self._cost = policy, cost
        self.chosen: list[int] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        self.chosen.append(self._policy.choose(bucket, caps))
        return self.chosen[-1]

    def learn(self, reading: DispatchResult) -> None:
        self._policy.learn(replace(reading, seconds=self._cost(reading.depth)))


@pytest.mark.parametrize(("price", "depth"), [(0.02, 3), (2.0, 0)])
def test_an_engine_settles_on_what_pays(price: float, depth: int) -> None:
    """With a price of a draft token, in plain rounds."""
    policy = Priced(Adaptive((0, 3)), lambda depth: 1 + price * depth)
    pair().policy = policy
    (done,) = pair().generate(demo.PROMPT, SamplingParams(max_tokens=200, temperature=0))
    assert done.token_ids == always_drafting()[0][:200]
    assert Counter(policy.chosen[2 * (MIN_SAMPLES + 1) :]).most_common(1)[0][0] == depth
    assert done.metrics.num_rounds_per_depth[depth] > 0.8 * done.metrics.num_drafts


@pytest.mark.parametrize(("draft", "depth"), [(False, 0), (0, 0), (2, 3), (True, 3)])
def test_a_request_s_own_cap_holds(draft: bool | int, depth: int) -> None:
    policy = Priced(Adaptive((0, 3)), lambda depth: 1.0)
    pair().policy = policy
    (done,) = pair().generate(demo.PROMPT, SamplingParams(max_tokens=40, temperature=0, draft=draft))
    assert done.token_ids == always_drafting()[0][:40]
    assert policy.chosen[-1] == depth == max(policy.chosen)
    cap = 3 if draft is True else int(draft)
    assert len(done.metrics.num_accepted_per_position) == cap
    assert done.metrics.num_draft_tokens <= cap * done.metrics.num_drafts


def test_the_metrics_tell_the_rounds_by_depth() -> None:
    pair().policy = Forced([0, 0, 3, 0], 3)
    (done,) = pair().generate(demo.PROMPT, SamplingParams(max_tokens=20, temperature=0))
    assert done.metrics.num_rounds_per_depth == {0: 3, 3: done.metrics.num_drafts - 3}
    text = exposition(done.metrics, Latencies(), Gauges(0, 0, 0.0), "m")
    assert 'vllm:spec_decode_num_drafts_per_depth_total{model_name="m",depth="0"} 3.0' in text


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(adaptive=1), "adaptive: expected a bool, got 1"),
        (dict(adaptive=True, accept="block"), "adaptive: expected accept=\"coupled\", got 'block'"),
        (dict(draft_depths=(0, 3)), "draft_depths: expected None without adaptive=True"),
        (dict(adaptive=True, draft_depths=(1, 3)), "draft_depths: the first must be 0"),
        (dict(adaptive=True, draft_depths=(0, 3, 2)), "draft_depths: expected ascending sizes from 0"),
        (dict(adaptive=True, draft_depths=(0, 2)), "draft_depths: the last must be that of chain:3, 3, got"),
        (dict(adaptive=True, drafter=None), "adaptive: expected a drafter, got none"),
    ],
)
def test_an_impossible_choice_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(small.target(), **dict(drafter=NGram(Tree.chain(3))) | options)
