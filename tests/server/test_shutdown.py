"""Test how the server ends: after a signal, with running requests, and after a failure of the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from jspec import Engine, SamplingParams
from jspec.server.app import make_app
from jspec.server.http.errors import ApiError
from jspec.server.http.settings import Settings
from jspec.server.routes.calls import OpenCalls
from tests.support import serving

ASK: dict[str, Any] = dict(prompt="Once upon a time", max_tokens=24, temperature=0.8, seed=7)
PATH = "/v1/completions"
BODY: dict[str, Any] = dict(messages=[{"role": "user", "content": "Once"}], max_tokens=4)


async def submitted(server: serving.Running, count: int) -> None:
    while server.service.calls.pending < count:
        await asyncio.sleep(0.005)


async def status_of(server: serving.Running, path: str, **body: Any) -> tuple[int, str]:
    """Return the status and the error code of a request of its own connection."""
    reader, writer = await serving.post(server.url, path, body)
    status, _, raw = await serving.answer(reader)
    writer.close()
    return status, json.loads(raw)["error"]["code"]


def test_running_requests_end_while_new_ones_are_refused() -> None:
    (done,) = serving.engine().generate(ASK["prompt"], SamplingParams(max_tokens=24, temperature=0.8, seed=7))

    async def run(server: serving.Running) -> None:
        with serving.held(serving.engine()) as gate:
            streamed, first = await serving.post(server.url, PATH, {**ASK, "stream": True})
            whole, second = await serving.post(server.url, PATH, ASK)
            await submitted(server, 2)
            server.server.drain()
            for path in (PATH, "/tokenize", "/v1/chat/completions"):
                assert await status_of(server, path, **ASK) == (503, "draining")
            with server.http() as http:
                assert http.get("/health").status_code == 503
            gate.set()
            _, _, body = await serving.answer(streamed)
            assert "".join(one["choices"][0]["text"] for one in serving.events(body)[:-1]) == done.text
            status, _, body = await serving.answer(whole)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, done.text)
            first.close()
            second.close()

    with serving.running() as server:
        asyncio.run(run(server))
        serving.wait_until(server.ended)
    assert server.server.status == 0


def test_requests_that_do_not_end_in_time_get_an_error() -> None:
    async def run(server: serving.Running) -> None:
        with serving.held(serving.engine()):
            streamed, first = await serving.post(server.url, PATH, {**ASK, "stream": True})
            whole, second = await serving.post(server.url, PATH, ASK)
            await streamed.readuntil(b": ping\n\n")
            await submitted(server, 2)
            server.server.drain()
            rest = await streamed.readuntil(b"[DONE]\n\n")
            assert b'"code":"draining"' in rest
            status, _, body = await serving.answer(whole)
            assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
            first.close()
            second.close()

    with serving.running(drain_seconds=0.2, ping_seconds=0.05) as server:
        asyncio.run(run(server))
        serving.wait_until(server.ended)
    assert serving.engine().pages_in_use == 0


def die(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next step end the engine's thread."""

    def step() -> bool:
        raise RuntimeError("a broken thread")

    monkeypatch.setattr(engine.threads, "turn", step)


def lose_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine look as after a failure that it could not recover from."""
    monkeypatch.setattr(engine.threads.recovery, "healthy", False)


@pytest.mark.parametrize("fail", [die, lose_device])
def test_server_of_a_failed_engine_ends_with_status_1(
    fail: Callable[[Engine, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving.small_engine(serving.SLOTS, serving.MAX_LEN)
    with serving.running(engine, ping_seconds=0.05) as server:
        assert server.client().completions.create(model=serving.NAME, **ASK).choices[0].text
        fail(engine, monkeypatch)
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):  # it may have ended already
            server.client().completions.create(model=serving.NAME, **ASK)
        with pytest.raises(ApiError) as caught:
            server.service.check_ready()
        assert (caught.value.status, caught.value.code) == (503, "unhealthy")
        serving.wait_until(server.ended)
        monkeypatch.undo()
    assert server.server.status == 1


def test_server_that_cannot_compile_what_it_should_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def warmup(**outputs: bool) -> None:
        raise ValueError("no memory for the programs")

    monkeypatch.setattr(serving.engine(), "warmup", warmup)
    with serving.running(warm=("logprobs",)) as server:
        serving.wait_until(server.ended)
    assert server.server.status == 1


def test_failure_while_a_request_is_prepared_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a broken process")

    with serving.running() as server:
        monkeypatch.setattr(serving.engine(), "prepare", prepare)
        with pytest.raises(openai.InternalServerError, match="a broken process"):
            server.client().completions.create(model=serving.NAME, **ASK)


def test_request_that_comes_as_the_engines_thread_ends_gets_503() -> None:
    engine = serving.small_engine(serving.SLOTS, serving.MAX_LEN)
    calls, request = OpenCalls(engine, 1), engine.prepare([5])
    engine.close()
    with pytest.raises(ApiError, match="serves no more") as caught, calls.submitted([request]):
        pass
    assert (caught.value.status, calls.pending, calls._open) == (503, 0, set())


def test_mounted_application_serves_once_its_lifespan_runs() -> None:
    app = make_app(serving.engine(), Settings(names=(serving.NAME,), keys=(hashlib.sha256(b"secret").digest(),)))
    outer = Starlette(routes=[Mount("/llm", app)])

    async def statuses() -> list[tuple[int, Any]]:
        transport, found = httpx.ASGITransport(outer), []
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/llm") as http:
            for key in ("secret", "wrong"):
                answer = await http.post("/v1/messages", json=BODY, headers={"x-api-key": key})
                found.append((answer.status_code, answer.json()["type"]))
            found.append(((await http.get("/health")).status_code, None))
            counted = await http.get("/metrics", headers={"x-api-key": "secret"})
            assert 'handler="/v1/messages"' in counted.text
        return found

    async def run() -> None:
        assert await statuses() == [(503, "error"), (401, "error"), (503, None)]
        async with app.router.lifespan_context(app):
            assert await statuses() == [(200, "message"), (401, "error"), (200, None)]

    asyncio.run(run())


@pytest.mark.slow
def test_command_serves_the_demo_and_ends_on_sigterm_after_its_running_request() -> None:
    words = [sys.executable, "-m", "jspec", "serve", "--port", "0", "--slots", "2", "--max-len", "512"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first.startswith("jspec serves demo at http://127.0.0.1:")
        url = first.split()[4]
        assert "curl" in process.stdout.readline() and "openai.OpenAI" in process.stdout.readline()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        asked: Any = dict(model="demo", prompt="def main(", max_tokens=160, temperature=0)
        asked |= dict(extra_body={"ignore_eos": True})
        whole = client.completions.create(**asked)
        stream = client.completions.create(**asked, stream=True)
        texts = [next(stream).choices[0].text]
        os.kill(process.pid, signal.SIGTERM)
        statuses = _statuses(url)
        texts += [chunk.choices[0].text for chunk in stream]
        assert "".join(texts) == whole.choices[0].text
        assert set(statuses) <= {503}
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def _statuses(url: str) -> list[int]:
    """Return the statuses of /health until the server listens no more, or half a second is over."""
    found, end = [], time.monotonic() + 0.5
    time.sleep(0.05)
    while time.monotonic() < end:
        try:
            found.append(httpx.get(f"{url}/health").status_code)
        except httpx.TransportError:
            break
    return found
