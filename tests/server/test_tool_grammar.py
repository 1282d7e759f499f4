"""Test that an answer that must call tools does: text of the byte pair is always calls whose arguments are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from jspec.engine.grammar import json_schema
from jspec.engine.grammar.cfg_matcher import LarkGrammar, Matcher
from jspec.engine.reading import harmony
from jspec.engine.reading.reasoning import FORMATS
from jspec.engine.reading.text_reader import AnswerPart
from jspec.server.tool_calls import gemma, markup
from jspec.server.tool_calls.auto_grammar import auto_grammar
from jspec.server.tool_calls.choose import parser_for
from jspec.server.tool_calls.grammar import tool_grammar
from jspec.server.tool_calls.tools import read_choice
from tests.server.test_tool_calls import gemma_value
from tests.support import byte_grammars, byte_pair
from tests.support.answers import TOOLS, Joined, joined, tool
from tests.support.random_schemas import END

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
        ([tool("f", {"type": "object", "propertys": {}})], r"tools\[0\]\.function\.parameters\.propertys: "),
        (
            [tool("g"), tool("f", {"properties": {"x": {"type": "int"}}})],
            r"tools\[1\]\.function\.parameters\.properties\.x\.type: expected one of",
        ),
        (
            [tool("g"), tool("f", {"properties": {"x": {"anyOf": [{}, {"not": {}}]}}})],
            r"tools\[1\]\.function\.parameters\.properties\.x\.anyOf\[1\]\.not: no grammar enforces this keyword",
        ),
        (
            [tool("f", {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"format": "iri"}}})],
            r"tools\[0\]\.function\.parameters\.\$defs\.a\.format: expected one of date, ",
        ),
        (
            [tool("f", {"properties": {"a b": {"not": {}}}})],
            r"tools\[0\]\.function\.parameters: 'not' at #/properties/a b: ",
        ),
        ([tool("f", {"title": "a" * 2**16})], "tools: json_schema: expected at most 65536 characters"),
        ([tool(name, {"properties": {name * 40_000: {}}}) for name in "ab"], "tools: json_schema: expected at most"),
        (
            [tool("f", {"type": "object", "properties": {"x": {"$id": "a"}}})],
            r"tools\[0\]\.function\.parameters\.properties\.x\.\$id: ",
        ),
    ],
)
def test_tool_grammar_of_a_wrong_schema_raises_and_names_the_tool(tools: Any, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        tool_grammar(read_choice(tools, "required"))
    for each in tools:
        each["function"]["strict"] = True
    if "at most" not in error:
        with pytest.raises(ValueError, match=f"^{error}"):
            auto_grammar(read_choice(tools, "auto"), "hermes", {}, None)


def test_tool_grammar_of_too_many_large_schemas_raises_before_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(json_schema, "check", lambda schema: read.append(schema))
    with pytest.raises(ValueError, match=r"^tools: json_schema: expected at most"):
        tool_grammar(read_choice([tool(f"f{i}", {"properties": {"x" * 30_000: {}}}) for i in range(3)], "required"))
    assert not read
    tool_grammar(read_choice([tool("f", WEATHER)], "required"))
    assert read  # the negative control


# -- calls that the model need not make

X = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
STRICT = [tool("f", X), tool("g", X)]
STRICT[0]["function"]["strict"] = True
MARKUP = (*markup.FORMATS["seed_oss"].markers[:2], *markup.FORMATS["glm45"].markers[2:])
MARKERS = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", *harmony.MARKERS, *gemma.MARKERS, *MARKUP)
TOKENS = {text: 0xC0 + i for i, text in enumerate(MARKERS)}
HEAD, TO = "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant", "to=functions."
ALLOWED = {  # texts in each format that a strict tool allows, and whether each has one call at its end or none
    "hermes": [
        ("a < b, <tool", True),
        ('Look: <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', True),
        ('Look: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> b', False),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>\n', True),
        ('<tool_call>{"name": "g", "arguments": {"x": 3}}</tool_call>', True),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' * 2, False),
    ],
    "llama3_json": [
        ('{"answer": 3}', True),
        ('{"name": "f", "parameters": {"x": 1}}', True),
        ('Look: <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', False),
    ],
    "mistral": [
        ("[1, 2]", True),
        ('Look:[TOOL_CALLS]f[ARGS]{"x": 2}', True),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 2}}]', True),
        ('[TOOL_CALLS]f[ARGS]{"x": 2} b', False),
        ('[TOOL_CALLS]f[ARGS]{"x": 2}[TOOL_CALLS]g[ARGS]{}', False),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"x": 2}}, {"name": "g", "arguments": {}}]', False),
    ],
    "harmony": [
        (" is 4.", True),
        (f"{HEAD}<|channel|>final<|message|>x = 1<|return|>", True),
        (f'{HEAD}<|channel|>commentary {TO}f <|constrain|>json<|message|>{{"x": 1}}<|call|>', True),
        (f'<|start|>assistant {TO}g<|channel|>commentary json<|message|>{{"x": 3}}', True),
        (f"<|channel|>commentary {TO}g<|message|>{{}}<|call|><|start|>assistant<|channel|>final<|message|>a", False),
        (f"<|channel|>commentary {TO}g<|message|>{{}}<|end|>{HEAD} {TO}g<|channel|>commentary<|message|>{{}}", False),
    ],
    "glm45": [
        ("a < b, <tool", True),
        ("Look: <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", True),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>2</arg_value></tool_call> b", False),
        ("<tool_call>g<arg_key>y</arg_key><arg_value>3</arg_value></tool_call>\n<tool_call>g</tool_call>", False),
    ],
    "seed_oss": [
        ("a < b, <seed:tool", True),
        ("<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>", True),
        ("<seed:tool_call><function=g></function></seed:tool_call>", True),
        ("<seed:tool_call><function=g></function></seed:tool_call> b", False),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", True),
        ("<tool_call><function=g><parameter=x>\na\n</parameter></function></tool_call> b", False),
    ],
    "gemma4": [
        ("a < b, <|tool", True),
        ("Look: <|tool_call>call:f{x:1}<tool_call|>", True),
        ('<|tool_call>call:g{x:3,y:[{<|"|>a<|"|>:<|"|>b<|"|>}]}<tool_call|>', True),
        ("<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{}<tool_call|>", False),
        ("<|tool_call>call:f{x:1}<tool_call|> b", False),
    ],
}
REFUSED = {
    "hermes": ["<tool_call>x", '<tool_call>{"name": "f", "arguments": {"x": 3}}', '<tool_call>{"name": "h", '],
    "llama3_json": [
        '{"name": "f", "parameters": {"x": 3}}',
        ' {"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 3}}',
        '<think>A</think>{"name": "f", "parameters": {"x": 3}}',
        '<|python_tag|>{"name": "f", "parameters": {"x": 3}}',
    ],
    "mistral": ['[TOOL_CALLS]f[ARGS]{"x": 3}', '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 3}}]', "[TOOL_CALLS]h"],
    "harmony": [
        f'{HEAD}<|channel|>commentary {TO}f <|constrain|>json<|message|>{{"x": 3}}',
        f'{HEAD} {TO}f<|channel|>commentary json<|message|>{{"x": 3}}',
        f"{HEAD}<|channel|>commentary {TO}h<|message|>{{}}",
    ],
    "glm45": [
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>f</tool_call>",
        "<tool_call>h</tool_call>",
        "<tool_call>g<arg_key>y\n</arg_key><arg_value>3</arg_value></tool_call>",
    ],
    "seed_oss": ["<seed:tool_call><function=f><parameter=y>1</parameter></function></seed:tool_call>"],
    "qwen3_coder": ["<tool_call><function=f><parameter=x>3</parameter></function></tool_call>"],
    "gemma4": [
        *("<|tool_call>call:f{x:3}<tool_call|>", "<|tool_call>call:f{}<tool_call|>", "<|tool_call>call:h{}"),
        "<|tool_call>call:g{y\nz:3}<tool_call|>",
    ],
}


def lark_of(format_: str, specials: dict[str, int], tools: Any = STRICT, *, parallel: bool | None = None) -> str:
    lark = auto_grammar(read_choice(tools, "auto"), format_, specials, parallel)
    assert lark is not None
    return lark


def allows(lark: str, text: str, specials: dict[str, int]) -> bool:
    """Return whether a grammar allows a text whose special tokens are bytes that no text has."""
    pattern = "|".join(map(re.escape, specials)) or "(?!)"
    pieces = re.split(f"({pattern})", text)
    ids = [token for piece in pieces for token in ([specials[piece]] if piece in specials else piece.encode())]
    grammar = byte_grammars.maker().of(SamplingParams(grammar=lark), (END,), ())
    assert isinstance(grammar, LarkGrammar)
    try:
        Matcher(grammar).follow([*ids, END])
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("format_", "specials"),
    [
        *((name, TOKENS) for name in ALLOWED),
        *((name, {}) for name in ("llama3_json", "mistral", "glm45", "seed_oss", "gemma4")),
    ],
)
def test_grammar_of_strict_tools_leaves_text_free_and_calls_only_as_the_schema_says(
    format_: str, specials: dict[str, int]
) -> None:
    lark, alone = lark_of(format_, specials), lark_of(format_, specials, parallel=False)
    for text, is_single in ALLOWED[format_]:
        assert allows(lark, text, specials), text
        assert allows(alone, text, specials) is is_single, text
        parser = parser_for(None, format_, read_choice(STRICT, "auto"), None)
        parts = [*parser.push(text), *parser.finish()]
        calls = joined(parts).calls
        is_last = not calls or parts[-1].call is not None
        assert (len(calls) < 2 and is_last) is is_single  # as the reader finds them
        assert all(json.loads(arguments) in ({"x": 1}, {"x": 2}) for name, arguments in calls if name == "f")
    for text in REFUSED[format_]:
        assert not allows(lark, text, specials), text


RICH = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "e": {"enum": ["a", "b c", None]},
        "n": {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]},
        "l": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        "t": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["e"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "additionalProperties": False,
        }
    },
}
RIGHT: list[dict[str, Any]] = [
    {"e": "a"},
    {"e": None, "n": 2, "t": "null x"},
    {"s": 'x "{}"\n', "e": "b c", "l": [{}, {"v": True, "kids": [{"kids": []}]}], "t": None},
    {"e": "a", "n": None, "l": []},
]
FALSE: list[dict[str, Any]] = [
    {},
    {"e": "c"},
    {"e": "a", "n": 1},
    {"e": "a", "n": "x"},
    {"e": "a", "l": [{"v": 1}]},
    {"e": "a", "l": [{"kids": [{"w": 1}]}]},
    {"e": "a", "u": 1},
]


def as_glm(given: dict[str, Any]) -> str:
    parts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in given.items())
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parts)
    return f"<tool_call>f\n{inside}</tool_call>"


def as_gemma(given: dict[str, Any]) -> str:
    return f"<|tool_call>call:f{gemma_value(given)}<tool_call|>"


@pytest.mark.parametrize("specials", [{}, TOKENS])
@pytest.mark.parametrize(("format_", "write"), [("glm45", as_glm), ("gemma4", as_gemma)])
def test_grammar_of_strict_tools_follows_schemas_in_values_that_are_no_json(
    format_: str, write: Callable[[Any], str], specials: dict[str, int]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": RICH, "strict": True}}]
    lark = lark_of(format_, specials, tools)
    for given in RIGHT:
        assert allows(lark, write(given), specials), given
        parser = parser_for(None, format_, read_choice(tools, "auto"), None)
        ((_, arguments),) = joined([*parser.push(write(given)), *parser.finish()]).calls
        assert json.loads(arguments) == given
    for given in FALSE:
        assert not allows(lark, write(given), specials), given


def test_grammar_of_gemma_writes_names_as_the_reader_takes_them() -> None:
    schema = {"type": "object", "properties": {" x": {"type": "integer"}}, "required": [" x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    written = '<|tool_call>call:f{<|"|> x<|"|>:1}<tool_call|>'
    lark = lark_of("gemma4", {}, tools)
    assert allows(lark, written, {}) and not allows(lark, written.replace('<|"|>', ""), {})
    parser = parser_for(None, "gemma4", read_choice(tools, "auto"), None)
    assert joined([*parser.push(written), *parser.finish()]).calls == [("f", '{" x": 1}')]


@pytest.mark.parametrize(
    ("format_", "schema", "place"),
    [
        ("glm45", {"properties": {"x": {"type": "string", "pattern": "a"}}}, "properties.x.pattern"),
        ("glm45", {"properties": {"x": {"type": ["string", "integer"], "minimum": 1}}}, "properties.x.minimum"),
        ("glm45", {"properties": {"x": {"type": "array", "contains": {}}}}, "properties.x.contains"),
        ("glm45", {"properties": {"x": {"anyOf": [{"type": "string"}], "maxLength": 1}}}, "properties.x.maxLength"),
        ("seed_oss", {"properties": {}, "additionalProperties": True}, "additionalProperties"),
        ("seed_oss", {"properties": {"x": {"type": "string", "enum": [1]}}}, "properties.x.enum"),
        ("gemma4", {"properties": {"x": {"type": "string", "const": 1}}}, "properties.x.const"),
        ("gemma4", {"properties": {"x": {"enum": ["ab"], "maxLength": 1}}}, "properties.x.maxLength"),
        ("glm45", {"properties": {"x": {"enum": ["ab"], "maxLength": 1}}}, "properties.x.maxLength"),
        ("gemma4", {"properties": {"x": {"items": {"type": "string", "maxLength": 1}}}}, "properties.x.items"),
        ("gemma4", {"properties": {"x": {"type": "array", "minItems": 1}}}, "properties.x.minItems"),
        ("glm45", {"properties": {"a\nb": {"type": "integer"}}}, "properties"),
        ("seed_oss", {"properties": {"x": {"enum": ["1", 2]}}}, "properties.x.enum"),
        ("seed_oss", {"properties": {"x": {"enum": ["</parameter>"]}}}, "properties.x.enum"),
        ("qwen3_coder", {"properties": {"x": {"const": "a\n"}}}, "properties.x.const"),
        ("seed_oss", {"properties": {"a>b": {"type": "integer"}}}, "properties"),
    ],
)  # fmt: skip
def test_keyword_of_a_strict_tool_that_values_without_json_cannot_follow_is_refused_by_its_place(
    format_: str, schema: Any, place: str
) -> None:
    tools = [tool("g"), {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    with pytest.raises(ValueError, match=rf"^tools\[1\]\.function\.parameters\.{re.escape(place)}: "):
        lark_of(format_, {}, tools)


@pytest.mark.parametrize(
    ("format_", "name", "specials"),
    [
        ("hermes", "think", {}),
        ("glm45", "think", {}),
        ("gemma4", "gemma4", TOKENS | {"<|channel>": 0xD8, "<channel|>": 0xD9}),
        ("seed_oss", "seed_oss", TOKENS | {"<seed:think>": 0xD8, "</seed:think>": 0xD9}),
        ("mistral", "mistral", {}),
        ("mistral", "mistral", {"[TOOL_CALLS]": 0xC0, "[ARGS]": 0xC1, "[THINK]": 0xC2, "[/THINK]": 0xC3}),
    ],
)
@pytest.mark.parametrize("parallel", [None, False])
def test_grammar_of_strict_tools_leaves_reasoning_free_up_to_its_end(
    format_: str, name: str, specials: dict[str, int], parallel: bool | None
) -> None:
    made = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
        "mistral": '[TOOL_CALLS]f{"x": 1}',
        "glm45": "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
        "seed_oss": "<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>",
        "gemma4": "<|tool_call>call:f{x:1}<tool_call|>",
    }
    call, (*_, start), (end,) = made[format_], FORMATS[name].openings, FORMATS[name].closings
    wrong, choice = call.replace("1", "3"), read_choice(STRICT, "auto")
    for has_begun in (False, True):
        lark = auto_grammar(choice, format_, specials, parallel, FORMATS[name], has_begun=has_begun)
        assert lark is not None
        opening = "" if has_begun else f"\n{start}"
        for text in ("", "a", f"a{wrong}b", f"{wrong}{end}\n{call}", f"a{end}b{end}{call}"):
            assert allows(lark, opening + text, specials), text
        for text in (f"a{end}{wrong}", f"{wrong}{end}{wrong}", f"{end}{call}{start}{wrong}{end}"):
            assert not allows(lark, opening + text, specials), text
        assert allows(lark, wrong, specials) is allows(lark, f"a{start}{wrong}", specials) is has_begun
        assert allows(lark, f"{opening}{end}{call * 2}", specials) is (parallel is None)
        parser = parser_for(None, format_, choice, name, prompt=start if has_begun else "")
        answer = joined([*parser.push(f"{opening}a{wrong}{end}{call}"), *parser.finish()])
        assert (answer.reasoning, answer.calls) == (f"a{wrong}", [("f", '{"x": 1}')])  # as the reader finds them


def test_grammar_of_tools_that_are_not_strict_is_none_unless_calls_may_not_be_several() -> None:
    loose = [tool("f", X)]
    for choice in (read_choice(loose, "auto"), read_choice(STRICT, "required"), read_choice(STRICT, "none")):
        assert auto_grammar(choice, "hermes", {}, None) is None
    lark = lark_of("hermes", {}, loose, parallel=False)
    call = '<tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>'
    assert allows(lark, call, {}) and not allows(lark, call * 2, {})


@pytest.mark.parametrize(("format_", "specials"), [("pythonic", {}), ("harmony", {})])
def test_strict_tools_in_a_format_that_no_grammar_can_force_are_refused(format_: str, specials: Any) -> None:
    with pytest.raises(ValueError, match=r'^tools: expected strict false .*"required"'):
        auto_grammar(read_choice(STRICT, None), format_, specials, None)
    with pytest.raises(ValueError, match=r'^parallel_tool_calls: expected true .*"required"'):
        auto_grammar(read_choice([tool("f")], None), format_, specials, False)


def test_many_ordinary_strict_tools_have_a_grammar_and_too_large_ones_are_refused_unread() -> None:
    text = {"anyOf": [{"enum": [f"a{i}" for i in range(5)]}, {"type": "object", "properties": {"q": {}}}]}
    schema = {"type": "object", "properties": {f"property_{i}_of_the_tool": text for i in range(25)}}
    many = [tool(f"f{i}", schema) for i in range(30)]
    large = [tool(f"f{i}", {"properties": {"x" * 2**16: {"type": "nothing"}}}) for i in range(5)]
    for each in (*many, *large):
        each["function"]["strict"] = True
    lark = lark_of("hermes", {}, many)
    assert len(lark) > 120_000
    arguments = json.dumps(dict.fromkeys(schema["properties"], "a1"))
    call = f'<tool_call>{{"name": "f29", "arguments": {arguments}}}</tool_call>'
    assert allows(lark, call, {}) and not allows(lark, call.replace("a1", "b1"), {})
    with pytest.raises(ValueError, match=r"^tools: expected strict tools whose schemas have at most 262144 characters"):
        read_choice(large, "auto")
    many = [{**each, "function": {**each["function"], "name": f"g{i}"}} for i, each in enumerate(many * 3)]
    with pytest.raises(ValueError, match=r"^tools: expected (strict )?tools whose .* at most 262144 characters"):
        lark_of("hermes", {}, many)


def test_strict_that_is_no_bool_is_refused() -> None:
    wrong = [{"type": "function", "function": {"name": "f", "strict": "yes"}}]
    with pytest.raises(ValueError, match=r"^tools\[0\]\.function\.strict: expected true or false, got 'yes'$"):
        read_choice(wrong, None)
