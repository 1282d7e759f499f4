"""Test /v1/messages with Anthropic's Python client: answers are those of chat completions, in the client's types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jspec.server.ask.anthropic_input import read_messages, read_thinking
from jspec.server.http.errors import ApiError
from jspec.server.http.settings import digest_of
from jspec.server.reading.blocks import AnswerBlock
from jspec.server.routes.anthropic import _content
from tests.support import serving, tool_serving
from tests.support.tool_serving import check_types, saying

anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")

USER: list[Any] = [{"role": "user", "content": "Once upon a time"}]
SYSTEM = {"role": "system", "content": "Tell a story."}
SEED: dict[str, Any] = {"temperature": 0.8, "seed": 7}  # the client has no arguments for them
SEEDED = {"extra_body": SEED}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "description": "Do it.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": SCHEMA}}
CALLS = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"x": 2}}'
ANSWER = f"<think>\nI call.\n</think>\n\nLook:\n{CALLS}</tool_call>"


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(tool_serving.engine()) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: serving.Running) -> Any:
    return client_of(server)


def client_of(server: serving.Running, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def given(**fields: Any) -> dict[str, Any]:
    return {"model": serving.NAME, "messages": USER, "max_tokens": 16, **fields}


def ask(client: Any, **fields: Any) -> Any:
    answer = client.messages.create(**given(**fields))
    check_types(answer)
    return answer


def chat(server: serving.Running, messages: list[Any], **fields: Any) -> Any:
    """Return the answer of chat completions."""
    return server.client().chat.completions.create(
        model=serving.NAME, messages=messages, max_tokens=16, **{**SEEDED, **fields}
    )


def test_text_and_usage_equal_those_of_chat_completions(server: serving.Running, client: Any) -> None:
    answer, other = ask(client, system="Tell a story.", **SEEDED), chat(server, [SYSTEM, *USER])
    (block,) = answer.content
    assert (block.type, block.text) == ("text", other.choices[0].message.content)
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == other.usage.prompt_tokens
    assert usage.output_tokens == other.usage.completion_tokens == 16
    blocks = [{"type": "text", "text": "Tell a story.", "cache_control": {"type": "ephemeral"}}]
    again = ask(client, system=blocks, **SEEDED)
    assert again.content == answer.content and again.usage.cache_read_input_tokens > 0
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == other.usage.prompt_tokens
    assert ask(client, system="Be brief.", **SEEDED).content != answer.content  # the negative control


def test_stop_sequence_ends_the_text_before_it(client: Any) -> None:
    whole = ask(client, **SEEDED).content[0].text
    answer = ask(client, stop_sequences=[whole[5:9]], **SEEDED)
    assert answer.content[0].text == whole[: whole.index(whole[5:9])]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", whole[5:9])


def test_stream_has_the_six_kinds_of_events_in_order(client: Any) -> None:
    fields = given(tools=[TOOL], extra_body=saying(ANSWER), max_tokens=200)
    events = list(client.messages.create(**fields, stream=True))
    for event in events:
        check_types(event)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    for index, (kind, text) in enumerate(
        [("thinking", "I call."), ("text", "Look:"), ("tool_use", '{"x": 1}'), ("tool_use", '{"x": 2}')]
    ):
        first, *deltas, last = [event for event in events if getattr(event, "index", None) == index]
        assert (first.type, first.content_block.type, last.type) == ("content_block_start", kind, "content_block_stop")
        assert {event.type for event in deltas} == {"content_block_delta"}
        key = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[kind]
        assert "".join(getattr(event.delta, key) for event in deltas) == text
    assert kinds.count("content_block_start") == 4
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens > 16


def test_stream_helper_of_the_client_accumulates_the_whole_answer(client: Any) -> None:
    fields = given(tools=[TOOL], extra_body={**SEED, **saying(ANSWER)}, max_tokens=200)
    whole = ask(client, **fields)
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    for own, other in zip(final.content, whole.content, strict=True):
        differ = {"id", "parsed_output"}  # ids are drawn; the helper adds parsed_output
        assert {k: v for k, v in own.to_dict().items() if k not in differ} == {
            k: v for k, v in other.to_dict().items() if k not in differ
        }
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "f"}])
def test_forced_call_has_valid_input(client: Any, choice: Any) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=100)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "f", "tool_use")
    assert call.input in ({"x": 1}, {"x": 2})


def test_tool_choice_none_leaves_calls_in_the_text(client: Any) -> None:
    text = f"{CALLS}</tool_call>"
    answer = ask(client, tools=[TOOL], tool_choice={"type": "none"}, extra_body=saying(text), max_tokens=200)
    assert [block.text for block in answer.content] == [text] and answer.stop_reason == "end_turn"


def test_call_that_is_cut_off_is_text(client: Any) -> None:
    answer = ask(client, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}, max_tokens=1)
    assert answer.stop_reason == "max_tokens" and [block.type for block in answer.content] == ["text"]


def test_schema_of_the_output_is_kept(client: Any) -> None:
    fields = given(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=60)
    assert ask(client, **fields).content[0].text.replace(" ", "") in ('{"x":1}', '{"x":2}')


def test_answer_goes_back_with_the_results_of_its_calls(server: serving.Running, client: Any) -> None:
    """The prompt is that of a chat with the same messages."""
    first = ask(client, tools=[TOOL], extra_body=saying(ANSWER), max_tokens=200)
    ids = [block.id for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id_, "content": [{"type": "text", "text": "3"}]} for id_ in ids]
    turns = [
        *USER,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    second = ask(client, messages=turns, tools=[TOOL], **SEEDED)
    function = [{"name": "f", "arguments": f'{{"x": {x}}}'} for x in (1, 2)]
    calls = [{"id": id_, "type": "function", "function": one} for id_, one in zip(ids, function, strict=True)]
    other = chat(
        server,
        [
            *USER,
            {"role": "assistant", "reasoning_content": "I call.", "content": "Look:", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": id_, "content": "3"} for id_ in ids),
            {"role": "user", "content": "And?"},
        ],
        tools=[CHAT_TOOL],
    )
    assert second.content[0].text == other.choices[0].message.content
    tokens = client.messages.count_tokens(model=serving.NAME, messages=turns, tools=[TOOL])
    check_types(tokens)
    assert tokens.input_tokens == other.usage.prompt_tokens
    assert tokens.input_tokens > client.messages.count_tokens(model=serving.NAME, messages=turns).input_tokens


def test_last_message_of_the_assistant_is_continued(server: serving.Running, client: Any) -> None:
    turns = [*USER, {"role": "assistant", "content": "there was"}]
    other = chat(server, turns, extra_body={**SEED, "continue_final_message": True})
    assert ask(client, messages=turns, **SEEDED).content[0].text == other.choices[0].message.content


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if enable_thinking is false %}", "enable_thinking"),
        ("{%- elif not thinking %}", "thinking"),
        ("{% if thinking is defined and thinking %}", "thinking"),
        ("{% if message.thinking %}", None),
        ("{% if 'thinking' in message %}", None),
    ],
)
def test_thinking_sets_the_variable_by_which_the_template_turns_it_on(template: str, switch: str | None) -> None:
    for kind in ("enabled", "adaptive"):
        assert read_thinking("thinking", {"type": kind}, template) == ({switch: True} if switch else {})


def test_thinking_is_turned_on_and_off_by_the_chat_template(server: serving.Running, client: Any) -> None:
    for kind, is_on in (("adaptive", True), ("disabled", False)):
        extra = {**SEED, "chat_template_kwargs": {"enable_thinking": is_on}}
        message = chat(server, USER, extra_body=extra).choices[0].message
        (block,) = ask(client, thinking={"type": kind}, **SEEDED).content
        assert block.type == ("thinking" if is_on else "text")
        assert (block.thinking if is_on else block.text) == (message.reasoning_content if is_on else message.content)


def test_key_is_taken_from_either_header() -> None:
    with serving.running(tool_serving.engine(), keys=(digest_of("secret"),)) as server:
        assert ask(client_of(server, "secret")).content
        with pytest.raises(anthropic.AuthenticationError) as raised:
            ask(client_of(server, "wrong"))
        assert raised.value.body["error"]["type"] == "authentication_error"
        with server.http() as http:
            for key, status in (("secret", 200), ("wrong", 401), ("", 401)):
                assert http.post("/v1/messages", headers={"x-api-key": key}, json=given()).status_code == status
            both = {"x-api-key": "secret", "Authorization": "Bearer wrong"}
            assert http.post("/v1/messages", headers=both, json=given()).status_code == 200


def test_stream_that_fails_raises_the_clients_error(server: serving.Running, client: Any) -> None:
    calls = server.service.calls
    stream = client.messages.create(**given(max_tokens=400, extra_body={"ignore_eos": True}), stream=True)
    assert next(stream).type == "message_start"
    calls._loop.call_soon_threadsafe(calls.fail_all, ApiError(503, "the server ends"))  # type: ignore[union-attr]
    with pytest.raises(anthropic.APIStatusError, match="the server ends"):
        list(stream)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 0}, "max_tokens: expected an int >= 1"),
        ({"messages": []}, "messages: expected a list with 1 to"),
        ({"messages": [{"role": "system", "content": "a"}]}, r"messages\[0\]\.role: expected one of user, assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]\.content\[0\]\.type: "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, r"messages\[0\].*\.tool_use_id: "),
        ({"system": [{"type": "image"}]}, r"system\[0\]\.type: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]\.type: expected custom or nothing"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\]\.input_schema: expected an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: expected tools beside it"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice: expected names of"),
        ({"thinking": {"type": "on"}}, r"thinking\.type: expected one of disabled, adaptive, enabled"),
        ({"thinking": {"type": "enabled"}}, r"thinking\.budget_tokens: expected an int >= 1024, got None"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            r"thinking\.budget_tokens: expected less than max_t",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
            r"thinking\.budget_tokens: expected nothing, because the marker <think> of its reasoning is no single",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "int"}}}}, "output_config: "),
        ({"container": "a"}, "container: expected nothing"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers: expected nothing"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs: expected a field that this route knows"),
    ],
)
def test_wrong_or_unsupported_field_raises_the_clients_error_that_names_it(
    client: Any, fields: dict[str, Any], error: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=error) as raised:
        ask(client, **fields)
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "invalid_request_error"


def test_errors_of_other_kinds_have_their_types(client: Any, server: serving.Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        ask(client, model="other")
    assert raised.value.body["error"]["type"] == "not_found_error"
    with server.http() as http:
        assert http.get("/v1/messages").json()["type"] == "error"
        assert "type" not in http.get("/v1/chat/completions").json()  # the negative control


@pytest.mark.parametrize("arguments", ['{"x": 1e999}', '{"x": "\\ud800"}', "[1]", '{"x"'])
def test_call_whose_arguments_the_answer_cannot_have_as_an_object_is_text(arguments: str) -> None:
    call = AnswerBlock(0, "call", "1", "f", arguments)
    assert _content(call) == {"type": "text", "text": arguments}
    call.text = '{"x": "\\ud83d\\ude00"}'
    assert _content(call) == {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "\U0001f600"}}


def test_blocks_become_the_messages_of_a_chat() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "d"},
                {"type": "text", "text": "e"},
                {"type": "tool_result", "tool_use_id": "2"},
            ],
        },
        {"role": "assistant", "content": "f"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert read_messages("messages", turns, None).messages == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "c", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "assistant", "content": "f"},
    ]


@pytest.mark.parametrize(("arguments", "stop"), [('{"x": ', None), ('{"x": ', ['"x"']), ('{"x": 1e999}', None)])
def test_call_that_breaks_off_is_no_tool_use_in_the_reason_of_the_end(
    client: Any, arguments: str, stop: list[str] | None
) -> None:
    say = saying(f'<tool_call>{{"name": "f", "arguments": {arguments}')
    fields: dict[str, Any] = {"tools": [TOOL], "extra_body": say, "max_tokens": 200}
    fields |= {} if stop is None else {"stop_sequences": stop}
    answer = ask(client, **fields)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason == ("end_turn" if stop is None else "stop_sequence")
    *_, last, _ = client.messages.create(**given(**fields), stream=True)
    assert last.delta.stop_reason == answer.stop_reason
