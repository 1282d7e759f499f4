"""Test how much longer 64 streams take over HTTP: with an 8B model on a GPU, and with the byte pair on a CPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jspec import Eagle3, Engine, Tree
from jspec.engine.callers.by_hand import ByHand
from jspec.tools.bench import random_models
from tests.support import byte_pair
from tests.support.serving import address, running

STREAMS, TOKENS, REPEATS = 64, 256, 5
REPOSITORY = Path(__file__).parents[2]


def alone(engine: Engine) -> float:
    """Return the seconds from the first token of the last of the engine's own streams to the end of all."""
    with ByHand(engine) as by_hand:
        own = [dict(max_tokens=TOKENS, ignore_eos=True, seed=i) for i in range(STREAMS)]
        requests = [by_hand.submit([7 + i] * 16, **own[i]) for i in range(STREAMS)]
        while not all(request.token_ids for request in requests):
            by_hand.step()
        start = time.perf_counter()
        while any(request.finish_reason is None for request in requests):
            by_hand.step()
        return time.perf_counter() - start


def over_http(url: str, most: int) -> float:
    """Return the seconds from the first chunk of the last of the clients' streams to the end of all.

    Args:
        most: largest number of tokens that a round emits.
    """
    words = [sys.executable, "-m", "tests.support.stream_client", *map(str, (*address(url), STREAMS, TOKENS))]
    out = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    first, last, chunks = zip(*json.loads(out), strict=True)
    assert min(chunks) >= TOKENS / most / 2, "a chunk a round, but for those that a slow client lets merge"
    return max(last) - max(first)


def ratio(engine: Engine) -> float:
    """Return the median time of the streams over HTTP, divided by that without HTTP."""
    most = engine.core.runner.program.drafter.tree.depth + 1
    engine.warmup()
    alone(engine)
    with running(engine, names=("m",)) as served:
        over_http(served.url, most)
        found = [(alone(engine), over_http(served.url, most)) for _ in range(REPEATS)]
    ms = [[seconds * 1e3 / TOKENS for seconds in times] for times in zip(*found, strict=True)]
    print("ms for each of the tokens, alone and over HTTP:", *(" ".join(f"{x:.3f}" for x in times) for times in ms))
    own, http = map(statistics.median, ms)
    return http / own


@pytest.mark.h200
def test_64_http_streams_of_an_8b_model_take_at_most_1_percent_longer_than_without_http(data: Path) -> None:
    target = random_models.random_target("llama3-8b", "bfloat16")
    tokenizer = str(data / "tokenizers" / "gpt2")
    with Engine(
        target, tokenizer=tokenizer, slots=STREAMS, max_len=512, buckets=(STREAMS,), prefix_cache=False
    ) as engine:
        assert ratio(engine) <= 1.01


@pytest.mark.timing
def test_64_http_streams_of_the_demo_pair_take_at_most_a_quarter_longer_than_without_http() -> None:
    """The client runs on the same cores."""
    drafter = Eagle3.from_pretrained(byte_pair.HEAD, tree=Tree.chain(4))
    options = dict(slots=STREAMS, max_len=512, buckets=(STREAMS,), prefix_cache=False)
    with Engine.from_pretrained(byte_pair.TARGET, drafter=drafter, tokenizer="bytes", **options) as engine:
        assert ratio(engine) <= 1.25
