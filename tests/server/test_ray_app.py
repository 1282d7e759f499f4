"""Test several engines behind one address with Ray Serve: routing, a lost replica, a client that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jspec.server.http.events import EVENT_HEADERS
from jspec.server.http.settings import Settings
from tests.support import byte_pair

ray_app = pytest.importorskip("jspec.server.ray_app", reason="needs the extra ray")
prefix_router = pytest.importorskip("jspec.server.prefix_router", reason="needs the extra ray")
ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.once

PATIENCE = 120.0  # seconds
PROMPT = "class Config:\n    def _interpolate_some(self, parser, option, accum, "


# -- the router


class RouterWithoutRay(prefix_router.PrefixRouter):  # type: ignore[misc, name-defined]
    """The router without Ray: its replicas are names, and the number of requests of each is given."""

    def __init__(self, loads: Mapping[str, int]) -> None:
        self.loads = dict(loads)
        self.initialize_state()

    @property
    def replica_queue_len_cache(self) -> Mapping[str, int]:
        return self.loads

    def route(self, text: str) -> list[str]:
        """Return the replicas in the order in which they are tried for a prompt."""
        replicas = [SimpleNamespace(replica_id=name) for name in self.loads]
        ask = ray_app.Ask({}, b"", text)
        pending = SimpleNamespace(args=[ask], routing_context=SimpleNamespace(should_backoff=False))
        ranks = asyncio.run(self.choose_replicas(replicas, pending))
        assert pending.routing_context.should_backoff
        return [one.replica_id for rank in ranks for one in rank]


def test_requests_with_equal_beginnings_go_to_one_replica() -> None:
    router = RouterWithoutRay(dict.fromkeys("abc", 0))
    shared = "x" * 1024
    home, *_ = router.route(shared + "first question")
    router.loads[home] = prefix_router.BUSIER - 1
    for end in ("second", "third" * 500, ""):
        assert router.route(shared + end)[0] == home
    assert {router.route("y" * 512 + end)[0] for end in "123"} != {home}  # another beginning: the least busy replica


def test_home_with_too_many_requests_passes_them_on() -> None:
    router = RouterWithoutRay(dict.fromkeys("ab", 0))
    home, other = router.route("short")
    router.loads[home] = prefix_router.BUSIER - 1
    assert router.route("short") == [home, other]
    router.loads[home] = prefix_router.BUSIER
    assert router.route("short") == [other, home]
    router.loads[home] = 0
    assert router.route("short") == [home, other]  # it is still the home


def test_home_that_is_gone_is_replaced() -> None:
    router = RouterWithoutRay(dict.fromkeys("ab", 0))
    home, other = router.route("prompt")
    del router.loads[home]
    router.loads["new"] = 5
    assert router.route("prompt") == [other, "new"]
    router.loads |= {other: 3, "new": 0}
    assert router.route("prompt") == [other, "new"]


def test_number_of_remembered_homes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MOST_HOMES", 4)
    router = RouterWithoutRay({"a": 0})
    for number in range(9):
        router.route(f"prompt {number}")
    assert len(router._homes) == 4
    assert prefix_router.marks_of("prompt 8")[0] in router._homes


def test_marks_of_prompts_are_equal_up_to_the_block_in_which_they_differ() -> None:
    one, two = (prefix_router.marks_of("x" * 1100 + end) for end in ("a", "b"))
    assert len(one) == len(two) == 3 and one[:2] == two[:2] and one[2] != two[2]
    assert prefix_router.marks_of("") == []


# -- options and messages


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "no target"),
        ({"target": "x", "gpu": 1}, "gpu"),
        ({"target": "x"}, "no_auth"),
        ({"target": "x", "no_auth": True, "engine": {"slot": 1}}, "slot"),
    ],
)
def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], words: str) -> None:
    monkeypatch.delenv("JSPEC_API_KEY", raising=False)
    with pytest.raises((ValueError, TypeError), match=words):
        ray_app.app(args)


def test_settings_hold_the_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSPEC_API_KEY", "one, two")
    settings = ray_app.Options("x", server={"names": ["m"], "max_queue": 3}).settings()
    assert settings.accepts_key(b"two") and not settings.accepts_key(b"three") and not settings.is_loopback
    assert settings.names == ("m",) and settings.max_queue == 3
    with pytest.raises(ValueError, match="no_auth"):
        ray_app.Options("x", no_auth=True).settings()


def test_reader_that_leaves_is_told_to_the_application() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        assert (await receive())["body"] == b"question"
        try:
            for number in range(1000):
                await send({"type": "http.response.body", "body": bytes([number % 256]), "more_body": True})
                seen.append("sent")
        finally:
            seen.append((await receive())["type"])

    async def read() -> None:
        answer = ray_app.messages(app, ray_app.Ask({}, b"question", ""))
        first = [await anext(answer) for _ in range(3)]
        assert [message["body"] for message in first] == [b"\0", b"\1", b"\2"]
        await answer.aclose()

    asyncio.run(read())
    assert seen.count("sent") < 6  # the application waited for its reader
    assert seen[-1] == "http.disconnect"


@pytest.mark.parametrize(
    ("state", "healthy", "fails"), [("ready", True, False), ("ready", False, True), ("unhealthy", True, True)]
)
def test_health_check_fails_with_the_engine(state: str, healthy: bool, fails: bool) -> None:
    service = SimpleNamespace(state=state, calls=SimpleNamespace(thread=SimpleNamespace(healthy=healthy)))
    replica = SimpleNamespace(_app=SimpleNamespace(state=SimpleNamespace(service=service)))
    with pytest.raises(RuntimeError, match="engine") if fails else contextlib.nullcontext():
        ray_app.Replica.check_health(replica)


class Lost:
    """A handle of replicas whose answers break off after some messages."""

    def __init__(self, sent: list[Any]) -> None:
        self._sent, self.stream = sent, self

    def options(self, **_: Any) -> Lost:
        return self

    def remote(self, _: ray_app.Ask) -> Lost:
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self._sent:
            yield message
        raise ray.exceptions.RayError("a lost actor")

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_lost_replica_is_an_error_in_the_form_of_the_route(path: str, has_begun: bool) -> None:
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", EVENT_HEADERS["content-type"].encode())],
    }
    ingress = ray_app.Ingress(Lost([start] * has_begun), Settings())  # type: ignore[arg-type]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        messages = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await ingress._answer({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == (200 if has_begun else 503)
    body = b"".join(message.get("body", b"") for message in sent).decode()
    kind = json.loads(body.split("data: ")[-2 if body.endswith("[DONE]\n\n") else -1])["error"]["type"]
    assert kind == ("overloaded_error" if path == "/v1/messages" else "server_error")
    assert body.endswith("[DONE]\n\n") == (has_begun and path == "/v1/completions")
    assert body.startswith("event: error\n") == (has_begun and path == "/v1/messages")


# -- two replicas


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of two replicas of the byte pair."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
        yield from _served()


def _served() -> Iterator[str]:
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=150 * 2**20, log_to_driver=False)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ray.serve.start(http_options={"port": port})
        options = dict(slots=4, max_len=1024, prefill_buckets=(256, 1024))
        models = dict(target=str(byte_pair.TARGET), drafter=str(byte_pair.HEAD), tokenizer="bytes", dtype="float32")
        ray.serve.run(ray_app.app(dict(**models, engine=options, server={"names": ["bytes"]}, gpus=0, no_auth=True)))
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.serve.shutdown()
        ray.shutdown()


def ask(address: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def replicas() -> list[str]:
    """Return the names of the engines' actors."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if "#engine#" in one["name"]]


