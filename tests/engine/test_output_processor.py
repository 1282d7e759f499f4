"""Test tokens, text, finish reasons and counters; all drafts are right, so requests end inside rounds."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jspec import Completion, Engine, Metrics, Model, SamplingParams, Tree
from jspec.core.records import StepOutput
from jspec.engine.request.request import OutputState, Request
from jspec.engine.run.output_processor import process_step_output
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.tools.testing import Scripted
from tests.support import engines, tiny

pytestmark = pytest.mark.once

VOCAB, LENGTH, LONGEST = 256, 4, 30
EOS = 255  # so unlikely that plain decoding never emits it
PROMPTS = ["abc", "Zürich ", "\u20ac"]
GREEDY = SamplingParams(max_tokens=LONGEST, temperature=0)


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny.model(VOCAB, layers=1, sharpness=1.5)


def make(target: Model, **options: Any) -> Engine:
    return engines.make(
        target, tokenizer="bytes", slots=2, max_len=64, buckets=(2,), prefill_buckets=(16,), eos_ids=(EOS,), **options
    )


@pytest.fixture(scope="module")
def plain(target: Model) -> list[Completion]:
    with make(target) as engine:
        done = engine.generate(PROMPTS, GREEDY)
    assert not any(EOS in completion.token_ids for completion in done)
    return done


@pytest.fixture(scope="module")
def engine(target: Model, plain: list[Completion]) -> Engine:
    """Return an engine whose drafts are right: after the prefill's token each round emits five."""
    return make(target, drafter=Scripted(plain, [GREEDY] * len(plain), Tree.chain(LENGTH)))


@pytest.fixture(scope="module")
def traced(engine: Engine) -> list[Completion]:
    return engine.generate(PROMPTS, GREEDY, trace=True)


def with_(**changes: Any) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=LONGEST, temperature=0) | changes))


def first_at(ids: list[int], lowest: int, *, inside: Callable[[int], bool]) -> int:
    """Return the first index >= ``lowest`` that satisfies ``inside`` and whose token did not occur before."""
    return next(i for i in range(lowest, len(ids)) if ids[i] not in ids[:i] and inside(i))


def flags(*, cap: int) -> list[bool]:
    """Return for each token whether it was drafted; each round has ``cap`` drafted tokens and a bonus token."""
    return ([False] + ([True] * cap + [False]) * LONGEST)[:LONGEST]


# -- drafts


def test_rounds_with_right_drafts_accept_every_draft_token(traced: list[Completion], plain: list[Completion]) -> None:
    for completion, expected in zip(traced, plain, strict=True):
        assert completion.token_ids == expected.token_ids
        assert completion.from_draft == flags(cap=LENGTH)
        assert [round_.accept_len for round_ in completion.rounds or []] == [LENGTH] * 6
        assert [len(round_.emitted) for round_ in completion.rounds or []] == [5] * 5 + [4]


def test_traced_rounds_of_a_completion_contain_its_tokens(traced: list[Completion]) -> None:
    for completion in traced:
        rounds = completion.rounds
        assert rounds is not None
        assert completion.token_ids[:1] + [t for r in rounds for t in r.emitted] == completion.token_ids
        assert completion.from_draft == [False, *(i < r.accept_len for r in rounds for i in range(len(r.emitted)))]
        roots = [completion.token_ids[0], *(r.emitted[-1] for r in rounds[:-1])]
        assert [r.tokens[0] for r in rounds] == roots
        for r in rounds:
            assert r.parents.tolist() == list(range(-1, LENGTH)) and r.scores[0] == 0
            assert r.path == list(range(r.accept_len + 1))
            assert [r.tokens[node] for node in r.path[1:]][: len(r.emitted)] == r.emitted[: r.accept_len]


def test_round_text_of_a_traced_round_has_one_line_per_node(traced: list[Completion]) -> None:
    rounds = traced[0].rounds
    assert rounds is not None
    lines = rounds[0].to_text().splitlines()
    assert len(lines) == LENGTH + 2
    assert [line.split()[:2] for line in lines[:-1]] == [["*", str(token)] for token in rounds[0].tokens]
    assert lines[-1] == f"emitted {rounds[0].emitted}"


def test_engine_that_traces_again_compiles_nothing(
    engine: Engine, traced: list[Completion], compilations: list[str]
) -> None:
    """An untraced completion has no rounds."""
    (again,) = engine.generate(PROMPTS[0], GREEDY, trace=True)
    assert not compilations
    assert [r.to_text() for r in again.rounds or []] == [r.to_text() for r in traced[0].rounds or []]
    assert engine.generate(PROMPTS[0], GREEDY)[0].rounds is None


