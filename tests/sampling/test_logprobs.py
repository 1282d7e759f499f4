"""Compare log-probabilities of emitted tokens and of prompts with one dense pass over the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from jspec import Completion, Drafter, DraftModel, Engine, Model, NGram, SamplingParams, Suffix, TokenLogprob, Tree
from jspec.core.config import EngineConfig
from jspec.engine.text.tokenizer import ByteTokenizer
from tests.reference import decoder, processors
from tests.support import byte_pair, engines, tiny

pytestmark = pytest.mark.once

TOLERANCE = 1e-4
PROMPTS = [
    [3, 1, 4],
    np.random.default_rng(0).integers(0, engines.VOCAB, 31).tolist(),
    [5, 9, 2, 6, 5, 3, 5, 8, 9],
    [7],
]
PARAMS = [
    SamplingParams(max_tokens=14, temperature=0, logprobs=3, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(max_tokens=12, seed=1, temperature=0.8, top_k=6, min_p=0.05, logprobs=16),
    SamplingParams(max_tokens=12, seed=2),
    SamplingParams(max_tokens=9, seed=3, logprobs=0, logit_bias={2: 4.0, 3: -100}, bad_words=[[6, 1], [1, 6]], draft=2),
]


@cache
def tree() -> Engine:
    """Return an engine with a dynamic tree, processed log-probabilities, and too few pages for all requests at once."""
    return Engine(
        engines.target(),
        drafter=DraftModel(tiny.model(engines.VOCAB, layers=1, seed=2), Tree.topk(9, 3, 3)),
        slots=3,
        max_len=engines.MAX_LEN,
        page_size=4,
        pages=22,
        buckets=(3,),
        prefill_buckets=(6,),
        logprobs_mode="processed_logprobs",
    )


def chain() -> Engine:
    return engines.eagle3(rounds=3, page_size=1)


def rows(target: Model, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, mode: str) -> np.ndarray:
    """Compute the log-probabilities at each emitted token [tokens, vocab] by one dense pass over the text."""
    logits = decoder.logits(target, np.array([[*prompt, *output]]))[0][len(prompt) - 1 : -1]
    if mode == "processed_logprobs":
        texts = [output[:count] for count in range(len(output))]
        edited = [
            processors.edited(row.astype(np.float32), prompt, text, params, params.stop_token_ids)
            for row, text in zip(logits, texts, strict=True)
        ]
        logits = np.array([processors.processed(row, params) if params.temperature else row for row in edited])
    return log_softmax(logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def check(found: Sequence[TokenLogprob], tokens: Sequence[int], expected: np.ndarray, count: int) -> None:
    """Check each token's log-probability and rank, and the most likely tokens in any order of near ties."""
    assert [one.token_id for one in found] == list(tokens) and len(expected) == len(tokens)
    for one, row in zip(found, expected, strict=True):
        assert abs(one.logprob - row[one.token_id]) < TOLERANCE
        value = row[one.token_id]
        assert 1 + (row > value + TOLERANCE).sum() <= one.rank <= (row > value - TOLERANCE).sum()
        best = np.sort(row[np.isfinite(row)])[::-1][:count]
        np.testing.assert_allclose(list(one.top.values()), best, atol=TOLERANCE)
        np.testing.assert_allclose([row[token] for token in one.top], best, atol=TOLERANCE)
        assert list(one.top.values()) == sorted(one.top.values(), reverse=True)
        assert one.top.get(one.token_id, one.logprob) == one.logprob


