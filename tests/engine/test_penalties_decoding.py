"""Test penalties in the engine: plain decoding equals transformers' processors, and drafters equal plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Engine, SamplingParams, Tree
from jspec.core.config import EngineConfig
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.input.penalty_input import bad_words
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.sampling import sampler
from tests.reference import decoder, processors
from tests.support import engines, tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

PROMPTS = [[1, 2, 3], [4] * 6, list(range(1, 12)), [5, 1, 5, 1, 5], [7], [9, 9, 2, 1], [3, 1, 2, 3, 1, 2, 3], [6, 2]]
LENGTH = 24
BOTH = dict(repetition_penalty=1.4, frequency_penalty=0.3)
ENGINE_PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, **BOTH, presence_penalty=0.2),
    SamplingParams(temperature=0, max_tokens=LENGTH, bad_words=[[14], [15, 6, 15], [6, 15, 3], [1, 6]]),
    SamplingParams(seed=3, max_tokens=LENGTH, allowed_token_ids=[1, 5, 6, 7, 11], frequency_penalty=-0.5, draft=2),
    SamplingParams(seed=4, max_tokens=LENGTH, stop_token_ids=(1, 2, 3, 6), min_tokens=11, **BOTH, top_k=6, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=LENGTH),
    SamplingParams(seed=5, max_tokens=2, logit_bias={2: 4.0, 3: -100}, draft=False),
    SamplingParams(temperature=0, max_tokens=3, stop_token_ids=tuple(range(8)), min_tokens=3, presence_penalty=1.5),
    SamplingParams(seed=7, max_tokens=1, logit_bias={11: 100}, min_p=0.1),
]


@cache
def plain_tokens() -> list[list[int]]:
    done = engines.plain().generate(PROMPTS, ENGINE_PARAMS)
    return [completion.raise_for_error().token_ids for completion in done]


def by_processors(prompt: list[int], params: SamplingParams) -> list[int]:
    """Decode token by token with a pass over the whole text, transformers' processors and the project's noise."""
    output: list[int] = []
    while len(output) < params.max_tokens and not set(output[-1:]) & set(params.stop_token_ids):
        text = np.array([[*prompt, *output]])
        logits = decoder.logits(engines.target(), text)[0, -1].astype(np.float32)
        logits = processors.edited(logits, prompt, output, params, params.stop_token_ids)
        if params.temperature:
            key = sampler.keys(on_device([[0, params.seed]], jnp.uint32), 0, on_device([text.shape[1]]))
            logits = processors.processed(logits, params) + np.asarray(sampler.gumbel(key, engines.VOCAB))[0]
        output.append(int(logits.argmax()))
    return output


def test_plain_decoding_with_penalties_equals_decoding_with_transformers_processors() -> None:
    """In later runs the prompts' pages are cached and the slots were used before."""
    assert plain_tokens() == [by_processors(*each) for each in zip(PROMPTS, ENGINE_PARAMS, strict=True)]
    for order in (range(8), range(7, -1, -1)):
        done = engines.plain().generate([PROMPTS[i] for i in order], [ENGINE_PARAMS[i] for i in order])
        assert [completion.token_ids for completion in done] == [plain_tokens()[i] for i in order]


def test_plain_decoding_without_penalties_emits_other_tokens() -> None:
    """Negative control: the one row that has no penalties keeps its tokens."""
    off = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None, bad_words=())
    off |= dict(allowed_token_ids=None, min_tokens=0)
    done = engines.plain().generate(PROMPTS, [replace(params, **off) for params in ENGINE_PARAMS])
    same = [completion.token_ids == expected for completion, expected in zip(done, plain_tokens(), strict=True)]
    assert same == [not params.controls_used for params in ENGINE_PARAMS]


def test_chain_drafting_with_penalties_emits_tokens_of_plain_decoding() -> None:
    engine = engines.eagle3(rounds=3, page_size=1)
    check_engine(engine)


