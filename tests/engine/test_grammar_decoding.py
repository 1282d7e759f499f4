"""Grammars through the engine: with drafters what they are without, and without what masking token by token gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Engine, SamplingParams, Tree, verify
from jspec.core.ancestors import ancestors
from jspec.core.records import Draft, SlotView
from jspec.engine.grammar.token_table import Grammar, TokenTexts, compile_grammar
from jspec.engine.penalty_input import pack_controls
from jspec.engine.request import Request
from jspec.engine.sampling_params import sample_seed
from jspec.sampling import grammar_mask, logprobs, penalties
from tests.reference import regular
from tests.reference.masking import decoded
from tests.support import lettered, small
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")

LENGTH = 18
LIST = r"\{(1|12|(é))+(,(1|12|(é))+)*\}"
PROMPTS = [[1, 2, 3], [4] * 6, list(range(1, 12)), [5, 1, 5, 1, 5], [7], [9, 9, 2, 1], [3, 1, 2, 3, 1, 2, 3], [6, 2]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, regex=LIST, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=LENGTH, regex="((a|b){2}c)*"),
    SamplingParams(seed=3, max_tokens=LENGTH, regex='"(a|b|ab|(é)){3,20}"', top_k=9, draft=2),
    SamplingParams(seed=4, max_tokens=LENGTH, regex="((a|b){2}c){2,9}", stop_token_ids=(5,)),
    SamplingParams(temperature=0, max_tokens=LENGTH),
    SamplingParams(seed=6, max_tokens=LENGTH, regex=LIST, bad_words=[[8], [7, 7], [7, 9]], temperature=1.7),
    SamplingParams(
        seed=7, max_tokens=LENGTH, regex="(c|(é))*", logit_bias={0: -3.0}, allowed_token_ids=[0, 11, 12, 13]
    ),
    SamplingParams(seed=8, max_tokens=LENGTH, presence_penalty=1.0),
]


@cache
def expected() -> list[list[int]]:
    return [decoded(*each) for each in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("make", [lettered.chain, pytest.param(lettered.tree, marks=pytest.mark.long)])
def test_an_engine_decodes_as_masking_token_by_token(make: Any) -> None:
    """A second time the prompts' pages are found, slots and tables held others; preempted where pages are few."""
    engine: Engine = make()
    for order in (range(8), range(7, -1, -1)):
        done = engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
        assert [completion.raise_for_error().token_ids for completion in done] == [expected()[i] for i in order]
        for completion, index in zip(done, order, strict=True):
            check_text(completion.text or "", completion.finish_reason, PARAMS[index])
    if make is lettered.tree:
        assert engine.metrics.num_preemptions > 0
    assert engine.metrics.num_accepted_tokens > 0


def check_text(text: str, reason: str, params: SamplingParams) -> None:
    """At its end it matches as a whole; cut short, it is the beginning of a text that does."""
    if params.regex is not None:
        is_whole = reason in ("eos", "stop")
        assert regular.matches(params.regex, text.replace("\ufffd", "").encode(), partial=not is_whole)


def test_grammars_are_what_makes_the_difference() -> None:
    """Negative control: without them every row but those that have none decodes otherwise. And most of them end."""
    done = lettered.chain().generate(PROMPTS, [replace(params, regex=None) for params in PARAMS])
    same = [completion.token_ids == tokens for completion, tokens in zip(done, expected(), strict=True)]
    assert same == [params.regex is None for params in PARAMS]
    ends = [tokens[-1] in (0, 5) for tokens, params in zip(expected(), PARAMS, strict=True) if params.regex]
    assert 2 <= sum(ends) < len(ends)


def test_every_completion_of_a_prompt_has_the_grammar() -> None:
    params = replace(PARAMS[2], n=3, draft=True)
    (done,) = lettered.chain().generate([PROMPTS[2]], params)
    seeds = [sample_seed(3, index) for index in range(3)]
    assert [one.token_ids for one in done.samples] == [decoded(PROMPTS[2], params, seed) for seed in seeds]


def test_bad_words_that_leave_nothing_end_that_request_alone() -> None:
    """Behind "a" the grammar wants "b", by that name or within "ab": all are taken out, which is known too late."""
    stuck = SamplingParams(temperature=0, max_tokens=9, regex="(ca)b+", bad_words=[[1, 2], [13, 3]])
    done = lettered.chain().generate([PROMPTS[0], PROMPTS[1]], [stuck, PARAMS[1]])
    assert done[0].finish_reason == "error" and done[0].token_ids == [13, 1, 0]
    with pytest.raises(
        ValueError, match=r"regex='\(ca\)b\+': behind 2 tokens bad_words=\(\(1, 2\), \(13, 3\)\) or the"
    ):
        done[0].raise_for_error()
    assert done[1].token_ids == expected()[1]


