"""Test tool calls and reasoning of /v1/chat/completions with OpenAI's Python client, streamed and whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jspec.engine.text.tokenizer import HFTokenizer
from jspec.server.routes import chat
from jspec.server.tool_calls.auto_grammar import auto_grammar
from tests.support import serving, tool_serving
from tests.support.tool_serving import saying, telling

MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
STRICT: list[Any] = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
ANSWER = f"<think>\nI call.\n</think>\n\nLook:\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(tool_serving.engine()) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: serving.Running) -> openai.OpenAI:
    return server.client()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": serving.NAME, "messages": MESSAGES, "max_tokens": 200, "seed": 1, **fields}
    )


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, list[list[str]], str]:
    """Return content, reasoning, calls as [id, name, arguments], and the reason of the end of a streamed answer."""
    content = reasoning = ""
    calls: list[list[str]] = []
    for chunk in ask(client, stream=True, **fields):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
        reason = choice.finish_reason
    return content, reasoning, calls, reason


def test_answer_with_reasoning_and_calls_is_split_streamed_or_not(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "extra_body": saying(ANSWER)}
    answer = ask(client, **fields)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == (
        "Look:",
        "I call.",
        "tool_calls",
    )
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("f", '{"x": 1}')] * 2
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens / 2
    content, reasoning, parts, reason = streamed(client, **fields)
    assert (content, reasoning, [tuple(part[1:]) for part in parts], reason) == (
        "Look:",
        "I call.",
        calls,
        "tool_calls",
    )
    assert len({part[0] for part in parts}) == 2


def test_calls_without_tools_are_content(client: openai.OpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = ask(client, extra_body=saying(CALL), **fields).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_call_cut_by_max_tokens_is_streamed_as_far_as_it_came(client: openai.OpenAI) -> None:
    content, _, calls, reason = streamed(client, tools=TOOLS, tool_choice="required", max_tokens=18)
    whole = streamed(client, tools=TOOLS, tool_choice="required")
    assert reason == "length" and whole[3] == "tool_calls"
    if calls:
        assert whole[2][0][2].startswith(calls[0][2])
    else:
        assert content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_forced_calls_are_valid_streamed_or_not(client: openai.OpenAI, choice: Any, is_parallel: bool) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": is_parallel, "n": 2}
    for one in ask(client, **fields).choices:
        calls = one.message.tool_calls
        is_whole = one.finish_reason == "tool_calls"
        assert calls and (len(calls) == 1 or is_parallel)
        assert is_whole or is_parallel, "max_tokens may cut a list of calls alone"
        assert not is_whole or one.message.content is None
        complete = calls if is_whole else calls[:-1]
        assert all(json.loads(call.function.arguments) in ({"x": 1}, {"x": 2}) for call in complete)
    content, _, parts, _ = streamed(client, **{**fields, "n": 1})
    assert (content == "" or is_parallel) and parts[0][1] == "f"


def test_reasoning_can_be_left_in_the_content_or_sent_under_another_name() -> None:
    say = saying("<think>\nI call.\n</think>\n\nLook:")
    with serving.running(tool_serving.engine(), reasoning=False) as server:
        message = ask(server.client(), extra_body=say).choices[0].message
        assert message.content == "<think>\nI call.\n</think>\n\nLook:"
    with serving.running(tool_serving.engine(), reasoning_field="reasoning") as server:
        message = ask(server.client(), extra_body=say).choices[0].message
        assert (message.content, message.reasoning) == ("Look:", "I call.")


def test_prompt_that_ends_inside_reasoning_begins_the_answer_there(client: openai.OpenAI) -> None:
    inside = {"chat_template_kwargs": {"enable_thinking": True}, **saying("I call.</think>Look:")}
    message = ask(client, extra_body=inside).choices[0].message
    assert (message.content, message.reasoning_content) == ("Look:", "I call.")
    outside = saying("I call.</think>Look:")  # the negative control
    assert ask(client, extra_body=outside).choices[0].message.content == "I call.</think>Look:"


def test_answer_in_a_schema_has_no_reasoning_even_if_the_prompt_ends_inside_it(client: openai.OpenAI) -> None:
    inside = {"chat_template_kwargs": {"enable_thinking": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    message = ask(client, response_format=schema, extra_body=inside).choices[0].message
    assert json.loads(message.content) in ({"x": 1}, {"x": 2})
    free = ask(client, extra_body=inside, max_tokens=8).choices[0].message  # the negative control
    assert free.reasoning_content and not free.content


def test_grammar_of_strict_tools_is_written_where_grammars_are_compiled(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def write(*args: Any, **more: Any) -> str | None:
        threads.append(threading.current_thread().name)
        return auto_grammar(*args, **more)

    monkeypatch.setattr(chat, "auto_grammar", write)
    ask(client, tools=STRICT, max_tokens=2)
    assert len(threads) == 1 and threads[0].startswith("jspec-grammar")


@pytest.mark.parametrize("has_begun", [False, True])
def test_strict_tools_leave_a_call_in_the_reasoning_as_it_is(client: openai.OpenAI, has_begun: bool) -> None:
    thought = f"Not {CALL.replace('1', '3')}."
    kwargs = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}} if has_begun else {}
    with telling(tool_serving.engine(), f"{'' if has_begun else '<think>'}{thought}</think>{CALL}"):
        (choice,) = ask(client, tools=STRICT, **kwargs).choices
    assert choice.message.reasoning_content == thought and choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"x": 1}']


PLAIN = """{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
[{{ message.role }}] {{ message.content }}{% endfor %}"""
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": "f", "arguments": text}}
            for id_, text in (("a", '{"x": 1}'), ("b", '{"x": 2}'))
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "one"},
    {"role": "tool", "tool_call_id": "b", "content": "two"},
    {"role": "user", "content": "And?"},
]
RENDERED = """[assistant] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]\
[user] Result of f:
one

