"""Test that every field of the two APIs is served, or refused by its name, as the tables of the routes say."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jspec.engine.request.sampling_params import SamplingParams
from jspec.server.app import make_app
from jspec.server.ask.fields import CHAT, COMPLETIONS, read_fields
from jspec.server.http.errors import ApiError
from jspec.server.http.settings import Settings
from jspec.server.routes.anthropic import MESSAGES
from jspec.server.routes.responses import RESPONSES
from jspec.server.tool_calls.tools import read_choice
from tests.support import serving

SCHEMA = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# Fields that both routes serve: a value, and the fields of SamplingParams that it becomes.
SERVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("m", {}),
    "max_tokens": (3, {"max_tokens": 3}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.9, {"top_p": 0.9}),
    "n": (2, {"n": 2}),
    "stop": (["a"], {"stop": ("a",)}),
    "seed": (4, {"seed": 4}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True, "continuous_usage_stats": False}, {}),
    "presence_penalty": (1, {"presence_penalty": 1}),
    "frequency_penalty": (-1, {"frequency_penalty": -1}),
    "logit_bias": ({"5": 2.0}, {"logit_bias": {5: 2.0}}),
    "response_format": ({"type": "json_object"}, {"json_schema": '{"type": "object"}'}),
    "top_k": (5, {"top_k": 5}),
    "min_p": (0.1, {"min_p": 0.1}),
    "repetition_penalty": (1.1, {"repetition_penalty": 1.1}),
    "min_tokens": (1, {"min_tokens": 1}),
    "stop_token_ids": ([7], {"stop_token_ids": (7,)}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "bad_words": (["x"], {"bad_words": ("x",)}),
    "allowed_token_ids": ([1, 2], {"allowed_token_ids": (1, 2)}),
    "prompt_logprobs": (1, {"prompt_logprobs": 1}),
    "priority": (3, {"priority": 3}),
    "structured_outputs": ({"regex": "a+"}, {"regex": "a+"}),
    "return_token_ids": (True, {}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "draft": (2, {"draft": 2}),
    "thinking_token_budget": (0, {"thinking_budget": 0}),
    "max_thinking_tokens": (9, {"thinking_budget": 9}),
    "jspec": ({"rounds": True, "metrics": True}, {}),
}
SERVED_BY = {
    "completions": {
        "prompt": ("a", {}),
        "logprobs": (2, {"logprobs": 2}),
        "echo": (True, {}),
        "add_special_tokens": (False, {}),
    },
    "chat": {
        "messages": ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], {}),
        "max_completion_tokens": (3, {"max_tokens": 3}),
        "logprobs": (True, {}),
        "top_logprobs": (20, {}),
        "tools": ([TOOL], {}),
        "tool_choice": ("auto", {}),
        "parallel_tool_calls": (True, {}),
        "chat_template_kwargs": ({"a": 1}, {}),
        "continue_final_message": (True, {}),
        "add_generation_prompt": (False, {}),
        "reasoning_effort": ("low", {}),
        "prediction": ({"type": "content", "content": "ab"}, {"prediction": "ab"}),
    },
}
WITHOUT_EFFECT = {
    "user": "me",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
}
REFUSED: dict[str, Any] = {
    "length_penalty": 2.0,
    "use_beam_search": True,
    "truncate_prompt_tokens": 3,
    "prompt_embeds": "AA==",
    "include_stop_str_in_output": True,
    "cache_salt": "s",
    "unheard_of": 1,
}
REFUSED_BY = {
    "completions": {"suffix": "a", "prediction": {}, "messages": [], "tools": [], "max_completion_tokens": 3},
    "chat": {
        "functions": [],
        "function_call": "auto",
        "audio": {},
        "modalities": ["text", "audio"],
        "web_search_options": {},
        "image_url": "http://a",
        "chat_template": "{{ x }}",
        "prompt": "a",
        "echo": True,
        "suffix": "a",
    },
}
UNKNOWN = {
    "completions": ("messages", "tools", "max_completion_tokens", "prediction"),
    "chat": ("prompt", "echo", "suffix"),
}
ACCEPTED_IF_NEUTRAL = ("best_of", "prompt_cache_retention", "request_id", "spaces_between_special_tokens")
NEUTRAL_BY: dict[str, tuple[str, ...]] = {"completions": (), "chat": ("add_special_tokens",)}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a"}}
TABLES = {"completions": COMPLETIONS, "chat": CHAT}
ROUTES = pytest.mark.parametrize("route", sorted(TABLES))


@ROUTES
def test_served_fields_become_the_parameters_that_they_name(route: str) -> None:
    for name, (value, params) in {**SERVED, **SERVED_BY[route]}.items():
        ask = read_fields({name: value}, TABLES[route])
        made = SamplingParams(**ask.params)
        assert {key: getattr(made, key) for key in ask.params} == params, name
        assert set(ask.own) == (set() if params else {name}), name


@ROUTES
def test_fields_without_effect_change_nothing(route: str) -> None:
    ask = read_fields(WITHOUT_EFFECT, TABLES[route])
    assert ask.params == {}


@ROUTES
def test_refused_fields_are_named(route: str) -> None:
    for name, value in {**REFUSED, **REFUSED_BY[route]}.items():
        with pytest.raises(ApiError) as caught:
            read_fields({name: value}, TABLES[route])
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.message.startswith(f"{name}: expected ")


@pytest.mark.parametrize(
    ("table", "name", "hint"),
    [
        (CHAT, "guided_json", 'give structured_outputs {"json": ...} instead'),
        (MESSAGES, "response_format", 'give structured_outputs {"json": ...} instead'),
        (COMPLETIONS, "regex", 'give structured_outputs {"regex": ...} instead'),
        (COMPLETIONS, "guided_choice", 'give structured_outputs {"choice": [...]} instead'),
        (CHAT, "ebnf", 'give structured_outputs {"grammar": ...} instead'),
        (CHAT, "max_new_tokens", "give max_tokens instead"),
        (RESPONSES, "max_new_tokens", "give max_output_tokens instead"),
        (RESPONSES, "max_tokens", "give max_output_tokens instead"),
        (MESSAGES, "stop", "give stop_sequences instead"),
        (COMPLETIONS, "do_sample", "give temperature (0 for greedy decoding) instead"),
        (COMPLETIONS, "num_return_sequences", "give n instead"),
        (CHAT, "enable_thinking", 'give chat_template_kwargs {"enable_thinking": ...} instead'),
        (COMPLETIONS, "enable_thinking", "leave it out"),  # it has no chat template
        (COMPLETIONS, "num_beams", "leave it out, because jspec has no beam search"),
        (CHAT, "tempature", "perhaps temperature"),
        (CHAT, "unheard_of", "leave it out"),
    ],
)
def test_unknown_fields_are_refused_with_what_to_send_instead(table: Any, name: str, hint: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields({name: 1}, table)
    expected = f"{name}: expected a field that this route knows, got an unknown one; {hint}"
    assert (caught.value.param, caught.value.message) == (name, expected)


@ROUTES
def test_null_counts_as_absent_for_every_field(route: str) -> None:
    nothing = read_fields(dict.fromkeys([*TABLES[route]]), TABLES[route])
    assert (nothing.own, nothing.params) == ({}, {})


@ROUTES
def test_every_field_of_the_table_is_listed_here(route: str) -> None:
    """So that no field is offered without a line in this file."""
    listed = {*SERVED, *SERVED_BY[route], *WITHOUT_EFFECT, *REFUSED, *REFUSED_BY[route]}
    unknown = {"unheard_of", *UNKNOWN[route]}
    assert set(TABLES[route]) == listed - unknown | {*ACCEPTED_IF_NEUTRAL, *NEUTRAL_BY[route]}


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("stream_options", {"other": True}, "stream_options.other"),
        ("response_format", "json", "response_format"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema",
        ),
        ("structured_outputs", {}, "structured_outputs"),
        ("structured_outputs", {"choice": ["a", 1]}, "structured_outputs.choice"),
        ("structured_outputs", {"structural_tag": "a"}, "structured_outputs.structural_tag"),
        ("messages", [1], "messages[0]"),
        ("messages", [{"role": "user", "content": "a"}] * 2049, "messages"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ("jspec", {"trees": True}, "jspec.trees"),
        ("tools", [{"type": "function"}], "tools[0]"),
        ("model", 5, "model"),
    ],
)
def test_wrong_values_are_refused_with_the_place_inside_the_field(field: str, value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields({field: value}, CHAT)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_unknown_fields_are_ignored_on_request_and_known_ones_are_not() -> None:
    assert read_fields({"unheard_of": 1}, CHAT, ignore_unknown=True).own == {}
    with pytest.raises(ApiError):
        read_fields({"audio": {}}, CHAT, ignore_unknown=True)


OPEN = {"type": "object", "properties": {"a": {"properties": {"b": {"type": "null"}}}}}
CLOSED = {"additionalProperties": False, "type": "object"}
CLOSED["properties"] = {"a": {"properties": {"b": {"type": "null"}}, "additionalProperties": False}}


@pytest.mark.parametrize(("strict", "schema"), [({}, OPEN), ({"strict": False}, OPEN), ({"strict": True}, CLOSED)])
def test_strict_schema_closes_its_objects(strict: dict[str, Any], schema: dict[str, Any]) -> None:
    value = {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN, **strict}}
    read = read_fields({"response_format": value}, CHAT)
    assert json.loads(read.sampling_params().json_schema or "") == schema
    tool = {"type": "function", "function": {"name": "f", "parameters": OPEN, **strict}}
    assert read_choice([tool], "required").schemas["f"] == schema


ASKED = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 20},
    "/v1/responses": {"input": "Once", "max_output_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 20},
}


@pytest.mark.parametrize("route", ASKED)
def test_sampling_of_the_model_holds_for_fields_that_a_request_leaves_out(route: str) -> None:
    """The fields that the client writes out are those that the server has without them."""
    sampling = {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.3}
    body = {"model": serving.NAME, "seed": 7, **ASKED[route]}

    def answer(client: httpx.Client, **fields: Any) -> Any:
        got = client.post(route, json={**body, **fields}).raise_for_status().json()
        return got.get("choices") or got.get("content") or [item["content"] for item in got["output"]]

    with (
        serving.running() as plain,
        serving.running(sampling=sampling) as server,
        plain.http() as theirs,
        server.http() as ours,
    ):
        assert answer(ours) == answer(theirs, **sampling) != answer(theirs)
        assert answer(ours, temperature=0) == answer(theirs, **sampling | {"temperature": 0}) != answer(ours)


def test_default_sampling_that_the_engine_cannot_follow_is_refused_when_the_application_is_made() -> None:
    with serving.small_engine(2, 64, controls=False) as engine:
        for sampling, needs in (({"repetition_penalty": 1.05}, "repetition_penalty=1.05"), ({"min_tokens": 2}, "min_")):
            with pytest.raises(ValueError, match=rf"^sampling: expected no such default .*controls=False, got {needs}"):
                make_app(engine, Settings(sampling=sampling))
        make_app(engine, Settings(sampling={"repetition_penalty": 1, "top_k": 4}))
