"""Test what the server refuses before the engine sees it: hosts, keys, bodies, and requests beyond the queue."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import jspec
from jspec.engine.input import grammar_input
from jspec.server.http.settings import Settings, digest_of
from jspec.server.routes.service import GRAMMAR_SECONDS
from tests.support import serving

ASK: dict[str, Any] = dict(prompt="Once upon a time", max_tokens=4, temperature=0)
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(max_body=2000, body_seconds=0.3, max_queue=4) as one:
        yield one


def refusal(server: serving.Running, body: Any = ASK, **headers: str) -> tuple[int, str | None]:
    """Send a request of one's own making; return the status, and the code of the error if there is one."""

    async def run() -> tuple[int, str | None]:
        reader, writer = await serving.post(server.url, PATH, body, **headers)
        status, _, raw = await serving.answer(reader)
        writer.close()
        return status, json.loads(raw).get("error", {}).get("code")

    return asyncio.run(run())


# -- the header Host


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"])
def test_local_names_in_host_are_served(server: serving.Running, host: str) -> None:
    assert refusal(server, Host=host) == (200, None)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_foreign_names_in_host_are_refused(server: serving.Running, host: str) -> None:
    assert refusal(server, Host=host) == (403, "host_not_allowed")


def test_host_is_free_where_an_allowed_name_or_no_loopback_address_says_so() -> None:
    assert Settings(allowed_hosts=("api.example",)).accepts_host("api.example:443")
    assert Settings(allowed_hosts=("Api.Example",)).accepts_host("API.example")
    assert not Settings(allowed_hosts=("api.example",)).accepts_host("b.example")
    assert Settings(host="0.0.0.0").accepts_host("anything")


# -- keys


def test_each_of_several_keys_opens_all_routes_and_others_open_health_alone() -> None:
    with serving.running(keys=(digest_of("first"), digest_of("second"))) as server:
        for key in ("first", "second"):
            assert server.client(api_key=key).models.list().data
            assert refusal(server, Authorization=f"Bearer {key}") == (200, None)
        for key in ("third", "firs", "first2", "", "Bearer first", "é"):
            assert refusal(server, Authorization=f"Bearer {key}".rstrip()) == (401, "invalid_api_key")
        for header in ("first", "Basic first", "Bearer"):
            assert refusal(server, Authorization=header) == (401, "invalid_api_key")
        with server.http() as http:
            paths = ("/v1/models", "/metrics", "/stats", "/tokenize", "/nope", "/v1/models/tiny", "/health/")
            assert [http.get(path).status_code for path in paths] == [401] * len(paths)
            assert [http.get(path).status_code for path in ("/health", "/ping")] == [200, 200]
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").models.list()


# -- bodies


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_content_types_are_refused_so_that_a_foreign_page_needs_a_preflight(
    server: serving.Running, kind: str
) -> None:
    assert refusal(server, Content_Type=kind) == (415, "unsupported_media_type")


def test_json_with_a_charset_is_served(server: serving.Running) -> None:
    assert refusal(server, Content_Type="application/json; charset=utf-8") == (200, None)


def test_preflight_is_answered_only_with_an_allowed_origin(server: serving.Running) -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-api-key, x-stainless-lang"
    with server.http() as http:
        assert "access-control-allow-origin" not in http.options(PATH, headers=asked).headers
    with (
        serving.running(allow_origins=("https://page.example",), keys=(digest_of("k"),)) as other,
        other.http() as http,
    ):
        answer = http.options(PATH, headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        foreign = http.options(PATH, headers={**asked, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in foreign.headers


def test_body_beyond_the_limit_is_refused_by_its_announced_and_by_its_counted_size(server: serving.Running) -> None:
    large = {**ASK, "prompt": "a" * 3000}
    assert refusal(server, large) == (413, "body_too_large")
    assert refusal(server, {**ASK, "user": "a" * 1800}) == (200, None)

    assert asyncio.run(_chunked(server)) == 413


async def _chunked(server: serving.Running) -> int:
    reader, writer = await asyncio.open_connection(*serving.address(server.url))
    kinds = "Content-Type: application/json\r\nTransfer-Encoding: chunked"
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{kinds}\r\n\r\n"
    writer.write(head.encode() + b"1000\r\n" + b" " * 4096 + b"\r\n")  # and no end
    status, _, _ = await serving.answer(reader)
    writer.close()
    return status


def test_half_a_body_is_answered_with_408_in_time(server: serving.Running) -> None:
    assert refusal(server, b'{"prompt": "a', Content_Length="100") == (408, "body_timeout")


def test_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(server: serving.Running) -> None:
    async def run() -> None:
        _, writer = await serving.post(server.url, PATH, b'{"prompt": "a', Content_Length="100")
        writer.close()
        await asyncio.sleep(0.1)

    asyncio.run(run())
    assert (server.service.num_active, server.service.calls.pending) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": ' + b"9" * 1000 + b"}",
        b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_body_that_is_no_json_object_is_refused(server: serving.Running, body: bytes) -> None:
    status, code = refusal(server, body)
    assert status == 400
    assert code in ("invalid_json", "invalid_value")


def test_half_of_a_surrogate_pair_is_refused_with_its_field(server: serving.Running) -> None:
    right = {"messages": [{"role": "user", "content": "a"}]}
    wrong = [{"messages": [{"role": "user", "content": "a\ud800"}]}, {**right, "stop": ["\udfff"]}]
    wrong += [{**right, "user": "\ud83d"}, {**right, "metadata": {"\ude00": "a"}}]
    with server.http() as http:
        for body in wrong:
            raw = json.dumps(body).encode()
            answer = http.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(body)[-1])
        assert http.post(PATH, json={**ASK, "prompt": "a\U0001f600"}).status_code == 200


def test_head_that_is_too_large_is_refused(server: serving.Running) -> None:
    status, code = refusal(server, ASK, X_Large="a" * 300_000)
    assert (status, code) == (400, "invalid_http")


def test_what_is_no_http_gets_an_error_in_json(server: serving.Running) -> None:
    async def run() -> int:
        reader, writer = await asyncio.open_connection(*serving.address(server.url))
        writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
        status, _, raw = await serving.answer(reader)
        assert json.loads(raw)["error"]["type"] == "invalid_request_error"
        writer.close()
        return status

    assert asyncio.run(run()) == 400


# -- routes


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nope", 404), ("GET", PATH, 405), ("PUT", "/health", 405), ("POST", "/v1/models", 405)],
)
def test_unknown_routes_and_methods_get_errors_in_json(
    server: serving.Running, method: str, path: str, status: int
) -> None:
    with server.http() as http:
        answer = http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] in ("route_not_found", "method_not_allowed")


