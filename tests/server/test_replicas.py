"""Test a server of two replicas: answers, streams, routes about the server, failures and the command's options."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import openai
import pytest

from jspec import Engine, Replicas, SamplingParams
from jspec.server import run
from jspec.tools.command_line import run as run_command
from tests.support import folders, serving

ASK: dict[str, Any] = dict(model=serving.NAME, max_tokens=16, temperature=0.8)
PROMPTS = [f"Once upon {i} times" for i in range(10)]
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def two() -> Iterator[Replicas]:
    make = lambda mesh: serving.small_engine(serving.SLOTS, serving.MAX_LEN, mesh=mesh)  # noqa: E731
    with Replicas(make, jax.devices()[1:3]) as made:
        yield made


def expected() -> list[str]:
    """Return the texts that the small engine gives."""
    params = [SamplingParams(max_tokens=16, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    return [done.text or "" for done in serving.engine().generate(PROMPTS, params)]


def test_server_of_two_replicas_streams_and_answers_with_the_texts_of_one_engine(two: Replicas) -> None:
    """All requests are sent before any engine makes a step, so both replicas have some."""
    before = [engine.metrics.num_tokens for engine in two.engines]

    async def ask(server: serving.Running, seed: int, stream: bool) -> str:
        body = ASK | {"prompt": PROMPTS[seed], "seed": seed, "stream": stream}
        reader, writer = await serving.post(server.url, PATH, body)
        status, _, raw = await serving.answer(reader)
        writer.close()
        assert status == 200
        parts = serving.events(raw)[:-1] if stream else [json.loads(raw)]
        return "".join(one["choices"][0]["text"] for one in parts)

    async def ask_all(server: serving.Running) -> list[str]:
        with serving.held(two.engines[0]), serving.held(two.engines[1]):
            asked = [asyncio.create_task(ask(server, seed, seed % 2 == 0)) for seed in range(len(PROMPTS))]
            while server.service.calls.pending < len(PROMPTS):
                await asyncio.sleep(0.005)
        return await asyncio.gather(*asked)

    with serving.running(two) as server:
        assert server.service.calls.limit == 5 * 2 * serving.SLOTS
        assert asyncio.run(ask_all(server)) == expected()
        with server.http() as http:
            assert http.get("/health").json() == {"status": "ok", "replicas": 2, "failed": 0}
            stats, metrics = http.get("/stats").json(), http.get("/metrics").text
    gained = [engine.metrics.num_tokens - own for engine, own in zip(two.engines, before, strict=True)]
    assert min(gained) > 16
    assert (stats["slots"], stats["pages_total"]) == (two.num_slots, two.num_pages)
    assert stats["tokens"] == two.metrics.num_tokens
    assert re.findall(r'generation_tokens_total\{model_name="tiny",engine="(\d)"\}', metrics) == ["0", "1"]
    assert metrics.count("# TYPE vllm:generation_tokens_total counter") == 1


def test_server_of_one_engine_says_nothing_of_replicas() -> None:
    with serving.running() as server, server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}


def test_client_that_leaves_ends_its_request_on_its_replica(two: Replicas) -> None:
    async def leave(server: serving.Running) -> None:
        reader, writer = await serving.post(server.url, PATH, ASK | {"prompt": "a", "max_tokens": 150, "stream": True})
        await reader.readuntil(b"data: ")
        writer.close()

    with serving.running(two) as server:
        asyncio.run(leave(server))
        serving.wait_until(lambda: server.service.calls.pending == 0)
    assert two.metrics.pages_in_use == 0 and two.metrics.finished["abort"] >= 1


def test_server_serves_on_without_a_lost_replica_and_ends_without_any(
    two: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving.running(two) as server, server.http() as http:
        monkeypatch.setattr(two.engines[0].threads.recovery, "healthy", False)
        for seed in range(4):
            answer = server.client().completions.create(prompt=PROMPTS[seed], seed=seed, **ASK)
            assert answer.choices[0].text == expected()[seed]
        assert http.get("/health").json() == {"status": "ok", "replicas": 2, "failed": 1}
        assert not server.ended()
        monkeypatch.setattr(two.engines[1].threads.recovery, "healthy", False)
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):  # it may have ended already
            server.client().completions.create(prompt="a", **ASK)
        serving.wait_until(server.ended)
        monkeypatch.undo()
    assert server.server.status == 1


# -- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    return folders.write(
        path, folders.TARGET | {"vocab_size": 256}, folders.target_tensors({**folders.TARGET, "vocab_size": 256})
    )


def test_command_with_replicas_and_tensor_parallel_serves_engines_on_devices_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Engine | Replicas] = []

    def serve(engine: Engine | Replicas, *_: Any) -> int:
        assert isinstance(engine, Replicas)
        served.append(engine)
        found = [engine.core.runner.program.mesh for engine in engine.engines]
        assert [list(mesh.devices) for mesh in found if mesh is not None] == [jax.devices()[:2], jax.devices()[2:4]]
        assert engine.num_slots == 6
        return 0

    monkeypatch.setattr(run, "serve", serve)
    words = ["serve", "--target", str(folder), "--tokenizer", "bytes", "--port", "0", "--slots", "3", "--max-len", "64"]
    assert run_command([*words, "--replicas", "2", "--tensor-parallel", "2"]) == 0
    assert len(served) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--replicas", "3", "--tensor-parallel", "2"],
            "--replicas 3 with --tensor-parallel 2: devices: expected 1 to 4",
        ),
        (["--replicas", "0"], "--replicas 0 with --tensor-parallel 1: devices: expected 1 to 4"),
    ],
)
def test_command_refuses_more_replicas_than_devices(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run_command(["serve", "--target", str(folder), "--port", "0", *words]) == 2
    assert message in capsys.readouterr().err


def test_commands_answer_the_name_of_vllm_with_ours(capsys: pytest.CaptureFixture) -> None:
    for command in ("serve", "generate"):
        with pytest.raises(SystemExit):
            run_command([command, "--target", "demo", "--data-parallel-size", "2"])
        assert "instead: --replicas of jspec serve" in capsys.readouterr().err
