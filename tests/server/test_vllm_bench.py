"""Test that `vllm bench serve` reads streams and metrics, and prints the engine's own acceptance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jspec import Engine
from tests.support import clients, serving

pytestmark = pytest.mark.clients
NUM_PROMPTS, NUM_TOKENS = 12, 48


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clients.story_folder(data, tmp_path_factory.mktemp("stories") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return clients.story_engine(folder)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[serving.Running]:
    with serving.running(engine, max_queue=2 * NUM_PROMPTS) as one:
        yield one


def bench(server: serving.Running, folder: Path, home: Path, backend: str, endpoint: str) -> dict[str, Any]:
    options = {
        "backend": backend,
        "base-url": server.url,
        "endpoint": endpoint,
        "model": serving.NAME,
        "tokenizer": str(folder),
        "dataset-name": "random",
        "random-input-len": 32,
        "random-output-len": NUM_TOKENS,
        "num-prompts": NUM_PROMPTS,
        "temperature": 0,
        "result-filename": home / "result.json",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    printed = clients.run("vllm", "bench", "serve", *words, "--ignore-eos", "--save-result", home=home)
    print(printed[printed.index("====") :])
    return json.loads((home / "result.json").read_text())


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_printed_counts_and_acceptance_are_the_engines_own(
    engine: Engine, server: serving.Running, folder: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    before = dataclasses.replace(engine.metrics)
    result, after = bench(server, folder, tmp_path, backend, endpoint), engine.metrics
    drafts, tokens, accepted = (
        getattr(after, name) - getattr(before, name)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["total_output_tokens"] == after.num_tokens - before.num_tokens == NUM_PROMPTS * NUM_TOKENS
    counts = tuple(result[f"spec_decode_{name}"] for name in ("num_drafts", "draft_tokens", "accepted_tokens"))
    assert counts == (drafts, tokens, accepted) and accepted > 0
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / tokens)
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0
