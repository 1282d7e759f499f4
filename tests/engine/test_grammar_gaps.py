"""Test that streams continue while grammars of other requests take long to compile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from tests.support import engines, lettered

pytestmark = [pytest.mark.once, pytest.mark.timing]
pytest.importorskip("outlines_core")
pytest.importorskip("llguidance")

EXPLODES = "(a|b)*a(a|b){20}"
TOKENS = 128_000


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {  # an engine made in the thread that uses it
    "regex": lambda: dict(regex=EXPLODES),
    "nested arrays": lambda: dict(json_schema=nested(26)),
    "enum": lambda: dict(json_schema={"enum": [f"value {index}" for index in range(100_000)]}),
    "many properties": lambda: dict(json_schema={"properties": {f"name{i}": {"type": "integer"} for i in range(1500)}}),
    "pattern": lambda: dict(json_schema={"type": "string", "pattern": f"^{EXPLODES}$"}),
    "any value": lambda: dict(json_schema={}),
    "rules": lambda: dict(
        grammar="start: r0\n" + "".join(f'r{i}: r{i + 1} | "a" r{i + 1}\n' for i in range(900)) + 'r900: "b"'
    ),
}


class Words(lettered.Lettered):
    """A tokenizer with a large vocabulary; the model lacks most of its tokens."""

    def token_bytes(self) -> list[bytes | None]:
        rng = random.Random(0)
        return [*self._texts[: engines.VOCAB], *(b"%x" % rng.getrandbits(24) for _ in range(TOKENS))]


@cache
def engine() -> Engine:
    made = Engine(
        engines.target(), slots=2, max_len=engines.MAX_LEN, page_size=4, tokenizer=lettered.tokenizer(), eos_ids=(0,)
    )
    made.generate([[1]], SamplingParams(max_tokens=4, ignore_eos=True))
    made.generate([[1]], SamplingParams(max_tokens=4, regex="a{3}"))
    made.generate([[1]], SamplingParams(max_tokens=4, grammar='start: "a" start | "b"'))
    return made


def refused_or_served(given: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        engine().input_processor.requests([[1]], SamplingParams(max_tokens=4, **given), trace=False)


STREAMED = SamplingParams(max_tokens=engines.MAX_LEN - 2, ignore_eos=True, temperature=0)


def longest_gap(is_over: Callable[[], bool]) -> float:
    """Stream requests until ``is_over`` returns True; return the longest pause between two chunks, in seconds."""
    last, longest = time.perf_counter(), 0.0
    while True:
        for _ in engine().stream([1], STREAMED):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        if is_over():
            return longest


def gap_beside(name: str) -> float:
    """Return the longest pause of a stream, in seconds, while a thread compiles a grammar."""
    engine()
    thread = threading.Thread(target=lambda: refused_or_served(HOSTILE[name]()))
    thread.start()
    try:
        return longest_gap(lambda: not thread.is_alive())
    finally:
        thread.join()


def gap_in_asyncio(name: str) -> float:
    """Return the longest pause of the event loop, in seconds, while a task submits a request with a grammar."""

    async def ask() -> None:
        params = SamplingParams(max_tokens=4, **HOSTILE[name]())
        with contextlib.suppress(ValueError):
            async for _ in engine().astream([1], params):
                pass

    async def run() -> float:
        task, last, longest = asyncio.create_task(asyncio.wait_for(ask(), 60)), time.perf_counter(), 0.0
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        await task
        return longest

    engine()
    return asyncio.run(run())


@pytest.mark.parametrize("name", HOSTILE)
def test_longest_pause_of_a_stream_beside_a_hostile_grammar_is_under_200_ms(name: str) -> None:
    assert gap_beside(name) < 0.2


@pytest.mark.parametrize("name", ["regex", "pattern", "rules"])
def test_longest_pause_of_the_event_loop_beside_a_hostile_grammar_is_under_200_ms(name: str) -> None:
    assert gap_in_asyncio(name) < 0.2


def test_llguidance_tokenizer_of_a_large_vocabulary_holds_the_interpreter_under_200_ms() -> None:
    from jspec.engine.grammar.cfg_matcher import GuidanceVocabulary

    vocabulary, gaps, done = GuidanceVocabulary(Words().token_bytes(), TOKENS), list[float](), threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    assert vocabulary.tokenizer.vocab_size == TOKENS + 1
    done.set()
    thread.join()
    assert max(gaps) < 0.2
