"""Test that engines with any drafter keep thinking budgets: their tokens are those of plain decoding on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from jspec import Beside, Engine, NGram, SamplingParams, Tree
from jspec.core.config import EngineConfig
from jspec.draft.base import Drafter
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.sampling_params import sample_seed
from jspec.step import decode
from jspec.tools.testing import Random, Scripted
from tests.reference import descent
from tests.reference.masking import decoded
from tests.reference.thinking import Budget
from tests.support import engines, lettered
from tests.support.grammar_cases import READERS
from tests.support.lettered import CLOSE, OPEN

pytestmark = pytest.mark.once

LENGTH = 18
PROMPTS = {
    "open": [3, OPEN, 5, 1],
    "just open": [4] * 9 + [OPEN],
    "waiting": [7, 2, 5],
    "closed": [OPEN, 1, CLOSE, 9, 2],
    "long": [OPEN, 2, CLOSE, 6, OPEN, *range(1, 9)],
}
ENDS = {"</think>": [CLOSE], "ab1{</think>": [3, 7, 5, CLOSE]}
SHORT, LONG = ENDS
Asked = tuple[list[int], SamplingParams]


@cache
def requests() -> list[Asked]:
    """Budgets around the numbers of thoughts of the prompts; greedy and sampled; alone and with other controls."""
    made = []
    for seed, (budget, prompt) in enumerate((b, p) for b in (0, 1, 2, 3, 5, 8, 16, 17, 30) for p in PROMPTS.values()):
        fields: dict[str, Any] = dict(seed=seed, temperature=0.0 if seed in (3, 7, 11, 15, 19) else 1.0)
        if seed % 7 == 2:
            fields |= dict(repetition_penalty=1.2, bad_words=[[CLOSE], [3, 7]], logit_bias={OPEN: 2.5})
        elif seed % 2:
            fields |= dict(logit_bias={CLOSE: 2.0, OPEN: 2.5})  # it often ends by itself
        if seed % 7 == 3:
            fields |= dict(stop_token_ids=[7])  # inside the longer forced text
        made.append((prompt, SamplingParams(max_tokens=LENGTH, thinking_budget=budget, **fields)))
    for budget in (0, 1, 3):  # cut inside the forced text
        cut = SamplingParams(max_tokens=budget + 2, thinking_budget=budget, seed=90 + budget, logit_bias={CLOSE: -50})
        made.append((PROMPTS["just open"], cut))
    return made


def on_host(asked: Asked, end: str, seed: int | None = None) -> list[int]:
    """Decode token by token with the budget of the reference."""
    prompt, params = asked
    text = lettered.Thoughtful().encode(end)
    budget = Budget(OPEN, CLOSE, text, params.thinking_budget, params.grammar_field is not None)
    more: dict[str, Any] = dict(texts=lettered.THINKING_TEXTS, readers=READERS, answer=budget.answer)
    return decoded(prompt, params, seed, edit=budget.edited, **more)


@cache
def expected(end: str) -> list[list[int]]:
    return [on_host(asked, end) for asked in requests()]


def forced_tokens(asked: Asked, tokens: list[int]) -> list[int | None]:
    """Return the token that is forced at each place of an output; None: none is."""
    prompt, params = asked
    budget = Budget(OPEN, CLOSE, ENDS[LONG], params.thinking_budget)
    return [budget.forced(prompt, tokens[:size]) for size in range(len(tokens))]


@cache
def chain(end: str) -> Engine:
    return lettered.small_chain(lettered.Thoughtful(), thinking_end=end)


@cache
def dynamic_tree(end: str) -> Engine:
    return lettered.small_tree(lettered.Thoughtful(), thinking_end=end)


def joined_tree(end: str) -> Engine:
    """Return an engine like `static_tree`, with the chain of a look-up beside its tree."""
    return static_tree(end, look_up=True)


@cache
def static_tree(end: str, look_up: bool = False) -> Engine:
    """Return an engine whose drafts have the right token among wrong ones, so it emits four tokens a round."""
    prompts, params = zip(*requests(), strict=True)
    known = chain(end).generate(prompts, params)
    drafter: Drafter = Scripted(known, list(params), Tree.parse("static:0,1,2,0.0,0.1,1.0,2.0,2.1,2.1.0"))
    drafter = Beside(drafter, NGram("chain:4"), "beside") if look_up else drafter
    options: dict[str, Any] = dict(slots=8, max_len=engines.MAX_LEN, buckets=(8,), prefill_buckets=(16,), page_size=4)
    tokens = dict(tokenizer=lettered.Thoughtful(), eos_ids=(lettered.END,), thinking_end=end)
    return engines.make(engines.target(), drafter, **tokens, **options)


def check(engine: Engine, end: str) -> None:
    """Compare twice; in the second run prompts are in the cache, and slots were used before."""
    prompts, params = zip(*requests(), strict=True)
    before = engine.metrics
    for order in (1, -1):
        done = engine.generate(prompts[::order], params[::order])
        assert [each.raise_for_error().token_ids for each in done] == expected(end)[::order]
    after = engine.metrics
    assert after.num_accepted_tokens > before.num_accepted_tokens
    assert after.num_cached_tokens > before.num_cached_tokens
    assert engine.pages_in_use == 0


def test_requests_have_all_ends_of_reasoning() -> None:
    """They end by themselves, well before the budget or one token before it, or by force, or are cut in between."""
    ends: set[str] = set()
    for (prompt, params), tokens in zip(requests(), expected(LONG), strict=True):
        budget = Budget(OPEN, CLOSE, ENDS[LONG], params.thinking_budget)
        counts = [budget.thoughts(prompt, tokens[:size]) for size in range(len(tokens) + 1)]
        forced = forced_tokens((prompt, params), tokens)
        least = max(params.thinking_budget or 0, counts[0] or 0)
        for count, token, chosen in zip(counts, tokens, forced, strict=False):
            if token == CLOSE and count is not None and chosen is None:
                ends.add("before it" if count < least - 1 else "one before")
            if token == CLOSE and chosen is not None:
                ends.add("forced")
        if forced[-1:] != [None] and tokens[-1] != CLOSE:
            ends.add("stop inside" if len(tokens) < params.max_tokens else "cut inside")
        ends |= {"never begun"} if set(counts) == {None} else set()
        ends |= {"in the prompt"} if (counts[0] or 0) > params.thinking_budget else set()
    assert ends == {"before it", "one before", "forced", "stop inside", "cut inside", "never begun", "in the prompt"}


@pytest.mark.parametrize("end", ENDS)
def test_chain_keeps_thinking_budgets(end: str) -> None:
    check(chain(end), end)


@pytest.mark.parametrize("end", [LONG, pytest.param(SHORT, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [static_tree, dynamic_tree, pytest.param(joined_tree, marks=pytest.mark.long)])
def test_trees_keep_thinking_budgets(make: Callable[[str], Engine], end: str) -> None:
    """Pages for the dynamic tree are few, so requests are preempted, some of them inside their reasoning."""
    engine = make(end)
    before = engine.metrics.num_preemptions
    check(engine, end)
    assert make is not dynamic_tree or engine.metrics.num_preemptions > before


def test_forced_text_and_natural_ends_are_accepted_as_drafts() -> None:
    prompts, params = zip(*requests(), strict=True)
    done = static_tree(LONG).generate(prompts, params)
    accepted = {
        forced is not None
        for asked, one in zip(requests(), done, strict=True)
        for forced, token, drafted in zip(
            forced_tokens(asked, one.token_ids), one.token_ids, one.from_draft, strict=True
        )
        if drafted and token == CLOSE
    }
    assert accepted == {True, False}


TWENTY = "ab1{}c," * 3 + "c</think>"  # of 20 tokens


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_rounds_emit_a_forced_text_a_whole_draft_at_a_time(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafters do not know the text: if the rounds draft what they propose, they emit about a token each."""
    tokens = lettered.Thoughtful()
    forced = tokens.encode(TWENTY)
    options: dict[str, Any] = dict(slots=2, max_len=engines.MAX_LEN, buckets=(2,), prefill_buckets=(16,))
    options |= dict(tokenizer=tokens, eos_ids=(lettered.END,), thinking_end=TWENTY, accept=rule)
    budget = 3
    bias = {CLOSE: -50.0, lettered.END: -50.0}  # it never ends by itself
    params = SamplingParams(max_tokens=budget + len(forced), thinking_budget=budget, seed=1, logit_bias=bias)
    prompts = [PROMPTS["just open"], [4, 2, OPEN]]

    def run() -> tuple[list[list[int]], int]:
        drafter = Random(Tree.chain(4)) if rule == "rejection" else NGram("chain:4")
        done = engines.make(engines.target(), drafter, **options).generate(prompts, params)
        return [one.raise_for_error().token_ids for one in done], max(one.metrics.num_drafts for one in done)

    outputs, rounds = run()
    assert [one[budget:] for one in outputs] == [forced] * 2 and len(forced) == 20
    assert rounds <= 5 + budget - 1, "the first token of an answer belongs to no round"
    if rule == "rejection":
        return
    assert outputs == [on_host((prompt, params), TWENTY) for prompt in prompts]
    monkeypatch.setattr(decode, "draft_forced_text", lambda draft, rows, is_chain: draft)
    options |= dict(slots=3, buckets=(3,))  # other programs, which are traced anew
    slow, rounds = run()
    assert rounds > 12 and slow == outputs, "negative control"


