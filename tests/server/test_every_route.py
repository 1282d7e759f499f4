"""Test what chat completions, responses and messages share: special tokens as markers, strict tools, prefills."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jspec.server.app import make_app
from jspec.server.http.settings import Settings
from tests.server.test_chat_tools import ANSWER, CALL, MESSAGES, SCHEMA, TOOLS, ask, streamed
from tests.server.test_chat_tools import STRICT as LISTED
from tests.support import serving, tool_serving
from tests.support.tool_serving import saying


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(tool_serving.engine()) as one:
        yield one


SPOKEN = (  # in harmony; <|other|> is a special token of no format, which no answer shows
    "<|channel|>analysis<|message|>Need<|other|> f.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:"
    '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
)
FOUND = ("Look:", "Need f.", [("f", '{"x": 1}')])


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
Found = tuple[str, str, list[Any]]  # content, reasoning and calls of an answer


def found_in(server: serving.Running, route: str, **fields: Any) -> Found:
    """Return what the answer of a route has."""
    with server.http() as http:
        return read_whole(route, http.post(PATHS[route], json=body_of(route, fields)).json())


def body_of(route: str, fields: dict[str, Any]) -> dict[str, Any]:
    function = TOOLS[0]["function"]
    asked: dict[str, Any] = {"model": serving.NAME, "messages": MESSAGES, "max_tokens": 200, "tools": TOOLS}
    if route == "messages":
        asked["tools"] = [{"name": "f", "input_schema": SCHEMA}]
    elif route == "responses":
        asked = {"model": serving.NAME, "input": MESSAGES, "tools": [{"type": "function", **function}]}
    return asked | fields


def read_whole(route: str, answer: Any) -> Found:
    if route == "chat":
        message = answer["choices"][-1]["message"]
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


@pytest.mark.parametrize("route", PATHS)
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
    "chat": LISTED[0],
    "responses": {"type": "function", **TOOLS[0]["function"], "strict": True},
    "messages": {"name": "f", "input_schema": SCHEMA, "strict": True},
}


THOUGHT = ANSWER.removesuffix(f"{CALL}\n{CALL}")
WRONG = {  # answers with a call of each format, whose argument is wrong
    "hermes": f"{THOUGHT}{CALL}".replace('"x": 1', '"x": 3'),
    "harmony": SPOKEN.replace("<|other|>", "").replace('"x": 1', '"x": 3'),
    "glm45": f"{THOUGHT}<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "seed_oss": f"{THOUGHT}<seed:tool_call><function=f><parameter=x>3</parameter></function></seed:tool_call>",
    "qwen3_coder": f"{THOUGHT}<tool_call><function=f><parameter=x>\n3\n</parameter></function></tool_call>",
    "gemma4": f"{THOUGHT}<|tool_call>call:f{{x:3}}<tool_call|>",
}


@pytest.mark.parametrize("route", STRICT)
@pytest.mark.parametrize("format_", WRONG)
def test_arguments_of_a_strict_tool_follow_its_schema_on_every_route(route: str, format_: str) -> None:
    engine = tool_serving.special_engine() if format_ == "harmony" else tool_serving.engine()
    with serving.running(engine, tool_parser=format_) as server, tool_serving.telling(engine, WRONG[format_]):
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


OBJECT = {"type": "json_schema", "schema": {"type": "object"}}
FORMATS: dict[str, tuple[str, Any, Any]] = {  # the field of a schema, its value, and a choice that forces calls
    "chat": ("response_format", {"type": "json_object"}, "required"),
    "responses": ("text", {"format": {**OBJECT, "name": "x"}}, "required"),
    "messages": ("output_config", {"format": OBJECT}, {"type": "any"}),
}


@pytest.mark.parametrize("route", FORMATS)
@pytest.mark.parametrize("other", [{"regex": "a"}, {"grammar": 'start: "a"'}, {"json": {"const": 1}}])
def test_two_fields_that_each_set_a_grammar_are_named(server: serving.Running, route: str, other: Any) -> None:
    field, value, forced = FORMATS[route]
    pairs: list[dict[str, Any]] = [{field: value, "tools": None}, {"tool_choice": forced}]
    pairs = [{**pair, "structured_outputs": other} for pair in pairs] + [{field: value, "tool_choice": forced}]
    for pair in pairs:
        with server.http() as http:
            message = http.post(PATHS[route], json=body_of(route, pair)).json()["error"]["message"]
        one, _, rest = message.partition(": expected nothing beside ")
        two, _, remedy = rest.partition("; ")
        assert {one, two} <= {*pair} and one != two and remedy == "give one of the two", message


@pytest.mark.parametrize("route", FORMATS)
def test_field_that_contradicts_a_grammar_is_named_with_the_grammars_field(server: serving.Running, route: str) -> None:
    field, value, forced = FORMATS[route]
    grammars: list[dict[str, Any]] = [{"structured_outputs": {"regex": "a"}, "tools": None}]
    grammars += [{field: value, "tools": None}, {"tool_choice": forced}, {"tools": [STRICT[route]]}]
    for asked in grammars:
        with server.http() as http:
            body = body_of(route, {**asked, "min_tokens": 2})
            message = http.post(PATHS[route], json=body).json()["error"]["message"]
        assert message.startswith(f"min_tokens: expected its default beside {next(iter(asked))}, "), message


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


@pytest.mark.parametrize(
    ("is_harmony", "said", "options", "text", "reasoning"),
    [
        (False, ANSWER.removesuffix(CALL), {}, f"Look:\n{CALL}\n", "I call."),
        (False, "I add.</think>\n3", {"chat_template_kwargs": {"enable_thinking": True}}, "3", "I add."),
        (False, "3", {"chat_template_kwargs": {"enable_thinking": False}}, "3", ""),
        (False, "d.</think>3", {"continue_final_message": True}, "3", "d."),
        (False, '{"x": 1}', {"json_schema": SCHEMA, "chat_template_kwargs": {"enable_thinking": True}}, '{"x": 1}', ""),
        (True, SPOKEN, {}, SPOKEN[SPOKEN.index("Look") :].replace("<|end|>", "\n").removesuffix("<|call|>"), "Need f."),
        (
            True,
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            {},
            "Hi",
            "Hm",
        ),
    ],
)
def test_engine_splits_reasoning_from_the_text_of_chats(
    is_harmony: bool, said: str, options: dict[str, Any], text: str, reasoning: str
) -> None:
    engine = tool_serving.special_engine() if is_harmony else tool_serving.engine()
    messages = (
        [*MESSAGES, {"role": "assistant", "content": "<think>I ad"}]
        if "continue_final_message" in options
        else MESSAGES
    )
    fields: dict[str, Any] = {"max_tokens": 200, "n": 2, **options}
    with tool_serving.telling(engine, said):
        (done,) = engine.chat(messages, **fields)
        ((other,),) = [asyncio.run(engine.achat([messages], **fields))]
        chunks = [chunk for chunk in engine.chat_stream(messages, **fields) if chunk.index == 1]
    for each in (*done.samples, *other.samples):
        assert (each.text, each.reasoning or "") == (text, reasoning)
    assert ("".join(c.text or "" for c in chunks), "".join(c.reasoning or "" for c in chunks)) == (text, reasoning)
    assert engine.generate("a", max_tokens=1)[0].reasoning is None


@pytest.mark.parametrize("route", ["chat/completions", "messages", "messages/count_tokens"])
def test_conversation_with_too_many_calls_is_refused_before_it_is_rendered(server: serving.Running, route: str) -> None:
    call: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made: dict[str, Any] = {"content": None, "tool_calls": [call] * 1025}
    if route != "chat/completions":
        made = {"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * 1025}
    asked = {"model": serving.NAME, "messages": [*MESSAGES, *[{"role": "assistant", **made}] * 2, *MESSAGES]}
    with server.http() as http:
        error = http.post(f"/v1/{route}", json={**asked, **({} if "count" in route else {"max_tokens": 1})}).json()
    assert error["error"]["message"].startswith("messages: expected at most 2048 tool calls, got 2050; ")


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("route", STRICT)
def test_keyword_that_no_grammar_enforces_is_named_by_the_clients_path(
    server: serving.Running, route: str, forced: bool
) -> None:
    tool, schema = copy.deepcopy(STRICT[route]), {"properties": {"x": {"items": {"not": {}}, "type": "array"}}}
    place = {"chat": "function.parameters", "responses": "parameters", "messages": "input_schema"}[route]
    (tool["function"] if route == "chat" else tool)[place.split(".")[-1]] = {"type": "object", **schema}
    asked: dict[str, Any] = {"model": serving.NAME, "tools": [tool], "max_tokens": 1, "messages": MESSAGES}
    if route == "responses":
        asked = {"model": serving.NAME, "tools": [tool], "input": "a"}
    choice: Any = "required" if forced else "auto"
    asked["tool_choice"] = {"type": "any" if forced else "auto"} if route == "messages" else choice
    with server.http() as http:
        error = http.post({"chat": "/v1/chat/completions"}.get(route, f"/v1/{route}"), json=asked).json()["error"]
    path = f"tools[0].{place}.properties.x.items.not"
    assert error["message"] == f"{path}: no grammar enforces this keyword; leave it out"
    assert error.get("param", path) == path


def test_server_with_a_format_that_does_not_exist_is_refused() -> None:
    for field in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ValueError, match=f"^{field}: expected one of"):
            make_app(tool_serving.engine(), Settings(**{field: "other"}))  # type: ignore[arg-type]


def test_reasoning_in_messages_of_their_own_cannot_be_left_in_the_content() -> None:
    """The channels of harmony are no part of a text that users read."""
    plain = tool_serving.engine()
    cases: list[tuple[Any, dict[str, Any]]] = [
        (tool_serving.special_engine(), {}),
        (plain, {"reasoning_parser": "openai_gptoss"}),
        (plain, {"tool_parser": "harmony"}),
    ]
    for engine, names in cases:
        with pytest.raises(ValueError, match=r"^reasoning: expected True, got False \(--no-reasoning\)"):
            make_app(engine, Settings(reasoning=False, **names))
        make_app(engine, Settings(**names))
    make_app(tool_serving.engine(), Settings(reasoning=False))


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


@pytest.mark.parametrize("prefill", ["<think>\nI", "<think>\nI "])
def test_reasoning_that_a_prefill_has_begun_is_reasoning_on_every_route(server: serving.Running, prefill: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": prefill}]
    say = saying(" call.</think>Look:")
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert found_in(server, "chat", tools=None, messages=messages, **more, **say) == ("Look:", " call.", [])
    assert found_in(server, "messages", tools=None, messages=messages, **say) == ("Look:", " call.", [])
