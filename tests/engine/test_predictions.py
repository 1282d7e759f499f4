"""Test that predictions change no token, that right ones are accepted, and that none outlives its request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from jspec import Beside, Completion, Eagle3, Engine, EngineConfig, NGram, SamplingParams, Suffix
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.schedule.draft_length import DispatchResult, Policy
from jspec.engine.schedule.sizes import RoundSize
from tests.support import engines, lettered, tiny

pytestmark = pytest.mark.once

TOKENS, MOST = 30, 32
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1], [1, 5], [9, 2, 6, 5, 9, 2, 6, 5, 9, 2], [3], [7, 7, 7]]
OPTIONS: dict[str, Any] = dict(
    slots=2, max_len=engines.MAX_LEN, buckets=(2,), prefill_buckets=(8,), predicted_tokens=MOST
)
LETTERS = dict(tokenizer=lettered.tokenizer(), eos_ids=(lettered.END,))


def eagle3(tree: str) -> Eagle3:
    return Eagle3(tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1)), tree)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], float]] = {  # drafter, options, least length of right ones
    "ngram": (lambda: NGram("chain:4"), dict(page_size=4, pages=99, rounds_per_dispatch=2, **LETTERS), 4.5),
    "suffix": (lambda: Suffix("topk:9,3,4"), dict(slots=4, buckets=(4,), page_size=4, pages=26), 3.5),
    "engine": (lambda: Suffix("chain:4", scope="engine", corpus_tokens=64), {}, 4.5),
    "beside": (lambda: Beside(eagle3("chain:3"), NGram("chain:4"), "beside"), {}, 4.5),
    "replace": (lambda: Beside(eagle3("chain:3"), NGram("chain:4")), dict(adaptive=True, draft_depths=(0, 4)), 2.5),
    "divided": (lambda: Suffix("chain:4"), dict(tensor_parallel=2), 4.5),
}

MARKS = {"divided": pytest.mark.long, "engine": pytest.mark.long}


class Turns(Policy):
    """A policy that leaves each fourth round without a draft."""

    def __init__(self) -> None:
        self._depths = cycle((4, 4, 0, 4))

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        return RoundSize(next(self._depths))

    def learn(self, result: DispatchResult) -> None:
        pass


@cache
def engine_of(kind: str) -> Engine:
    drafter, options, _ = KINDS[kind]
    engine = engines.make(engines.target(), drafter=drafter(), **(OPTIONS | options))
    if engine.config.adaptive:
        engine.policy = Turns()
    return engine


def params_of(index: int, **fields: Any) -> SamplingParams:
    """Return parameters that alternate between greedy and seeded."""
    return SamplingParams(max_tokens=TOKENS, temperature=float(index % 2), seed=index, ignore_eos=True, **fields)


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.raise_for_error().token_ids for completion in completions]


def wrong(output: list[int]) -> list[int]:
    """Return a prediction whose tokens are all wrong."""
    return [(token + 1) % engines.VOCAB for token in output]


def edited(output: list[int]) -> list[int]:
    """Return an output without some tokens, with other tokens instead of some, and with some more."""
    return [*output[:6], *output[8:14], *wrong(output[14:16]), *output[16:20], 5, 5, *output[20:]]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in KINDS])
def test_tokens_with_any_prediction_are_those_of_plain_decoding(kind: str) -> None:
    """Slots are reused, prompts are chunked; "ngram" finds them in the prefix cache, and "suffix" has too few pages."""
    engine, plain = engine_of(kind), engines.plain()
    params = [params_of(index) for index in range(len(PROMPTS))]
    outputs = ids_of(plain.generate(PROMPTS, params))
    unrelated = np.random.default_rng(0).integers(0, engines.VOCAB, (5, MOST)).tolist()
    lengths = {}
    for name, predictions in {
        "none": [None] * 5,
        "right": outputs,
        "edited": list(map(edited, outputs)),
        "wrong": list(map(wrong, outputs)),
        "unrelated": unrelated,
        "mixed": [outputs[0], None, wrong(outputs[2]), edited(outputs[3]), []],
    }.items():
        each = [params_of(index, prediction=prediction) for index, prediction in enumerate(predictions)]
        done = engine.generate(PROMPTS, each)
        assert ids_of(done) == outputs, name
        lengths[name] = sum(one.metrics.num_tokens for one in done) / sum(one.metrics.num_drafts + 1 for one in done)
    assert lengths["right"] > max(KINDS[kind][2] * 0.9, lengths["none"] + 0.3), lengths
    assert lengths["right"] > lengths["edited"] > lengths["none"], lengths
    assert (engine.metrics.num_preemptions > 0) == (kind == "suffix")
    assert engine.metrics.num_cached_tokens > 0 or kind != "ngram"


def rounds_of(prediction: list[int] | None = None) -> list[list[list[int]]]:
    """Return the drafts of every round of two requests that run at once, with and without a prediction."""
    done = engine_of("ngram").generate(PROMPTS[:2], params_of(0, prediction=prediction), trace=True)
    return [[one_round.tokens.tolist() for one_round in one.rounds] for one in done]


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_prediction_is_forgotten_when_another_request_takes_its_slot(
    is_forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests without a prediction draft as those before; negative control: the engine forgets none."""
    before = rounds_of()
    assert rounds_of([7, 8, 9, 10, 11] * 5) != before
    if not is_forgotten:
        monkeypatch.setattr(engine_of("ngram").core.runner, "_predicted_slots", frozenset())
    assert (rounds_of() == before) == is_forgotten


