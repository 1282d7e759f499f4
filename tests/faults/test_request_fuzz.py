"""Test that requests with random and odd parameters are served as promised, or raise a short error."""

from __future__ import annotations

import json
import math
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jspec import Completion, Engine, SamplingParams
from tests.support import engines, lettered, random_schemas

pytestmark = pytest.mark.once

ALLOWED = (ValueError, TypeError, NotImplementedError, FileNotFoundError)
LONGEST, SECONDS, GROWTH = 500, 20.0, 300  # limits: characters of an error, seconds of a request, MB of memory


class Odd:
    """An object whose text, length and comparison all fail."""

    def __repr__(self) -> str:
        raise KeyError("odd")

    def __len__(self) -> int:
        raise KeyError("odd")

    def __eq__(self, other: object) -> bool:
        raise KeyError("odd")

    __hash__ = None  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 10**6, 2**63, 2**64, 10**30, 10**5000, -(10**5000)),
    *(0.5, 1.0, 3.5, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1e-30, 1e39),
    *("", "a", "ab", "\ud800", "\x00", "é" * 40, "x" * 10**6, "0", "nan", " ", b"a", bytearray(b"ab")),
    *([], [1], [[]], [None], [True], [-1], [2**70], ["a"], ["a", ""], ["\ud800"], [math.nan], [[1], ["a"]]),
    *((), (1, 2), ("a", "b"), (1.5,), {}, {1: 2}, {1: math.nan}, {"a": 1}, {"1": 1.0}, {-1: 0}, {2**70: 1}),
    *(set(), {1}, {"a"}, frozenset({3}), range(3), range(10**6), list(range(10**5))),
    *(dict.fromkeys(range(10**5), 1), object(), int, len, Odd(), [Odd()], nested(50)),
    *(Decimal("0.5"), Fraction(1, 2), 1j, memoryview(b"ab")),
    *(np.array(1), np.array([1, 2]), np.array([[1]]), np.array(["a"]), np.array([0.5]), np.array([None])),
    *(np.float32(0.5), np.float64("nan"), np.int64(3), np.bool_(True), np.str_("a"), np.uint8(200), np.array([])),
)


def odd(rng: random.Random) -> Any:
    return rng.choice(ODD) if rng.random() < 0.97 else rng.choice((iter([1, 2]), (i for i in range(3))))


FITTING: dict[str, Sequence[Any]] = {  # values that are often allowed, so that many requests are served
    "max_tokens": (1, 2, 5, 40, np.int64(3), 10**9),
    "temperature": (0, 0.0, 0.3, 1, 2.5, 1e-6, 1e6, np.float32(0.7)),
    "top_k": (-1, 0, 1, 3, 10**9),
    "top_p": (1, 1.0, 0.5, 1e-9),
    "min_p": (0, 0.1, 1),
    "seed": (None, 0, 2**64 - 1),
    "stop": ("a", ["b", "ab"], ("}", "1"), [], "é", ["ab"] * 3, None),
    "stop_token_ids": ([], [1], (2, 3), {4}, np.array([5, 6])),
    "ignore_eos": (True, False),
    "repetition_penalty": (0.5, 1.5, 1e-3, 1e3),
    "presence_penalty": (-2, 2, 0.5),
    "frequency_penalty": (-2, 2, 0.5),
    "logit_bias": ({1: 100}, {0: -100, 2: 5.5}, dict.fromkeys(range(engines.VOCAB), 1.0)),
    "bad_words": (["a"], [[1, 2], "b"], [[token] for token in range(8)]),
    "allowed_token_ids": ([1, 2, 3], range(engines.VOCAB), np.arange(4), [5]),
    "min_tokens": (0, 1, 2),
    "thinking_budget": (None, 0, 3),  # refused but for None, because the template has no markers
    "processor_args": ((), []),
    "skip_special_tokens": (True, False),
    "visible_special_tokens": (("a",), ["<s>", "b"], ()),
    "draft": (True, False, 0, 1, 10**9),
    "logprobs": (None, 0, 1, 16),
    "prompt_logprobs": (None, 0, 3),
    "priority": (-1, 0, 10**30),
    "n": (1, 2, 5),
}
GRAMMARS: dict[str, Sequence[Any]] = {
    "regex": ("[ab]{1,9}", "a|b", r"1(\d|a)?", "aab*", "(a|b)*a(a|b){20}", "(a{1,999}){1,999}"),
    "json_schema": (
        *({"type": "integer"}, {"type": "string", "maxLength": 4}, '{"enum": [1, "ab", {}]}', {"const": 12}, {}),
        *({"anyOf": [{"type": "string"}, {"type": "object"}]}, {"pattern": "^(a|b)*a(a|b){20}$", "type": "string"}),
    ),
    "grammar": ('start: "a" start | "b"', 'start: "{" start "}" | "1"', "start: <[3]> <[9-11]>", "start: /[ab]{3}/"),
}
TEXT_OF_GRAMMAR = dict(zip(GRAMMARS["grammar"], ("a*b", "{*1}*", 'ab(,|"|\ufffd)', "[ab]{3}"), strict=True))
SIGNS = 'aab1{}[]()|*+?\\^$.,:<>%/"~& \nstart:é\ud800\x00'
GRAMMAR_SHARE = 0.12  # of the requests; each compiles in another process, and runs as two programs a round
FIELDS = tuple(name for name in SamplingParams.__dataclass_fields__ if name not in GRAMMARS)
PROMPTS = ([1], [1, 2, 3], [15] * 40, "ab", "a{b}12", np.array([4, 5]), (7, 7), [3] * 47, "aab" * 9)