@pytest.mark.long
def test_text_of_two_replicas_is_the_engines_own(address: str) -> None:
    with byte_pair.engine(drafted=False) as engine:
        (own,) = engine.generate(PROMPT, max_tokens=40, temperature=0)
    answer = ask(address, PROMPT, max_tokens=40)
    assert answer["choices"][0]["text"] == own.text
    refused = httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, "temperature": -1}, timeout=PATIENCE)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "bytes"
    assert httpx.get(f"{address}/nothing").status_code == 404


@pytest.mark.long
def test_requests_of_one_prompt_stay_together(address: str) -> None:
    """Only the first request of a prompt computes it: its replica alone has its pages."""
    prompts = [f"# module {name}\n" + "value = compute(value)\n" * 26 for name in ("one", "two", "three")]
    answers = {prompt: [ask(address, prompt) for _ in range(8)] for prompt in prompts}
    for own in answers.values():
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in own]
        assert cached[0] < 100 and min(cached[1:]) > 500
        assert len({answer["choices"][0]["text"] for answer in own}) == 1


class Stream(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, address: str, prompt: str) -> None:
        super().__init__()
        self.body = {"prompt": prompt, "max_tokens": 300, "temperature": 0, "draft": False, "stream": True}
        self.url, self.text, self.error, self.finish = f"{address}/v1/completions", "", "", ""
        self.begun, self.is_done = threading.Event(), False
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                self.is_done = self.is_done or data == "[DONE]"
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                self.error = event.get("error", {}).get("code", self.error)
                for choice in event.get("choices", []):
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish
                self.begun.set()


@pytest.mark.long
def test_requests_of_a_killed_replica_fail_while_others_go_on_and_it_comes_back(address: str) -> None:
    prompts = [f"def function_{number}(self, value):\n    " for number in range(8)]
    before = replicas()
    assert len(before) == 2
    streams = [Stream(address, prompt) for prompt in prompts]
    assert all(stream.begun.wait(PATIENCE) for stream in streams)
    ray.kill(ray.get_actor(before[0], namespace="serve"))
    for stream in streams:
        stream.join(PATIENCE)
    lost = [stream for stream in streams if stream.error]
    assert {stream.error for stream in lost} == {"replica_lost"} and 0 < len(lost) < len(streams)
    assert all(stream.is_done for stream in streams)
    assert {stream.finish for stream in streams if not stream.error} == {"length"}
    wait(lambda: len(replicas()) == 2 and before[0] not in replicas() and running() == 2)
    again = [Stream(address, prompt) for prompt in prompts]
    for old, new in zip(streams, again, strict=True):
        new.join(PATIENCE)
        assert new.is_done and new.finish == "length" and new.text.startswith(old.text)


def running() -> int:
    """Return the number of engines that take requests."""
    states = ray.serve.status().applications["default"].deployments["engine"].replica_states
    return int(states.get("RUNNING", 0))


@pytest.mark.long
def test_client_that_leaves_has_its_request_aborted(address: str) -> None:
    assert aborted(address) == 0
    body = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "draft": False, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as answer:
        assert next(answer.iter_lines()).startswith("data: {")
    wait(lambda: aborted(address) == 1)


def aborted(address: str) -> int:
    """Return the largest number of aborted requests that a replica tells; each question goes to any idle replica."""
    counts = [0]
    for _ in range(12):
        lines = httpx.get(f"{address}/metrics", timeout=PATIENCE).text.splitlines()
        counts += [int(float(line.split()[-1])) for line in lines if "request_success" in line and '"abort"' in line]
    return max(counts)


def wait(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.2)
