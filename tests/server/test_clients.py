"""Test the server with clients that build on OpenAI's: instructor, langchain-openai and litellm.

Each answer is compared with the engine's own for the request that the client sent, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from jspec import SamplingParams
from jspec.server.tool_calls.grammar import tool_grammar
from tests.support import serving, tool_serving

pytestmark = pytest.mark.clients
PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
SAME = ("temperature", "seed", "max_tokens", "logit_bias")  # fields that have the same name in SamplingParams
SEEDED: dict[str, Any] = dict(temperature=0.8, seed=7)


class Shade(pydantic.BaseModel):
    dark: bool


class AnsweredColour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green"]
    shade: Shade
    other: Literal["a"] | None = None


class Anything(pydantic.BaseModel, extra="allow"):
    pass


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running(tool_serving.engine()) as one:
        yield one


@pytest.fixture
def bodies() -> list[dict[str, Any]]:
    """The requests that the client has sent."""
    return []


@pytest.fixture
def http(bodies: list[dict[str, Any]]) -> Iterator[httpx.Client]:
    hooks = {"request": [lambda request: bodies.append(json.loads(request.content))]}
    with httpx.Client(event_hooks=hooks, timeout=60) as one:  # type: ignore[arg-type]
        yield one


def own(body: dict[str, Any]) -> Any:
    """Return the engine's completion of a request to the chat route."""
    known = {*SAME, "model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls"}
    assert set(body) <= {*known, "response_format", "max_completion_tokens"}
    params = {name: body[name] for name in SAME if name in body}
    params |= {"max_tokens": params.get("max_tokens", body.get("max_completion_tokens"))}
    tools = body.get("tools")
    if "response_format" in body:
        shape = body["response_format"]
        params["json_schema"] = shape["json_schema"]["schema"] if "json_schema" in shape else {"type": "object"}
    params |= tool_grammar(tools, body.get("tool_choice"), body.get("parallel_tool_calls")) or {}
    (done,) = tool_serving.engine().chat(body["messages"], SamplingParams(**params), tools=tools)
    return done


def colour(done: Any) -> Any:
    return AnsweredColour.model_validate_json(done.text).model_dump()


# -- instructor


@pytest.fixture
def instruct(server: serving.Running, http: httpx.Client) -> Any:
    """Make instructor's client in one of its modes, which tries once."""
    instructor = pytest.importorskip("instructor", reason="needs the package instructor")

    def make(mode: str, kind: Any, **fields: Any) -> tuple[Any, dict[str, Any]]:
        client = instructor.from_openai(server.client(http_client=http), mode=instructor.Mode[mode])
        return client, dict(model=serving.NAME, messages=MESSAGES, response_model=kind, max_retries=0, **SEEDED)

    return make


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_parses_the_engines_own_object(instruct: Any, bodies: list[Any], mode: str) -> None:
    client, fields = instruct(mode, AnsweredColour)
    parsed, answer = client.create_with_completion(**fields)
    done = own(bodies[-1])
    assert isinstance(parsed, AnsweredColour) and parsed.model_dump() == colour(done)
    assert answer.usage.completion_tokens == len(done.token_ids)
    others = [colour(own({**bodies[-1], "seed": seed})) for seed in range(4)]
    assert any(one != parsed.model_dump() for one in others)  # the negative control


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_streams_parts_of_the_engines_own_object(instruct: Any, bodies: list[Any], mode: str) -> None:
    client, fields = instruct(mode, AnsweredColour)
    parts = list(client.create_partial(**fields))
    assert bodies[-1]["stream"] is True
    assert len(parts) > 3 and parts[0].name is None
    assert parts[-1].model_dump() == colour(own(bodies[-1]))


def test_instructor_takes_any_object_in_the_mode_without_a_schema(instruct: Any, bodies: list[Any]) -> None:
    client, fields = instruct("JSON", Anything)
    tokenizer = tool_serving.engine().tokenizer
    ends = {str(tokenizer.encode(text)[0]): 6.0 for text in ('"', "}")}  # texts and objects are short
    parsed = client.create(**fields, logit_bias=ends)
    assert bodies[-1]["response_format"] == {"type": "json_object"}
    assert parsed.model_dump() == json.loads(own(bodies[-1]).text)


# -- langchain-openai


@pytest.fixture
def chat(server: serving.Running, http: httpx.Client) -> Any:
    """langchain's model of the chat route, which tries once."""
    langchain = pytest.importorskip("langchain_openai", reason="needs the package langchain-openai")
    options = dict(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)
    return langchain.ChatOpenAI(model=serving.NAME, **options, **SEEDED)