def odd_grammar(rng: random.Random, name: str) -> Any:
    """An odd value, random signs, or a random schema, for a field of `GRAMMARS`."""
    kind = rng.randrange(3)
    if kind == 0:
        return odd(rng)
    if kind == 1 or name != "json_schema":
        signs = "".join(rng.choices(SIGNS, k=rng.randrange(40)))
        return f"start: {signs}" if name == "grammar" else signs
    return random_schemas.with_definitions(np.random.default_rng(rng.randrange(2**32)))


def some_request(rng: random.Random) -> tuple[Any, Any]:
    """Return a prompt and parameters by name; about one value in six is odd, except those of grammars."""

    def value(name: str) -> Any:
        return rng.choice(FITTING[name]) if name in FITTING and rng.random() < 0.85 else odd(rng)

    params = {name: value(name) for name in rng.sample(FIELDS, rng.choice((0, 1, 2, 3, 4, 6)))}
    if rng.random() < GRAMMAR_SHARE:
        for name in rng.sample([*GRAMMARS], rng.choice((1, 1, 1, 1, 2))):
            params[name] = rng.choice(GRAMMARS[name]) if rng.random() < 0.5 else odd_grammar(rng, name)
    return (odd(rng) if rng.random() < 0.15 else rng.choice(PROMPTS)), params


def check_served(engine: Engine, prompt: Any, params: SamplingParams, done: Completion) -> None:
    """Check a completion's number of tokens, the reason of its end, and the shapes of its records."""
    assert len(done.samples) == params.n
    for one in done.samples:
        assert one.error is None or isinstance(one.error, ValueError), one.error
        room = engines.MAX_LEN - len(one.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        assert params.min_tokens <= len(one.token_ids) <= limit or one.error is not None
        assert all(0 <= token < engines.VOCAB for token in one.token_ids)
        assert one.metrics.num_tokens == len(one.token_ids) == len(one.from_draft)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.eos_ids)}
        assert not ends & {*one.token_ids[params.min_tokens : -1]}, "it went on after a stop token"
        assert one.finish_reason in ("eos", "stop", "length", "error")
        if one.finish_reason == "length":
            assert len(one.token_ids) == limit and one.token_ids[-1] not in ends
        assert one.text is not None
        if params.min_tokens == 0:
            assert not any(stop in one.text for stop in params.stop), "it went on after a stop string"
        if params.allowed_token_ids is not None and not params.grammar_field and not one.error:
            assert {*one.token_ids} <= {*params.allowed_token_ids}
        if one.finish_reason in ("eos", "stop") and not params.stop:
            check_grammar(params, one.text)
        assert (one.logprobs is None) == (params.logprobs is None)
        assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
        assert one.prompt_logprobs is None or len(one.prompt_logprobs) == len(one.prompt_token_ids)


def check_grammar(params: SamplingParams, text: str) -> None:
    """Check that a whole text satisfies the request's grammar, by other libraries than those that wrote it."""
    if params.regex in GRAMMARS["regex"]:
        assert re.fullmatch(params.regex, text)
    elif params.json_schema is not None:
        valid = pytest.importorskip("jsonschema").Draft202012Validator(json.loads(str(params.json_schema)))
        assert valid.is_valid(json.loads(text)), (params.json_schema, text)
    elif params.grammar in TEXT_OF_GRAMMAR:
        assert re.fullmatch(TEXT_OF_GRAMMAR[params.grammar], text)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.fuzz)])
def test_engine_given_random_requests_serves_them_or_refuses_in_few_words(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("outlines_core")
    pytest.importorskip("llguidance")
    monkeypatch.setattr(lettered.chain().input_processor._grammars._run, "seconds", 0.5)  # of CPU time for a grammar
    engine, rng, outcomes, times = lettered.chain(), random.Random(count), Counter[str](), list[float]()
    faults: list[str] = []
    before = 0
    for index in range(count):
        prompt, fields = some_request(rng)
        start = time.perf_counter()
        try:
            params = SamplingParams(**fields)
            (done,) = engine.generate(prompt, params)
        except ALLOWED as error:
            outcomes[type(error).__name__] += 1
            if isinstance(error, UnicodeError):
                faults.append(f"{index}: {error!r} for {sorted(fields)}")
            if len(str(error)) >= LONGEST:
                faults.append(f"{index}: a message of {len(str(error))} characters: {error!s:.300}")
        except Exception as error:
            faults.append(f"{index}: {type(error).__name__}: {error!s:.200} for {sorted(fields)}")
        else:
            outcomes["served"] += 1
            if params.grammar_field is not None:
                outcomes[f"served {params.grammar_field}"] += 1
            check_served(engine, prompt, params, done)
        times.append(time.perf_counter() - start)
        if index == count // 4:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{count} requests: {dict(outcomes)}; the longest took {max(times):.2f} s; memory grew by {grown:.0f} MB")
    assert not faults, "\n".join(faults[:20])
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    engine.scheduler.pages.check()
    assert max(times) < SECONDS and grown < GROWTH
    assert outcomes["served"] > count / 10 and outcomes["ValueError"] > count / 10
    assert count < 1000 or all(outcomes[f"served {name}"] > 5 for name in GRAMMARS)
