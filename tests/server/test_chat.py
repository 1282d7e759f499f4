"""Test /v1/chat/completions with OpenAI's Python client against the engine itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from jspec import SamplingParams
from jspec.engine.request.too_long import CHARACTERS_PER_TOKEN
from tests.support import serving

MESSAGES: list[Any] = [
    {"role": "system", "content": "Tell a story."},
    {"role": "user", "content": "Once upon a time"},
]
WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}
SEEDED: dict[str, Any] = dict(max_completion_tokens=24, temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running() as one:
        yield one


@pytest.fixture(scope="module")
def client(server: serving.Running) -> openai.OpenAI:
    return server.client()


def own(messages: Any = None, max_completion_tokens: int | None = None, **fields: Any) -> Any:
    """Return the engine's completion of the same conversation."""
    template = {name: fields.pop(name) for name in ("continue_final_message", "tools") if name in fields}
    params = SamplingParams(max_tokens=max_completion_tokens, **fields)
    (done,) = serving.engine().chat(messages or MESSAGES, params, **template)
    return done


def ask(client: openai.OpenAI, messages: Any = None, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": serving.NAME, "messages": messages or MESSAGES, **fields})


def test_message_equals_the_engines_own(client: openai.OpenAI) -> None:
    done = own(**SEEDED)
    answer = ask(client, **SEEDED)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", done.text)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(done.prompt_token_ids),
        len(done.token_ids),
    )
    assert ask(client, **SEEDED, extra_body={"draft": False}).choices[0].message.content == done.text
    assert ask(client, **{**SEEDED, "seed": 8}).choices[0].message.content != done.text  # the negative control