def test_what_the_engine_cannot_follow_is_refused_before_anything_is_queued() -> None:
    for engine, given, message in ((lettered.chain(), dict(regex="x"), "none of its texts can be written"),):
        with pytest.raises(ValueError, match=message):
            engine.generate([[1], [2]], [SamplingParams(), SamplingParams(**given)])
        assert not engine.scheduler.has_work


def test_the_memory_of_the_tables_is_planned() -> None:
    """2 bytes a cell and a token of the vocabulary, for every slot."""
    state, plan = lettered.chain()._device.state, lettered.chain().memory_plan
    bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(state.grammars))
    assert bytes_ == 2 * 2 * (2**18 + small.VOCAB + 1) and plan.slots > bytes_


# One stage by itself: logits at every node, and what the accept rules make of them.
ROWS, NODES, DEPTH = 6, 8, 7
LOAD, ADMIT = jax.jit(grammar_mask.load), jax.jit(penalties.admit)


def random_case(seed: int, *, chain: bool) -> tuple[np.ndarray, Draft, list[Request]]:
    """Trees of tokens of which many violate the row's grammar, behind texts that do not; the last row has none."""
    rng = np.random.default_rng(seed)
    parents = np.array([[-1, *(n if chain else rng.integers(0, n + 1) for n in range(NODES - 1))]] * ROWS)
    tokens, requests = rng.integers(0, small.VOCAB, (ROWS, NODES)), []
    expressions = [LIST, "((a|b){2}c)*", '"(a|b|ab|(é)){3,20}"', "(ab|a)(a|ba)*", "c*a*b*"]
    for row in range(ROWS):
        grammar = Grammar("", *[np.zeros(1)] * 2)
        if row < len(expressions):
            grammar = compile_grammar("regex", expressions[row], TokenTexts(lettered.TEXTS, small.VOCAB), (0, 14))
        output: list[int] = []
        while len(output) < rng.integers(1, 6) and row < len(expressions):
            token = int(rng.integers(0, small.VOCAB))
            output += [token] * (token not in (0, 14) and grammar.follow([*output, token]) >= 0)
        output = output or [1]
        for node in range(1, NODES):  # every second one may come behind its parent
            line = [*output, *context(tokens, parents, row, parents[row, node])]
            right = [t for t in range(1, 14) if row < len(expressions) and grammar.follow([*line, t]) >= 0]
            if right and rng.random() < (0.9 if chain else 0.7):
                tokens[row, node] = rng.choice(right)
        params = SamplingParams(regex=expressions[row]) if row < len(expressions) else SamplingParams()
        tokens[row, 0] = output[-1]
        request = Request(row, (3,), params, 0, (0, 14), 100, token_ids=output)
        request.slot, request.grammar = ROWS - 1 - row, grammar if params.regex else None
        requests.append(request)
    draft = Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        scores=jnp.zeros((ROWS, NODES)),
        valid=jnp.ones((ROWS, NODES), bool),
        probs=None,
        vocab_map=None,
    )
    return rng.normal(0, 3, (ROWS, NODES, small.VOCAB)).astype(np.float32), draft, requests


def context(tokens: np.ndarray, parents: np.ndarray, row: int, node: int) -> list[int]:
    """The tokens of a node's ancestors below the root, and its own."""
    found = []
    while node > 0:
        found.append(int(tokens[row, node]))
        node = int(parents[row, node])
    return found[::-1]


def view_of(requests: list[Request], **options: Any) -> SlotView:
    """The view of a bucket whose slots and tables were filled as an engine fills them."""
    state, grammars = penalties.unused(ROWS, small.VOCAB), grammar_mask.unused(ROWS, 4000, small.VOCAB)
    for table, request in enumerate(requests):
        if request.grammar is not None:
            packed = grammar_mask.pack(table, request.grammar.class_of, request.grammar.next, 4000)
            grammars = LOAD(grammars, jnp.asarray(packed))
            state = ADMIT(state, jnp.asarray(pack_controls(request, small.VOCAB, table)))
    view = view_of_rows([request.token_ids[-1] for request in requests], **options)
    stops = jnp.asarray([[0, 14, *[-1] * 6]] * ROWS, jnp.int32)
    slots = jnp.asarray([request.slot for request in requests], jnp.int32)
    return view.replace(slots=slots, sampling=view.sampling.replace(stop_ids=stops), controls=state, grammars=grammars)