def test_prediction_serves_each_of_several_completions_and_each_grammar() -> None:
    """Grammars are a table of the device, and a parser of the host, whose rounds are two programs."""
    engine = engine_of("ngram")
    for fields in (
        dict(n=3, temperature=0.7),
        dict(regex="(ab|ba|c,){8,12}", temperature=1.0),
        dict(grammar='start: ("ab" | "ba" | "c,")~8..12', temperature=1.0),
    ):
        (without,) = engine.generate("aab", SamplingParams(max_tokens=24, seed=3, **fields))
        samples = without.raise_for_error().samples
        for prediction, is_right in ((samples[0].token_ids, True), ("b1" * 9, False)):
            params = SamplingParams(max_tokens=24, seed=3, **fields, prediction=prediction)
            (done,) = engine.generate("aab", params)
            assert ids_of(done.samples) == ids_of(samples)
            assert (done.metrics.mean_acceptance_length > 3.5) == is_right, (fields, done.metrics)


def check(config: EngineConfig, prediction: Any, tokenizer: Any = None) -> Any:
    return InputProcessor(tokenizer, engines.VOCAB, (), config).request([1], SamplingParams(prediction=prediction))


@pytest.mark.parametrize(
    ("most", "prediction", "message"),
    [
        (0, [1], "prediction: expected nothing, because this engine has predicted_tokens=0, got (1,); leave it out"),
        (0, "a", "--predicted-tokens N) and a drafter with a look-up (--ngram, or --lookup ngram beside a head)"),
        (2, [1, 2, 3], "prediction: expected at most 2 tokens, got 3; shorten it, or raise the engine's predicted_tok"),
        (2, "a" * 257, "prediction: expected at most 256 characters (128 for each of 2 tokens), got 257; shorten it"),
        (2, [99], f"prediction: expected ids in [0, {engines.VOCAB}), got 99"),
        (2, "a", "prediction: expected token ids, because this engine has no tokenizer, got 'a'; pass tokenizer="),
        (2, [-1], "SamplingParams.prediction: expected None, a text or a list of token ids >= 0, got (-1,)"),
        (2, 1.5, "SamplingParams.prediction: expected None, a text or a list of token ids >= 0, got 1.5"),
    ],
)
def test_prediction_that_cannot_be_used_raises(most: int, prediction: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(EngineConfig(predicted_tokens=most), prediction)


def test_text_of_a_prediction_has_the_tokenizers_ids_without_special_ones() -> None:
    tokens = lettered.tokenizer()
    made = check(EngineConfig(predicted_tokens=9), "aabc", tokens)
    assert made.prediction == tuple(tokens.encode("aabc")) and len(made.prediction) == 2


def test_engine_with_predicted_tokens_and_no_look_up_raises() -> None:
    message = "predicted_tokens: expected a drafter with a look-up, got Eagle3('chain:3'); name one (drafter=\"ngram\""
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(engines.target(), drafter=eagle3("chain:3"), predicted_tokens=4)


def test_predictions_are_refused_under_rules_whose_tokens_depend_on_the_draft() -> None:
    """A caller's earlier answer with the same seed would be accepted more often than its probability."""
    with pytest.raises(ValueError, match="predicted_tokens: expected accept=\"coupled\", got 'rejection'"):
        engines.make(engines.target(), NGram("chain:4"), **(OPTIONS | dict(accept="rejection")))