def test_samples_and_streams_keep_their_budget() -> None:
    prompt, params = PROMPTS["open"], SamplingParams(max_tokens=LENGTH, thinking_budget=4, seed=5, n=3)
    streamed: dict[int, list[int]] = {}
    for chunk in chain(LONG).stream(prompt, params):
        streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
    alone = replace(params, n=1)
    assert [streamed[i] for i in range(3)] == [on_host((prompt, alone), LONG, sample_seed(5, i)) for i in range(3)]


def test_requests_without_their_budgets_have_other_tokens_if_any_was_forced() -> None:
    """Negative control."""
    prompts, params = zip(*requests(), strict=True)
    done = chain(LONG).generate(prompts, [replace(each, thinking_budget=None) for each in params])
    same = [one.token_ids == tokens for one, tokens in zip(done, expected(LONG), strict=True)]
    free = [set(forced_tokens(*each)) == {None} for each in zip(requests(), expected(LONG), strict=True)]
    assert same == free and 10 < sum(free) < 30


GRAMMARS: dict[str, dict[str, Any]] = {
    "table": dict(regex=r"((a|b){2}c)*"),
    "table with the start marker": dict(regex=r"(a|<think>)(a|b|<think>){2,9}"),
    "masks": dict(grammar=descent.LISTS),
}


