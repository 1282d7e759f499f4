"""Test engines that choose the draft depth: tokens do not depend on it, and draft caches stay complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import (
    Beside,
    DFlash,
    Drafter,
    DraftModel,
    DSpark,
    Eagle3,
    Engine,
    Medusa,
    Model,
    NGram,
    PEagle,
    SamplingParams,
    Suffix,
    Tree,
)
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.run.model_runner import ModelRunner
from jspec.engine.run.prometheus import Gauges, Latencies, exposition
from jspec.engine.run.stopwatch import Stopwatch
from jspec.engine.schedule.draft_length import MIN_SAMPLES, Adaptive, DispatchResult, Fixed, Policy
from jspec.engine.schedule.sizes import RoundSize
from jspec.step.decode import spec_step
from jspec.step.executable_key import ExecutableKey
from tests.support import byte_pair, cover, engines, tiny
from tests.support.beside import check_sources

pytestmark = pytest.mark.once

MAX_LEN = engines.MAX_LEN
STATIC = Tree.static([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0)])
PAUSE = 6  # rounds
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8]]


class Forced(Policy):
    """A policy that takes its depths from a list, then a default depth, and keeps the results."""

    def __init__(self, depths: Sequence[int], default: int) -> None:
        self._depths, self._default = iter(depths), default
        self.readings: list[DispatchResult] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        return RoundSize(next(self._depths, self._default))

    def learn(self, reading: DispatchResult) -> None:
        self.readings.append(reading)

    def accepted(self, row: int) -> list[int]:
        """Return the number of accepted draft tokens of each round in which a row ran."""
        return [int(n) for reading in self.readings for n in reading.accepted[:, row] if n >= 0]


def head(target: Model) -> Any:
    return tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))


DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "eagle3": lambda target: Eagle3(head(target), Tree.topk(12, 3, 4)),
    "dflash": lambda target: DFlash(tiny.dflash_head(target, block_size=4, feature_layers=(0, 1)), Tree.topk(12, 3, 4)),
    "peagle": lambda target: PEagle(
        tiny.peagle_head(target, draft_vocab=12, feature_layers=(0, 1)), Tree.topk(12, 3, 4)
    ),
    "dspark": lambda target: DSpark(tiny.dspark_head(target, block_size=3, feature_layers=(0, 1)), STATIC),
    "medusa": lambda target: Medusa(tiny.medusa_heads(target, 3), STATIC),
    "draft model": lambda target: DraftModel(
        target, STATIC
    ),  # drafts with the target itself, so drafts are right if its cache is complete
    "n-gram": lambda target: NGram(Tree.chain(3)),
    "beside": lambda target: Beside(Eagle3(head(target), Tree.chain(2)), NGram(Tree.chain(3)), "beside"),
    "suffix": lambda target: Suffix(Tree.topk(6, 3, 2), max_n=4, scope="engine", corpus_tokens=64),
}


DEPTHS_OF = {
    "eagle3": (0, 2, 3),
    "dflash": (0, 2, 3),
    "dspark": (0, 2, 3),
    "peagle": (0, 1, 2, 3),
}
LOOK_UP = ("n-gram", "suffix")
LONG = ("dflash", "peagle", "suffix")  # their caches and texts are kept as those of "dspark", "eagle3" and "n-gram"
DEFAULT = [name for name in DRAFTERS if name not in LONG]
ALL = [
    *DEFAULT,
    *(pytest.param(name, marks=pytest.mark.matrix if name == "suffix" else pytest.mark.long) for name in LONG),
]


def make(name: str) -> Engine:
    """Make an engine with two slots; with the n-gram drafter it runs two rounds per dispatch."""
    return engines.make(
        engines.target(),
        drafter=DRAFTERS[name](engines.target()),
        slots=2,
        max_len=MAX_LEN,
        page_size=4,
        buckets=(2,),
        prefill_buckets=(16,),
        prefix_cache=name not in LOOK_UP,
        adaptive=True,
        draft_depths=DEPTHS_OF.get(name, (0, 3)),
        rounds_per_dispatch=2 if name == "n-gram" else 1,
        controls=False,
    )


engine = cache(make)


def generate(one: Engine, policy: Policy, temperature: float, prompts: Sequence[list[int]] = PROMPTS) -> Any:
    one.policy = policy
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    return [done.raise_for_error() for done in one.generate(list(prompts), params)]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *cover.checkerboard(DEFAULT, (0.0, 1.0)),
        *(pytest.param(name, heat, marks=pytest.mark.long) for name in LONG for heat in (0.0, 1.0)),
    ],
)
def test_adaptive_engine_with_any_sequence_of_depths_emits_tokens_of_plain_decoding(
    name: str, temperature: float, compilations: list[str]
) -> None:
    expected = [done.token_ids for done in generate(engines.plain(), Fixed(0), temperature)]
    one, depths = engine(name), DEPTHS_OF.get(name, (0, 3))
    generate(one, Fixed(3), temperature)
    compilations.clear()
    for seed in range(2):
        choices = np.random.default_rng(seed).choice(depths, 100).tolist()
        done = generate(one, Forced(choices, 3), temperature)
        assert [one.token_ids for one in done] == expected
        ran = sum((one.metrics for one in done), start=type(done[0].metrics)()).num_rounds_per_depth
        if name == "beside":
            check_sources(one.metrics)
        assert set(ran) == set(depths) and sum(ran.values()) == sum(one.metrics.num_drafts for one in done)
    assert compilations == []


def wipe(one: Engine) -> None:
    """Clear the page pool and the draft's caches, because a repeated request may get the same pages."""
    one.scheduler.pages.clear()
    state = one.core.runner.state
    of_head = getattr(state.draft, "model", state.draft)  # of a head beside a look-up
    if hasattr(of_head, "cache"):
        cleared = replace(of_head, cache=jax.tree.map(jnp.zeros_like, of_head.cache))
        draft = cleared if of_head is state.draft else replace(state.draft, model=cleared)
        one.core.runner.target_side.state = replace(state, draft=draft)


