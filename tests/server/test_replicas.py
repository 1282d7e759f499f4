"""Test a server of two replicas: answers, streams, routes about the server, failures and the command's options."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import pytest

from jspec import Beside, Engine, Replicas, SamplingParams, Tree
from jspec.server import run
from jspec.tools.command_line import run as run_command
from tests.support import engines, folders, serving, tiny
from tests.support.beside import Known, KnownModel

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


TEXTS = ("one, two", "two, one", "abc defg", "12 34 56")
ROUNDS = 3  # of each answer


def look_up_beside_a_head(mesh: Any) -> Engine:
    """Make an engine whose look-up drafts three right tokens, and whose head drafts a right one and a wrong one."""
    plain = engines.shared_bytes().generate(list(TEXTS), SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
    outputs, prompts = np.array([done.token_ids for done in plain]), [list(text.encode()) for text in TEXTS]
    head = Known(outputs, prompts, Tree.chain(2), 256, np.array([[0, 1]] * len(TEXTS)))
    drafter = Beside(KnownModel(head), Known(outputs, prompts, Tree.chain(3), 256), "beside")
    return engines.make(tiny.model(256, layers=1), drafter=drafter, mesh=mesh, **engines.BYTE_OPTIONS)


def test_answers_and_prometheus_text_name_what_the_head_and_the_look_up_drafted() -> None:
    """In each round the first token is both's and counts as the head's, and so does its wrong one."""
    asked: list[dict[str, Any]] = [{"n": 1}, {"n": 2}, {"n": 1, "stream": True}, {"n": 2, "stream": True}]
    with Replicas(look_up_beside_a_head, jax.devices()[1:3]) as two:
        with serving.running(two) as server, server.http() as http:
            for text, fields in zip(TEXTS, asked, strict=True):
                answer = server.client().completions.create(
                    model=serving.NAME,
                    prompt=text,
                    max_tokens=1 + 4 * ROUNDS,
                    temperature=0,
                    extra_body={"ignore_eos": True, "jspec": {"metrics": True}},
                    **fields,
                )
                last = [chunk for chunk in answer if chunk.choices][-1] if "stream" in fields else answer
                found, rounds = last.model_extra["metrics"]["speculative_decoding"], fields["n"] * ROUNDS
                assert found["num_spec_steps"] == rounds
                assert found["num_draft_tokens_per_source"] == {"head": 2 * rounds, "lookup": 2 * rounds}
                assert found["num_accepted_draft_tokens_per_source"] == {"head": rounds, "lookup": 2 * rounds}
            text = http.get("/metrics").text
        total = ROUNDS * sum(fields["n"] for fields in asked)
        assert two.metrics.num_accepted_tokens_per_source == {"head": total, "lookup": 2 * total}
    for name, head, look_up in (("draft", 2, 2), ("accepted", 1, 2)):
        pattern = rf'jspec:spec_decode_num_{name}_tokens_per_source_total{{.*engine="(\d)",source="(\w+)"}} (\S+)'
        samples = re.findall(pattern, text)
        assert sorted(sample[:2] for sample in samples) == [(engine, s) for engine in "01" for s in ("head", "lookup")]
        for source, each in (("head", head), ("lookup", look_up)):
            assert sum(float(count) for _, of, count in samples if of == source) == each * total
    drafters = re.findall(r'jspec:drafter_info{model_name="tiny",engine="(\d)",(.*)} 1.0', text)
    labels = 'drafter="Beside",head="KnownModel",lookup="Known",tree="chain:2 beside chain:3"'
    assert drafters == [("0", labels), ("1", labels)]


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
