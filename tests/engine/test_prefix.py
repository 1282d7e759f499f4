"""Test that requests with a common prefix share pages, which changes neither their tokens nor their drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Beside, Completion, DFlash, Drafter, DraftModel, DSpark, Eagle3, Engine, SamplingParams, Suffix, Tree
from jspec.core.prefill_input import PrefillInput, PromptPiece
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.run.model_runner import ModelRunner
from jspec.step.executable_key import ExecutableKey
from tests.support import cover, engines, tiny

pytestmark = pytest.mark.once

PAGE, MAX_LEN, LENGTH = 4, 64, 3
TOLERANCE = 1e-4  # rounding of float32 scores in chunks of other sizes
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "plain": lambda: None,
    "eagle3": lambda: Eagle3(
        tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1)), Tree.chain(LENGTH)
    ),
    "dflash": lambda: DFlash(
        tiny.dflash_head(engines.target(), block_size=4, feature_layers=(0, 1)), Tree.topk(6, LENGTH, 3)
    ),
    "dspark": lambda: DSpark(
        tiny.dspark_head(engines.target(), block_size=4, feature_layers=(0, 1)), Tree.chain(LENGTH)
    ),
    "draft model": lambda: DraftModel(tiny.model(engines.VOCAB, layers=1, seed=1), Tree.chain(LENGTH)),
    "beside": lambda: Beside(
        Eagle3(tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1)), Tree.chain(2)),
        Suffix(Tree.chain(LENGTH)),
        "beside",
    ),
    "suffix": lambda: Suffix(Tree.chain(LENGTH), max_n=3, scope="engine", corpus_tokens=64),
}
LONG = ("dflash",)  # keeps the caches that "dspark" keeps
DEFAULT = [name for name in DRAFTERS if name not in LONG]
NAMES = [*DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
WITH_CACHE: list[Engine] = []
GREEDY, SAMPLED = dict(temperature=0.0), dict(temperature=1.0, seed=7)


@cache
def engine(name: str, *, cached: bool, page_size: int = PAGE) -> Engine:
    """Return an engine with two slots; its draft model samples drafts, which depend on the draft cache."""
    made = engines.make(
        engines.target(),
        drafter=DRAFTERS[name](),
        slots=2,
        max_len=MAX_LEN,
        page_size=page_size,
        buckets=(2,),
        prefill_buckets=(6, 16),
        accept="rejection" if name == "draft model" else "coupled",
        prefix_cache=cached,
        controls=False,
    )
    WITH_CACHE.extend([made] * cached)
    return made


@pytest.fixture(autouse=True)
def _all_comes_back() -> Iterator[None]:
    """Check before and after each test that no page is held or lost."""
    for one in WITH_CACHE:
        one.scheduler.pages.clear()
    yield
    for one in WITH_CACHE:
        one.scheduler.pages.check()
        assert one.pages_in_use == 0 and not one.scheduler.has_work


def prompt(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, engines.VOCAB, size).tolist()


def chat(one: Engine, controls: dict[str, Any], turns: tuple[tuple[int, int], ...], *, trace: bool = False) -> Any:
    """Run a conversation in which each turn appends tokens to the text and decodes an answer."""
    said: list[int] = []
    done: list[Completion] = []
    for turn, (asked, answered) in enumerate(turns):
        said += prompt(asked, seed=turn)
        params = SamplingParams(max_tokens=answered, **controls)
        done += one.generate(said, params, trace=trace)
        said += done[-1].token_ids
    return done


def tokens(done: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in done]


def accepted(done: list[Completion]) -> list[list[int]]:
    return [one.metrics.num_accepted_per_position for one in done]


def cached_tokens(done: list[Completion]) -> list[int]:
    return [one.metrics.num_cached_tokens for one in done]


TURNS = ((9, 6), (1, 3), (3, 8), (1, 1), (2, 7), (5, 5))


@pytest.mark.parametrize(
    ("name", "controls"),
    [
        *cover.checkerboard(DEFAULT, (GREEDY, SAMPLED), ("greedy", "sampled")),
        *(pytest.param(name, own, marks=pytest.mark.long) for name in LONG for own in (GREEDY, SAMPLED)),
    ],
)
def test_prefix_cache_in_a_conversation_changes_neither_tokens_nor_drafts(name: str, controls: dict[str, Any]) -> None:
    one, other = (chat(engine(name, cached=cached), controls, TURNS) for cached in (True, False))
    assert tokens(one) == tokens(other)
    assert [done.from_draft for done in one] == [done.from_draft for done in other]
    assert accepted(one) == accepted(other)
    assert sum(cached_tokens(one)) > 50 and sum(cached_tokens(other)) == 0
    if name != "plain" and controls == GREEDY:
        assert sum(done.metrics.num_accepted_tokens for done in one) > 0


@pytest.mark.parametrize("name", NAMES)
def test_prefix_cache_in_a_conversation_finds_every_full_page_of_earlier_turns(name: str) -> None:
    """Pages that were filled while decoding are found too, including those of a request's last round."""
    done = chat(engine(name, cached=True), SAMPLED, TURNS)
    held = 0
    for turn in done:
        size = len(turn.prompt_token_ids)
        assert turn.metrics.num_cached_tokens == min(held // PAGE * PAGE, size - 1)
        assert turn.metrics.num_prompt_tokens == size
        held = size + len(turn.token_ids) - 1  # the newest token was never an input


def traced(one: Engine, turns: tuple[tuple[int, int], ...] = TURNS) -> list[np.ndarray]:
    return [round.scores for done in chat(one, GREEDY, turns, trace=True) for round in done.rounds]


@pytest.fixture(scope="module")
def expected_scores() -> list[np.ndarray]:
    return traced(engine("eagle3", cached=False))


def test_requests_with_shared_pages_have_unchanged_draft_scores(expected_scores: list[np.ndarray]) -> None:
    """Equal scores show that shared pages contain all draft cache rows and features."""
    np.testing.assert_allclose(traced(engine("eagle3", cached=True)), expected_scores, atol=TOLERANCE)


def test_requests_with_shared_pages_of_one_row_have_unchanged_draft_scores(expected_scores: list[np.ndarray]) -> None:
    one = engine("eagle3", cached=True, page_size=1)
    np.testing.assert_allclose(traced(one), expected_scores, atol=TOLERANCE)
    done = chat(one, GREEDY, TURNS)
    assert cached_tokens(done) == [len(turn.prompt_token_ids) - 1 for turn in done], "a row is missing from the cache"


def no_pending_rows(one: Engine, patch: pytest.MonkeyPatch) -> None:
    key = ExecutableKey("write_pending_rows")
    patch.setitem(one.core.runner.programs.compiled, key, lambda params, state, packed: state)


def no_edges(one: Engine, patch: pytest.MonkeyPatch) -> None:
    original = one.core._dispatch

    def dispatch(plan: Any) -> Any:
        draft = one.core.runner.state.draft
        one.core.runner.target_side.state = replace(
            one.core.runner.state, draft=replace(draft, page_end_features=jnp.ones_like(draft.page_end_features))
        )
        return original(plan)

    patch.setattr(one.core, "_dispatch", dispatch)


@pytest.mark.parametrize("spoil", [no_pending_rows, no_edges])
def test_draft_score_comparison_with_incomplete_shared_pages_fails(
    expected_scores: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None]
) -> None:
    """Negative controls: the last draft cache rows or the features at page ends are missing."""
    one = engine("eagle3", cached=True)
    traced(one, TURNS[:1])  # compiles the programs before one of them is replaced
    one.scheduler.pages.clear()
    spoil(one, monkeypatch)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(traced(one), expected_scores, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 16, 17, 24, 29])
