"""Test thinking budgets, and schemas after reasoning, on all routes that generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import serving, tool_serving
from tests.support.tool_serving import telling

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")

TEMPLATE = tool_serving.TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
USER = [{"role": "user", "content": "a"}]
THOUGHT, BUDGET = "I add three numbers, then one more. " * 3, 5
ANSWER = '{"x": 1}'
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
INSIDE = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving.running(engine()) as server, server.http() as client:
        yield client


def engine() -> Any:
    return tool_serving.special_engine(TEMPLATE)


def chat(http: httpx.Client, told: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message and the usage of a conversation whose model would answer with a text."""
    with telling(engine(), told):
        body = {"model": serving.NAME, "messages": USER, "max_tokens": 80, **fields}
        got = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return got["choices"][0]["message"], got["usage"]


def first_tokens(text: str, count: int) -> str:
    tokenizer = engine().tokenizer
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:count]).rstrip()


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_chat_with_a_budget_ends_the_reasoning_there(http: httpx.Client, name: str, has_begun: bool) -> None:
    """The model's own end comes later. Without a budget it comes where the model writes it."""
    told, inside = (THOUGHT, INSIDE) if has_begun else ("[THINK]" + THOUGHT, {})
    told += "[/THINK]It is 4."
    free, _ = chat(http, told, **inside)
    assert (free["reasoning_content"], free["content"]) == (THOUGHT.rstrip(), "It is 4.")
    message, usage = chat(http, told, **inside, **{name: BUDGET})
    assert message["reasoning_content"] == first_tokens(THOUGHT, BUDGET)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == BUDGET + 1 + (not has_begun)
    same, _ = chat(http, told, **inside, **{name: 70})  # the model's own end comes before
    assert same == free


@pytest.mark.parametrize("asked", ["schema", "tool"])
@pytest.mark.parametrize("budget", [None, BUDGET])
def test_schema_and_forced_tools_begin_after_the_reasoning_of_the_prompt(
    http: httpx.Client, asked: str, budget: int | None
) -> None:
    fields: dict[str, Any] = (
        {"response_format": FORMAT} if asked == "schema" else dict(tools=[TOOL], tool_choice="required")
    )
    told = f"{THOUGHT}[/THINK]{ANSWER}"
    message, _ = chat(http, told, **fields, **INSIDE, thinking_token_budget=budget)
    expected = THOUGHT.rstrip() if budget is None else first_tokens(THOUGHT, budget)
    assert message["reasoning_content"] == expected
    text = message["content"] if asked == "schema" else message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(text)["x"] in (1, 2)
    outside, _ = chat(http, told, **fields)  # the negative control: the prompt has not begun reasoning
    assert "reasoning_content" not in outside


def test_schema_and_forced_tools_stand_alone_where_reasoning_stays_in_the_content() -> None:
    told = f"{THOUGHT}[/THINK]{ANSWER}"
    with serving.running(engine(), reasoning=False) as server, server.http() as http:
        message, _ = chat(http, told, response_format=FORMAT, **INSIDE)
        called, _ = chat(http, f"{THOUGHT}[/THINK]{ANSWER}", tools=[TOOL], tool_choice="required", **INSIDE)
        plain, _ = chat(http, f"{THOUGHT}[/THINK]It is 4.", **INSIDE)
    assert message["content"] == ANSWER
    assert json.loads(called["tool_calls"][0]["function"]["arguments"])["x"] in (1, 2)
    assert plain["content"].startswith(THOUGHT.rstrip()), "control"


def test_chat_of_the_engine_has_the_reasoning_before_a_schema_apart() -> None:
    fields: dict[str, Any] = dict(max_tokens=80, temperature=0, json_schema=SCHEMA)
    with telling(engine(), f"{THOUGHT}[/THINK]{ANSWER}"):
        (done,) = engine().chat(USER, **fields, **INSIDE)
        chunks = list(engine().chat_stream(USER, **fields, **INSIDE, thinking_budget=BUDGET))
        (outside,) = engine().chat(USER, **fields)
    assert (done.reasoning, done.text) == (THOUGHT.rstrip(), ANSWER)
    assert "".join(chunk.reasoning or "" for chunk in chunks) == first_tokens(THOUGHT, BUDGET)
    assert json.loads("".join(chunk.text or "" for chunk in chunks))["x"] in (1, 2)
    assert outside.reasoning is None and json.loads(outside.text)["x"] in (1, 2)