def test_unknown_fields_are_ignored_on_request(server: serving.Running) -> None:
    assert refusal(server, {**ASK, "foo": 1}) == (400, "invalid_value")
    with serving.running(ignore_unknown=True) as other:
        assert refusal(other, {**ASK, "foo": 1}) == (200, None)
        assert refusal(other, {**ASK, "suffix": "a"}) == (400, "invalid_value")  # known, and not offered


# -- the queue


def test_completions_beyond_the_queue_get_429_and_each_of_n_counts(server: serving.Running) -> None:
    async def run() -> None:
        with serving.held(serving.engine()) as gate:
            waiting = [await serving.post(server.url, PATH, {**ASK, "n": 3})]
            while server.service.calls.pending < 3:
                await asyncio.sleep(0.005)
            reader, writer = await serving.post(server.url, PATH, {**ASK, "prompt": ["a", "b"]})
            status, headers, raw = await serving.answer(reader)
            error = json.loads(raw)["error"]
            assert (status, headers["retry-after"], error["code"]) == (429, "1", "queue_full")
            assert error["type"] == "rate_limit_error"
            writer.close()
            waiting.append(await serving.post(server.url, PATH, ASK))
            while server.service.calls.pending < 4:
                await asyncio.sleep(0.005)
            gate.set()
            for reader, writer in waiting:
                status, _, _ = await serving.answer(reader)
                assert status == 200
                writer.close()

    asyncio.run(run())
    serving.wait_until(lambda: server.service.calls.pending == 0)


def test_openais_client_tries_again_after_429(server: serving.Running) -> None:
    with serving.held(serving.engine()) as gate:

        async def run() -> str:
            _, writer = await serving.post(server.url, PATH, {**ASK, "n": 4})
            while server.service.calls.pending < 4:
                await asyncio.sleep(0.005)
            impatient = server.client()
            with pytest.raises(openai.RateLimitError):
                await asyncio.to_thread(lambda: impatient.completions.create(model=serving.NAME, **ASK))
            asyncio.get_running_loop().call_later(0.2, gate.set)
            patient = server.client(max_retries=2)
            done = await asyncio.to_thread(lambda: patient.completions.create(model=serving.NAME, **ASK))
            writer.close()
            return done.choices[0].text

        assert asyncio.run(run())


def test_request_that_no_queue_could_hold_is_refused_for_good(server: serving.Running) -> None:
    assert refusal(server, {**ASK, "n": 5}) == (400, "too_many_completions")
    assert refusal(server, {**ASK, "prompt": ["a"] * 5}) == (400, "too_many_completions")


def test_refused_requests_leave_their_room_to_others(server: serving.Running) -> None:
    for _ in range(10):
        assert refusal(server, {**ASK, "n": 4, "prompt": [10**6]})[0] == 400
    assert server.service.calls.pending == 0
    assert refusal(server) == (200, None)


# -- grammars

SLOW = "(a|b|c|d|aa|bb|cc){1,400}[ab]{300}(a|b){1,400}"  # an automaton of very many states