def test_prefix_cache_on_a_repeated_prompt_finds_all_full_pages(size: int) -> None:
    """The newest token must be computed, so a full page that ends with it is not used."""
    plain = SamplingParams(max_tokens=6, **GREEDY)
    one = engine("eagle3", cached=True)
    first, second = (one.generate(prompt(size), plain)[0] for _ in range(2))
    (expected,) = engine("eagle3", cached=False).generate(prompt(size), plain)
    assert first.token_ids == second.token_ids == expected.token_ids
    assert first.from_draft == second.from_draft == expected.from_draft
    assert cached_tokens([first, second]) == [0, min(size // PAGE * PAGE, size - 1)]


def test_running_requests_with_equal_prompts_share_pages() -> None:
    """The second request starts while the first one is still running."""
    one = engine("eagle3", cached=True)
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in (1, 2)]
    most = 0
    with ByHand(one) as by_hand:
        requests = [by_hand.submit(prompt(16), own) for own in params]
        while by_hand.step():
            one.scheduler.pages.check()
            most = max(most, one.scheduler.pages.num_used)
    own = one.scheduler.pages.needed(16 + 8 + LENGTH + 1)
    assert most == 2 * own - 4
    expected = engine("eagle3", cached=False).generate([prompt(16)] * 2, params)
    assert [request.token_ids for request in requests] == tokens(expected)


@pytest.mark.parametrize("name", ["eagle3", "draft model"])
def test_request_that_finds_shared_pages_does_not_write_them(name: str) -> None:
    """The prompt fills whole pages; their bits are unchanged after the prompt was served again.

    The drafter's cache rows are overwritten with marks first, so a later write would show.
    """
    one, params = engine(name, cached=True), SamplingParams(max_tokens=1, **GREEDY)
    one.generate(prompt(16), params)
    pages = one.scheduler.pages.match(list(one.scheduler.pages._page_of))
    marked = jax.tree.map(lambda pool: pool.at[pages[-1], :, PAGE - 1].add(1), one.core.runner.state.draft.cache)
    one.core.runner.target_side.state = replace(
        one.core.runner.state, draft=replace(one.core.runner.state.draft, cache=marked)
    )

    def rows() -> list[np.ndarray]:
        pools = [one.core.runner.state.target, one.core.runner.state.draft.cache]
        return [np.array(pool)[pages] for pool in jax.tree.leaves(pools)]

    before = rows()
    (again,) = one.generate(prompt(16), SamplingParams(max_tokens=9, **GREEDY))
    assert len(pages) == 4 and again.metrics.num_cached_tokens == 15
    for old, new in zip(before, rows(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_prompt_with_another_first_token_finds_no_cached_page() -> None:
    """A page is found only if all tokens up to the page's end are equal."""
    one, params = engine("plain", cached=True), SamplingParams(max_tokens=1, **GREEDY)
    one.generate(prompt(16), params)
    other = [(prompt(16)[0] + 1) % engines.VOCAB, *prompt(16)[1:]]
    (done,) = one.generate(other, params)
    assert done.metrics.num_cached_tokens == 0
    (done,) = one.generate([*prompt(16)[:8], *other[8:12], 1], params)
    assert done.metrics.num_cached_tokens == 12, "expected the three pages that agree"


def test_cached_pages_of_a_full_pool_are_evicted_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """After thirty prompts the latest prompt is cached and the oldest is not."""
    one, params = engine("plain", cached=True), SamplingParams(max_tokens=4, **GREEDY)
    prompts = [prompt(12, seed=seed) for seed in range(30)]
    expected = engine("plain", cached=False).generate(prompts, params)
    assert tokens(one.generate(prompts, params)) == tokens(expected)
    pages = one.scheduler.pages
    assert len(pages._page_of) > pages.pages // 2
    (latest,) = one.generate(prompts[-1], params)
    (oldest,) = one.generate(prompts[0], params)
    assert (latest.metrics.num_cached_tokens, oldest.metrics.num_cached_tokens) == (11, 0)


def test_metrics_after_cached_prompts_count_hits_and_the_hit_rate() -> None:
    one = engine("plain", cached=True)
    before = one.metrics
    one.generate([prompt(16), prompt(16)], SamplingParams(max_tokens=2))
    now = one.metrics
    hits, asked = (getattr(now, name) - getattr(before, name) for name in ("num_cached_tokens", "num_prompt_tokens"))
    assert (hits, asked) == (15, 32)
    assert now.prefix_hit_rate == now.num_cached_tokens / now.num_prompt_tokens


# -- preemption


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_requests_preempted_repeatedly_keep_their_tokens_and_drafts(name: str, cached: bool) -> None:
    """Two requests share a pool that holds little more than one, so the later one is preempted."""
    one = engine(name, cached=cached)
    prompts = [prompt(9, seed=seed) for seed in range(4)]
    params = [
        SamplingParams(max_tokens=size, seed=seed, temperature=seed % 2)
        for seed, size in enumerate((25, 30, 17, 22), start=3)
    ]
    expected = one.generate(prompts, params)
    pages = one.scheduler.pages
    pages.clear()
    pages.reserve(-1, (pages.num_free - 12) * PAGE)
    done = one.generate(prompts, params)
    pages.release(-1)
    assert [turn.metrics.num_preemptions for turn in expected] == [0] * 4
    assert sum(turn.metrics.num_preemptions for turn in done) >= 2 and done[0].metrics.num_preemptions == 0
    assert tokens(done) == tokens(expected)
    if name != "suffix":  # the drafter also drafts from the texts of the first run
        assert [turn.from_draft for turn in done] == [turn.from_draft for turn in expected]
        assert accepted(done) == accepted(expected)


def test_preemption_comparison_with_a_resampled_newest_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a preempted request samples its newest token again with other noise."""
    original = ModelRunner._pack

    def forgets_root(self: ModelRunner, plan: Any, size: int) -> PrefillInput:
        packed = original(self, plan, size)
        packed.pieces[:, PromptPiece._fields.index("root")] = -1
        return packed

    monkeypatch.setattr(ModelRunner, "_pack", forgets_root)
    with pytest.raises(AssertionError):
        test_requests_preempted_repeatedly_keep_their_tokens_and_drafts("draft model", False)


def test_requests_with_a_lower_priority_number_are_served_first() -> None:
    one = engine("plain", cached=False)
    params = [SamplingParams(max_tokens=4, priority=priority, **GREEDY) for priority in (1, 1, 0, 2, 0)]
    served: list[int] = []
    with ByHand(one) as by_hand:
        requests = [by_hand.submit(prompt(5), own) for own in params]
        while by_hand.step():
            served += [index for index, r in enumerate(requests) if r.token_ids and index not in served]
    assert served == [2, 4, 0, 1, 3]