def resumed(one: Engine, prompt: list[int], pause: int, temperature: float) -> tuple[list[int], list[int]]:
    """Return accepted tokens per round after ``pause`` rounds, for a run that drafts in these and one that does not."""
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
def test_drafter_after_plain_rounds_has_the_acceptance_of_always_drafting(name: str) -> None:
    always, after = resumed(engine(name), PROMPTS[0], PAUSE, temperature=float(name not in LOOK_UP))
    assert after == always and len(always) >= 4
    assert sum(always) > 2


@pytest.mark.parametrize("name", ["eagle3", "draft model"])
def test_drafter_with_cached_pages_from_plain_rounds_has_unchanged_acceptance(name: str) -> None:
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


@pytest.mark.parametrize("name", ["n-gram", "beside", pytest.param("suffix", marks=pytest.mark.matrix)])
def test_lookup_drafter_after_plain_rounds_knows_their_tokens(name: str) -> None:
    (done,) = generate(engine(name), Fixed(0), 1.0, PROMPTS[:1])
    state = engine(name).core.runner.state.draft
    history = np.asarray(getattr(state, "lookup", state).history)
    text = [*done.prompt_token_ids, *done.token_ids]
    assert text in [row[: len(text)].tolist() for row in history]


def without_draft_rows(one: Engine) -> Any:
    """Compile a round of depth 0 that does not write the draft model's cache rows."""
    program, slots = replace(one.core.runner.program, drafter=one.core.runner.program.drafter.cut(0)), one.config.slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(program.drafter), "write_pending_rows", lambda self, params, state, view: state)
        rows = jax.ShapeDtypeStruct((slots,), jnp.int32)
        step = jax.jit(partial(spec_step, program), donate_argnums=1)
        return step.lower(one.core.runner.params, one.core.runner.state, rows).compile()


