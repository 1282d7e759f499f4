"""Test /v1/responses with OpenAI's Python client: answers are those of chat completions, in the client's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from jspec.server.ask.response_input import read_input
from jspec.server.http.errors import ApiError
from tests.support import serving, tool_serving
from tests.support.tool_serving import check_types, saying

INPUT = [{"role": "developer", "content": "Tell a story."}, {"role": "user", "content": "Once upon a time"}]
MESSAGES: list[Any] = [{**INPUT[0], "role": "system"}, INPUT[1]]
SEEDED: dict[str, Any] = {"temperature": 0.8, "extra_body": {"seed": 7}}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "f", "description": "Do it.", "parameters": SCHEMA, "strict": False}
CALLS = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"x": 2}}'
ANSWER = f"<think>\nI call.\n</think>\n\nLook:\n{CALLS}</tool_call>"
DONE = ["response.content_part.done", "response.output_item.done"]


class Agreed(pydantic.BaseModel):
    agreed: bool


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(tool_serving.engine()) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: serving.Running) -> openai.OpenAI:
    return server.client()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": serving.NAME, "input": INPUT, "max_output_tokens": 16, **fields}
    answer = client.responses.create(**given)
    if not given.get("stream"):
        check_types(answer)
    return answer


def events_of(client: openai.OpenAI, **fields: Any) -> list[Any]:
    """Return the events of a stream, after a check of their types and numbers."""
    events = list(ask(client, stream=True, **fields))
    for number, event in enumerate(events):
        check_types(event)
        assert event.sequence_number == number
    return events


def test_text_and_usage_equal_those_of_chat_completions(client: openai.OpenAI) -> None:
    answer = ask(client, **SEEDED)
    chat = client.chat.completions.create(model=serving.NAME, messages=MESSAGES, max_tokens=16, **SEEDED)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    other = ask(client, temperature=0.8, extra_body={"seed": 8})
    assert other.output_text != answer.output_text  # the negative control


def test_instructions_and_a_text_are_the_same_as_messages(client: openai.OpenAI) -> None:
    short = ask(client, instructions="Tell a story.", input="Once upon a time", **SEEDED)
    assert short.output_text == ask(client, **SEEDED).output_text
    assert 0 < short.usage.input_tokens_details.cached_tokens < short.usage.input_tokens
    assert short.instructions == "Tell a story."


def test_stream_of_a_text_has_typed_events_that_join_to_the_text(client: openai.OpenAI) -> None:
    whole, events = ask(client, **SEEDED), events_of(client, **SEEDED)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2 and "".join(event.delta for event in deltas) == whole.output_text
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        *DONE,
        "response.incomplete",
    ]
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
    assert {event.item_id for event in deltas} == {last.output[0].id}


def test_answer_with_reasoning_text_and_calls_has_an_item_for_each(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "extra_body": saying(ANSWER), "max_output_tokens": 200}
    answer = ask(client, **fields)
    reasoning, message, *calls = answer.output
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reasoning.content[0].text == "I call." and message.content[0].text == "Look:"
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x": 1}'), ("f", '{"x": 2}')]
    assert calls[0].call_id != calls[1].call_id and answer.status == "completed"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens / 2

    events = events_of(client, **fields)
    last = events[-1].response
    assert events[-1].type == "response.completed" and len(last.output) == 4
    for index, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[0].item.id == item.id
        assert own[-1].type == "response.output_item.done" and own[-1].item == item
        begun = [event.part.text for event in own if event.type == "response.content_part.added"]
        assert begun == [""] if item.type != "function_call" else own[0].item.arguments == ""
        joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert joined == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert [item.to_dict().keys() for item in last.output] == [item.to_dict().keys() for item in answer.output]


def test_stream_helper_of_the_client_accumulates_the_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [{**TOOL, "strict": True}], "max_output_tokens": 200}
    asked = client.responses.stream(model=serving.NAME, input="a", **fields)
    with tool_serving.telling(tool_serving.engine(), ANSWER), asked as stream:
        events = list(stream)
        final = stream.get_final_response()
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    (*_, text) = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert text == "Look:"  # what the client has joined
    assert [json.loads(event.arguments) for event in done] == [{"x": 1}, {"x": 2}]
    assert final.output_text == "Look:"
    assert final.output[2].parsed_arguments == {"x": 1}  # type: ignore[union-attr]


def test_pydantic_class_is_parsed_from_the_answer(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=serving.NAME, input="Do you agree?", text_format=Agreed)
    assert isinstance(answer.output_parsed, Agreed) and answer.status == "completed"
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_forced_call_has_valid_arguments(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=100)
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)["x"] in (1, 2)) == ("function_call", "f", True)
    assert answer.tools[0].name == "f" and answer.parallel_tool_calls is False


def test_answer_goes_back_as_input_with_the_results_of_its_calls(client: openai.OpenAI) -> None:
    """The prompt is that of a chat with the same messages."""
    first = ask(client, tools=[TOOL], extra_body=saying(ANSWER), max_output_tokens=200)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    items = [*INPUT, *(item.to_dict() for item in first.output), *results]
    second = ask(client, input=items, tools=[TOOL], **SEEDED)
    made = [{"id": c.call_id, "type": "function", "function": {"name": "f", "arguments": c.arguments}} for c in calls]
    thought = {"role": "assistant", "reasoning_content": "I call.", "content": "Look:", "tool_calls": made}
    chat = client.chat.completions.create(
        model=serving.NAME,
        messages=[*MESSAGES, thought, *({"role": "tool", "tool_call_id": c.call_id, "content": "3"} for c in calls)],
        tools=[{"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}],  # type: ignore[list-item]
        max_tokens=16,
        **SEEDED,
    )
    assert chat.usage is not None and second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.output_text == chat.choices[0].message.content


def test_stream_that_fails_ends_with_a_failed_response(server: serving.Running, client: openai.OpenAI) -> None:
    seen = []
    body = {"ignore_eos": True, "seed": 1}
    for event in ask(client, input="a", max_output_tokens=400, extra_body=body, stream=True):
        if event.type == "response.output_text.delta" and seen[-1].type != event.type:
            error = ApiError(503, "the server ends")
            server.service.calls._loop.call_soon_threadsafe(server.service.calls.fail_all, error)  # type: ignore[union-attr]
        seen.append(event)
    check_types(seen[-1])
    assert seen[0].type == "response.created" and seen[-1].type == "response.failed"
    assert seen[-1].response.error.message == "the server ends"
    assert [item.status for item in seen[-1].response.output] == ["incomplete"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools[1].name"),
        (
            {"tools": [{**TOOL, "parameters": {"properties": {"x": {"type": "int"}}}}], "tool_choice": "required"},
            "tools[0].parameters.properties.x.type",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "int"}}}}, "text"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"jspec": {"rounds": True}}}, "jspec"),
    ],
)
def test_wrong_or_unsupported_field_raises_the_clients_error_that_names_it(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.param == param


def test_input_items_become_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "d"}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "e"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "f", "annotations": []}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "g"}]},
    ]
    function = {"name": "f", "arguments": "{}"}
    assert read_input("input", items, "z").messages == [
        {"role": "system", "content": "z\n\na"},
        {"role": "user", "content": "b\nc"},
        {
            "role": "assistant",
            "reasoning_content": "d",
            "tool_calls": [{"id": id_, "type": "function", "function": function} for id_ in "12"],
        },
        {"role": "tool", "tool_call_id": "1", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "assistant", "reasoning_content": "g", "content": ""},
    ]


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
CALLED = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
YES = {"role": "assistant", "content": "yes"}
WHY, SO = ({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("why", "so"))


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([WHY, YES, CALL], [{**YES, "reasoning_content": "why", **CALLED}]),
        ([YES, WHY, CALL], [{**YES, "reasoning_content": "why", **CALLED}]),
        ([WHY, SO, YES], [{**YES, "reasoning_content": "why\nso"}]),
        ([YES, WHY, SO, CALL], [{**YES, "reasoning_content": "why\nso", **CALLED}]),
        ([INPUT[1], WHY, CALL], [INPUT[1], {"role": "assistant", "reasoning_content": "why", **CALLED}]),
        ([YES, WHY, YES], [YES, {**YES, "reasoning_content": "why"}]),
    ],
)
def test_reasoning_text_and_calls_in_a_row_are_one_message(items: list[Any], messages: list[Any]) -> None:
    made = read_input("input", items, None)
    assert made.messages == messages
    if CALL in items:
        assert made.names[f"messages[{len(messages) - 1}].tool_calls[0]"] == f"input[{len(items) - 1}]"


def test_call_that_breaks_off_is_incomplete_streamed_or_not(client: openai.OpenAI) -> None:
    broken = f'<tool_call>{{"name": "f", "arguments": {{"x": 1}}}}</tool_call>{CALLS[:44]}'
    fields: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 200, "extra_body": saying(broken)}
    for answer in (ask(client, **fields), events_of(client, **fields)[-1].response):
        assert (answer.status, answer.incomplete_details) == ("incomplete", None)
        assert [(item.arguments, item.status) for item in answer.output] == [
            ('{"x": 1}', "completed"),
            ('{"x": ', "incomplete"),
        ]
    assert events_of(client, **fields)[-1].type == "response.incomplete"
