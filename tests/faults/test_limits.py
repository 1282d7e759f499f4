"""Test that no request takes unbounded memory, stalls other requests, or enters another engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from jspec import Engine, SamplingParams
from jspec.engine.callers import engine_thread
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.input.penalty_input import pack_controls
from jspec.engine.request import token_logprobs
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.too_long import CHARACTERS_PER_TOKEN
from jspec.engine.schedule import scheduler
from tests.support import brittle, engines, lettered
from tests.support.serving import wait_until

pytestmark = pytest.mark.once

BOUNDS: list[tuple[str, Any, Any]] = [  # field, largest allowed value, a larger value
    ("n", 1024, 1025),
    ("stop", [str(i) for i in range(64)], [str(i) for i in range(65)]),
    ("stop", "a" * 1000, "a" * 1001),
    ("stop_token_ids", [1] * 1024, [1] * 1025),
    ("logit_bias", dict.fromkeys(range(1000), 1.0), dict.fromkeys(range(2**20 + 1), 1.0)),
    ("bad_words", [[i] for i in range(1024)], [[i] for i in range(1025)]),
    ("bad_words", ["a" * 1000], ["a" * 1001]),
    ("bad_words", [[1] * 1000], [[1] * 1001]),
    ("allowed_token_ids", np.arange(2**12), np.arange(2**20 + 1)),
    ("processor_args", [1.0] * 1024, [1.0] * 1025),
]
HUGE = [
    "x" * 10**6,
    list(range(-1, 10**6)),
    10**5000,
    -(10**5000),
    {-i: "x" * 1000 for i in range(1000)},
    ["x" * 999] * 64,
]
FIELDS = list(SamplingParams.__dataclass_fields__)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Yield the shared engine; check after every test that it holds no page, slot or request."""
    yield brittle.engine()
    brittle.check_idle(brittle.engine())


@pytest.mark.parametrize(("field", "largest", "beyond"), BOUNDS, ids=[field for field, *_ in BOUNDS])
def test_sampling_params_beyond_a_bound_raises_naming_bound_and_size(field: str, largest: Any, beyond: Any) -> None:
    SamplingParams(**{field: largest})
    with pytest.raises(
        ValueError, match=rf"SamplingParams\.{field}: expected .*(at most|to) \d+.*, got \d+$"
    ) as caught:
        SamplingParams(**{field: beyond})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3.5e38),  # infinite on the device: a masked logit of -inf would become NaN
        ("processor_args", (1.0, -1e39)),
        ("stop", "a\ud800"),
        ("bad_words", ["\udfff"]),
    ],
)
def test_sampling_params_value_that_the_device_or_tokenizer_cannot_hold_raises(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}: expected .*(float32|whole)"):
        SamplingParams(**{field: value})
    SamplingParams(temperature=3.4e38, processor_args=(-3.4e38,), stop="é", bad_words=["\U0001f600"])


@pytest.mark.parametrize("field", FIELDS)
def test_sampling_params_huge_wrong_value_raises_a_short_error(field: str) -> None:
    messages = [message for message in map(partial(error_of, field), HUGE) if message is not None]
    assert len(messages) >= 2
    assert all(field in message and len(message) < 500 for message in messages)


def error_of(field: str, value: Any) -> str | None:
    """Return the message of the error for a field's value; None if the value is allowed."""
    try:
        SamplingParams(**{field: value})
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "a" * (64 * CHARACTERS_PER_TOKEN + 1),
            r"expected at most 8192 characters \(128 for each of max_len=64 tokens\)",
        ),
        ("a" * 64, "prompt: expected fewer tokens than max_len=64, .* got 64;"),
        ([1] * 10**6, "prompt: expected fewer tokens than max_len=64, .* got 1000000;"),
        (np.ones(10**6, int), "prompt: expected fewer tokens than max_len=64, .* got 1000000;"),
        ([["x" * 10**6] * 3] * 10, r"prompt: expected int token ids, got \["),
    ],
    ids=["characters", "tokens of a text", "list", "array", "nested"],
)
def test_engine_prompt_beyond_a_bound_raises_before_it_is_tokenised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prompt: Any, message: str
) -> None:
    encoded: list[int] = []
    encode = type(engine.tokenizer).encode
    monkeypatch.setattr(
        type(engine.tokenizer), "encode", lambda self, text: (encoded.append(len(text)), encode(self, text))[1]
    )
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        engine.submit(prompt if not isinstance(prompt, list) or len(prompt) > 10 else prompt[:1])
    assert len(str(caught.value)) < 500 and max(encoded, default=0) <= 64


