"""Test grammar tables in single stages: the masked logits of every draft node, and the accept rules on these logits."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import SamplingParams, Tree, verify
from jspec.core.ancestors import ancestors
from jspec.core.records import Draft, SlotView
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.input.penalty_input import pack_controls
from jspec.engine.request.request import OutputState, Request, RequestState
from jspec.sampling import grammar_mask, logprobs, penalties
from tests.reference import regular
from tests.support import engines, lettered
from tests.support.arrays import on_device
from tests.support.grammar_cases import LIST
from tests.support.tables import table
from tests.support.views import draft_of_rows, view_of_rows

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")

ROWS, NODES, DEPTH = 6, 8, 7
LOAD, ADMIT = jax.jit(grammar_mask.load), jax.jit(penalties.admit)


def random_case(seed: int, *, chain: bool) -> tuple[np.ndarray, Draft, list[Request]]:
    """Return drafts with many tokens that violate the row's grammar; the last row has no grammar."""
    rng = np.random.default_rng(seed)
    parents = np.array([[-1, *(n if chain else rng.integers(0, n + 1) for n in range(NODES - 1))]] * ROWS)
    tokens, requests = rng.integers(0, engines.VOCAB, (ROWS, NODES)), []
    expressions = [LIST, "((a|b){2}c)*", '"(a|b|ab|(é)){3,20}"', "(ab|a)(a|ba)*", "c*a*b*"]
    for row in range(ROWS):
        grammar = Grammar("", *[np.zeros(1)] * 2)
        if row < len(expressions):
            grammar = table(expressions[row], lettered.TEXTS, engines.VOCAB, stop_ids=(0, 14))
        output: list[int] = []
        while len(output) < rng.integers(1, 6) and row < len(expressions):
            token = int(rng.integers(0, engines.VOCAB))
            output += [token] * (token not in (0, 14) and grammar.follow([*output, token]) >= 0)
        output = output or [1]
        for node in range(1, NODES):  # most nodes get a token that may follow their parent
            line = [*output, *context(tokens, parents, row, parents[row, node])]
            allowed = [t for t in range(1, 14) if row < len(expressions) and grammar.follow([*line, t]) >= 0]
            if allowed and rng.random() < (0.9 if chain else 0.7):
                tokens[row, node] = rng.choice(allowed)
        params = SamplingParams(regex=expressions[row]) if row < len(expressions) else SamplingParams()
        tokens[row, 0] = output[-1]
        own = {"state": RequestState(slot=ROWS - 1 - row), "output": OutputState(token_ids=output)}
        request = Request(row, (3,), params, 0, (0, 14), 100, grammar=grammar if params.regex else None, **own)
        requests.append(request)
    return rng.normal(0, 3, (ROWS, NODES, engines.VOCAB)).astype(np.float32), draft_of_rows(tokens, parents), requests


def context(tokens: np.ndarray, parents: np.ndarray, row: int, node: int) -> list[int]:
    """Return the tokens after the root up to a node."""
    path = []
    while node > 0:
        path.append(int(tokens[row, node]))
        node = int(parents[row, node])
    return path[::-1]


def view_of(requests: list[Request], **options: Any) -> SlotView:
    """Return a view of the requests' slots, with slots and tables filled as by the engine."""
    state, grammars = penalties.unused(ROWS, engines.VOCAB), grammar_mask.unused(ROWS, 4000, engines.VOCAB)
    for index, request in enumerate(requests):
        if request.grammar is not None:
            packed = grammar_mask.pack(index, request.grammar.class_of, request.grammar.next, 4000)
            grammars = LOAD(grammars, on_device(packed))
            state = ADMIT(state, on_device(pack_controls(request, engines.VOCAB, index)))
    view = view_of_rows([request.token_ids[-1] for request in requests], **options)
    stops = on_device([[0, 14, *[-1] * 6]] * ROWS, jnp.int32)
    slots = on_device([request.state.slot for request in requests], jnp.int32)
    return view.replace(slots=slots, sampling=view.sampling.replace(stop_ids=stops), controls=state, grammars=grammars)


