"""Compare the forced tokens at every draft node with a budget that is read off the whole text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import SamplingParams
from jspec.core.ancestors import ancestors
from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import Draft, SlotView
from jspec.core.thinking import ENDED, WAITS, WAITS_ONCE, Thinking
from jspec.engine.input.penalty_input import pack_controls
from jspec.engine.input.thinking_input import ThinkingInput
from jspec.engine.request.request import Request
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.sampling import penalties, thinking
from tests.reference.thinking import Budget
from tests.sampling.test_penalties import DEPTH, NODES, ROWS, VOCAB, admit, context, random_case, view_of
from tests.support.arrays import on_device
from tests.support.lettered import Lettered, Thoughtful

pytestmark = pytest.mark.once

START, END = 4, 7  # tokens that the random texts have often
TEXT = (1, 5, END)


TEXTS = [{START: b"<think>", END: b"</think>"}.get(token, bytes([ord("a") + token])) for token in range(VOCAB)]


def thinking_input() -> ThinkingInput:
    return ThinkingInput(Thoughtful(TEXTS), "bf</think>")


def check_nodes(run: Any, seed: int, *, chain: bool) -> None:
    """Compare all nodes of four rows: a budget alone, one beside penalties and bans, none, and one after `advance`."""
    rng = np.random.default_rng(seed)
    logits, draft, requests = random_case(seed, chain=chain)
    bans = dict(bad_words=[[END], [1], [1, 5]], min_tokens=90, repetition_penalty=1.3)
    every = [SamplingParams(thinking_budget=int(b), max_tokens=100) for b in rng.integers(0, 12, ROWS)]
    every[1], every[2] = replace(every[1], **bans), SamplingParams(presence_penalty=1.0)
    view, requests = view_with(requests, every)
    edited = np.asarray(run(on_device(logits), draft, view))
    for row, (request, params) in enumerate(zip(requests, every, strict=True)):
        budget = Budget(START, END, TEXT, params.thinking_budget)
        for node in range(NODES):
            token = budget.forced(request.prompt_token_ids, [*request.token_ids, *context(draft, row, node)])
            allowed = np.flatnonzero(edited[row, node] > -np.inf).tolist()
            assert (allowed == [token]) if token is not None else len(allowed) > 1, (row, node)


def view_with(requests: list[Request], every: list[SamplingParams]) -> tuple[SlotView, list[Request]]:
    """Return the view of a batch, and its requests; the last output token of row 3 comes by `text_after`."""
    made = thinking_input()
    requests = [
        replace(request, params=params, thinking=made.of(params, request.prompt_token_ids))
        for request, params in zip(requests, every, strict=True)
    ]
    view = view_of(requests, every)
    late, slot = requests[3], requests[3].state.slot
    output = replace(late.output, token_ids=late.token_ids[:-1])
    before = admit()(view.controls, on_device(pack_controls(replace(late, output=output), VOCAB)))
    tokens, slots = on_device([[late.token_ids[-1], NO_TOKEN]], np.int32), on_device([slot], np.int32)
    thought = penalties.text_after(before, slots, tokens, on_device([1], np.int32))["thought"][0]
    controls = view.controls.replace(thought=view.controls.thought.at[slot].set(thought))  # type: ignore[union-attr]
    return view.replace(controls=controls), requests


def edited_logits(logits: jax.Array, draft: Draft, view: SlotView) -> jax.Array:
    return penalties.apply_penalties(logits, view, penalties.node_paths(draft, ancestors(draft.parents), DEPTH))


@cache
def compiled() -> Any:
    return jax.jit(edited_logits)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_forced_token_of_every_node_depends_on_its_own_path(seed: int, chain: bool) -> None:
    check_nodes(compiled(), seed, chain=chain)


def test_budget_with_one_count_for_all_nodes_of_a_round_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(thinking, "states", lambda row, path: row.thought[:, None] + 0 * path[..., 0])
    _fails()


def test_budget_without_effect_at_drafted_nodes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    original = thinking.forced_tokens

    def at_root(row: Any, path: Any) -> Any:
        return original(row, path).at[:, 1:].set(NO_TOKEN)

    monkeypatch.setattr(thinking, "forced_tokens", at_root)
    _fails()


def _fails() -> None:
    run, failed = jax.jit(lambda *args: edited_logits(*args)), 0
    for seed in range(25):
        try:
            check_nodes(run, seed, chain=False)
        except AssertionError:
            failed += 1
    assert failed > 10


STATES = st.sampled_from([ENDED, WAITS, WAITS_ONCE, 0, 1, 9])
PATHS = st.lists(st.sampled_from([START, END, 0]), max_size=DEPTH)


@cache
def device_states() -> Any:
    return jax.jit(thinking.states)


@given(begun=STATES, path=PATHS)
@settings(max_examples=300)
def test_state_on_the_device_is_that_of_the_host(begun: int, path: list[int]) -> None:
    host = Thinking(START, END, begun=begun)
    row = penalties.unused(1, VOCAB).replace(
        thought=on_device([begun], np.int32), think_markers=on_device([[START, END]], np.int32)
    )
    padded = on_device([[[*path, *[NO_TOKEN] * (DEPTH - len(path))]]], np.int32)
    assert np.asarray(device_states()(row, padded)).item() == host.after(path)


def test_reasoning_has_begun_if_the_last_start_marker_follows_every_special_token() -> None:
    tokenizer = Thoughtful(TEXTS)
    tokenizer.hidden_ids = frozenset({9})
    made, params = ThinkingInput(tokenizer, None), SamplingParams(thinking_budget=1)
    begun = {(1, START, 2, 3): 2, (START,): 0, (1, 2): WAITS, (START, 2, END, 3): WAITS, (END, START): 0}
    begun |= {(START, 2, 9, 3): WAITS, (9, START, 2): 1}
    assert {prompt: made.of(params, prompt).begun for prompt in begun} == begun
    assert made.of(params, [START, 2, 3]).budget == 2 and made.of(params, [3]).budget == 1
    assert made.of(SamplingParams(), [START]) == Thinking()
    with_grammar = SamplingParams(regex="a+")
    assert made.of(with_grammar, [START]).grammar_waits and made.of(with_grammar, [1]) == Thinking()
    assert made.of(replace(with_grammar, thinking_budget=1), [1]).begun == WAITS_ONCE
    for own in (r"a*<\/think>b", r"a*<\/?think>b</think>"):
        assert made.of(SamplingParams(regex=own), [START]) == Thinking(), "the grammar reads the reasoning itself"


def test_marker_in_the_text_of_an_earlier_turn_begins_no_reasoning() -> None:
    """The token between turns is shown in texts, as those of some models are."""
    tokenizer: Any = Thoughtful(TEXTS)
    prompt, with_grammar = [START, 3, 1], SamplingParams(regex="a")
    assert ThinkingInput(tokenizer, None).of(with_grammar, prompt).grammar_waits, "control: 3 is no added token"
    tokenizer.added_ids = frozenset({3})
    made = ThinkingInput(tokenizer, None)
    assert made.of(with_grammar, prompt) == Thinking()
    assert made.of(SamplingParams(thinking_budget=2), prompt).begun < 0
    assert made.of(with_grammar, [3, START, 1]).begun == 1


def with_special_token() -> Thoughtful:
    tokenizer: Any = Thoughtful(TEXTS)
    tokenizer.special_texts, tokenizer.hidden_ids = {"<s>": 0}, frozenset({0})
    return tokenizer


ENDS: list[tuple[Any, str | None, str]] = [
    (Thoughtful(TEXTS), "so", r"^thinking_end: expected .*, got 'so', but it ends with none of </think>, <\|end\|>"),
    (Thoughtful(TEXTS), "a<think>b</think>", "but it has a marker before its end"),
    (Thoughtful(TEXTS), "a" * 64 + "</think>", "but it has 65 tokens, more than 64"),
    (with_special_token(), "<s></think>", "but it has <s> before its end"),
    (ByteTokenizer(), "[/THINK]", r"but the marker \[THINK\] of its reasoning is no single token"),
    (None, "</think>", "but this engine has no tokenizer"),
]


@pytest.mark.parametrize(("tokenizer", "text", "error"), ENDS, ids=range(len(ENDS)))
def test_text_that_cannot_end_reasoning_is_refused(tokenizer: Any, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ThinkingInput(tokenizer, text)
    assert ThinkingInput(Thoughtful(TEXTS), "a" * 63 + "</think>").of(SamplingParams(thinking_budget=1), [1]).forced[
        62:
    ] == (
        0,
        END,
    )


def test_budget_of_an_engine_without_markers_is_refused() -> None:
    plain = Lettered()
    for tokenizer, reason in ((None, "this engine has no tokenizer"), (plain, "the chat template has no markers of")):
        made = ThinkingInput(tokenizer, None)
        with pytest.raises(
            ValueError, match=f"^thinking_budget: expected nothing, because {reason}.*, got 3; leave it out"
        ):
            made.of(SamplingParams(thinking_budget=3), [1])
        assert made.of(SamplingParams(regex="a"), [1]) == Thinking()


@pytest.mark.parametrize("budget", [-1, 1.5, True, 2**31])
def test_budget_that_is_no_count_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"^SamplingParams\.thinking_budget: expected None or 0 to 2147483647, got"):
        SamplingParams(thinking_budget=budget)


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens", "budget_tokens"])
def test_names_of_other_libraries_raise_an_error_that_names_ours(name: str) -> None:
    with pytest.raises(TypeError, match=f"expected thinking_budget=, got {name}="):
        SamplingParams(**{name: 3})