def test_langchain_answers_with_the_engines_own_text_and_usage_streamed_or_not(chat: Any, bodies: list[Any]) -> None:
    short = chat.model_copy(update={"max_tokens": 24})
    answer = short.invoke(PROMPT)
    done = own(bodies[-1])
    size = (len(done.prompt_token_ids), len(done.token_ids))
    assert answer.content == done.text != short.model_copy(update={"seed": 8}).invoke(PROMPT).content
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == size
    chunks = list(short.stream(PROMPT, stream_usage=True))
    assert bodies[-1]["stream_options"] == {"include_usage": True}
    assert "".join(chunk.content for chunk in chunks) == done.text and len(chunks) > 3
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert (usage["input_tokens"], usage["output_tokens"]) == size
    assert [chunk.response_metadata["finish_reason"] for chunk in chunks if "finish_reason" in chunk.response_metadata]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_the_engines_own_object_streamed_or_not(chat: Any, bodies: list[Any], method: str) -> None:
    runnable = chat.with_structured_output(AnsweredColour, method=method)
    parsed = runnable.invoke(PROMPT)
    assert type(parsed) is AnsweredColour and parsed.model_dump() == colour(own(bodies[-1]))
    assert list(runnable.stream(PROMPT))[-1] == parsed and bodies[-1]["stream"] is True


@pytest.mark.parametrize("choice", ["any", "AnsweredColour"])
def test_langchain_reads_forced_calls_streamed_or_not(chat: Any, bodies: list[Any], choice: str) -> None:
    tooled = chat.bind_tools([AnsweredColour], tool_choice=choice, parallel_tool_calls=False)
    (call,) = tooled.invoke(PROMPT).tool_calls
    given = json.loads(own(bodies[-1]).text)
    assert (call["name"], call["args"]) == ("AnsweredColour", given["arguments"] if choice == "any" else given)
    first, *chunks = tooled.stream(PROMPT)
    (streamed,) = sum(chunks, first).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])


def test_langchain_sends_a_tools_result_back(chat: Any, bodies: list[Any]) -> None:
    short = chat.model_copy(update={"max_tokens": 24}).bind_tools([AnsweredColour])
    call = {"name": "Colour", "args": {"name": "red"}, "id": "call_1"}
    turns = [
        ("user", PROMPT),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    ]
    answer = short.invoke(turns)
    for sent in bodies[-1]["messages"][1]["tool_calls"]:  # the template is given arguments as an object
        sent["function"]["arguments"] = json.loads(sent["function"]["arguments"])
    assert answer.content == own(bodies[-1]).text


def test_langchain_raises_openais_error_that_names_the_field(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat.invoke(PROMPT, top_p=2)
    assert raised.value.param == "top_p"


# -- litellm


@pytest.fixture
def complete(server: serving.Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """litellm's function that asks the chat route, once."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # without it the import reads a list of prices
    litellm = pytest.importorskip("litellm", reason="needs the package litellm")
    client = server.client(http_client=http)
    options = dict(model=f"openai/{serving.NAME}", messages=MESSAGES, client=client, num_retries=0, **SEEDED)
    return partial(litellm.completion, **options)


def test_litellm_answers_with_the_engines_own_text_streamed_or_not(complete: Any, bodies: list[Any]) -> None:
    answer = complete(max_tokens=24)
    done = own(bodies[-1])
    assert answer.choices[0].message.content == done.text != own({**bodies[-1], "seed": 8}).text
    assert answer.usage.total_tokens == len(done.prompt_token_ids) + len(done.token_ids)
    *chunks, usage = complete(max_tokens=24, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == done.text and len(chunks) > 3
    assert usage.usage.completion_tokens == len(done.token_ids)


def test_litellm_takes_objects_and_calls(complete: Any, bodies: list[Any]) -> None:
    answer = complete(response_format=AnsweredColour)
    assert answer.choices[0].message.content == own(bodies[-1]).text
    assert AnsweredColour.model_validate_json(answer.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "f", "parameters": AnsweredColour.model_json_schema()}}
    answer = complete(tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", own(bodies[-1]).text)


def test_litellms_route_for_vllm_takes_vllms_fields(server: serving.Running, complete: Any) -> None:
    route = dict(model=f"hosted_vllm/{serving.NAME}", api_base=f"{server.url}/v1", client=None, max_tokens=24)
    params = SamplingParams(**SEEDED, max_tokens=24, top_k=3)
    text = tool_serving.engine().chat(MESSAGES, params)[0].text
    assert complete(**route, top_k=3).choices[0].message.content == text
    assert complete(**route).choices[0].message.content != text  # the negative control
