"""Test streams on the wire: their form, pings, slow readers, clients that leave, and errors after the first event."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jspec import SamplingParams
from jspec.server.app import make_app
from jspec.server.http.settings import Settings
from jspec.server.routes.completions import CompletionAnswer
from tests.support import serving

PROMPT = "Once upon a time"
ASK: dict[str, Any] = dict(prompt=PROMPT, max_tokens=24, temperature=0.8, seed=7)
CHAT: dict[str, Any] = dict(messages=[{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(max_queue=100, ping_seconds=0.1, request_timeout=60) as one:
        yield one


def post(server: serving.Running, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
    async def run() -> tuple[int, dict[str, str], bytes]:
        reader, writer = await serving.post(server.url, path, body)
        try:
            return await serving.answer(reader)
        finally:
            writer.close()

    return asyncio.run(run())


def own_texts(count: int) -> list[str]:
    """Return the engine's texts for the seeds 0 to ``count - 1``."""
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=seed) for seed in range(count)]
    return [done.text or "" for done in serving.engine().generate([PROMPT] * count, params)]


def num_aborted() -> int:
    return serving.engine().metrics.finished.get("abort", 0)


def test_completions_stream_has_openais_form(server: serving.Running) -> None:
    status, headers, body = post(server, "/v1/completions", {**ASK, "stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    *chunks, done = serving.events(body)
    assert done == "[DONE]"
    for chunk in chunks:
        assert list(chunk) == ["id", "object", "created", "model", "choices"]
        assert chunk["object"] == "text_completion"
        (choice,) = chunk["choices"]
        assert list(choice) == ["index", "text", "logprobs", "finish_reason", "stop_reason"]
    assert [chunk["choices"][0]["finish_reason"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_chat_stream_has_openais_form(server: serving.Running) -> None:
    _, _, body = post(
        server, "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    )
    first, *chunks, usage, done = serving.events(body)
    assert done == "[DONE]"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [list(chunk["choices"][0]["delta"]) for chunk in chunks[:-1]] == [["content"]] * (len(chunks) - 1)
    assert usage["choices"] == []
    assert list(usage["usage"]) == ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"]


def test_pings_come_while_a_prompt_waits_and_clients_pass_over_them(server: serving.Running) -> None:
    (text,) = own_texts(1)

    async def run() -> bytes:
        with serving.held(serving.engine()) as gate:
            reader, writer = await serving.post(server.url, "/v1/completions", {**ASK, "seed": 0, "stream": True})
            head = await reader.readuntil(b": ping\n\n")
            assert b"data:" not in head
            gate.set()
            rest = await reader.readuntil(b"[DONE]\n\n")
            writer.close()
            return rest

    rest = asyncio.run(run())
    assert rest.count(b"data: ") > 1
    with serving.held(serving.engine()) as gate:
        stream = server.client().completions.create(model=serving.NAME, **{**ASK, "seed": 0}, stream=True)
        gate.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_pings_come_while_text_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own_texts(1)  # compiles, which would be a reason for pings too
    turn = serving.engine().threads.turn
    monkeypatch.setattr(serving.engine().threads, "turn", lambda: time.sleep(0.03) or turn())
    monkeypatch.setattr(CompletionAnswer, "events", lambda answer, outputs: answer.count_output(outputs) or "")
    with serving.running(ping_seconds=0.1) as server:
        _, _, body = post(server, "/v1/completions", {**ASK, "max_tokens": 60, "ignore_eos": True, "stream": True})
    assert body.startswith(b": ping\n\n: ping\n\n") and body.endswith(b"data: [DONE]\n\n")


def test_64_streams_at_once_lose_nothing_and_keep_their_order(server: serving.Running) -> None:
    texts = own_texts(64)

    async def one(seed: int) -> str:
        reader, writer = await serving.post(server.url, "/v1/completions", {**ASK, "seed": seed, "stream": True})
        _, _, body = await serving.answer(reader)
        writer.close()
        return "".join(chunk["choices"][0]["text"] for chunk in serving.events(body)[:-1])

    async def run() -> list[str]:
        return list(await asyncio.gather(*map(one, range(64))))

    assert asyncio.run(run()) == texts
    assert len(set(texts)) == 64  # so a text in another's stream would show


def read_slowly(body: Any, **settings: Any) -> bytes:
    """Return the stream for a client that reads no further while the engine runs its request.

    The application's own ``send`` waits, as uvicorn's does while a connection's buffer is full.
    """
    bodies: list[bytes] = []

    async def run() -> None:
        app = make_app(serving.engine(), Settings(**settings))
        calls = app.state.service.calls
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                bodies.append(message["body"])
                while calls.pending:
                    await asyncio.sleep(0.005)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

    asyncio.run(run())
    return b"".join(bodies)


def test_chunks_of_a_slow_reader_are_merged(server: serving.Running) -> None:
    done = serving.engine().generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.8, seed=7, logprobs=0))[0]
    chunks = serving.events(read_slowly({**ASK, "logprobs": 0, "stream": True}))[:-1]
    assert len(chunks) == 2  # the first, and all others in one
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == done.text
    scores = [x for chunk in chunks for x in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert scores == pytest.approx([one.logprob for one in done.logprobs or []])
    assert chunks[-1]["choices"][0]["finish_reason"] is not None


def test_request_of_a_slow_reader_is_aborted_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    before, turn = num_aborted(), serving.engine().threads.turn
    monkeypatch.setattr(serving.engine().threads, "turn", lambda: time.sleep(0.03) or turn())
    body = {**ASK, "max_tokens": 150, "ignore_eos": True, "stream": True}
    *_, error, done = serving.events(read_slowly(body, request_timeout=0.3))
    assert (error["error"]["code"], done) == ("timeout", "[DONE]")
    assert num_aborted() == before + 1


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_request_of_a_client_that_leaves_is_aborted(
    server: serving.Running, is_stream: bool, has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = num_aborted()

    async def run() -> None:
        with serving.held(serving.engine()) as gate:
            body = {**ASK, "max_tokens": 150, "ignore_eos": True, "stream": is_stream}
            reader, writer = await serving.post(server.url, "/v1/completions", body)
            while serving.engine().threads.num_unfinished == 0:
                await asyncio.sleep(0.005)
            if has_begun:
                gate.set()
                await reader.read(is_stream)  # one byte of a stream
            writer.close()
            while server.service.num_active:
                await asyncio.sleep(0.005)

    asyncio.run(run())
    serving.wait_until(lambda: server.service.calls.pending == 0)
    assert num_aborted() == before + 1
    assert serving.engine().pages_in_use == 0
    assert post(server, "/v1/completions", ASK)[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_request_of_a_client_that_stays_is_not_aborted(server: serving.Running) -> None:
    """The negative control of the test before."""
    before = num_aborted()
    post(server, "/v1/completions", {**ASK, "stream": True})
    assert num_aborted() == before


def test_failed_step_is_an_error_before_the_first_event_and_an_event_after_it(
    server: serving.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, step, events = serving.engine().core, serving.engine().core.step, CompletionAnswer.events
    written, failing = threading.Event(), True

    def tell(answer: CompletionAnswer, outputs: Any) -> str:
        text = events(answer, outputs)
        written.set() if text else None
        return text

    def fail(**options: Any) -> bool:
        nonlocal failing
        running = serving.engine().scheduler.running
        if running and failing and (written.is_set() or any(request.token_ids for request in running)):
            failing = not written.wait(30)  # once
            raise RuntimeError("a broken device")
        return step(**options)

    monkeypatch.setattr(core, "step", fail)
    monkeypatch.setattr(CompletionAnswer, "events", tell)
    written.set()
    with pytest.raises(openai.InternalServerError, match="a broken device"):
        server.client().completions.create(model=serving.NAME, **ASK)
    written.clear()
    failing = True
    stream = server.client().completions.create(model=serving.NAME, **ASK, stream=True)
    assert next(stream).choices[0].text
    with pytest.raises(openai.APIError, match="a broken device"):
        list(stream)
    written.clear()
    failing = True
    *_, error, done = serving.events(post(server, "/v1/completions", {**ASK, "stream": True})[2])
    assert done == "[DONE]"
    assert error["error"]["type"] == "server_error" and error["error"]["code"] == "engine_error"
    monkeypatch.undo()
    assert server.client().completions.create(model=serving.NAME, **ASK).choices[0].text


def test_request_that_takes_too_long_ends_with_504_or_an_error_event() -> None:
    with serving.running(request_timeout=0.3, ping_seconds=0.1) as server, serving.held(serving.engine()):
        status, _, body = post(server, "/v1/completions", ASK)
        assert (status, json.loads(body)["error"]["code"]) == (504, "timeout")
        _, _, body = post(server, "/v1/completions", {**ASK, "stream": True})
        error, done = serving.events(body)
        assert (error["error"]["code"], done) == ("timeout", "[DONE]")
        serving.wait_until(lambda: server.service.num_active == 0)


def test_rounds_are_sent_to_one_request_at_a_time() -> None:
    body = {**ASK, "stream": True, "jspec": {"rounds": True}}
    with serving.running(live=True) as server:
        *chunks, _ = serving.events(post(server, "/v1/completions", body)[2])
        rounds = [one for chunk in chunks for one in chunk["jspec"]["rounds"]]
        (done,) = serving.engine().generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.8, seed=7), trace=True)
        assert len(rounds) == len(done.rounds or [])
        tokenizer = serving.engine().tokenizer
        assert tokenizer is not None
        for sent, record in zip(rounds, done.rounds or [], strict=True):
            assert len(sent["e"]) == len(sent["d"]) == len(record.emitted)
            assert len(sent["a"]) == record.accept_len + 1
            assert sum(sent["d"]) == min(record.accept_len, len(record.emitted))
            assert sent["p"][0] == -1 and all(0 <= parent < node for node, parent in enumerate(sent["p"]) if node)
            assert len(sent["t"]) == len(sent["p"]) == len(sent["s"])
            end = record.break_off
            assert (sent.get("r"), sent.get("q")) == ((end.rank, end.draft_probability) if end else (None, None))
        first = chunks[0]["choices"][0]["text"]
        assert first + "".join(text for one in rounds for text in one["e"]) == done.text
        status, _, raw = post(server, "/v1/completions", {**body, "n": 2})
        assert (status, json.loads(raw)["error"]["param"]) == (400, "jspec.rounds")
        with serving.held(serving.engine()):

            async def two() -> int:
                _, waiting = await serving.post(server.url, "/v1/completions", body)
                while not server.service.calls.pending:
                    await asyncio.sleep(0.005)
                reader, writer = await serving.post(server.url, "/v1/completions", body)
                status, headers, _ = await serving.answer(reader)
                assert headers["retry-after"] == "1"
                waiting.close()
                writer.close()
                return status

            assert asyncio.run(two()) == 429


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_events_have_no_line_separators_inside(server: serving.Running, path: str) -> None:
    """A client that splits lines as Python's `str.splitlines` does finds whole events."""
    text, chat = "a\u2028b\u2029c\x85d\x0be\x1ef\n", {"model": serving.NAME, "messages": CHAT["messages"]}
    asked = {
        "completions": {"prompt": PROMPT, "max_tokens": 64},
        "chat/completions": chat,
        "responses": {"input": PROMPT},
        "messages": {**chat, "max_tokens": 64},
    }
    body = {**asked[path], "structured_outputs": {"choice": [text]}, "stream": True}
    lines = post(server, f"/v1/{path}", body)[2].decode().splitlines()
    assert all(line.startswith(("event: ", "data: ", ": ping")) or not line for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    assert text in "".join(_texts(json.loads(each)) for each in data)


def _texts(event: Any) -> str:
    """Return the new text of an event of any route."""
    if "choices" in event:
        (choice,) = event["choices"]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    delta = event.get("delta", "") if event["type"] in ("response.output_text.delta", "content_block_delta") else ""
    return delta if isinstance(delta, str) else delta["text"]