def test_stream_has_the_role_first_then_the_text_then_the_reason(client: openai.OpenAI) -> None:
    done = own(**SEEDED)
    counted = {"jspec": {"metrics": True}}
    chunks = list(ask(client, **SEEDED, stream=True, stream_options={"include_usage": True}, extra_body=counted))
    has_metrics = ["metrics" in (chunk.model_extra or {}) for chunk in chunks]
    assert has_metrics == [False] * (len(chunks) - 2) + [True, False]
    assert chunks[-2].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == done.metrics.num_drafts
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == done.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [{"eos": "stop"}.get(done.finish_reason, done.finish_reason)]
    assert deltas[-1].content is None
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(done.token_ids)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_several_choices_are_those_of_the_engine_streamed_or_not(client: openai.OpenAI) -> None:
    texts = [one.text for one in own(**SEEDED, n=3).samples]
    assert [choice.message.content for choice in ask(client, **SEEDED, n=3).choices] == texts
    streamed = ["", "", ""]
    roles: list[int] = []
    for chunk in ask(client, **SEEDED, n=3, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert streamed == texts
    assert sorted(roles) == [0, 1, 2]


def test_answer_without_a_limit_goes_on_to_the_models_end(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=1.0, seed=3, logit_bias={"2": -100})
    assert answer.usage.total_tokens == serving.MAX_LEN
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_of_each_token_equal_the_engines(client: openai.OpenAI, top: int) -> None:
    fields = {**SEEDED, "max_completion_tokens": 10}
    done = own(**fields, logprobs=top)
    entries = ask(client, **fields, logprobs=True, top_logprobs=top).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in done.logprobs])
    assert [len(entry.top_logprobs) for entry in entries] == [top] * len(entries)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace").startswith(done.text)
    assert all(bytes(entry.bytes).decode(errors="replace") == entry.token for entry in entries)
    streamed = ask(client, **fields, logprobs=True, top_logprobs=top, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [entry for one in pieces if one for entry in one.content] == entries


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_usage_with_a_prediction_counts_the_drafts_that_were_accepted_and_rejected(
    client: openai.OpenAI, is_stream: bool, in_parts: bool
) -> None:
    """A wrong prediction changes no token; without a prediction the usage has no such counters."""
    for prediction in ("Once upon", "zq" * 20, None):
        done = own(**SEEDED, prediction=prediction)
        content: Any = [{"type": "text", "text": prediction}] if in_parts else prediction
        fields = {} if prediction is None else {"prediction": {"type": "content", "content": content}}
        if is_stream:
            *_, last = ask(client, **SEEDED, **fields, stream=True, stream_options={"include_usage": True})
            usage = last.usage
        else:
            answer = ask(client, **SEEDED, **fields)
            assert answer.choices[0].message.content == done.text
            usage = answer.usage
        assert usage.completion_tokens == len(done.token_ids)
        details = usage.completion_tokens_details
        if prediction is None:
            assert details is None and done.metrics.num_accepted_tokens > 0
            continue
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert accepted == done.metrics.num_accepted_tokens
        assert accepted + rejected == done.metrics.num_draft_tokens
        assert (accepted > 0) == (prediction != "zq" * 20) and rejected > 0


def test_logprobs_not_asked_for_are_null(client: openai.OpenAI) -> None:
    assert ask(client, **SEEDED).choices[0].logprobs is None
    assert ask(client, **SEEDED, logprobs=False).choices[0].logprobs is None


class Colour(pydantic.BaseModel):
    name: Literal["red", "green"]
    shade: Literal[1, 2]


def test_pydantic_class_is_parsed_from_the_answer(client: openai.OpenAI) -> None:
    fields = dict(model=serving.NAME, messages=MESSAGES, temperature=1.0, seed=1)
    answer = client.chat.completions.parse(**fields, response_format=Colour)  # type: ignore[arg-type]
    assert isinstance(answer.choices[0].message.parsed, Colour)
    with client.chat.completions.stream(**fields, response_format=Colour) as stream:  # type: ignore[arg-type]
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    answer = ask(client, **SEEDED, response_format={"type": "json_object"}, logit_bias={})
    assert answer.choices[0].message.content.startswith("{")


def test_content_in_text_parts_equals_the_joined_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    answer = ask(client, [{"role": "user", "content": parts}], **SEEDED)
    text = [{"role": "user", "content": "Once upon\na time"}]
    assert answer.choices[0].message.content == own(text, **SEEDED).text


def test_final_message_is_continued_on_request(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "There was a"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(client, messages, **SEEDED, extra_body=more)
    assert answer.choices[0].message.content == own(messages, **SEEDED, continue_final_message=True).text


def test_token_ids_and_prompt_scores_are_returned_if_asked_for(client: openai.OpenAI) -> None:
    done = own(**SEEDED, prompt_logprobs=0)
    answer = ask(client, **SEEDED, extra_body={"return_token_ids": True, "prompt_logprobs": 0})
    assert answer.prompt_token_ids == done.prompt_token_ids
    assert answer.choices[0].token_ids == done.token_ids
    assert len(answer.prompt_logprobs) == len(done.prompt_token_ids)
    assert answer.prompt_logprobs[0] is None
    chunks = ask(client, **SEEDED, extra_body={"return_token_ids": True}, stream=True)
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert ids == done.token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"prediction": {"type": "tokens", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": "a b " * serving.PREDICTED}}, "prediction"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinkin": True}}}, "chat_template_kwargs.enable_thinkin"),
        ({"extra_body": {"prompt": "a"}}, "prompt"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
            "response_format",
        ),
    ],
)
def test_wrong_field_raises_the_clients_error_that_names_it(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": serving.NAME, "messages": MESSAGES, **fields})
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(param)  # type: ignore[index]


def test_tokenize_and_detokenize_are_the_engines(server: serving.Running) -> None:
    tokenizer = serving.engine().tokenizer
    assert tokenizer is not None
    with server.http() as http:
        made = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert made["tokens"] == tokenizer.chat(MESSAGES)
        assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), serving.MAX_LEN)
        made = http.post("/tokenize", json={"prompt": "a time", "return_token_strs": True}).json()
        assert made["tokens"] == tokenizer.encode("a time")
        assert "".join(made["token_strs"]) == "a time"
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "a time"}
        for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [10**9]}), ("/tokenize", {"prompt": 1})):
            assert http.post(path, json=body).status_code == 400


LONG = "a" * (serving.MAX_LEN * CHARACTERS_PER_TOKEN + 1)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
LONG_TOOL = {"name": "f", "description": LONG}
CHAT = ("/tokenize", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")


@pytest.mark.parametrize(
    ("paths", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (CHAT[:2], {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
        (CHAT[:2], {"messages": MESSAGES, "tools": [{"type": "function", "function": LONG_TOOL}]}),
        (CHAT[2:], {"messages": MESSAGES[1:], "tools": [{**LONG_TOOL, "input_schema": {}}]}),
        (CHAT[:2], {"messages": MESSAGES, "chat_template_kwargs": {"a": [LONG]}}),
        (("/tokenize", "/v1/completions"), {"prompt": LONG}),
        (("/tokenize", "/v1/completions"), {"prompt": LONG, "add_special_tokens": False}),
    ],
    ids=["message", "call", "tool", "tool of messages", "template", "prompt", "prompt without special tokens"],
)
def test_texts_too_long_for_any_prompt_are_refused_before_they_are_tokenised(
    server: serving.Running, monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...], body: dict[str, Any]
) -> None:
    tokenizer = serving.engine().tokenizer
    for name in ("encode", "chat"):
        monkeypatch.setattr(type(tokenizer), name, lambda *given, **options: pytest.fail("tokenised"))
    with server.http() as http:
        for path in paths:
            answer = http.post(path, json={"max_tokens": 1, **body} if "tok" not in path else body)
            assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"]