# -- stop strings that are special tokens


class Marked(lettered.Lettered):
    """A tokenizer of letters whose hidden tokens have texts."""

    special_texts: ClassVar = {"<end>": lettered.END, "<mark>": lettered.MARK}


def processor_with_special_texts() -> Any:
    one = lettered.chain().input_processor
    return type(one)(Marked(), one.vocab_size, (lettered.END,), one.config)


def test_stop_string_that_is_a_special_token_becomes_a_stop_token() -> None:
    params = SamplingParams(stop=["a", "<mark>", "<end>"], stop_token_ids=[5])
    (request,) = processor_with_special_texts().requests([1], params, trace=False)
    assert request.stop_ids == (lettered.END, 5, lettered.MARK)
    (request,) = lettered.chain().input_processor.requests([1], params, trace=False)
    assert request.stop_ids == (lettered.END, 5), "control: a tokenizer without special texts"


@pytest.mark.parametrize("stop", ["<mark>a", "a<mark>", "<mark><end>"])
def test_stop_string_with_text_beside_a_special_token_raises(stop: str) -> None:
    with pytest.raises(ValueError, match=rf"stop: '{stop}' can never match, .*special token '<(mark|end)>'"):
        processor_with_special_texts().requests([1], SamplingParams(stop=stop), trace=False)


def test_engine_with_a_special_token_as_stop_string_ends_at_that_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lettered.chain()
    monkeypatch.setattr(engine.input_processor, "tokenizer", Marked())
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={lettered.MARK: 100}, stop="<mark>")
    (done,) = engine.generate([1, 2], params)
    assert (done.finish_reason, done.stop_reason, done.token_ids) == ("stop", lettered.MARK, [lettered.MARK])


# -- requests of another engine, forked processes


def test_engine_refuses_requests_of_another_engine(engine: Engine) -> None:
    other = lettered.chain()
    request = engine.submit([1, 2], SamplingParams(max_tokens=3))
    for call in (other.result, other.abort):
        with pytest.raises(
            ValueError, match=rf"expected a request of this engine, got request {request.id} of another"
        ):
            call(request)
        with pytest.raises(TypeError, match="expected a request that submit returned, got 5"):
            call(5)  # type: ignore[arg-type]
    assert len(engine.result(request).token_ids) == 3


@pytest.mark.filterwarnings("ignore")  # jax and Python warn of forks
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_engine_in_a_forked_child_raises_instead_of_hanging(engine: Engine) -> None:
    request = engine.submit([1, 2], SamplingParams(max_tokens=3))
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate([1]),
        lambda: engine.submit([1]),
        lambda: list(engine.stream([1])),
        lambda: engine.result(request),
        lambda: engine.abort(request),
        engine.close,
        engine.warmup,
        lambda: engine.metrics,
        engine.prometheus,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused += "forked child" in str(error)
        os._exit(refused)
    end = time.monotonic() + brittle.PATIENCE
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(child, 9)
    assert found[0] == child and os.waitstatus_to_exitcode(found[1]) == len(calls)
    assert len(engine.result(request).token_ids) == 3, "the parent goes on"


# -- work between two steps