@pytest.mark.parametrize(("draft", "cap"), [(False, 0), (0, 0), (1, 1), (3, 3), (LENGTH, 4), (99, 4), (True, 4)])
def test_request_with_a_draft_cap_has_other_rounds_but_equal_tokens(
    engine: Engine, plain: list[Completion], draft: Any, cap: int
) -> None:
    (done,) = engine.generate(PROMPTS[0], with_(draft=draft))
    assert done.token_ids == plain[0].token_ids
    rounds = -(-(LONGEST - 1) // (cap + 1))
    assert done.metrics.num_drafts == rounds
    assert done.metrics.num_draft_tokens == rounds * cap
    known = [
        [1 + (cap + 1) * r + i < LONGEST for r in range(rounds)] for i in range(cap)
    ]  # the drafter knows no later tokens
    assert done.metrics.num_accepted_per_position == [sum(at) for at in known]
    assert done.from_draft == flags(cap=cap)


def test_request_with_a_draft_cap_in_a_batch_limits_only_its_own_drafts(
    engine: Engine, plain: list[Completion]
) -> None:
    done = engine.generate(PROMPTS, [with_(draft=False), with_(), with_(draft=2)])
    assert [completion.token_ids for completion in done] == [completion.token_ids for completion in plain]
    assert [completion.metrics.num_drafts for completion in done] == [29, 6, 10]


# -- ends


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
def test_request_with_max_tokens_inside_a_round_ends_there(
    engine: Engine, plain: list[Completion], max_tokens: int
) -> None:
    (done,) = engine.generate(PROMPTS[0], with_(max_tokens=max_tokens))
    assert done.token_ids == plain[0].token_ids[:max_tokens]
    assert (done.finish_reason, done.stop_reason) == ("length", None)
    rounds = -(-(max_tokens - 1) // 5)
    assert done.metrics.num_drafts == rounds and done.metrics.num_tokens == max_tokens
    assert done.metrics.num_accepted_tokens == sum(done.from_draft) <= max_tokens - 1
    assert done.metrics.mean_acceptance_length == 1 + sum(done.from_draft) / max(rounds, 1)


@pytest.mark.parametrize("place", ["prefill", "inside a round", "bonus token"])
def test_request_with_a_stop_token_anywhere_in_a_round_ends_there(
    engine: Engine, plain: list[Completion], place: str
) -> None:
    """The first round emits tokens 1 to 5; the fifth is its bonus token, the target's own."""
    inside = {
        "prefill": lambda i: i == 0,
        "inside a round": lambda i: i % 5 in (2, 3),
        "bonus token": lambda i: i % 5 == 0,
    }
    for index, completion in enumerate(plain):
        ids = completion.token_ids
        end = first_at(ids, 0 if place == "prefill" else 1, inside=inside[place])
        (done,) = engine.generate(PROMPTS[index], with_(stop_token_ids=(7, ids[end])))
        assert done.token_ids == ids[: end + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", ids[end])
        assert done.text == ByteTokenizer().decode(ids[:end])
        assert done.metrics.num_drafts == -(-end // 5)


def test_request_with_eos_inside_a_round_ends_there(
    engine: Engine, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids contain the EOS token and the text does not; with ignore_eos decoding continues after it."""
    ids = plain[0].token_ids
    end = first_at(ids, 7, inside=lambda i: i % 5 in (2, 3))
    monkeypatch.setattr(engine.input_processor, "eos_ids", (EOS, ids[end]))
    (done,) = engine.generate(PROMPTS[0], with_())
    assert done.token_ids == ids[: end + 1]
    assert (done.finish_reason, done.stop_reason) == ("eos", ids[end])
    assert done.text == ByteTokenizer().decode(ids[:end])
    (ignoring,) = engine.generate(PROMPTS[0], with_(ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == (ids, "length")
    assert ignoring.text == plain[0].text
    (asked,) = engine.generate(PROMPTS[0], with_(ignore_eos=True, stop_token_ids=(ids[end],)))
    assert (asked.token_ids, asked.finish_reason, asked.stop_reason) == (ids[: end + 1], "stop", ids[end])


def test_request_with_a_stop_token_at_max_tokens_has_finish_reason_stop(
    engine: Engine, plain: list[Completion]
) -> None:
    ids = plain[0].token_ids
    end = first_at(ids, 1, inside=lambda i: i > 1)
    (done,) = engine.generate(PROMPTS[0], with_(max_tokens=end + 1, stop_token_ids=(ids[end],)))
    assert (done.finish_reason, len(done.token_ids)) == ("stop", end + 1)


# -- text


def test_stream_chunks_joined_equal_text_and_tokens_of_the_completion(engine: Engine, plain: list[Completion]) -> None:
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        chunks = list(engine.stream(prompt, GREEDY))
        assert "".join(chunk.text or "" for chunk in chunks) == expected.text
        assert [t for chunk in chunks for t in chunk.token_ids] == expected.token_ids
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len(chunks) == 7  # one chunk for the prefill's token and one for each of six rounds
        assert all(len(chunk.from_draft) == len(chunk.token_ids) for chunk in chunks)
        (done,) = engine.generate(prompt, GREEDY)
        assert done.text == expected.text
        assert done.pieces is not None and len(done.pieces) == len(done.token_ids)
        assert "".join(done.pieces) == done.text[: len("".join(done.pieces))]


def test_engine_given_one_prompt_in_any_form_returns_equal_tokens(engine: Engine, plain: list[Completion]) -> None:
    assert engine.generate([]) == []
    ids = list(PROMPTS[0].encode())
    forms: list[Any] = [PROMPTS[0], ids, tuple(ids), [ids], [PROMPTS[0]]]
    for form in forms:
        (done,) = engine.generate(form, GREEDY)
        assert (done.token_ids, done.prompt_token_ids) == (plain[0].token_ids, ids)
        assert done.samples == [done]
    mixed = engine.generate([PROMPTS[1], ids], [with_(max_tokens=2), with_(max_tokens=3)])
    assert [c.token_ids for c in mixed] == [plain[1].token_ids[:2], plain[0].token_ids[:3]]


def test_progress_bar_of_a_run_counts_its_tokens(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(PROMPTS[0], GREEDY)
    assert capsys.readouterr().err == ""
    engine.generate(PROMPTS[0], GREEDY, progress=True)
    assert "30/30" in capsys.readouterr().err


def test_completion_html_of_a_text_colours_each_drafted_token(traced: list[Completion]) -> None:
    page = traced[0]._repr_html_()
    assert page.count("background") == sum(traced[0].from_draft)


def test_engine_html_has_its_repr_and_its_memory_in_words(engine: Engine) -> None:
    page = engine._repr_html_()
    assert html.escape(repr(engine)) in page and html.escape(str(engine.memory_plan)) in page


# -- counters


def test_metrics_of_three_rounds_equal_those_computed_by_hand() -> None:
    """Rounds of 4 draft tokens accept 4, 2 and 0; the request ends within the last round."""
    metrics = Metrics(num_tokens=1)
    for accept_len, emitted in ((4, 4), (2, 2), (0, 0), (3, 1)):
        metrics.count_round(depth=4, drafted=4, accept_len=accept_len, emitted_drafts=emitted)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 16, 7)
    assert metrics.mean_acceptance_length == 1 + 7 / 4
    assert metrics.acceptance_rate == 7 / 16
    assert metrics.acceptance_per_position == [3 / 4, 3 / 4, 2 / 4, 1 / 4]
    both = metrics + Metrics(
        num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1, num_accepted_per_position=[1], num_tokens=2
    )
    assert (both.num_drafts, both.num_accepted_per_position, both.num_tokens) == (5, [4, 3, 2, 1], 3)
    assert Metrics().mean_acceptance_length == 1 and Metrics().acceptance_rate == 0


def test_output_processor_given_several_rounds_stops_at_the_ended_one() -> None:
    """The report's columns are three tokens, count, accept_len, drafted and ended; the request ends in round two."""
    output = OutputState(token_ids=[3], from_draft=[False], pieces=[""])
    request = Request(1, (5,), SamplingParams(), 0, (9,), 10, output=output)
    report = np.asarray([[[4, 6, 7, 3, 2, 2, 0]], [[8, 9, -1, 2, 2, 2, 1]], [[-1, -1, -1, 0, 0, 0, 0]]])
    step = StepOutput(report=report, trace=None)  # type: ignore[arg-type]
    assert process_step_output(request, step, 0, is_round=True) == "stop"
    assert request.token_ids == [3, 4, 6, 7, 8, 9] and output.stop_reason == 9
    assert output.from_draft == [False, True, True, False, True, True]
    assert (request.metrics.num_drafts, request.metrics.num_accepted_tokens) == (2, 4)


def test_engine_metrics_after_several_requests_are_the_sum_of_theirs(engine: Engine) -> None:
    before = engine.metrics
    done = engine.generate(PROMPTS, GREEDY)
    added = sum((completion.metrics for completion in done), before)
    assert engine.metrics == added
    for completion in done:
        assert 0 < completion.metrics.time_to_first_token < 60
        assert completion.metrics.time_per_output_token == completion.metrics.decode_seconds / (LONGEST - 1) > 0
