"""Test that invalid input raises an error, with expected value, given value and remedy, before queueing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jspec import Engine, Model, SamplingParams
from tests.support import engines, paper

pytestmark = pytest.mark.once

MAX_LEN = 32


@pytest.fixture(scope="module")
def target() -> Model:
    return engines.target()


@pytest.fixture(scope="module")
def engine(target: Model) -> Engine:
    """Return an engine with seven usable pages of four rows, too few for max_len tokens."""
    return paper.make(
        target,
        slots=2,
        max_len=MAX_LEN,
        page_size=4,
        pages=8,
        buckets=(2,),
        prefill_buckets=(8,),
        eos_ids=(2, 3, 4),
    )


@pytest.fixture(autouse=True)
def _the_other_request_goes_on(engine: Engine) -> Iterator[None]:
    """Check that another request, which runs during every test, keeps its tokens."""
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    (expected,) = engine.generate([1, 2], params)
    stream = engine.stream([1, 2], params)
    tokens = list(next(stream).token_ids)
    yield
    if not engine.threads.is_closed:
        assert engine.threads.do(lambda: len(engine.core.live)) <= 1, "something was queued"
        tokens += [token for chunk in stream for token in chunk.token_ids]
        assert tokens == expected.token_ids and engine.pages_in_use == 0


GREEDY = SamplingParams(temperature=0)
BAD_REQUESTS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "empty prompt": ([[]], None, ValueError, r"^prompt: expected at least one token, got none; give a BOS"),
    "one of several is empty": ([[1], []], None, ValueError, r"^prompts\[1\]: expected at least one token, got none"),
    "prompt of max_len": (
        [1] * 32,
        None,
        ValueError,
        r"^prompt: expected fewer tokens than max_len=32, .*got 32; shorten it or raise",
    ),
    "prompt beyond max_len": (
        [[1], [1] * 99],
        None,
        ValueError,
        r"^prompts\[1\]: expected fewer tokens than max_len=32, .*got 99",
    ),
    "token too large": ([1, 16], None, ValueError, r"^prompt: expected ids in \[0, 16\), got 16"),
    "token negative": ([1, -1], None, ValueError, r"^prompt: expected ids in \[0, 16\), got -1"),
    "token not whole": ([[1.5]], None, TypeError, r"^prompt: expected int token ids, got 1\.5 in \[1\.5\]"),
    "prompt a number": (
        [[1], 7],
        None,
        TypeError,
        r"^prompts\[1\]: expected a text or a list of int token ids, got 7; a prompt of one token is \[7\]",
    ),
    "text without tokenizer": (
        "hello",
        None,
        ValueError,
        r"^prompt: expected token ids, because this engine has no tokenizer, got 'hello'; pass tokenizer=",
    ),
    "too few parameters": ([[1], [1]], [GREEDY], ValueError, r"expected one or 2, one a prompt, got 1"),
    "too many parameters": ([1], [GREEDY, GREEDY], ValueError, r"params: expected one, got 2"),
    "parameters of another kind": (
        [1],
        ["max_tokens"],
        TypeError,
        r"expected SamplingParams or a dict of its fields, got 'max_tokens'",
    ),
    "too many pages": (
        [1] * 8,
        SamplingParams(max_tokens=30),
        ValueError,
        r"needs 9 pages \(33 rows\), the pool has 7; lower max_tokens or raise pages",
    ),
    "too many stop ids": (
        [1],
        SamplingParams(stop_token_ids=(5, 6, 7, 8, 9, 10)),
        ValueError,
        r"at most 8 with the EOS ids, got 9; name fewer, or set ignore_eos",
    ),
    "stop id out of range": (
        [1],
        SamplingParams(stop_token_ids=(16,)),
        ValueError,
        r"stop_token_ids: expected ids in \[0, 16\), got 16",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_engine_given_an_invalid_request_raises_before_queueing(engine: Engine, case: str) -> None:
    prompts, params, error, message = BAD_REQUESTS[case]
    with pytest.raises(error, match=message):
        engine.generate(prompts, params)
    if isinstance(prompts, str) or (not isinstance(prompts[0], list) and not isinstance(params, list)):
        with pytest.raises(error, match=message):
            engine.stream(prompts, params)


def test_stream_with_no_or_several_prompts_raises(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        engine.stream([])
    with pytest.raises(TypeError, match="expected int token ids"):
        engine.stream([[1], [2]])  # type: ignore[list-item]


def test_chat_without_tokenizer_or_template_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from jspec.engine.text.tokenizer import ByteTokenizer

    with pytest.raises(ValueError, match="chat: expected an engine with a tokenizer, got none; pass tokenizer="):
        engine.chat([{"role": "user", "content": "hi"}])
    monkeypatch.setattr(engine.input_processor, "tokenizer", ByteTokenizer())
    with pytest.raises(ValueError, match="no chat template: write the prompt as text"):
        engine.chat([{"role": "user", "content": "hi"}])


BAD_PARAMS: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1, 1.5, True, "3")),
    *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), None, True)),
    *(("top_k", value) for value in (-2, 0.5, None)),
    *(("top_p", value) for value in (0, -0.1, 1.01, float("nan"))),
    *(("min_p", value) for value in (-0.1, 1.01, float("nan"))),
    *(("seed", value) for value in (-1, 2**64, 1.0, True)),
    *(("stop_token_ids", value) for value in ((-1,), (1.5,), 5, None, "ab")),
    *(("ignore_eos", value) for value in (1, None)),
    *(("repetition_penalty", value) for value in (0, -1.0, 1e4, float("nan"), None)),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (2.1, -2.1, float("inf"), "1")),
    *(
        ("logit_bias", value)
        for value in ({-1: 1.0}, {1.5: 1.0}, {"1": 1.0, 1: 2.0}, {"one": 1.0}, {1: 101}, {1: float("-inf")}, [1], 5)
    ),
    *(("bad_words", value) for value in ("word", 5, (5,), ((),), ("",), ((-1,),), (" ",), None, {"a": 1})),
    *(("allowed_token_ids", value) for value in ((), (-1,), (1.5,), 5, "ab")),
    *(("min_tokens", value) for value in (-1, 17, 1.5, True, None)),
    *(("draft", value) for value in (-1, 1.5, None)),
]


@pytest.mark.parametrize(("field", "value"), BAD_PARAMS, ids=str)
def test_sampling_params_with_impossible_value_raise_naming_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}: expected .*, got ") as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


def test_sampling_params_with_unknown_field_raise_naming_it() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams: expected max_tokens= or .*, got max_token=$"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "odd",
    [
        dict(top_k=2**40),
        dict(top_k=-1),
        dict(seed=2**64 - 1),
        dict(seed=np.int32(7)),
        dict(seed=np.uint64(7)),
        dict(max_tokens=np.int64(3)),
        dict(stop_token_ids=[np.int64(5)]),
        dict(draft=2**40),
        dict(repetition_penalty=np.float32(1.5), presence_penalty=-2, frequency_penalty=np.int64(2)),
        dict(logit_bias={np.int64(5): 100, 0: -100.0}, bad_words=[], allowed_token_ids={1, 5}),
        dict(logit_bias={}, bad_words=[[np.int64(3), 5], (2,)], min_tokens=np.int32(3)),
    ],
    ids=str,
)
def test_engine_given_sampling_params_with_extreme_or_numpy_values_decodes(engine: Engine, odd: dict[str, Any]) -> None:
    (done,) = engine.generate(np.array([1, 2]), SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | odd)))
    assert len(done.token_ids) == 3 or done.finish_reason == "stop"