def test_engine_step_with_prompt_logprobs_makes_no_records(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = token_logprobs.token_logprobs

    def counted(scores: Any, row: Any, tokens: Any, num_top: int) -> Any:
        made.append(len(tokens))
        return make(scores, row, tokens, num_top)

    monkeypatch.setattr(token_logprobs, "token_logprobs", counted)
    prompt = list(range(1, 41))
    request = engine.submit(prompt, SamplingParams(max_tokens=2, prompt_logprobs=3, n=2))
    wait_until(lambda: all(sample.finish_reason for sample in request.samples))
    done = engine.result(request)
    assert made == [16, 16, 7], "one call a chunk, for the first of two completions"
    found = done.prompt_logprobs
    assert found is not None and found[0] is None and [one.token_id for one in found[1:] if one] == prompt[1:]
    assert done.others[0].prompt_logprobs is found, "thousands of completions share one list"


def test_event_loop_makes_no_records_of_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of long prompts take long, so tasks let other threads make them."""
    made: list[int] = []
    make = token_logprobs.token_logprobs

    def counted(*args: Any) -> Any:
        made.append(threading.get_ident())
        return make(*args)

    monkeypatch.setattr(token_logprobs, "token_logprobs", counted)
    prompt, params = list(range(1, 41)), SamplingParams(max_tokens=2, prompt_logprobs=3, n=2)

    async def both() -> tuple[Any, Any]:
        (done,) = await engine.agenerate(prompt, params)
        chunks = [chunk async for chunk in engine.astream(prompt, params) if chunk.prompt_logprobs is not None]
        return done.prompt_logprobs, chunks[0].prompt_logprobs

    assert engine.generate(prompt, params)[0].prompt_logprobs is not None
    assert len(made) == 3, "control"
    made.clear()
    generated, streamed = asyncio.run(both())
    assert generated == streamed and len(made) == 6 and threading.get_ident() not in made


def test_queue_and_abort_of_many_requests_let_the_thread_step_in_between(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a bounded number of completions is handled in one call."""
    handled: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            handled[-1] += 1
            return original(*args)

        return call

    def begins(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (handled.append(0), original(*args))[1]

    threads = engine.threads
    monkeypatch.setattr(threads._programs, "queue", begins(threads._programs.queue))
    monkeypatch.setattr(threads, "_abort", begins(threads._abort))
    monkeypatch.setattr(engine.core, "add", counted(engine.core.add))
    monkeypatch.setattr(engine.core, "finish", counted(engine.core.finish))
    with ByHand(engine) as by_hand:
        request = by_hand.submit([1, 2, 3], SamplingParams(n=1000, stop=["a" * 1000]))
        shared = {id(sample.output.decoder._matcher._stops) for sample in request.samples}
        assert len(shared) == 1, "the stop strings are prepared once"
        threads._take_calls()
        assert len(handled) == 4 and max(handled) == engine_thread.AT_ONCE and sum(handled) == 1000
        by_hand.abort(request)
        threads._take_calls()
        assert len(handled) == 8 and max(handled) == engine_thread.AT_ONCE and sum(handled) == 2000
        by_hand.result(request)


def test_engine_metrics_with_waiting_requests_count_only_requests_that_ran(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Metrics] = []
    add = Metrics.__add__
    monkeypatch.setattr(Metrics, "__add__", lambda self, other: (added.append(other), add(self, other))[1])
    with ByHand(engine) as by_hand:
        request = by_hand.submit([1, 2, 3], SamplingParams(n=500))
        by_hand.step()
        before = engine.core.metrics()
        assert len(added) <= brittle.SLOTS
        by_hand.abort(request)
        by_hand.result(request)
    assert engine.metrics.finished["abort"] == before.finished.get("abort", 0) + 500


def test_scheduler_removes_a_waiting_request_in_logarithmic_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = brittle.engine()
    compared: list[int] = []
    order = scheduler._order
    with ByHand(engine) as by_hand:
        request = by_hand.submit([1, 2, 3], SamplingParams(n=1000))
        engine.threads._take_calls()
        monkeypatch.setattr(scheduler, "_order", lambda one: (compared.append(one.id), order(one))[1])
        engine.scheduler.finish(request.samples[700])
        assert len(compared) <= 11 and request.samples[700] not in engine.scheduler.waiting
        engine.scheduler.add(request.samples[700])
        by_hand.abort(request)
        by_hand.result(request)


def test_packed_controls_of_a_bias_on_the_whole_vocabulary_have_every_value() -> None:
    engine = lettered.chain()
    bias = {token: token / 8 - 1 for token in reversed(range(engines.VOCAB))}
    params = SamplingParams(logit_bias=bias, allowed_token_ids=[0, 2, 4])
    (request,) = engine.input_processor.requests([1], params, trace=False)
    request.state.slot = 1
    packed = pack_controls(request, engines.VOCAB).view(np.float32)
    expected = np.full(engines.VOCAB, -np.inf, np.float32)
    expected[[0, 2, 4]] = [bias[token] for token in (0, 2, 4)]
    windows = np.lib.stride_tricks.sliding_window_view(packed, engines.VOCAB)
    assert (windows == expected).all(axis=1).sum() == 1
