"""Test tool calls and reasoning of /v1/chat/completions with OpenAI's Python client, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jspec.server.app import make_app
from jspec.server.http.settings import Settings
from tests.support import serving, tool_serving
from tests.support.tool_serving import saying

MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
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
                openai.BadRequestError, match="hermes, llama3_json, mistral, pythonic, harmony"
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


SPOKEN = (  # in harmony; <|other|> is a special token of no format, which no answer shows
    "<|channel|>analysis<|message|>Need<|other|> f.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:"
    '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
)
FOUND = ("Look:", "Need f.", [("f", '{"x": 1}')])


def found_in(server: serving.Running, route: str, **fields: Any) -> tuple[str, str, list[Any]]:
    """Return content, reasoning and calls of the answer of a route."""
    function = TOOLS[0]["function"]
    asked: dict[str, Any] = {"model": serving.NAME, "messages": MESSAGES, "max_tokens": 200, "tools": TOOLS}
    if route == "messages":
        asked["tools"] = [{"name": "f", "input_schema": SCHEMA}]
    elif route == "responses":
        asked = {"model": serving.NAME, "input": MESSAGES, "tools": [{"type": "function", **function}]}
    with server.http() as http:
        answer = http.post({"chat": "/v1/chat/completions"}.get(route, f"/v1/{route}"), json=asked | fields).json()
    if route == "chat":
        message = answer["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        return message["content"] or "", message.get("reasoning_content", ""), calls
    if route == "messages":
        blocks = answer["content"]
        calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
        return *("".join(block.get(key, "") for block in blocks) for key in ("text", "thinking")), calls  # type: ignore[return-value]
    items = answer["output"]
    texts = {
        kind: [p["text"] for i in items if i["type"] == kind for p in i["content"]] for kind in ("message", "reasoning")
    }
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return "".join(texts["message"]), "".join(texts["reasoning"]), calls


@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
def test_markers_that_are_special_tokens_split_the_answer_of_every_route(route: str) -> None:
    engine = tool_serving.special_engine()
    with serving.running(engine) as server, tool_serving.telling(engine, SPOKEN):
        assert found_in(server, route) == FOUND
        assert found_in(server, route, skip_special_tokens=True) == FOUND
        shown = found_in(server, route, skip_special_tokens=False)
        assert shown == ("Look:", "Need<|other|> f.", FOUND[2])
        if route == "chat":
            content, reasoning, calls, reason = streamed(server.client(), tools=TOOLS)
            assert (content, reasoning, [tuple(call[1:]) for call in calls], reason) == (*FOUND, "tool_calls")


STRICT: dict[str, Any] = {  # a strict tool, by route
    "chat": {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
    "responses": {"type": "function", **TOOLS[0]["function"], "strict": True},
    "messages": {"name": "f", "input_schema": SCHEMA, "strict": True},
}


@pytest.mark.parametrize("route", STRICT)
@pytest.mark.parametrize("format_", ["hermes", "harmony"])
def test_arguments_of_a_strict_tool_follow_its_schema_on_every_route(route: str, format_: str) -> None:
    engine = tool_serving.special_engine() if format_ == "harmony" else tool_serving.engine()
    text = SPOKEN.replace("<|other|>", "") if format_ == "harmony" else ANSWER
    with serving.running(engine) as server, tool_serving.telling(engine, text.replace('"x": 1', '"x": 3')):
        content, reasoning, calls = found_in(server, route, tools=[STRICT[route]])
        assert (content, reasoning) == ("Look:", "Need f." if format_ == "harmony" else "I call.")
        assert calls and all(json.loads(arguments) in ({"x": 1}, {"x": 2}) for _, arguments in calls)
        loose = found_in(server, route)[2]  # the negative control
        assert json.loads(loose[0][1]) == {"x": 3}


@pytest.mark.parametrize("route", STRICT)
def test_answer_that_may_have_one_call_has_one_on_every_route(server: serving.Running, route: str) -> None:
    one: dict[str, Any] = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    fields = one if route == "messages" else {"parallel_tool_calls": False}
    with tool_serving.telling(tool_serving.engine(), f"{CALL}\n{CALL}"):
        assert len(found_in(server, route)[2]) == 2
        assert len(found_in(server, route, **fields)[2]) == 1


def test_strict_tool_in_a_format_that_no_grammar_can_force_is_refused() -> None:
    with serving.running(tool_serving.engine(), tool_parser="pythonic") as server:
        with pytest.raises(openai.BadRequestError, match='set tool_choice to "required"') as raised:
            ask(server.client(), tools=[STRICT["chat"]])
        assert raised.value.param == "tools"


@pytest.mark.parametrize("route", STRICT)
@pytest.mark.parametrize("is_named", [True, False])
def test_forced_calls_of_a_template_without_tools_work_on_every_route(route: str, is_named: bool) -> None:
    choice: Any = {"type": "tool", "name": "f"} if route == "messages" else {"type": "function", "name": "f"}
    if not is_named:
        choice = {"type": "any"} if route == "messages" else "required"
    elif route == "chat":
        choice = {"type": "function", "function": {"name": "f"}}
    with serving.running() as server:
        content, reasoning, ((name, arguments), *_) = found_in(server, route, tool_choice=choice)
        assert (content, reasoning, name) == ("", "", "f") and json.loads(arguments) in ({"x": 1}, {"x": 2})
        asked = {
            "model": serving.NAME,
            "messages": MESSAGES,
            "tools": TOOLS,
            "max_tokens": 1,
            "tool_choice": "required",
        }
        with server.http() as http:
            chat = http.post("/v1/chat/completions", json={**asked, "return_token_ids": True}).json()
            prompt = http.post("/detokenize", json={"tokens": chat["prompt_token_ids"]}).json()["prompt"]
            assert prompt.count(json.dumps(TOOLS[0]["function"])) == 1 and prompt.count("Once upon a time") == 1
            listed = [{"name": "f", "input_schema": SCHEMA}]
            counted = {**asked, "tools": listed, "tool_choice": {"type": "any"}}
            del counted["max_tokens"]
            tokens = http.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"]
            assert tokens == chat["usage"]["prompt_tokens"]
            error = http.post("/v1/chat/completions", json={**asked, "tool_choice": "auto"}).json()["error"]
    assert error["param"] == "tools" and 'set tool_choice to "required" or a tool' in error["message"]


def test_server_with_a_format_that_does_not_exist_is_refused() -> None:
    for field in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ValueError, match=f"^{field}: expected one of"):
            make_app(tool_serving.engine(), Settings(**{field: "other"}))  # type: ignore[arg-type]


def test_reasoning_that_a_special_token_of_the_prompt_has_begun_is_reasoning() -> None:
    engine = tool_serving.special_engine("{{ messages[0].content }}[THINK]")
    with serving.running(engine) as server, tool_serving.telling(engine, "I add.[/THINK]3"):
        assert found_in(server, "chat", tools=None) == ("3", "I add.", [])


@pytest.mark.parametrize("route", ["chat", "messages"])
def test_message_of_harmony_that_a_prefill_has_begun_goes_on(route: str) -> None:
    engine = tool_serving.special_engine()
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    fields: dict[str, Any] = {"tools": None, "messages": messages}
    if route == "chat":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    with serving.running(engine) as server, tool_serving.telling(engine, " 3."):
        assert found_in(server, route, **fields) == (" 3.", "", [])


def test_parser_of_reasoning_by_name_overrides_the_templates() -> None:
    engine, text = tool_serving.special_engine(), "[THINK]I add.[/THINK]3"
    with serving.running(engine, reasoning_parser="mistral") as server, tool_serving.telling(engine, text):
        assert found_in(server, "chat", tools=None) == ("3", "I add.", [])
    with serving.running(engine, reasoning=False) as server, tool_serving.telling(engine, SPOKEN):
        content, reasoning, calls = found_in(server, "chat")
        assert content.startswith("<|channel|>analysis<|message|>Need f.<|end|>Look:") and not reasoning
        assert calls == FOUND[2]


@pytest.mark.parametrize("prefill", ["<think>\nI", "<think>\nI "])
def test_reasoning_that_a_prefill_has_begun_is_reasoning_on_every_route(server: serving.Running, prefill: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": prefill}]
    say = saying(" call.</think>Look:")
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert found_in(server, "chat", tools=None, messages=messages, **more, **say) == ("Look:", " call.", [])
    assert found_in(server, "messages", tools=None, messages=messages, **say) == ("Look:", " call.", [])


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
        ({"tools": [STRICT["chat"]], "extra_body": saying("a")}, "structured_outputs"),
        ({"tools": TOOLS, "parallel_tool_calls": False, "extra_body": saying("a")}, "structured_outputs"),
    ],
)
def test_wrong_tools_raise_the_clients_error_that_names_them(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.param == param