@pytest.mark.long
def test_dynamic_tree_with_penalties_and_preemption_emits_tokens_of_plain_decoding() -> None:
    """After a preemption the engine counts the prompt's and output's tokens again."""
    drafter = DraftModel(tiny.model(engines.VOCAB, layers=1, seed=2), Tree.topk(9, 3, 3))
    engine = engines.make(
        engines.target(),
        drafter=drafter,
        slots=4,
        max_len=engines.MAX_LEN,
        page_size=4,
        pages=26,
        buckets=(4,),
        prefill_buckets=(engines.MAX_LEN,),
    )
    check_engine(engine)
    assert engine.metrics.num_preemptions > 0


def check_engine(engine: Engine) -> None:
    done = engine.generate(PROMPTS, ENGINE_PARAMS)
    assert [completion.token_ids for completion in done] == plain_tokens()
    assert engine.metrics.num_accepted_tokens > 0
    assert not any(done[5].from_draft)


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(logit_bias={16: 1.0}), r"logit_bias: expected ids in \[0, 16\), got 16"),
    (dict(allowed_token_ids=[3, 99]), r"allowed_token_ids: expected ids in \[0, 16\), got 99"),
    (dict(bad_words=[[1, 20]]), r"bad_words: expected ids in \[0, 16\), got 20"),
    (
        dict(bad_words=["no"]),
        r"bad_words: expected token ids, because this engine has no tokenizer, got .no.; pass tokenizer=",
    ),
    (dict(bad_words=[[1] * 17]), r"words of at most 16 tokens, got one of 17"),
    (
        dict(bad_words=[[1, i % 16, i // 16] for i in range(129)]),
        r"bad_words: expected at most 128 of more than one token, got 129",
    ),
    (dict(min_tokens=50, max_tokens=60), r"min_tokens: expected at most 47, what max_len leaves, got 50"),
    (
        dict(min_tokens=1, allowed_token_ids=[1, 2], stop_token_ids=(2, 1)),
        r"expected a token that neither bad_words=\(\) nor min_tokens=1 takes out, got \(1, 2\); allow more or ban",
    ),
    (
        dict(bad_words=[[token] for token in range(16)]),
        r"expected a token that neither bad_words=.*, got None; allow more or ban less",
    ),
    (
        dict(allowed_token_ids=[1, 2], bad_words=[[1], [3, 3, 2]]),
        r"neither bad_words=\(\(1,\), \(3, 3, 2\)\) nor min_tokens=0 takes out after \(3, 3\), got \(1, 2\)",
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=str)
def test_request_with_impossible_penalties_raises_before_queueing(given: dict, message: str) -> None:
    engine = engines.plain()
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], [2]], [SamplingParams(), SamplingParams(**given)])
    assert not engine.scheduler.has_work


def test_input_processor_without_controls_raises_naming_the_penalties() -> None:
    admission = InputProcessor(None, engines.VOCAB, (), EngineConfig(controls=False))
    admission.requests([1], SamplingParams(top_k=3), trace=False)
    with pytest.raises(ValueError, match="presence_penalty, min_tokens: this engine was built with controls=False"):
        admission.requests([1], SamplingParams(presence_penalty=1, min_tokens=1), trace=False)


def test_bad_words_that_ban_every_repetition_make_tokens_alternate() -> None:
    """Each of the two allowed tokens is banned only after itself."""
    params = SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[5, 6], bad_words=[[5, 5], [6, 6]])
    (done,) = engines.plain().generate([1, 5], params)
    assert done.token_ids == [6, 5] * 4


def test_bad_words_given_as_text_are_banned_with_and_without_a_leading_blank() -> None:
    params = SamplingParams(bad_words=["ab", " ab", [1]])
    assert bad_words(params, ByteTokenizer()) == (tuple(b"ab"), tuple(b" ab"), (1,))


class Blanks:
    """A tokenizer that prepends a blank to a text, as SentencePiece does, with one token per character."""

    hidden_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return [0, *map(ord, " " + text)]


def test_bad_words_with_a_sentencepiece_tokenizer_include_the_form_without_blank() -> None:
    words = bad_words(SamplingParams(bad_words=["ab"]), Blanks())  # type: ignore[arg-type]
    assert words == ((32, 97, 98), (32, 32, 97, 98), (97, 98))


def test_sampling_params_with_numbers_too_large_for_a_float_raise() -> None:
    assert SamplingParams(max_tokens=2**64).max_tokens == 2**64
    for field in ("temperature", "presence_penalty", "min_tokens"):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: 10**400})