Result of f:
two

And?"""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, "none", "auto", None])
def test_template_without_tools_gets_calls_and_results_as_texts(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tool_serving.engine().tokenizer
    assert isinstance(tokenizer, HFTokenizer)
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", PLAIN)
    fields = {"messages": HISTORY, "tools": TOOLS, "tool_choice": choice} if choice else {"messages": HISTORY}
    if choice == "auto":
        with pytest.raises(ValueError, match=r"^tools: .* never reads"):
            chat.render(tokenizer, fields)
        return
    listed = "" if choice in ("none", None) else f"Tools that can be called:\n{json.dumps(TOOLS[0]['function'])}\n\n"
    assert tokenizer.decode(chat.render(tokenizer, fields)).strip() == f"[user] {listed}Hi{RENDERED}"


def test_parser_by_name_overrides_the_templates() -> None:
    with serving.running(tool_serving.engine(), tool_parser="mistral") as server:
        say = saying('[TOOL_CALLS]f[ARGS]{"x": 2}')
        (call,) = ask(server.client(), tools=TOOLS, extra_body=say).choices[0].message.tool_calls
        assert call.function.arguments == '{"x": 2}' and len(call.id) == 9


def test_tools_of_a_template_in_no_known_format_are_refused_by_name() -> None:
    with serving.running(tool_serving.engine()) as server:
        server.service.engine.tokenizer._tokenizer.chat_template = "{{ tools }}{{ messages }}"  # type: ignore[union-attr]
        try:
            with pytest.raises(
                openai.BadRequestError,
                match="hermes, llama3_json, mistral, pythonic, harmony, gemma4, glm45, seed_oss, qwen3_coder",
            ) as raised:
                ask(server.client(), tools=TOOLS)
        finally:
            server.service.engine.tokenizer._tokenizer.chat_template = tool_serving.TEMPLATE  # type: ignore[union-attr]
    assert raised.value.param == "tools"


BROKEN = {  # a call of each format that streams arguments, up to a place in its arguments
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": "aSTOP',
    "llama3_json": '{"name": "f", "parameters": {"x": "aSTOP',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": "aSTOP',
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"x": "aSTOP',
}


@pytest.mark.parametrize("format_", BROKEN)
@pytest.mark.parametrize("stop", ["STOP", None])
def test_call_that_breaks_off_is_no_call_in_the_reason_of_the_end(format_: str, stop: str | None) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "stop": stop, "extra_body": saying(BROKEN[format_])}
    with serving.running(tool_serving.engine(), tool_parser=format_) as server:
        content, _, ((_, name, arguments),), reason = streamed(server.client(), **fields)
        assert (content, name, reason) == ("", "f", "stop") and arguments.startswith('{"x": "a')
        (choice,) = ask(server.client(), **fields).choices
        assert choice.finish_reason == "stop" and choice.message.tool_calls[0].function.arguments == arguments


def test_forced_call_that_a_stop_string_cuts_is_no_call_in_the_reason_of_the_end(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        (answer,) = ask(client, tools=TOOLS, tool_choice=choice, stop='"x"').choices
        assert answer.finish_reason == "stop" and answer.message.tool_calls[0].function.arguments.strip() == "{"


def test_whole_call_before_a_stop_string_is_one_in_the_reason_of_the_end(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tools=TOOLS, stop="STOP", extra_body=saying(f"{CALL}STOP")).choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 2}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": STRICT, "extra_body": saying("a")}, "structured_outputs"),
        ({"tools": TOOLS, "parallel_tool_calls": False, "extra_body": saying("a")}, "structured_outputs"),
    ],
)
def test_wrong_tools_raise_the_clients_error_that_names_them(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.param == param
