"""Test the server with OpenAI's client for Node; `clients/openai.mjs` sends the requests, all in one run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jspec import SamplingParams
from tests.support import serving, tool_serving

SCRIPT = Path(__file__).parent / "clients" / "openai.mjs"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]
SEEDED: dict[str, Any] = {"max_tokens": 64, "temperature": 0.8, "seed": 7}
ANSWER = 'Look: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(tool_serving.engine()) as one:
        yield one


def num_aborted() -> int:
    return tool_serving.engine().metrics.finished.get("abort", 0)


@pytest.fixture(scope="module")
def results(server: serving.Running) -> Any:
    """What the script printed: of each case the answer, or the fields of the error that the client threw."""
    node = shutil.which("node")
    if node is None or not (SCRIPT.parent / "node_modules").exists():
        pytest.skip("needs Node and: npm install --prefix tests/server/clients --no-package-lock")
    given = {"model": serving.NAME, "prompt": PROMPT, "seeded": SEEDED, "answer": re.escape(ANSWER)}
    command = [node, str(SCRIPT), f"{server.url}/v1", json.dumps(given)]
    before = num_aborted()  # other files use the same engine
    found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return {**found, "aborted before": before}


def own(**params: Any) -> Any:
    (done,) = tool_serving.engine().generate([PROMPT], SamplingParams(**SEEDED, **params))
    return done


def own_chat(messages: Any = MESSAGES, *, tools: Any = None, **params: Any) -> Any:
    (done,) = tool_serving.engine().chat(messages, SamplingParams(**{**SEEDED, **params}), tools=tools)
    return done


def test_models_are_listed(results: Any) -> None:
    (model,) = results["models"]["answer"]
    assert (model["id"], model["max_model_len"]) == (serving.NAME, serving.MAX_LEN)


def test_texts_equal_the_engines_own_streamed_or_not(results: Any) -> None:
    done, chat = own(), own_chat()
    answer, chunks = results["completion"]["answer"], results["completion_stream"]["answer"]
    assert answer["choices"][0]["text"] == done.text != own_chat(seed=8).text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == done.text and len(chunks) > 3
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == len(done.token_ids)
    message, chunks = results["chat"]["answer"]["choices"][0]["message"], results["chat_stream"]["answer"]
    assert message == {"role": "assistant", "content": chat.text, "refusal": None}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == chat.text
    assert chunks[-1]["usage"]["prompt_tokens"] == len(chat.prompt_token_ids)
    helper = results["chat_helper"]["answer"]
    assert "".join(helper["pieces"]) == helper["content"] == chat.text and len(helper["pieces"]) > 3
    assert helper["usage"]["total_tokens"] == len(chat.prompt_token_ids) + len(chat.token_ids)


def test_choices_and_logprobs_equal_the_engines_own(results: Any) -> None:
    samples = own(n=2, logprobs=1).samples
    choices = results["completions_n"]["answer"]["choices"]
    assert [choice["text"] for choice in choices] == [one.text for one in samples] * 2
    scores = [score for choice in choices[:2] for score in choice["logprobs"]["token_logprobs"]]
    assert scores == pytest.approx([record.logprob for one in samples for record in one.logprobs])
    logprobs = results["chat"]["answer"]["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    records = own_chat(logprobs=2).logprobs
    assert [entry["logprob"] for entry in logprobs["content"]] == pytest.approx([one.logprob for one in records])
    assert {len(entry["top_logprobs"]) for entry in logprobs["content"]} == {2}


def test_zod_schema_is_parsed_from_the_answer(results: Any) -> None:
    whole, streamed = results["parsed"]["answer"]
    parsed = results["response"]["answer"]["parsed"]
    assert all(one["agreed"] in (True, False) and one["x"] in (1, 2) for one in (whole, streamed, parsed))
    assert whole == streamed


def test_forced_tool_is_run_by_the_client(results: Any) -> None:
    answer = results["run_tools"]["answer"]
    assert len(answer["taken"]) == 2 and answer["taken"][0] in ({"x": 1}, {"x": 2})
    assert answer["results"] == [f"got {one['x']}" for one in answer["taken"]]


def test_call_in_a_text_is_read_streamed_or_not(results: Any) -> None:
    for choice in results["calls"]["answer"]:
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"x": 1}'})
        assert choice["message"]["content"] == "Look:"


def test_conversation_with_a_tools_result_is_the_engines_own(results: Any) -> None:
    sent = results["conversation"]["answer"]
    function = {"name": "f", "arguments": {"x": 1}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    messages = [*MESSAGES, call, {"role": "tool", "tool_call_id": "call_1", "content": "got 1"}]
    done = own_chat(messages, tools=sent["tools"])
    assert sent["answer"]["choices"][0]["message"]["content"] == done.text
    assert sent["answer"]["usage"]["prompt_tokens"] == len(done.prompt_token_ids)


def test_responses_and_their_events_join_to_the_chats_text(results: Any) -> None:
    answer, text = results["response"]["answer"], own_chat().text
    assert answer["whole"]["output_text"] == answer["final"] == text
    deltas = [one["delta"] for one in answer["events"] if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text and len(deltas) > 3


@pytest.mark.parametrize(
    ("case", "kind", "status", "param", "code"),
    [
        ("bad_field", "BadRequestError", 400, "temperature", "invalid_value"),
        ("bad_stream", "BadRequestError", 400, "temperature", "invalid_value"),
        ("bad_model", "NotFoundError", 404, "model", "model_not_found"),
    ],
)
def test_refusal_is_the_clients_error(results: Any, case: str, kind: str, status: int, param: str, code: str) -> None:
    error = results[case]["answer"]
    assert (error["kind"], error["status"], error["param"], error["code"]) == (kind, status, param, code)
    assert error["message"].startswith(f"{status} {param}: expected ")


def test_loop_that_is_left_ends_the_request(server: serving.Running, results: Any) -> None:
    assert results["left"]["answer"]["choices"][0]["text"]
    serving.wait_until(lambda: server.service.calls.pending == 0)
    assert num_aborted() == results["aborted before"] + 1
