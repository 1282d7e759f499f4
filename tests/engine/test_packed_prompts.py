"""Test engines that prefill several prompts at once: tokens, shared pages, preemption, errors, aborts, budgets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from jspec import (
    Completion,
    DFlash,
    Drafter,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    Engine,
    Medusa,
    NGram,
    SamplingParams,
    Suffix,
    Tree,
)
from jspec.core import prompt_blocks
from jspec.core.prefill_input import PrefillInput, PromptPiece
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.run.model_runner import ModelRunner
from jspec.engine.schedule.scheduler import Plan, PrefillPlan, RoundPlan
from tests.support import brittle, engines, lettered, tiny
from tests.support.grammar_cases import MASKS, TABLE, GrammarCase, check_decoding

pytestmark = pytest.mark.once

MAX_LEN, SLOTS = 64, 8
DRAFTERS: dict[str, Callable[[Tree], Drafter]] = {
    "eagle3": lambda tree: Eagle3(tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1)), tree),
    "eagle": lambda tree: Eagle(tiny.eagle1_head(engines.target()), tree),
    "draft model": lambda tree: DraftModel(tiny.model(engines.VOCAB, layers=1, seed=1), tree),
    "dflash": lambda tree: DFlash(tiny.dflash_head(engines.target(), block_size=4, feature_layers=(0, 1)), tree),
    "dspark": lambda tree: DSpark(tiny.dspark_head(engines.target(), block_size=4, feature_layers=(0, 1)), tree),
    "medusa": lambda tree: Medusa(tiny.medusa_heads(engines.target(), 3), tree),
    "ngram": lambda tree: NGram(tree),
    "suffix": lambda tree: Suffix(tree, scope="engine", corpus_tokens=64),
}
CHAIN, DYNAMIC, STATIC = Tree.chain(2), Tree.topk(7, 3, 2), Tree.static([(0,), (1,), (0, 0)])


def random_prompt(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, engines.VOCAB, size).tolist()


COMMON = random_prompt(32, seed=99)
LENGTHS = (1, 2, 15, 16, 17, 5, MAX_LEN - 3, 31)
PROMPTS = [random_prompt(size, seed) for seed, size in enumerate(LENGTHS)] + [
    *([*COMMON, *random_prompt(size, size)] for size in (0, 0, 1, 9)),
    COMMON[:16],
    COMMON[:16],
]


def params(index: int, **options: Any) -> SamplingParams:
    """Return greedy and seeded parameters in turns; every third has penalties, every fourth bad words."""
    edits: dict[str, Any] = dict(repetition_penalty=1.3, logit_bias={3: 1.0}) if index % 3 == 0 else {}
    if index % 4 == 1:
        edits |= dict(bad_words=[[5], [7, 3]])
    return SamplingParams(max_tokens=12, temperature=index % 2, seed=index, **edits | options)


def engine(drafter: Drafter | None, **options: Any) -> Engine:
    fixed: dict[str, Any] = dict(slots=SLOTS, buckets=(SLOTS,), max_len=MAX_LEN, prefill_buckets=(64,))
    return engines.make(engines.target(), drafter=drafter, **fixed | options)


@cache
def plain_tokens() -> list[list[int]]:
    """Return the tokens of each prompt, which one engine without drafter prefills alone and in one block of rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_blocks, "BLOCK", MAX_LEN)
        alone = engine(None, slots=1, buckets=(1,), prefill_buckets=(MAX_LEN,), prefix_cache=False)
        return [alone.generate(prompt, params(index))[0].token_ids for index, prompt in enumerate(PROMPTS)]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return a list that receives each plan that any engine dispatches."""
    seen, original = list[Plan](), ModelRunner.dispatch

    def dispatch(self: ModelRunner, plan: Plan, *rest: Any) -> Any:
        seen.append(plan)
        return original(self, plan, *rest)

    monkeypatch.setattr(ModelRunner, "dispatch", dispatch)
    return seen


def prefills(plans: list[Plan]) -> list[PrefillPlan]:
    return [plan for plan in plans if isinstance(plan, PrefillPlan)]


def generate(one: Engine, **options: Any) -> list[Completion]:
    return one.generate(PROMPTS, [params(index, **options) for index in range(len(PROMPTS))])


def tokens(done: list[Completion]) -> list[list[int]]:
    return [one.raise_for_error().token_ids for one in done]


def trees(name: str) -> tuple[Tree, Tree]:
    return CHAIN, STATIC if name == "medusa" else DYNAMIC


@pytest.mark.parametrize(
    ("name", "tree", "page"),
    [
        ("eagle3", DYNAMIC, 16),
        pytest.param("draft model", CHAIN, 1, marks=pytest.mark.long),
        *(
            pytest.param(name, tree, page, marks=pytest.mark.matrix)
            for name in DRAFTERS
            for tree in trees(name)
            for page in (1, 16, 64)
        ),
    ],
    ids=str,
)
def test_engine_that_packs_prompts_emits_the_tokens_of_single_prompts(
    plans: list[Plan], name: str, tree: Tree, page: int
) -> None:
    """Some prompts share pages that the same prefill writes; the second time all prompts are in the prefix cache."""
    with engine(DRAFTERS[name](tree), page_size=page) as one:
        for turn in range(2):
            done = generate(one)
            assert tokens(done) == plain_tokens()
            if page < 64:
                cached = [each.metrics.num_cached_tokens for each in done]
                assert all(cached[-5:]) and (turn == 0 or cached[6] > 0)
        one.scheduler.pages.check()
        assert one.pages_in_use == 0
    assert max(len(plan.pieces) for plan in prefills(plans)) >= 3
    if page < 64:
        pieces = [piece for plan in prefills(plans) for piece in plan.pieces]
        assert any(not piece.is_written for piece in pieces), "no prompt was wholly in the cache"


@pytest.mark.parametrize("name", ["eagle3", *(pytest.param(name, marks=pytest.mark.matrix) for name in DRAFTERS)])
def test_engine_that_preempts_prompts_of_a_packed_prefill_emits_the_tokens_of_single_prompts(
    plans: list[Plan], name: str
) -> None:
    """The pool has pages for two prompts of full length; preempted requests come back with a known token."""
    with engine(DRAFTERS[name](trees(name)[1]), page_size=4, pages=36, rounds_per_dispatch=2) as one:
        assert tokens(generate(one)) == plain_tokens()
        assert one.metrics.num_preemptions > 0
    packed = [plan.pieces for plan in prefills(plans) if len(plan.pieces) > 1]
    assert any(piece.root is not None for pieces in packed for piece in pieces)


@pytest.fixture(scope="module")
def failing() -> Engine:
    """Return an engine whose tokenizer can be made to fail."""
    return engines.make(
        tiny.model(brittle.VOCAB, layers=1),
        tokenizer=brittle.BrittleTokenizer(),
        slots=4,
        max_len=MAX_LEN,
        page_size=4,
        buckets=(4,),
        prefill_buckets=(64,),
        controls=False,
    )


@pytest.mark.parametrize("fault", ["tokenizer", "abort before the result", "abort after the result"])
def test_fault_of_one_request_of_a_packed_prefill_loses_only_that_request(
    plans: list[Plan], failing: Engine, fault: str
) -> None:
    """The other prompts are equal to the lost one, so they share its pages."""
    one, prompt, same = failing, [7] * 9, SamplingParams(max_tokens=9, temperature=0.9, seed=3)
    wanted = one.generate(prompt, same)[0].token_ids
    one.scheduler.pages.clear()
    plans.clear()
    with pytest.MonkeyPatch.context() as patch, ByHand(one) as by_hand:
        lost, *others = [by_hand.submit(prompt, same) for _ in range(4)]
        if fault == "tokenizer":
            once = [True]
            patch.setattr(one.tokenizer, "fails", lambda ids: bool(once) and once.pop())
        by_hand.step()  # leaves the result unread
        assert one.core.in_flight
        if fault == "abort before the result":
            by_hand.abort(lost)
        by_hand.step()
        by_hand.abort(lost)
        while by_hand.step():
            pass
    assert prefills(plans)[0].requests[0] is lost and len(prefills(plans)[0].pieces) == 4
    assert any(piece.start for piece in prefills(plans)[0].pieces), "no page was shared"
    assert lost.finish_reason == ("error" if fault == "tokenizer" else "abort")
    assert isinstance(lost.error, KeyError) == (fault == "tokenizer")
    assert [other.token_ids for other in others] == [wanted] * 3
    one.scheduler.pages.check()
    assert one.pages_in_use == 0 and not one.scheduler.has_work


def test_comparison_with_swapped_pages_of_two_packed_prompts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two pieces of a prefill exchange their rows of the page table."""
    original = ModelRunner._pack

    def swapped(self: ModelRunner, plan: PrefillPlan, *rest: Any) -> PrefillInput:
        packed = original(self, plan, *rest)
        if len(plan.pieces) > 1:
            first = PromptPiece.width(0)
            packed.pieces[:2, first:] = packed.pieces[1::-1, first:]
        return packed

    monkeypatch.setattr(ModelRunner, "_pack", swapped)
    with engine(None, prefix_cache=False) as one:
        assert tokens(generate(one)) != plain_tokens()


