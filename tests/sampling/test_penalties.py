"""Compare penalties and bans at every draft node with transformers' processors on equal logits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspec import SamplingParams
from jspec.core.ancestors import ancestors
from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import Draft, SlotView
from jspec.engine.input.penalty_input import bad_words, check, pack_controls
from jspec.engine.request.request import OutputState, Request, RequestState
from jspec.sampling import penalties, sampler
from tests.reference import processors
from tests.support.arrays import on_device
from tests.support.views import draft_of_rows, view_of_rows

pytestmark = pytest.mark.once

ROWS, VOCAB, NODES, DEPTH = 4, 24, 7, 6  # shared by all tests, so each function compiles once
STOPS = (3, 8)
TOLERANCE = 1e-5
ALONE: dict[str, dict[str, Any]] = {
    "repetition": dict(repetition_penalty=1.7),
    "repetition below 1": dict(repetition_penalty=0.6),
    "presence": dict(presence_penalty=0.9),
    "frequency": dict(frequency_penalty=0.7),
    "negative penalties": dict(frequency_penalty=-0.7, presence_penalty=-0.3),
    "logit_bias": dict(logit_bias={0: 100, 5: -3.5, 7: -100.0}),
    "bad words": dict(bad_words=[[4], [1, 2], [2, 2, 3], [0], [5, 6, 7, 1]]),
    "allowed": dict(allowed_token_ids=[1, 2, 3, 9, 20]),
    "min_tokens": dict(min_tokens=9, max_tokens=50),
    "temperature": dict(temperature=0.6),
    "top_k": dict(top_k=5),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.2),
}


def random_case(seed: int, *, chain: bool) -> tuple[np.ndarray, Draft, list[Request]]:
    """Return random logits, drafts of few distinct tokens, and requests with texts of several lengths."""
    rng = np.random.default_rng(seed)
    parents = np.array([[-1, *(node if chain else rng.integers(0, node + 1) for node in range(NODES - 1))]] * ROWS)
    tokens = rng.integers(0, 10, (ROWS, NODES))
    requests = []
    for row in range(ROWS):
        prompt = rng.integers(0, 10, rng.integers(1, 30))
        output = rng.integers(0, 10, rng.integers(1, 12))
        tokens[row, 0] = output[-1]
        state = RequestState(slot=ROWS - 1 - row)  # a row's slot is not its own index
        text = OutputState(token_ids=output.tolist())
        request = Request(row, tuple(prompt.tolist()), SamplingParams(), 0, STOPS, 100, state=state, output=text)
        requests.append(request)
    return rng.normal(0, 3, (ROWS, NODES, VOCAB)).astype(np.float32), draft_of_rows(tokens, parents), requests


def with_params(request: Request, params: SamplingParams) -> Request:
    words = bad_words(params, None)
    check(params, words, STOPS, vocab_size=VOCAB, max_new_tokens=100)
    return replace(request, params=params, bad_words=words)


@cache
def admit() -> Any:
    return jax.jit(penalties.admit)


def view_of(requests: list[Request], params: list[SamplingParams]) -> SlotView:
    """Return the view of a batch whose slots hold the requests' controls, packed and admitted as by an engine."""
    state = penalties.unused(ROWS, VOCAB)
    for request, own in zip(requests, params, strict=True):
        if own.controls_used:
            state = admit()(state, on_device(pack_controls(with_params(request, own), VOCAB)))
    view = view_of_rows([request.token_ids[-1] for request in requests])
    rows = view.sampling.replace(
        temperature=on_device([p.temperature for p in params], jnp.float32),
        top_k=on_device([p.top_k for p in params], jnp.int32),
        top_p=on_device([p.top_p for p in params], jnp.float32),
        min_p=on_device([p.min_p for p in params], jnp.float32),
        stop_ids=on_device([[*STOPS, *[-1] * 6]] * ROWS, jnp.int32),
    )
    lengths = [len(request.prompt_token_ids) + len(request.token_ids) - 1 for request in requests]
    slots = on_device([request.state.slot for request in requests], jnp.int32)
    return view.replace(slots=slots, lengths=on_device(lengths, jnp.int32), sampling=rows, controls=state)


def edited_and_processed(logits: jax.Array, draft: Draft, view: SlotView) -> tuple[jax.Array, jax.Array]:
    path = penalties.node_paths(draft, ancestors(draft.parents), DEPTH)
    edited = penalties.apply_penalties(logits, view, path)
    return edited, sampler.process(edited, view.sampling)


@cache
def compiled() -> Any:
    return jax.jit(edited_and_processed)


def context(draft: Draft, row: int, node: int) -> list[int]:
    """Return the tokens on the path from the root to a node, without the root's token."""
    found, parents = [], np.asarray(draft.parents[row])
    while node > 0:
        found.append(int(draft.tokens[row, node]))
        node = parents[node]
    return found[::-1]