def test_schema_after_reasoning_that_the_answer_begins_needs_a_budget(http: httpx.Client) -> None:
    told = f"[THINK]{THOUGHT}[/THINK]{ANSWER}"
    message, _ = chat(http, told, response_format=FORMAT, thinking_token_budget=BUDGET)
    assert message["reasoning_content"] == first_tokens(THOUGHT, BUDGET) and json.loads(message["content"])["x"] in (
        1,
        2,
    )
    without, _ = chat(http, told, response_format=FORMAT)
    assert "reasoning_content" not in without and json.loads(without["content"])["x"] in (1, 2)


def test_strict_tools_that_the_model_need_not_call_keep_a_budget(http: httpx.Client) -> None:
    """Their grammar has the reasoning itself."""
    pytest.importorskip("llguidance")
    call = f'<tool_call>{{"name": "f", "arguments": {ANSWER}}}</tool_call>'
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    for budget, thought in ((BUDGET, first_tokens(THOUGHT, BUDGET)), (70, THOUGHT.rstrip())):
        fields = dict(tools=[strict], thinking_token_budget=budget, max_tokens=160)
        message, _ = chat(http, f"{THOUGHT}[/THINK]{call}", **fields, **INSIDE)
        assert message["reasoning_content"] == thought
        assert [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]] == [{"x": 1}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_streams_and_completions_of_several_prompts_keep_the_budget(http: httpx.Client, is_stream: bool) -> None:
    specials = engine().tokenizer.special_texts
    start, end = specials["[THINK]"], specials["[/THINK]"]
    told = f"{THOUGHT}[/THINK]It is 4."
    fields = {"model": serving.NAME, "prompt": [[5, start], [start, 6, 7, 8]], "n": 2, "max_tokens": 12}
    fields |= {"thinking_token_budget": BUDGET, "return_token_ids": True, "stream": is_stream}
    with telling(engine(), told) as ids:
        got = http.post("/v1/completions", json=fields).raise_for_status()
    tokens: dict[int, list[int]] = {}
    for body in [event for event in serving.events(got.content) if event != "[DONE]"] if is_stream else [got.json()]:
        for choice in body["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [tokens[i][:3] for i in range(2)] == [ids[:3]] * 2
    assert [tokens[i].index(end) for i in range(4)] == [BUDGET, BUDGET, BUDGET - 3, BUDGET - 3]


def test_messages_keep_their_budget_of_tokens(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "model": serving.NAME,
        "messages": USER,
        "max_tokens": 40,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400 and "thinking.budget_tokens: expected an int >= 1024, got 5" in refused.text
    monkeypatch.setattr("jspec.server.ask.anthropic_input.MIN_BUDGET", 1)
    with telling(engine(), f"{THOUGHT}[/THINK]It is 4."):
        got = http.post("/v1/messages", json=body).raise_for_status().json()
    assert got["content"][0]["thinking"] == first_tokens(THOUGHT, BUDGET)
    large = http.post("/v1/messages", json=body | {"thinking": {"type": "enabled", "budget_tokens": 40}})
    assert (
        large.status_code == 400 and "thinking.budget_tokens: expected less than max_tokens (40), got 40" in large.text
    )
    beside = http.post("/v1/messages", json=body | {"thinking": {"type": "adaptive", "budget_tokens": 40}})
    assert beside.status_code == 400 and "expected nothing beside the type" in beside.text


def test_responses_keep_a_budget(http: httpx.Client) -> None:
    body = {"model": serving.NAME, "input": "a", "max_output_tokens": 40, "thinking_token_budget": BUDGET, **INSIDE}
    with telling(engine(), f"{THOUGHT}[/THINK]It is 4."):
        got = http.post("/v1/responses", json=body).raise_for_status().json()
    assert got["output"][0]["content"][0]["text"] == first_tokens(THOUGHT, BUDGET)
    assert got["usage"]["output_tokens_details"]["reasoning_tokens"] == BUDGET + 1


def test_budget_of_a_model_without_markers_is_refused_under_the_name_of_the_field() -> None:
    with serving.running() as server, server.http() as http:
        body = {"model": serving.NAME, "messages": USER, "max_thinking_tokens": 3}
        got = http.post("/v1/chat/completions", json=body)
        error = got.json()["error"]
        assert got.status_code == 400 and error["param"] == "max_thinking_tokens"
        assert "the chat template has no markers of reasoning" in error["message"]