@pytest.mark.parametrize("case", [TABLE, MASKS], ids=["table", "masks"])
def test_engine_that_packs_prompts_with_grammars_emits_the_tokens_of_masked_decoding(
    plans: list[Plan], case: GrammarCase
) -> None:
    """The grammars' masks of first tokens reach the right prompts of a prefill."""
    pytest.importorskip(case.library)
    words = {"tokenizer": lettered.tokenizer(), "eos_ids": (lettered.END,)}
    check_decoding(engine(DRAFTERS["ngram"](CHAIN), prefill_buckets=(128,), **words), case, range(8))
    has_grammar = [
        [piece.request.params.grammar_field is not None for piece in plan.pieces] for plan in prefills(plans)
    ]
    assert max(map(sum, has_grammar)) > 1


def test_prompt_logprobs_of_packed_prompts_equal_those_of_single_prompts(plans: list[Plan]) -> None:
    with engine(None) as one:
        together = generate(one, prompt_logprobs=2, logprobs=1)
        alone = [
            one.generate(prompt, params(index, prompt_logprobs=2, logprobs=1))[0]
            for index, prompt in enumerate(PROMPTS)
        ]
    assert max(len(plan.pieces) for plan in prefills(plans)) >= 3
    for own, other in zip(together, alone, strict=True):
        found, wanted = ([*one.prompt_logprobs[1:], *one.logprobs] for one in (own, other))
        np.testing.assert_allclose([one.logprob for one in found], [one.logprob for one in wanted], atol=1e-4)
        assert [one.rank for one in found] == [one.rank for one in wanted]