@pytest.mark.parametrize("make", [chain, pytest.param(dynamic_tree, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", GRAMMARS)
def test_grammar_begins_after_the_reasoning(name: str, make: Callable[[str], Engine]) -> None:
    """It waits if the prompt ends inside reasoning, or if there is a budget and the output begins with the marker.

    No stop id ends a request before its answer.
    """
    pytest.importorskip("llguidance" if name == "masks" else "outlines_core")
    asked = [
        (prompt, SamplingParams(max_tokens=LENGTH, seed=seed, thinking_budget=budget, **GRAMMARS[name], **more))
        for seed, (budget, prompt) in enumerate((b, p) for b in (None, 0, 3, 6) for p in PROMPTS.values())
        for more in (dict(logit_bias={CLOSE: 2.0, OPEN: 9.0, lettered.END: 3.0}), dict(temperature=0.0))
    ]
    prompts, params = zip(*asked, strict=True)
    tokens = [on_host(each, LONG) for each in asked]
    done = make(LONG).generate(prompts, params)
    assert [each.raise_for_error().token_ids for each in done] == tokens
    assert any(CLOSE in one[:-1] for one in tokens) and any(CLOSE not in one for one in tokens)
    assert any(one[0] == OPEN and CLOSE in one[:-1] for one in tokens)


def test_grammar_with_the_end_marker_holds_for_the_whole_output() -> None:
    pytest.importorskip("outlines_core")
    params = SamplingParams(max_tokens=LENGTH, seed=1, regex="ab</think>c{2}")
    (done,) = chain(LONG).generate([PROMPTS["open"]], params)
    assert done.text == "ab</think>cc"
    (broken,) = chain(LONG).generate([PROMPTS["open"]], replace(params, thinking_budget=0))
    assert broken.token_ids[:2] == ENDS[LONG][:2], "the budget holds even against this grammar"
    with pytest.raises(
        ValueError, match=r"after 1 tokens bad_words=.* words of one token; or leave thinking_budget out"
    ):
        broken.raise_for_error()


def test_engine_without_controls_refuses_a_budget_by_name() -> None:
    admission = InputProcessor(lettered.Thoughtful(), engines.VOCAB, (), EngineConfig(controls=False))
    with pytest.raises(ValueError, match=r"^thinking_budget: this engine was built with controls=False"):
        admission.requests([1], SamplingParams(thinking_budget=3))


def test_end_text_that_does_not_fit_the_tokenizer_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(
        ValueError, match=r"^thinking_end: expected a text that can end the model's reasoning, got 'ab'"
    ):
        InputProcessor(lettered.Thoughtful(), engines.VOCAB, (), EngineConfig(thinking_end="ab"))