def check_all(engine: Engine, done: Sequence[Completion]) -> None:
    for one, prompt, params in zip(done, PROMPTS, PARAMS, strict=True):
        if params.logprobs is None:
            assert one.logprobs is None
            continue
        assert one.logprobs is not None and len(one.token_ids) == params.max_tokens
        expected = rows(engines.target(), prompt, one.token_ids, params, engine.config.logprobs_mode)
        check(one.logprobs, one.token_ids, expected, params.logprobs)
        with pytest.raises(AssertionError):  # negative control: one position off
            check(one.logprobs, one.token_ids, np.roll(expected, 1, axis=0), params.logprobs)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of plain decoding without log-probabilities."""
    params = [replace(one, logprobs=None) for one in PARAMS]
    return [one.token_ids for one in engines.plain().generate(PROMPTS, params)]


def test_logprobs_rounds_at_the_first_request_are_all_compiled_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one round fails to compile, no round is kept, and the next request compiles all of them."""
    engine = tree()
    engine.generate([1, 2], SamplingParams(max_tokens=2))
    assert not any("logprobs" in name for name in engine.compile_seconds)

    compile_one = engine.core.runner.programs._compile_one

    def fails(name: str, lowered: Any) -> Any:
        if name.startswith("round"):
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return compile_one(name, lowered)

    monkeypatch.setattr(engine.core.runner.programs, "_compile_one", fails)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        engine.generate([1, 2], SamplingParams(max_tokens=2, logprobs=1))
    assert not any(key.logprobs for key in engine.core.runner.programs.compiled if key.kind == "round")
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("make", [engines.plain, chain, tree], ids=["plain", "chain", "tree"])
def test_logprobs_of_emitted_tokens_equal_those_of_a_dense_forward_pass(make: Any, expected: list[list[int]]) -> None:
    """One request asks for no log-probabilities; all tokens equal those of a run without log-probabilities."""
    engine = make()
    done = engine.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in done] == expected
    check_all(engine, done)
    if make is not engines.plain:
        assert engine.metrics.num_accepted_tokens > 0


def test_logprobs_of_raw_and_processed_mode_differ(expected: list[list[int]]) -> None:
    """Negative control: each mode's values fail the check of the other mode."""
    for make, mode in ((chain, "processed_logprobs"), (tree, "raw_logprobs")):
        (one,) = make().generate(PROMPTS[1], PARAMS[1])
        assert one.logprobs is not None
        with pytest.raises(AssertionError):
            check(one.logprobs, one.token_ids, rows(engines.target(), PROMPTS[1], one.token_ids, PARAMS[1], mode), 16)


def prompt_rows(prompt: Sequence[int]) -> np.ndarray:
    return log_softmax(decoder.logits(engines.target(), np.array([prompt]))[0])[:-1]


def check_prompt(one: Completion, prompt: Sequence[int], count: int) -> None:
    found = one.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    known = [each for each in found if each is not None]
    check(known, prompt[1:], prompt_rows(prompt), count)


def test_prompt_logprobs_of_chunked_cached_or_preempted_prompts_equal_a_dense_pass(
    expected: list[list[int]],
) -> None:
    """Prompt log-probabilities are raw in both modes; in the second run cached pages are computed again."""
    engine = tree()
    params = [replace(one, prompt_logprobs=count) for one, count in zip(PARAMS, (2, 16, 0, 5), strict=True)]
    before = engine.metrics.num_preemptions
    for _ in range(2):
        done = engine.generate(PROMPTS, params)
        assert [one.token_ids for one in done] == expected
        for one, prompt, asked in zip(done, PROMPTS, params, strict=True):
            assert one.metrics.num_cached_tokens == 0 and asked.prompt_logprobs is not None
            check_prompt(one, prompt, asked.prompt_logprobs)
    assert engine.metrics.num_preemptions > before
    check_all(engine, done)
    with pytest.raises(AssertionError):  # negative control: one position off
        check_prompt(replace(done[1], prompt_logprobs=[None, *(done[1].prompt_logprobs or [])[:-1]]), PROMPTS[1], 16)
    (cached,) = engine.generate(PROMPTS[1], SamplingParams(max_tokens=1))
    assert cached.metrics.num_cached_tokens > 0 and cached.prompt_logprobs is None


def test_prompt_logprobs_of_n_completions_are_computed_once(expected: list[list[int]]) -> None:
    """Only the first completion scores the prompt; the others use its cached pages."""
    done = tree().generate(PROMPTS[1], SamplingParams(max_tokens=4, seed=5, n=3, logprobs=1, prompt_logprobs=1))[0]
    assert [one.metrics.num_cached_tokens > 0 for one in done.samples] == [False, True, True]
    for one in done.samples:
        check_prompt(one, PROMPTS[1], 1)
        assert one.logprobs is not None and [each.token_id for each in one.logprobs] == one.token_ids