def test_engine_with_32_short_prompts_runs_a_quarter_of_the_prefills(plans: list[Plan]) -> None:
    """Without packing each prompt would need a prefill of its own."""
    prompts = [random_prompt(20, seed) for seed in range(32)]
    with engines.make(engines.target(), slots=32, buckets=(32,), max_len=MAX_LEN, controls=False) as one:
        one.generate(prompts, SamplingParams(max_tokens=2))
    assert len(prefills(plans)) <= 32 // 4
    assert sum(len(plan.pieces) for plan in prefills(plans)) == 32


@pytest.mark.parametrize("budget", [8, 32, 96])
def test_engine_with_a_prefill_budget_packs_at_most_the_budget_between_rounds(plans: list[Plan], budget: int) -> None:
    """A budget below the smallest bucket allows one prefill of that bucket."""
    sizes: dict[str, Any] = dict(prefill_budget=budget, prefill_buckets=(16, 32), compile_ahead=True)
    with engine(None, prefix_cache=False, **sizes) as one, ByHand(one) as by_hand:
        first = by_hand.submit(random_prompt(3, 0), SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(3):
            by_hand.step()
        plans.clear()
        others = [by_hand.submit(random_prompt(9, seed), SamplingParams(max_tokens=1)) for seed in range(20)]
        for other in others:
            by_hand.result(other)
        assert first.finish_reason is None
    since, most = 0, 0
    for plan in plans:
        since = 0 if isinstance(plan, RoundPlan) else since + plan.bucket
        most = max(most, since)
    assert most == max(budget - budget % 16, 16)
    assert any(len(plan.pieces) == 2 for plan in prefills(plans)) == (budget >= 32)