def rows_of_both_caches(one: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Return the first layer's keys of slot 0's committed cache rows, of the draft model and of the target."""
    state = one.core.runner.state
    rows = np.arange(int(state.lengths[0]))
    pages = np.asarray(state.page_table)[0, rows // one.config.page_size]
    draft, target = (
        np.asarray(cache[0].k)[pages, :, rows % one.config.page_size] for cache in (state.draft.cache, state.target)
    )
    return draft, target


@pytest.mark.parametrize("spoilt", [False, True])
def test_draft_model_cache_after_rounds_of_depth_0_is_complete(spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is the target, so both caches have equal rows; the negative control is ``spoilt``."""
    one = engine("draft model")
    wipe(one)
    if spoilt:
        monkeypatch.setitem(one.core.runner.programs.compiled, ExecutableKey.round(2, 0), without_draft_rows(one))
    generate(one, Fixed(0), 0.0)
    draft, target = rows_of_both_caches(one)
    assert len(target) > 40
    assert np.allclose(draft, target, atol=1e-5) != spoilt
    wipe(one)


def test_stopwatch_with_pauses_between_steps_does_not_count_the_pauses() -> None:
    """The result of the dispatch that runs during the pause is read an hour later."""
    policy, passed = Recording(), [0.0]
    with make("draft model") as engine:
        engine.policy = policy
        engine.core.stopwatch = Stopwatch(lambda: time.perf_counter() + passed[0])
        with ByHand(engine) as by_hand:
            for pause in (0.0, 3600.0):
                request = by_hand.submit([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0))
                while request.finish_reason is None:
                    by_hand.step()
                    passed[0] += pause
    assert passed[0] >= 3 * 3600.0 and None in policy.heard
    told = [seconds for seconds in policy.heard if seconds is not None]
    assert told and max(told) < 3600.0


class Recording(Policy):
    """A policy that always drafts the whole tree and keeps the measured seconds."""

    def __init__(self) -> None:
        self.heard: list[float | None] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        return RoundSize(3)

    def learn(self, reading: DispatchResult) -> None:
        self.heard.append(reading.seconds)


# -- the embedded pair


@cache
def pair() -> Engine:
    return engines.make(
        Model.from_pretrained(byte_pair.TARGET, dtype="float32"),
        drafter=Eagle3.from_pretrained(byte_pair.HEAD, tree=Tree.chain(3), dtype="float32"),
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
    """Return the tokens, and the number of accepted draft tokens of each round."""
    return decode(Forced([], 3))


def decode(policy: Forced) -> tuple[list[int], list[int]]:
    pair().policy = policy
    (done,) = pair().generate(byte_pair.PROMPT, SamplingParams(max_tokens=300, temperature=0))
    return done.raise_for_error().token_ids, policy.accepted(0)


def after_a_pause(rounds: int) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, and accepted tokens per round after ``rounds`` or more plain rounds and after drafting rounds."""
    _, accepted = always_drafting()
    ends = np.cumsum(np.array(accepted) + 1)
    first = int(np.searchsorted(ends, rounds))
    pause = int(ends[first])
    wipe(pair())
    tokens, own = decode(Forced([0] * pause, 3))
    return tokens, own[pause:], accepted[first + 1 :]


@pytest.mark.long
@pytest.mark.parametrize("rounds", [30, 200])
def test_eagle3_after_plain_rounds_has_the_acceptance_of_always_drafting(rounds: int) -> None:
    tokens, after, always = after_a_pause(rounds)
    assert tokens == always_drafting()[0]
    assert after == always and len(always) > 50
    assert np.mean(always) > (0.7 if rounds == 30 else 0.3)  # this head drafts worse far from its prompt


@pytest.mark.long
@pytest.mark.parametrize("rounds", [30, 200])
def test_eagle3_after_plain_rounds_without_draft_rows_has_other_acceptance(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control; acceptance may even rise, because the head sees less of a long text."""
    monkeypatch.setitem(pair().core.runner.programs.compiled, ExecutableKey.round(1, 0), broken_pair())
    tokens, after, always = after_a_pause(rounds)
    assert tokens == always_drafting()[0], "the tokens must be the target's"
    assert after != always


class Priced(Policy):
    """An adaptive policy that gets a given cost per depth instead of the measured time."""

    def __init__(self, policy: Policy, cost: Callable[[int], float]) -> None:
        self._policy, self._cost = policy, cost
        self.chosen: list[int] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        size = self._policy.choose(bucket, caps)
        self.chosen.append(size.depth)
        return size

    def learn(self, reading: DispatchResult) -> None:
        self._policy.learn(replace(reading, seconds=self._cost(reading.size.depth)))


@pytest.mark.parametrize(("price", "depth"), [(0.02, 3), (2.0, 0)])
def test_adaptive_engine_with_given_costs_mostly_chooses_the_cheaper_depth(price: float, depth: int) -> None:
    """The unit of ``price``, the cost of drafting one token, is the time of a plain round. All drafts are right."""
    policy = Priced(Adaptive((0, 3)), lambda depth: 1 + price * depth)
    done = [one for _ in range(10) for one in generate(engine("draft model"), policy, 0.0)]
    assert [one.token_ids for one in done[:2]] == [one.token_ids for one in generate(engines.plain(), Fixed(0), 0.0)]
    assert all(one.token_ids == other.token_ids for one, other in zip(done[:-2], done[2:], strict=True))
    assert Counter(policy.chosen[2 * (MIN_SAMPLES + 1) :]).most_common(1)[0][0] == depth
    assert done[-1].metrics.num_rounds_per_depth[depth] > 0.8 * done[-1].metrics.num_drafts


@pytest.mark.parametrize(("draft", "depth"), [(False, 0), (0, 0), (2, 3), (True, 3)])
def test_adaptive_engine_with_the_draft_cap_of_a_request_drafts_no_deeper(draft: bool | int, depth: int) -> None:
    one, policy = engine("n-gram"), Priced(Adaptive((0, 3)), lambda depth: 1.0)
    one.policy = policy
    (done,) = one.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, draft=draft))
    assert done.token_ids == generate(engines.plain(), Fixed(0), 0.0)[0].token_ids
    assert policy.chosen[-1] == depth == max(policy.chosen)
    cap = 3 if draft is True else int(draft)
    assert len(done.metrics.num_accepted_per_position) == cap
    assert done.metrics.num_draft_tokens <= cap * done.metrics.num_drafts


