"""Test that 64 HTTP streams do not slow down the rounds of an 8B model on a GPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jspec import Engine
from jspec.tools.bench import random_models
from tests.support.serving import address, running

pytestmark = pytest.mark.h200
STREAMS, TOKENS, REPEATS = 64, 256, 5
REPOSITORY = Path(__file__).parents[2]


def alone(engine: Engine) -> float:
    """Return the seconds from the first token of the last of the engine's own streams to the end of all."""
    requests = [engine.prepare([7 + i] * 16, max_tokens=TOKENS, ignore_eos=True, seed=i) for i in range(STREAMS)]
    engine._queue(requests)
    while not all(request.token_ids for request in requests):
        engine.step()
    start = time.perf_counter()
    while any(request.finish_reason is None for request in requests):
        engine.step()
    return time.perf_counter() - start


def over_http(url: str) -> float:
    """Return the seconds from the first chunk of the last of the clients' streams to the end of all."""
    words = [sys.executable, "-m", "tests.support.stream_client", *map(str, (*address(url), STREAMS, TOKENS))]
    out = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    first, last, chunks = zip(*json.loads(out), strict=True)
    assert min(chunks) >= TOKENS / 2, "a chunk a round, but for those that a slow client lets merge"
    return max(last) - max(first)


def test_64_http_streams_of_an_8b_model_take_at_most_1_percent_longer_than_without_http(data: Path) -> None:
    target = random_models.random_target("llama3-8b", "bfloat16")
    tokenizer = str(data / "tokenizers" / "gpt2")
    with Engine(
        target, tokenizer=tokenizer, slots=STREAMS, max_len=512, buckets=(STREAMS,), prefix_cache=False
    ) as engine:
        alone(engine)
        with running(engine, names=("m",)) as served:
            over_http(served.url)
            found = [(alone(engine), over_http(served.url)) for _ in range(REPEATS)]
    ms = [[seconds * 1e3 / TOKENS for seconds in times] for times in zip(*found, strict=True)]
    print("ms a round, alone and over HTTP:", *(" ".join(f"{x:.3f}" for x in times) for times in ms))
    own, http = map(statistics.median, ms)
    assert http <= 1.01 * own
