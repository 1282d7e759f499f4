"""Test that an answer that must call tools does: text of the byte pair is always calls whose arguments are valid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from jspec.engine.grammar import json_schema
from jspec.server.reading.text_reader import AnswerPart
from jspec.server.tool_calls.choose import parser_for
from jspec.server.tool_calls.grammar import tool_grammar
from jspec.server.tool_calls.tools import read_choice
from tests.support import byte_pair
from tests.support.answers import TOOLS, Joined, joined, tool

pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")
pytestmark = pytest.mark.once

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 30}},
}
GROW = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["kids"],
    "additionalProperties": False,
}
MADE = [tool("get_weather", WEATHER), tool("grow", GROW)]
SEEDS = range(4)
MAX_TOKENS = 120


def is_weather(given: Any) -> bool:
    days = given.get("days", [])
    return (
        given.keys() - {"days"} == {"city", "unit"}
        and isinstance(given["city"], str)
        and len(given["city"]) <= 8
        and given["unit"] in ("C", "F")
        and len(days) <= 2
        and all(type(day) is int and 0 <= day <= 30 for day in days)
    )


def is_tree(given: Any) -> bool:
    return given.keys() == {"kids"} and len(given["kids"]) <= 2 and all(map(is_tree, given["kids"]))


VALID = {"get_weather": is_weather, "grow": is_tree}


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine of the byte target."""
    options: dict[str, Any] = {**byte_pair.OPTIONS, "slots": len(SEEDS), "buckets": (len(SEEDS),), "controls": True}
    return Engine.from_pretrained(byte_pair.TARGET, **options)


def answers(engine: Engine, tools: Any, choice: Any, parallel: bool | None) -> list[tuple[str, Joined]]:
    """Return (finish reason, what the parser finds) of one answer for each seed."""
    fields = tool_grammar(read_choice(tools, choice), parallel)
    assert fields is not None
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=float(seed), top_p=0.98, seed=seed, **fields)
        for seed in SEEDS
    ]
    found = []
    for done in engine.generate(["def weather(city):\n"] * len(params), params):
        parser, parts = parser_for(None, None, read_choice(tools, choice), False), list[AnswerPart]()
        for piece in done.pieces or [done.text or ""]:
            parts += parser.push(piece)
        found.append((str(done.finish_reason), joined([*parts, *parser.finish()])))
    return found


def check(found: list[tuple[str, Joined]], *, most: int) -> set[str]:
    """Check that answers are at most ``most`` calls with valid arguments; return the names called.

    Only an answer that max_tokens has cut may have an incomplete call, its last one.
    """
    assert any(reason == "eos" for reason, _ in found)
    for reason, answer in found:
        calls = answer.calls[:-1] if reason == "length" else answer.calls
        assert len(answer.calls) <= most and (reason == "length" or (answer.content == "" and calls))
        for name, arguments in calls:
            assert VALID[name](json.loads(arguments)), (name, arguments)
    return {name for _, answer in found for name, _ in answer.calls}


@pytest.mark.parametrize("name", VALID)
def test_answers_to_a_named_tool_are_its_arguments(engine: Engine, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    assert check(answers(engine, MADE, choice, None), most=1) == {name}


@pytest.mark.parametrize("parallel", [True, False])
def test_answers_to_required_calls_are_calls_of_the_tools(engine: Engine, parallel: bool) -> None:
    found = answers(engine, MADE, "required", parallel)
    called = check(found, most=MAX_TOKENS if parallel else 1)
    assert called == set(VALID) if parallel else called


def test_answers_of_another_grammar_fail_the_check(engine: Engine) -> None:
    """Negative control: the days may be up to 99."""
    day = {**WEATHER, "$defs": {"day": {"type": "integer", "minimum": 31, "maximum": 99}}}
    required = {**day, "required": ["city", "unit", "days"]}
    required["properties"] = {**WEATHER["properties"], "days": {**WEATHER["properties"]["days"], "minItems": 1}}  # type: ignore[dict-item]
    found = answers(engine, [tool("get_weather", required)], "required", False)
    with pytest.raises(AssertionError, match="get_weather"):
        check(found, most=1)


def test_tool_grammar_without_a_forced_call_is_none() -> None:
    for choice in (None, "auto", "none"):
        assert tool_grammar(read_choice(TOOLS, choice)) is None
    assert tool_grammar(read_choice(None, None)) is None


def test_tool_grammar_of_a_named_tool_is_the_schema_of_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    assert tool_grammar(read_choice(MADE, choice)) == {"json_schema": WEATHER}


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ([tool("f", {"type": "object", "propertys": {}})], "tools: f: json_schema: 'propertys' at #: "),
        ([tool("f", {"properties": {"x": {"type": "int"}}})], "tools: f: json_schema: 'type' at #/properties/x: "),
        ([tool("f", {"title": "a" * 2**16})], "tools: json_schema: expected at most 65536 characters"),
        ([tool(name, {"properties": {name * 40_000: {}}}) for name in "ab"], "tools: json_schema: expected at most"),
        ([tool("f", {"type": "object", "properties": {"x": {"$id": "a"}}})], r"tools: f: json_schema: '\$id' at"),
    ],
)
def test_tool_grammar_of_a_wrong_schema_raises_and_names_the_tool(tools: Any, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        tool_grammar(read_choice(tools, "required"))


def test_tool_grammar_of_too_many_large_schemas_raises_before_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(json_schema, "check", lambda schema: read.append(schema))
    with pytest.raises(ValueError, match=r"^tools: json_schema: expected at most"):
        tool_grammar(read_choice([tool(f"f{i}", {"properties": {"x" * 30_000: {}}}) for i in range(3)], "required"))
    assert not read
    tool_grammar(read_choice([tool("f", WEATHER)], "required"))
    assert read  # the negative control