def edited(logits: jax.Array, draft: Draft, view: SlotView) -> jax.Array:
    return penalties.apply_penalties(logits, view, penalties.node_paths(draft, ancestors(draft.parents), DEPTH))


def compare(seed: int, *, chain: bool, run: Any) -> None:
    logits, draft, requests = random_case(seed, chain=chain)
    found = np.asarray(run(jnp.asarray(logits), draft, view_of(requests)))
    assert not np.isnan(found).any()
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    violating = 0
    for row, request in enumerate(requests):
        for node in range(NODES):
            expected = logits[row, node].copy()
            text = [*request.token_ids, *context(tokens, parents, row, node)]
            if request.params.regex is not None:
                before = b"".join(lettered.TEXTS[token] or b"" for token in text)
                may_come = regular.allowed(request.params.regex, lettered.TEXTS, before, (0, 14))
                if set(text) & {0, 14} or not regular.matches(request.params.regex, before, partial=True):
                    violating += 1
                    continue  # taken out at an ancestor: what stands here never counts
                expected[sorted(set(range(small.VOCAB)) - may_come)] = -np.inf
            np.testing.assert_array_equal(found[row, node], expected)
    assert 0 < violating < ROWS * NODES * 0.7, seed


@cache
def jitted() -> Any:
    return jax.jit(edited)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_every_nodes_state_follows_its_parents(chain: bool) -> None:
    for seed in range(6):
        compare(seed, chain=chain, run=jitted())


def test_a_state_that_does_not_follow_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every node in the state of the root."""
    states = grammar_mask.states
    monkeypatch.setattr(grammar_mask, "states", lambda view, path: states(view, jnp.full_like(path, -1)))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        compare(0, chain=False, run=jax.jit(lambda *a: edited(*a)))


@pytest.mark.parametrize("rule", ["multi_candidate", "rejection", "block", "typical"])
def test_no_rule_accepts_or_draws_what_violates_the_grammar(rule: str) -> None:
    """And the state that is kept is the one behind the last token."""
    tree = Tree.chain(DEPTH)

    def run(logits: jax.Array, draft: Draft, view: SlotView) -> Any:
        return verify.accept(logits[None], draft, ancestors(draft.parents), view, tree)

    accept, accepted = jax.jit(run), 0
    for seed in range(8):
        logits, draft, requests = random_case(seed, chain=rule in ("block", "rejection"))
        if rule in ("block", "rejection"):
            draft = draft.replace(probs=jnp.full((ROWS, NODES, small.VOCAB), 1 / small.VOCAB))
        view = view_of(requests, temperature=1.0, accept=rule)
        view = view.replace(sampling=view.sampling.replace(seed=view.sampling.seed + 100 * seed))
        verdict = accept(jnp.asarray(logits), draft, view)
        assert verdict.grammar_state is not None
        for row, request in enumerate(requests[:-1]):
            assert request.grammar is not None
            tokens = np.asarray(verdict.tokens[row])[: int(verdict.counts[row])].tolist()
            state = request.grammar.follow([*request.token_ids, *tokens])
            assert state >= 0
            if not verdict.ended[row]:
                assert state == int(verdict.grammar_state[row])
            accepted += int(verdict.accept_len[row])
    assert accepted > 10


def test_processed_logprobs_are_of_what_the_grammar_leaves() -> None:
    """Of every token that a round emits: behind the accepted node before it."""
    tree = Tree.chain(DEPTH)

    def run(logits: jax.Array, draft: Draft, view: SlotView) -> Any:
        verdict = verify.accept(logits[None], draft, ancestors(draft.parents), view, tree)
        return verdict, logprobs.of_round(logprobs.PROCESSED, logits, draft, verdict, view, tree)

    logits, draft, requests = random_case(2, chain=False)
    view = view_of(requests)
    verdict, scores = jax.jit(run)(jnp.asarray(logits), draft, view)
    law = np.asarray(jax.nn.log_softmax(jitted()(jnp.asarray(logits), draft, view)))
    assert int(verdict.accept_len.max()) > 0
    for row in range(ROWS):
        for place, node in enumerate(np.asarray(verdict.path[row])[: int(verdict.counts[row])]):
            likeliest = np.sort(law[row, node])[::-1]
            np.testing.assert_allclose(scores.top[row, place], likeliest, atol=1e-5)
            token = int(verdict.tokens[row, place])
            np.testing.assert_allclose(scores.chosen[row, place], law[row, node, token], atol=1e-5)