def edited(logits: jax.Array, draft: Draft, view: SlotView) -> jax.Array:
    return penalties.apply_penalties(logits, view, penalties.node_paths(draft, ancestors(draft.parents), DEPTH))


def check_logits(seed: int, *, chain: bool, run: Any) -> None:
    """Compare the mask of each node with the tokens that the library regex allows after it."""
    logits, draft, requests = random_case(seed, chain=chain)
    found = np.asarray(run(on_device(logits), draft, view_of(requests)))
    assert not np.isnan(found).any()
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    violating = 0
    for row, request in enumerate(requests):
        for node in range(NODES):
            expected = logits[row, node].copy()
            text = [*request.token_ids, *context(tokens, parents, row, node)]
            if request.params.regex is not None:
                before = b"".join(lettered.TEXTS[token] or b"" for token in text)
                allowed = regular.allowed(request.params.regex, lettered.TEXTS, before, (0, 14))
                if set(text) & {0, 14} or not regular.matches(request.params.regex, before, partial=True):
                    violating += 1
                    continue  # an ancestor is banned, so this node's logits are never used
                expected[sorted(set(range(engines.VOCAB)) - allowed)] = -np.inf
            np.testing.assert_array_equal(found[row, node], expected)
    assert 0 < violating < ROWS * NODES * 0.7, seed


@cache
def jitted() -> Any:
    return jax.jit(edited)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_penalties_with_a_grammar_table_mask_each_node_by_the_path_to_that_node(chain: bool) -> None:
    for seed in range(6):
        check_logits(seed, chain=chain, run=jitted())


def test_penalties_with_the_roots_grammar_state_at_every_node_fail_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: every node gets the grammar state of the root."""
    states = grammar_mask.states
    monkeypatch.setattr(grammar_mask, "states", lambda view, path: states(view, jnp.full_like(path, -1)))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_logits(0, chain=False, run=jax.jit(lambda *a: edited(*a)))


@pytest.mark.parametrize("rule", ["multi_candidate", "rejection", "block", "traversal", "typical"])
def test_accept_rule_with_a_grammar_table_emits_only_allowed_tokens(rule: str) -> None:
    """The stored grammar state is the state after the last emitted token."""
    tree, drawn = Tree.chain(DEPTH), ("block", "rejection", "traversal")

    def run(logits: jax.Array, draft: Draft, view: SlotView) -> Any:
        return verify.accept(logits[None], draft, ancestors(draft.parents), view, tree)

    accept, accepted = jax.jit(run), 0
    for seed in range(8):
        logits, draft, requests = random_case(seed, chain=rule in drawn)
        if rule in drawn:
            draft = draft.replace(probs=on_device(np.full((ROWS, NODES, engines.VOCAB), 1 / engines.VOCAB)))
        view = view_of(requests, temperature=1.0, accept=rule)
        view = view.replace(sampling=view.sampling.replace(seed=view.sampling.seed + 100 * seed))
        verdict = accept(on_device(logits), draft, view)
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


def test_processed_logprobs_with_a_grammar_table_equal_those_of_the_masked_logits() -> None:
    """Each emitted token is scored by the logits of the accepted node before it."""
    tree = Tree.chain(DEPTH)

    def run(logits: jax.Array, draft: Draft, view: SlotView) -> Any:
        verdict = verify.accept(logits[None], draft, ancestors(draft.parents), view, tree)
        return verdict, logprobs.of_round(logprobs.PROCESSED, logits, draft, verdict, view, tree)

    logits, draft, requests = random_case(2, chain=False)
    view = view_of(requests)
    verdict, scores = jax.jit(run)(on_device(logits), draft, view)
    log_probs = np.asarray(jax.nn.log_softmax(jitted()(on_device(logits), draft, view)))
    assert int(verdict.accept_len.max()) > 0
    for row in range(ROWS):
        for place, node in enumerate(np.asarray(verdict.path[row])[: int(verdict.counts[row])]):
            likeliest = np.sort(log_probs[row, node])[::-1]
            np.testing.assert_allclose(scores.top[row, place], likeliest, atol=1e-5)
            token = int(verdict.tokens[row, place])
            np.testing.assert_allclose(scores.chosen[row, place], log_probs[row, node, token], atol=1e-5)