def compare(seed: int, params: list[SamplingParams], *, chain: bool, run: Any = None) -> None:
    logits, draft, requests = random_case(seed, chain=chain)
    view = view_of(requests, params)
    edited, processed = (np.asarray(x) for x in (run or compiled())(on_device(logits), draft, view))
    for row, (request, own) in enumerate(zip(requests, params, strict=True)):
        for node in range(NODES):
            output = [*request.token_ids, *context(draft, row, node)]
            expected = processors.edited(logits[row, node], request.prompt_token_ids, output, own, STOPS)
            np.testing.assert_allclose(edited[row, node], expected, atol=TOLERANCE, rtol=1e-6)
            if own.temperature:
                expected = processors.processed(expected, own)
                np.testing.assert_allclose(processed[row, node], expected, atol=TOLERANCE, rtol=1e-6)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ALONE)
def test_penalties_with_a_single_control_equal_transformers_at_every_node(name: str, chain: bool) -> None:
    """Other rows of the batch are greedy, have no controls, or have several controls."""
    others = [SamplingParams(**ALONE[name] | {"temperature": 0}), SamplingParams()]
    every = ALONE["repetition"] | ALONE["frequency"] | ALONE["bad words"] | ALONE["min_tokens"]
    for seed in range(3):
        compare(seed, [SamplingParams(**ALONE[name]), *others, SamplingParams(**every)], chain=chain)


IDS = st.integers(0, VOCAB - 1)
SOMETIMES = {
    "repetition_penalty": st.floats(0.3, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=6),
    "bad_words": st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=12),
    "allowed_token_ids": st.lists(IDS, min_size=14, max_size=20, unique=True),
    "min_tokens": st.integers(0, 16),
    "temperature": st.floats(0.2, 2),
    "top_k": st.integers(-1, VOCAB + 2),
    "top_p": st.floats(0.05, 1),
    "min_p": st.floats(0, 0.5),
}
PARAMS = st.fixed_dictionaries({}, optional=SOMETIMES).map(lambda given: SamplingParams(max_tokens=50, **given))


def has_choice(params: SamplingParams) -> bool:
    try:
        check(params, bad_words(params, None), STOPS, vocab_size=VOCAB, max_new_tokens=100)
    except ValueError:
        return False
    return True


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.booleans(), st.lists(PARAMS.filter(has_choice), min_size=ROWS, max_size=ROWS))
def test_penalties_in_random_combinations_equal_transformers_at_every_node(
    seed: int, chain: bool, params: list[SamplingParams]
) -> None:
    compare(seed, params, chain=chain)


WRONG: dict[str, Any] = {
    "ancestors are not in the counts": ("node_paths", lambda right: lambda *a: only_last(right(*a), keep=True)),
    "the node itself is not in the counts": ("node_paths", lambda right: lambda *a: only_last(right(*a), keep=False)),
    "penalties in the other order": ("_apply_counts", lambda _: other_order),
    "the prompt is not in the counts": ("_apply_counts", lambda right: lambda x, row, p: right(x, no_prompt(row), p)),
}


def only_last(path: jax.Array, *, keep: bool) -> jax.Array:
    """Replace each path's tokens by an unused token: all but the node's own (``keep``), or only its own."""
    depth = jnp.sum(path != NO_TOKEN, axis=-1, keepdims=True)
    is_own = on_device(np.arange(DEPTH)) == depth - 1
    return jnp.where((path != NO_TOKEN) & (is_own != keep), VOCAB + 1, path)


def other_order(logits: jax.Array, row: Any, path: jax.Array) -> jax.Array:
    """Apply the presence and frequency penalty before the repetition penalty, each by the correct code."""
    off = row.replace(repetition=on_device(np.ones(ROWS)))
    penalised = RIGHT_PENALTIES(logits, off, path)
    zeros = on_device(np.zeros(ROWS))
    return RIGHT_PENALTIES(penalised, row.replace(presence=zeros, frequency=zeros), path)


def no_prompt(row: Any) -> Any:
    return row.replace(counts=row.counts // penalties.GENERATED * penalties.GENERATED)


RIGHT_PENALTIES = penalties._apply_counts


@pytest.mark.parametrize("fault", WRONG)
def test_penalties_with_a_wrong_context_or_order_differ_from_transformers(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: tokens are missing from the counts, or the penalties are in another order."""
    name, change = WRONG[fault]
    monkeypatch.setattr(penalties, name, change(getattr(penalties, name)))
    every = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=0.3)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(0, [every] * ROWS, chain=True, run=jax.jit(lambda *a: edited_and_processed(*a)))