def test_adaptive_engine_after_a_request_has_metrics_of_rounds_by_depth() -> None:
    (done,) = generate(engine("draft model"), Forced([0, 0, 3, 0], 3), 0.0, PROMPTS[:1])
    assert done.metrics.num_rounds_per_depth == {0: 3, 3: done.metrics.num_drafts - 3}
    text = exposition(done.metrics, Latencies(), Gauges(0, 0, 0.0), "m")
    assert 'jspec:spec_decode_num_drafts_per_depth_total{model_name="m",engine="0",depth="0"} 3.0' in text


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(adaptive=1), "adaptive: expected a bool, got 1"),
        (dict(adaptive=True, accept="block"), "adaptive: expected accept=\"coupled\", got 'block'"),
        (dict(draft_depths=(0, 3)), "draft_depths: expected None without adaptive=True"),
        (dict(adaptive=True, draft_depths=(1, 3)), "draft_depths: expected 0 first"),
        (dict(adaptive=True, draft_depths=(0, 3, 2)), "draft_depths: expected ascending sizes from 0"),
        (dict(adaptive=True, draft_depths=(0, 2)), "draft_depths: expected 3 last, the depth of chain:3, got"),
        (dict(adaptive=True, drafter=None), "adaptive: expected a drafter, got none"),
    ],
)
def test_adaptive_engine_with_impossible_options_raises(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engines.make(engines.target(), **dict(drafter=NGram(Tree.chain(3))) | options)


def test_time_of_a_round_is_the_median_between_ends_while_one_is_dispatched_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two rounds, of which one loads the program, and one that is delayed do not count."""
    seconds, started, waited = [50.0, 9.0, 2.0, 2.0, 2.0, 30.0, 2.0, 2.0], Counter[str](), list[int]()

    def start() -> int:
        started["rounds"] += 1
        return started["rounds"]

    def wait(number: int) -> None:
        waited.append(started["rounds"] - number)  # number of rounds dispatched after it
        assert len(waited) == number, "rounds are waited for in their order"

    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds[: len(waited)]))
    assert ModelRunner._time_round(SimpleNamespace(wait=wait), start) == 2.0  # type: ignore[arg-type]
    assert waited == [0, *[1] * 6, 0]


def test_rounds_timed_ahead_have_a_time_for_every_size_and_change_no_state() -> None:
    """Without `compile_ahead` nothing is timed, as programs are compiled when they are first needed."""
    target = tiny.model(32, layers=1)
    options: dict[str, Any] = {"slots": 8, "max_len": 64, "prefill_buckets": (32,), "controls": False}
    start = partial(engines.make, target, drafter=NGram(Tree.chain(2)), **options)
    with start(compile_ahead=True, adaptive=True, draft_depths=(0, 2), buckets=(1, 8)) as one:
        runner = one.core.runner
        assert {size for bucket, size in runner.round_seconds if bucket == 1} == {*map(RoundSize, (0, 2))}
        assert {size.nodes for bucket, size in runner.round_seconds if bucket == 8} == {None, 1}
        assert min(runner.round_seconds.values()) > 0
        one.generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0.0))
        before = [np.array(leaf) for leaf in jax.tree.leaves(runner.state)]
        sizes = [*map(RoundSize, (0, 2))]
        assert runner._time_rounds(sizes).keys() == {(bucket, size) for bucket in (1, 8) for size in sizes}
        for leaf, own in zip(jax.tree.leaves(runner.state), before, strict=True):
            np.testing.assert_array_equal(leaf, own)
    for others in ({"compile_ahead": False, "adaptive": True}, {"compile_ahead": True}):
        with start(buckets=(8,), **others) as other:
            assert other.core.runner.round_seconds == {}