def test_grammar_that_takes_too_long_is_refused_and_others_are_served_meanwhile(
    server: serving.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = serving.engine().input_processor._grammars._run
    assert builder.seconds == GRAMMAR_SECONDS
    monkeypatch.setattr(builder, "seconds", 1.0)
    ended: list[str] = []

    async def one(name: str, **fields: Any) -> tuple[int, Any]:
        reader, writer = await serving.post(server.url, PATH, {**ASK, **fields})
        status, _, raw = await serving.answer(reader)
        writer.close()
        ended.append(name)
        return status, json.loads(raw)

    async def run() -> Any:
        slow = asyncio.create_task(one("slow", structured_outputs={"regex": SLOW}))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(one("second", structured_outputs={"regex": "ab?"}))
        return await one("plain"), await slow, await second

    (plain, _), (slow, error), (second, _) = asyncio.run(run())
    assert (plain, slow, second) == (200, 400, 200)
    assert error["error"]["param"] == "structured_outputs"
    assert "seconds of CPU time" in error["error"]["message"]
    assert ended == ["plain", "slow", "second"]  # grammars are compiled one at a time


# -- what it tells


def test_metrics_count_requests_and_tokens(server: serving.Running) -> None:
    tokens = "vllm:generation_tokens_total{"
    requests = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
    with server.http() as http:

        def value(start: str) -> float:
            lines = http.get("/metrics").text.splitlines()
            return next((float(line.split()[-1]) for line in lines if line.startswith(start)), 0.0)

        before = value(tokens), value(requests)
        assert refusal(server) == (200, None)
        serving.wait_until(lambda: value(requests) == before[1] + 1)  # counted once the answer is sent
        assert value(tokens) == before[0] + 4
        assert f'model_name="{serving.NAME}"' in http.get("/metrics").text
        stats = http.get("/stats").json()
    assert stats["slots"] == serving.SLOTS and stats["running"] == stats["waiting"] == 0
    assert 0 <= stats["pages_used"] <= stats["pages_total"]
    assert stats["acceptance_by_position"] == serving.engine().metrics.acceptance_per_position


NEW = "of_no_other_test"  # in grammars that the server has not compiled and kept
SCHEMA = {"type": "object", "properties": {NEW: {"type": "integer"}}}
SAID = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "a", "response_format": NAMED_SCHEMA}, "response_format"),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": NEW}}, "structured_outputs"),
        ("chat/completions", {**SAID, "response_format": NAMED_SCHEMA}, "response_format"),
        ("chat/completions", {**SAID, "structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        (
            "responses",
            {"input": "a", "text": {"format": {**NAMED_SCHEMA["json_schema"], "type": "json_schema"}}},
            "text",
        ),
        ("messages", {**SAID, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config"),
    ],
)
def test_missing_grammar_library_is_an_error_of_the_field_that_asks_for_a_grammar(
    server: serving.Running, path: str, body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any, **options: Any) -> None:
        raise ImportError("expected the library outlines_core, which is not installed")

    for name in ("compile_grammar", "compile_lark"):
        monkeypatch.setattr(grammar_input, name, missing)
    with server.http() as http:
        answer = http.post(f"/v1/{path}", json={"model": serving.NAME, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(field) and "expected the library outlines_core" in error["message"]
    assert path == "messages" or error["param"].partition(".")[0] == field


def test_version_is_the_packages_and_models_were_created_when_the_server_was() -> None:
    before = int(time.time())
    with serving.running() as server, server.http() as http:
        (model,) = server.client().models.list().data
        assert before <= model.created <= time.time()
        assert http.get("/version").json() == {"version": jspec.__version__}


def test_log_at_level_info_leaves_out_what_pages_and_probes_poll(
    server: serving.Running, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ("/health", "/ping", "/metrics", "/stats", "/version")
    for level, wanted in ((logging.DEBUG, paths), (logging.INFO, ("/version",))):
        caplog.clear()
        with server.http() as http, caplog.at_level(level, logger="jspec.server"):
            for path in paths:
                http.get(path)
            serving.wait_until(lambda: "/version" in caplog.text)
        lines = [record.getMessage() for record in caplog.records if record.name == "jspec.server"]
        assert [line.split()[1] for line in lines] == list(wanted)


def test_log_has_no_text_unless_asked_for(server: serving.Running, caplog: pytest.LogCaptureFixture) -> None:
    secret = {**ASK, "prompt": "a secret word", "user": "a secret name"}
    with caplog.at_level(logging.DEBUG):
        refusal(server, secret, Authorization="Bearer a-secret-key")
        refusal(server, {**secret, "temperature": -1, "secret_field": 1})
        serving.wait_until(lambda: sum("POST" in line for line in caplog.messages) == 2)
    assert "4 tokens" in caplog.text
    assert "secret" not in caplog.text
    with serving.running(log_text=True) as open_one, caplog.at_level(logging.INFO):
        refusal(open_one, secret)
    assert "a secret word" in caplog.text


def test_first_requests_wait_for_what_is_compiled_first() -> None:
    with serving.running(warm=("logprobs",)) as server:
        assert server.service.state in ("warming", "ready")
        serving.wait_until(lambda: server.service.state == "ready", 120)
        assert refusal(server) == (200, None)
        server.service.state = "warming"
        assert refusal(server) == (503, "warming")
        with server.http() as http:
            assert http.get("/health").status_code == 503