def test_stream_chunks_of_a_request_with_logprobs_contain_them_for_each_token(expected: list[list[int]]) -> None:
    params = replace(PARAMS[1], prompt_logprobs=2)
    (done,) = tree().generate(PROMPTS[1], params)
    first, *others = tree().stream(PROMPTS[1], params)
    assert first.prompt_logprobs == done.prompt_logprobs and not any(chunk.prompt_logprobs for chunk in others)
    assert [one for chunk in (first, *others) for one in chunk.logprobs or []] == done.logprobs
    assert all(len(chunk.logprobs or []) == len(chunk.token_ids) for chunk in (first, *others))
    assert all(chunk.logprobs is None for chunk in tree().stream(PROMPTS[1], PARAMS[2]))


def test_logprobs_of_a_request_with_stop_string_end_at_the_last_kept_token(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    engine = chain()
    monkeypatch.setattr(engine.input_processor, "tokenizer", ByteTokenizer())
    stop = "".join(map(chr, expected[1][4:6]))
    (done,) = engine.generate(PROMPTS[1], replace(PARAMS[1], stop=stop))
    assert done.logprobs is not None and len(done.token_ids) < PARAMS[1].max_tokens
    check(done.logprobs, done.token_ids, rows(engines.target(), PROMPTS[1], done.token_ids, PARAMS[1], "raw"), 16)


def test_completion_with_logprobs_and_trace_contains_both(expected: list[list[int]]) -> None:
    (done,) = engines.plain().generate(PROMPTS[0], PARAMS[0], trace=True)
    assert done.rounds is not None and [round_.emitted[0] for round_ in done.rounds] == done.token_ids[1:]
    assert done.logprobs is not None and done.token_ids == expected[0]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_sampling_params_with_invalid_number_of_logprobs_raises(name: str) -> None:
    for value in (-1, 21, 1.5, True, "3"):
        with pytest.raises(ValueError, match=rf"SamplingParams\.{name}: expected None or 0 to 20, got "):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"{name}: expected at most 16, the vocabulary, got 17"):
        engines.plain().generate([1], SamplingParams(**{name: 17}))  # type: ignore[arg-type]


def test_engine_config_with_unknown_logprobs_mode_raises() -> None:
    with pytest.raises(ValueError, match=r"logprobs_mode: expected one of \('raw_logprobs', 'processed_logprobs'\)"):
        EngineConfig(logprobs_mode="logits")


# -- a trained model

LONGEST_PROMPT = 250


@pytest.mark.parametrize(
    ("drafter", "count", "tokens"),
    [
        pytest.param("suffix", 3, 12, marks=pytest.mark.long),
        *(pytest.param(name, 80, 64, marks=pytest.mark.matrix) for name in ("none", "ngram", "suffix")),
    ],
)
def test_logprobs_of_a_trained_model_equal_those_of_a_dense_forward_pass(drafter: str, count: int, tokens: int) -> None:
    """Prompts of English text are decoded greedily and sampled alternately."""
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "ngram": NGram(Tree.chain(4)),
        "suffix": Suffix(Tree.topk(12, 4, 3)),
    }
    target = tiny.load_target(byte_pair.TARGET)
    prompts = [list(text.encode())[:LONGEST_PROMPT] for text in tiny.text_cuts(count, longest=LONGEST_PROMPT)]
    params = [SamplingParams(max_tokens=tokens, temperature=i % 2, seed=i, logprobs=5) for i in range(count)]
    engine = Engine(
        target,
        drafter=drafters[drafter],
        slots=4,
        max_len=LONGEST_PROMPT + tokens + 16,
        buckets=(4,),
        prefill_buckets=(128,),
    )
    with engine:
        done = engine.generate(prompts, params)
    for one, prompt, asked in zip(done, prompts, params, strict=True):
        assert one.logprobs is not None and len(one.token_ids) == tokens
        expected = rows(target, prompt, one.token_ids, asked, "raw_logprobs")
        check(one.logprobs, one.token_ids, expected, 5)
        with pytest.raises(AssertionError):  # negative control: one position off
            check(one.logprobs, one.token_ids, np.roll(expected, 1, axis=0), 5)
    assert drafter == "none" or engine.metrics.num_accepted_tokens > 0
