"""Test the server with clients that leave, hostile bodies and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from jspec.server.ask.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from jspec.server.routes.anthropic import MESSAGES
from jspec.server.routes.responses import RESPONSES
from tests.support import serving

ASK: dict[str, Any] = dict(prompt="Once upon a time", max_tokens=24, temperature=0.8, seed=7)
ASKED = [{"role": "user", "content": "a"}]
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {  # fields, and a body that is served
    "/v1/completions": (COMPLETIONS, {"prompt": "Once", "max_tokens": 2}),
    "/v1/chat/completions": (CHAT, {"messages": ASKED, "max_tokens": 2}),
    "/v1/responses": (RESPONSES, {"input": ASKED, "max_output_tokens": 2}),
    "/v1/messages": (MESSAGES, {"messages": ASKED, "max_tokens": 2}),
    "/v1/messages/count_tokens": (MESSAGES, {"messages": ASKED}),
    "/tokenize": (TOKENIZE, {"prompt": "a"}),
    "/detokenize": (DETOKENIZE, {"tokens": [5]}),
}
WORDS = ["text", "json_schema", "json_object", "function", "auto", "user", "assistant", "string", "object", "a", ""]
WORDS += ["custom", "tool", "tool_use", "any", "input_text", "thinking", "enabled", "message", "function_call"]
KEYS = ["type", "text", "role", "content", "function", "name", "schema", "json_schema", "regex", "choice", "rounds"]
KEYS += ["1", "format", "input_schema", "id", "input", "tool_use_id", "thinking", "arguments", "call_id", "output"]


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(max_queue=64, body_seconds=2, send_buffer=4096) as one:
        yield one


def check_nothing_is_left(server: serving.Running) -> None:
    """Check that the server is idle, holds no cache pages, and serves the next request."""
    serving.wait_until(lambda: server.service.num_active == 0 and server.service.calls.pending == 0)
    assert serving.engine().pages_in_use == 0
    assert server.service.state == "ready"
    assert server.client().completions.create(model=serving.NAME, **ASK).choices[0].text


def test_500_clients_that_leave_at_random_leave_nothing_behind(server: serving.Running) -> None:
    rng = random.Random(0)

    async def one(seed: int) -> int:
        await asyncio.sleep(rng.random() * 2)
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
        fields, right = ROUTES[path]
        body = {**right, "temperature": 0.8, "stream": rng.random() < 0.7}
        body |= {"max_output_tokens" if "input" in right else "max_tokens": 24}
        body |= {"seed": seed, "n": rng.choice((1, 1, 3))} if "n" in fields else {}
        raw = json.dumps(body).encode()
        sent = raw[: rng.randrange(len(raw))] if rng.random() < 0.2 else raw
        reader, writer = await serving.post(server.url, path, sent, Content_Length=str(len(raw)))
        read = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.3):
                while chunk := await reader.read(200):
                    read += len(chunk)
        writer.close()
        return read

    async def run() -> list[int]:
        return list(await asyncio.gather(*map(one, range(500))))

    read = asyncio.run(run())
    assert min(read) == 0 < max(read)  # some left before the first byte, some after it
    check_nothing_is_left(server)


def test_clients_that_do_not_read_hold_up_nobody_and_lose_nothing(server: serving.Running) -> None:
    """Each answer is larger than a connection's buffers, so most of it waits until the client reads."""
    body = {**ASK, "max_tokens": 150, "ignore_eos": True, "logprobs": 5, "n": 4, "stream": True}

    def ask() -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(serving.address(server.url))
        connection.sendall(serving.request(server.url, "/v1/completions", body))
        return connection

    async def read(connection: socket.socket) -> bytes:
        reader, writer = await asyncio.open_connection(sock=connection)
        _, _, raw = await serving.answer(reader)
        writer.close()
        return raw

    clients = [ask(), ask()]
    serving.wait_until(lambda: server.service.calls.pending > 0)
    serving.wait_until(lambda: server.service.calls.pending == 0, 60)  # the engine has finished, and nobody reads
    assert server.service.num_active == 2
    assert server.client().completions.create(model=serving.NAME, **ASK).choices[0].text

    for raw in [asyncio.run(read(client)) for client in clients]:
        choices = [chunk["choices"][0] for chunk in serving.events(raw)[:-1]]
        counts: Counter[int] = Counter()
        for choice in choices:
            counts[choice["index"]] += len(choice["logprobs"]["tokens"])
        assert counts == dict.fromkeys(range(4), 150)
        assert max(len(choice["logprobs"]["tokens"]) for choice in choices) > 20  # merged while nobody read
    check_nothing_is_left(server)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**70, -(2**63), 1e400, -1e308, 0.5])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw bodies with known fields of a route, a few unknown ones, and values of any kind."""
    fields, right = ROUTES[path]
    names = st.sampled_from(sorted(fields)) | st.text(max_size=8)
    return st.dictionaries(names, VALUES, max_size=3).map(lambda drawn: {**right, **drawn})


def check_answer(http: httpx.Client, path: str, body: dict[str, Any]) -> int:
    """Send a body; check that it is served, or refused with an error that names a field; return the status."""
    answer = http.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404, 413, 429), (body, answer.text)
    if answer.status_code in (400, 404):
        error = answer.json()["error"]
        names = tuple(name[:60] for name in (*ROUTES[path][0], *body))
        field = error["param"] if "param" in error else error["message"]  # Anthropic's errors have no such key
        is_named = field is not None and field.startswith(names) and error["message"].startswith(field)
        assert is_named or error["message"].startswith("body: expected JSON"), (body, error)
    return answer.status_code


def fuzz(server: serving.Running, examples: int) -> None:
    seen: set[int] = set()

    @hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(sorted(ROUTES)).flatmap(lambda path: st.tuples(st.just(path), bodies(path))))
    def run(case: tuple[str, dict[str, Any]]) -> None:
        seen.add(check_answer(http, *case))

    with server.http() as http:
        run()
    assert {200, 400} <= seen
    check_nothing_is_left(server)


def test_hostile_fields_are_served_or_refused_by_name(server: serving.Running) -> None:
    fuzz(server, 300)


@pytest.mark.fuzz
def test_10000_hostile_fields_are_served_or_refused_by_name(server: serving.Running) -> None:
    fuzz(server, 10_000)


def test_bytes_that_are_no_request_get_a_4xx_or_a_closed_connection(server: serving.Running) -> None:
    rng = random.Random(1)
    raw = json.dumps(ASK).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw

    async def one() -> int:
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice((rng.randrange(256), rng.randrange(32, 127)))
        reader, writer = await asyncio.open_connection(*serving.address(server.url))
        writer.write(damaged if rng.random() < 0.9 else rng.randbytes(100))
        status = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            async with asyncio.timeout(0.5):  # some wait for the rest of what is no whole request
                line = await reader.readuntil(b"\r\n")
            status = int(line.split()[1])
        writer.close()
        return status

    async def run() -> list[int]:
        return [status for _ in range(5) for status in await asyncio.gather(*(one() for _ in range(40)))]

    statuses = asyncio.run(run())
    assert {status // 100 for status in statuses} <= {0, 2, 4}
    assert {200, 400} <= set(statuses)
    check_nothing_is_left(server)
