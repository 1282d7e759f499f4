"""Test the parsers of tool calls: they find what was written, however the text is split, and lose nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jspec.engine.reading import text_reader
from jspec.engine.reading.text_reader import AnswerPart, CallDelta, OutputParser
from jspec.server.tool_calls.choose import FORMATS
from tests.support.answers import (
    MARKERS,
    TOOLS,
    Joined,
    auto,
    check_every_split,
    joined,
    parsed,
    scraps_of,
    split,
    tool,
)

pytestmark = pytest.mark.once

NAMES = [tool["function"]["name"] for tool in TOOLS]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.sampled_from([0.5, -1e30]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["x", "city", "y_2"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
BLANKS = st.sampled_from(["", " ", "\n", " \n\t"])
CUTS = st.lists(st.integers(0, 150), max_size=6)


# -- answers that are written as a format says, and what must be found in them


def write_object(draw: Any, name: str, arguments: dict[str, Any], keys: Sequence[str]) -> tuple[str, str]:
    """Return a call as JSON in one of many layouts, and the text of its arguments in it."""
    layout: dict[str, Any] = {"indent": draw(st.sampled_from([None, 1])), "ensure_ascii": draw(st.booleans())}
    text = json.dumps(arguments, **layout)
    members = [f'"name":{draw(BLANKS)}{json.dumps(name)}', f'"{draw(st.sampled_from(keys))}":{draw(BLANKS)}{text}']
    members += ['"id": "abc\\"}"', '"type": -1.5e3'][: draw(st.integers(0, 2))]
    return "{" + f"{draw(BLANKS)},{draw(BLANKS)}".join(draw(st.permutations(members))) + draw(BLANKS) + "}", text


def write_json(draw: Any, made: Sequence[tuple[str, Any]], keys: Sequence[str]) -> tuple[list[str], list[Any]]:
    texts = [write_object(draw, name, arguments, keys) for name, arguments in made]
    return [text for text, _ in texts], [(name, text) for (name, _), (_, text) in zip(made, texts, strict=True)]


@st.composite
def hermes(draw: Any) -> tuple[str, Joined]:
    texts, calls = write_json(draw, draw(CALLS), ["arguments"])
    before = draw(st.sampled_from(["", "I look.", "a < b, <tool"]))
    blocks = [f"{draw(BLANKS)}<tool_call>{draw(BLANKS)}{text}{draw(BLANKS)}</tool_call>" for text in texts]
    return before + "".join(blocks) + draw(BLANKS), Joined(before, calls=calls)


@st.composite
def llama3_json(draw: Any) -> tuple[str, Joined]:
    texts, calls = write_json(draw, draw(CALLS), ["arguments", "parameters"])
    before = draw(st.sampled_from(["", "<|python_tag|>", "I look. <|python_tag|>"]))
    separator = f"{draw(BLANKS)};{draw(BLANKS)}"
    return before + draw(BLANKS) + separator.join(texts) + draw(BLANKS), Joined(before[:7].strip("<|python"), "", calls)


@st.composite
def mistral(draw: Any) -> tuple[str, Joined]:
    made, before = draw(CALLS), draw(st.sampled_from(["", "I look."]))
    if draw(st.booleans()):
        texts, calls = write_json(draw, made, ["arguments"])
        array = f"[{draw(BLANKS)}" + f"{draw(BLANKS)},{draw(BLANKS)}".join(texts) + f"{draw(BLANKS)}]"
        return f"{before}{draw(BLANKS)}[TOOL_CALLS]{draw(BLANKS)}{array}{draw(BLANKS)}", Joined(before, calls=calls)
    middle, calls = draw(st.sampled_from(["", "[ARGS]", "[CALL_ID]aB3456789[ARGS]"])), []
    calls = [(name, json.dumps(arguments)) for name, arguments in made]
    texts = [f"[TOOL_CALLS]{draw(BLANKS)}{name}{middle}{arguments}" for name, arguments in calls]
    return before + draw(BLANKS).join(["", *texts, ""]), Joined(before, calls=calls)


@st.composite
def python_lists(draw: Any) -> tuple[str, Joined]:
    made = draw(CALLS)
    gap = f",{draw(BLANKS)}"
    texts = [f"{name}({gap.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in made]
    text, blank = f"[{gap.join(texts)}{draw(st.sampled_from(['', ',']))}]", draw(BLANKS)
    calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in made]
    if draw(st.booleans()):
        return f"I look.{blank}<|python_start|>{text}<|python_end|>{blank}", Joined("I look.", calls=calls)
    return blank + text + blank, Joined(calls=calls)


@st.composite
def harmony(draw: Any) -> tuple[str, Joined]:
    before, calls = draw(st.sampled_from(["", "I look."])), []
    texts = [f"<|channel|>commentary<|message|>{before}<|end|>"] if before else []
    for name, arguments in draw(CALLS):
        channel, to = "<|channel|>commentary", f" to=functions.{name}"
        header = draw(st.sampled_from([f"{to}{channel}", f"{channel}{to}"]))
        header += draw(st.sampled_from(["", " <|constrain|>json", " json"]))
        calls.append((name, json.dumps(arguments)))
        texts.append(f"{header}<|message|>{calls[-1][1]}{draw(st.sampled_from(['<|call|>', '<|end|>']))}")
    return "<|start|>assistant".join(texts), Joined(before, calls=calls)


# How GLM, Seed-OSS and Qwen3-Coder write calls and arguments; published in their chat templates.
MARKUP = {
    "glm45": ("<tool_call>{}~{}</tool_call>", "<arg_key>{}</arg_key>~<arg_value>{}</arg_value>~"),
    "seed_oss": (
        "<seed:tool_call>~<function={}>~{}</function>~</seed:tool_call>",
        "<parameter={}>{}</parameter>~",
    ),
    "qwen3_coder": ("<tool_call>~<function={}>~{}</function>~</tool_call>", "<parameter={}>\n{}\n</parameter>~"),
}
TYPES = {
    "x": {"type": "string"},
    "city": {"anyOf": [{"enum": ["a", "5"]}, {"$ref": "#/$defs/no"}]},
    "y_2": {"type": ["number", "boolean", "array", "object", "null"]},
}
TYPED = [tool(name, {"properties": TYPES, "$defs": {"no": {"type": "null"}}}) for name in NAMES]
TYPED_CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.fixed_dictionaries(
            {},
            optional={
                "x": st.text(max_size=5) | st.sampled_from(["5", "null", '"a"', " \n", "<arg", "</param\n"]),
                "city": st.sampled_from(["a", "5", None]),
                "y_2": VALUES.filter(lambda value: not isinstance(value, str)),
            },
        ),
    ),
    min_size=1,
    max_size=3,
)


def write_value(draw: Any, format_: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    as_python = format_ != "glm45" and draw(st.booleans())
    return repr(value) if as_python else json.dumps(value, ensure_ascii=False)


@st.composite
def markup(draw: Any, format_: str) -> tuple[str, Joined]:
    gap = draw(st.sampled_from(["\n", ""]))
    call, argument = (text.replace("~", gap) for text in MARKUP[format_])
    made, before, texts = draw(TYPED_CALLS), draw(st.sampled_from(["", "I look.", "a < b, <tool"])), [""]
    for name, arguments in made:
        written = [argument.format(key, write_value(draw, format_, value)) for key, value in arguments.items()]
        texts.append(call.format(name, "".join(written)))
    calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in made]
    return before + draw(BLANKS).join(texts) + draw(BLANKS), Joined(before, calls=calls)


def gemma_value(value: Any, quote: str = "") -> str:
    """Return a value as Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{quote}{key}{quote}:{gemma_value(value[key], quote)}' for key in value)}}}"
    return f"[{','.join(gemma_value(item, quote) for item in value)}]" if isinstance(value, list) else json.dumps(value)


@st.composite
def gemma4(draw: Any) -> tuple[str, Joined]:
    before, quote = draw(st.sampled_from(["", "I look.", "a < b, <|tool"])), draw(st.sampled_from(["", '<|"|>']))
    keys = st.text("aé_ ", min_size=1, max_size=3).map(str.strip)
    value = st.recursive(
        VALUES.filter(lambda value: not isinstance(value, (list, dict))),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2),
        max_leaves=4,
    )
    calls = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(keys, value, max_size=3)), min_size=1))
    texts = [f"<|tool_call>call:{name}{gemma_value(arguments, quote)}<tool_call|>" for name, arguments in calls]
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    return before + draw(BLANKS).join(["", *texts, ""]), Joined(before, calls=written)


@settings(max_examples=300, deadline=None)
@given(
    case=st.one_of(
        [
            st.tuples(st.just(name), strategy())
            for name, strategy in [
                ("hermes", hermes),
                ("llama3_json", llama3_json),
                ("mistral", mistral),
                ("pythonic", python_lists),
                ("harmony", harmony),
                ("gemma4", gemma4),
            ]
        ]
        + [st.tuples(st.just(name), markup(name)) for name in MARKUP]
    ),
    cuts=CUTS,
)
def test_parser_of_calls_in_its_format_finds_names_and_exact_arguments(
    case: tuple[str, tuple[str, Joined]], cuts: list[int]
) -> None:
    format_, (text, expected) = case
    make = partial(auto, format_, tools=TYPED if format_ in MARKUP else TOOLS)
    assert parsed(make, [text]) == expected
    assert parsed(make, split(text, cuts)) == expected
    assert parsed(make, [*text]) == expected


@pytest.mark.parametrize("format_", MARKUP)
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"allOf": [{"$ref": "#/$defs/no"}]}, "5", "5"),
        ({"type": "string", "anyOf": [{"pattern": "a"}, {"minLength": 1}]}, "5", "5"),
        ({"type": ["number", "null"], "anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": [{}], "enum": [[], "5"]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}, "5", "5"),
        ({"type": "array"}, '["</parameter></arg_value>", "\n"]', ["</parameter></arg_value>", "\n"]),
        ({"type": ["object", "string"]}, '{"a": "</arg_value>\n</parameter>"}', {"a": "</arg_value>\n</parameter>"}),
        ({"type": ["null", "string"]}, "{} ", "{} "),
        ({"type": ["array", "string"]}, "[a](b) ", "[a](b) "),
    ],
)
def test_type_of_an_argument_is_what_all_keywords_of_its_schema_allow(
    format_: str, schema: Any, written: str, value: Any
) -> None:
    defs = {"no": {"type": "string"}, "a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}
    call, argument = (text.replace("~", "") for text in MARKUP[format_])
    text = call.format("f", argument.format("x", written))
    for parameters in ({"properties": {"x": schema}}, {"properties": {"y": {}}, "additionalProperties": schema}):
        make = partial(auto, format_, tools=[tool("f", {**parameters, "$defs": defs})])
        ((_, arguments),) = check_every_split(make, text).calls
        assert json.loads(arguments) == {"x": value}


# -- any text


EXAMPLE = 'ab <tool_call>{"name": "f", "arguments": {}}</tool_call>'
HARMONY = "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>"
JSON = ("hermes", "llama3_json", "mistral")  # formats whose arguments are JSON


def without_markup(format_: str, parts: Sequence[AnswerPart], text: str) -> bool:
    """Return whether a text is what was found in it, in the same order, and between that only what belongs to calls."""
    pieces = [part.content or (part.call and part.call.arguments) or "" for part in parts]
    markup = [*map(re.escape, MARKERS[format_]), r"\s", r"[\[\]{},:;]", '"(?:name|arguments|parameters)"', '"?f"?']
    gap = f"(?:{'|'.join(markup)})*"
    return re.fullmatch(gap + gap.join(re.escape(piece) + gap for piece in pieces if piece), text) is not None


@st.composite
def scraps(draw: Any) -> tuple[str, str]:
    """Draw a format and a text of scraps of its calls, in any order."""
    format_ = draw(st.sampled_from(sorted(MARKERS)))
    return format_, "".join(draw(st.lists(st.sampled_from(scraps_of(format_)), max_size=8)))


@settings(max_examples=600, deadline=None)
@given(case=scraps(), cuts=CUTS)
@example(case=("hermes", '<tool_call>{"name": "f", "arguments": {"x": tru}}'), cuts=[])
@example(case=("mistral", '[TOOL_CALLS][{"name": f[ARGS]{}'), cuts=[])
def test_parser_of_any_scraps_gives_the_same_for_any_split_and_loses_nothing(
    case: tuple[str, str], cuts: list[int]
) -> None:
    format_, text = case
    make = partial(auto, format_)
    whole = parsed(make, [text])
    assert parsed(make, split(text, cuts)) == whole
    assert parsed(make, [*text]) == whole
    if not whole.calls:
        assert whole.content == text
    elif format_ in JSON:
        parser = make()
        assert without_markup(format_, [*parser.push(text), *parser.finish()], text)


@settings(max_examples=300, deadline=None)
@given(
    format_=st.sampled_from(sorted(FORMATS)),
    text=st.lists(st.text(max_size=4) | st.sampled_from(["<tool_call", "<|python_", "[TOOL_CALLS", " \n"]), max_size=6),
    cuts=CUTS,
)
def test_parser_of_a_text_without_calls_returns_it_unchanged(format_: str, text: list[str], cuts: list[int]) -> None:
    whole = "".join(text)
    assert parsed(partial(auto, format_), split(whole, cuts)) == Joined(whole)


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("hermes", "<tool_call>\nnot JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"'),
        ("hermes", ' \n<tool_call> <tool_call> {"arguments": {"x": nul}, "name": "f"}'),
        ("llama3_json", '{"name": "Bob", "parameters": {"x": 1}}'),
        ("llama3_json", '{"name": "f", "age": 3}'),
        ("llama3_json", 'It is {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS][]"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abc"),
        ("glm45", "<tool_call>unknown\n</tool_call>"),
        ("glm45", "<tool_call>f is a tool</tool_call>"),
        ("glm45", "<tool_call>f"),
        ("seed_oss", "<seed:tool_call><function=unknown></function></seed:tool_call>"),
        ("seed_oss", "<seed:tool_call>f</seed:tool_call>"),
        ("qwen3_coder", "<function=f></function>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:unknown{}<tool_call|>"),
        ("pythonic", "[f(x=1)] is how"),
        ("pythonic", "[f(x=1), g(y=2)]"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(x=1, x=2)]"),
        ("pythonic", "[f(x=y)]"),
        ("pythonic", "[f(x=f())]"),
        ("pythonic", "[f(x={1: 2})]"),
        ("pythonic", "[f(x={1, 2})]"),
        ("pythonic", "[f(x=1e999)]"),
        ("pythonic", r"[f(x='\ud800')]"),
        ("pythonic", "[f(x=01)]"),
        ("pythonic", "[f(**{'x': 1})]"),
        ("pythonic", "[f(x=1)"),
        ("pythonic", "f(x=1)"),
        ("pythonic", "<|python_start|>[f(x=1)]<|python_"),
    ],
)
def test_parser_of_what_only_looks_like_a_call_returns_it_as_content(format_: str, text: str) -> None:
    assert check_every_split(partial(auto, format_), text) == Joined(text)


@pytest.mark.parametrize(
    ("format_", "text", "content", "calls"),
    [
        (
            "hermes",
            'a\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nb\n<tool_call>{"name": "f", "arguments": {}} c',
            "a\nb c",
            [("f", "{}"), ("f", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": tru}} b', "}} b", [("f", '{"x": tru')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1, "a', "", [("f", '{"x": [1, "a')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id" 1}', ', "id" 1}', [("f", "{}")]),
        (
            "hermes",
            '<tool_call>{\n"name": "f", "arguments": {\n"s": "a\nb\t", "x": 1}}</tool_call>',
            "",
            [("f", '{\n"s": "a\\nb\\t", "x": 1}')],
        ),
        ("hermes", '<tool_call>{"arguments": {"s": "a\r\x00"}, "name": "f"}', "", [("f", r'{"s": "a\r\u0000"}')]),
        ("llama3_json", '{"name": "f", "parameters": {"s\n": "\n"}}', "", [("f", r'{"s\n": "\n"}')]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "\n\\n"}', "", [("f", r'{"s": "\n\n"}')]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "\n"}}]', "", [("f", r'{"s": "\n"}')]),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"s": "\n"}', "", [("f", r'{"s": "\n"}')]),
        ("pythonic", "[f(x='a\nb', y=\"\r\n\\\n\x00\")]", "", [("f", r'{"x": "a\nb", "y": "\r\n\u0000"}')]),
        ("llama3_json", '{"name": "f", "parameters": {}}; b', "; b", [("f", "{}")]),
        (
            "glm45",
            'a <tool_call>f\n<arg_key>s</arg_key>\n<arg_value>[1, "a\n"]</arg_value>\n</tool_call>\n b',
            "a\n b",
            [("f", r'{"s": [1, "a\n"]}')],
        ),
        ("glm45", "<tool_call>f<arg_key>s</arg_key>1</tool_call>", "<arg_key>s</arg_key>1</tool_call>", [("f", "")]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>5</arg_value><arg_ke", "", [("f", '{"s": 5')]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>[5", "", [("f", '{"s": [5')]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>[5] \n</arg_", "", [("f", '{"s": [5]')]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>5 apples", "", [("f", '{"s": "5 apples')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n12\n</para", "", [("f", '{"a": 12')]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>a\n", "", [("f", r'{"s": "a\n')]),
        ("glm45", "<tool_call>f<arg_key>is how\nit begins", "<arg_key>is how\nit begins", [("f", "")]),
        ("seed_oss", "<seed:tool_call><function=f><parameter=a>True</parameter></function", "", [("f", '{"a": true')]),
        ("seed_oss", "<seed:tool_call><function=f><parameter=a>1</parameter> b", " b", [("f", '{"a": 1')]),
        ("qwen3_coder", "<tool_call><function=f>\n</tool_call>\nb", "\nb", [("f", "{}")]),
        ("qwen3_coder", "a <tool_call><function=f></function>\nb", "a\nb", [("f", "{}")]),
        ("gemma4", '<|tool_call>call:f{s:<|"|>"\n<|"|>,b:{c:None]}', "]}", [("f", r'{"s": "\"\n", "b": {"c": null')]),
        ("gemma4", "<|tool_call>call:f{s:Paris}<tool_call|>", "s:Paris}<tool_call|>", [("f", "")]),
        ("gemma4", '<|tool_call>call:f{s:<|"|>Par', "", [("f", '{"s": "Par')]),
        ("gemma4", "<|tool_call>call:f{s:1", "", [("f", '{"s": 1')]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            ', {"name": "g", "arguments": {}}]',
            [("f", "{}")],
        ),
        ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]g{}", "[TOOL_CALLS]g{}", [("f", "{}")]),
        (
            "pythonic",
            "[f(x=(True, none))] <|python_start|>[f(x=(true, None, +.5))]",
            "[f(x=(True, none))]",
            [("f", '{"x": [true, null, 0.5]}')],
        ),
        ("pythonic", r'''[f(x="\d\\\n\x41", y=""), f(x="""a"
b""")]''', "", [("f", r'{"x": "\\d\\\nA", "y": ""}'), ("f", r'{"x": "a\"\nb"}')]),
    ],
)  # fmt: skip
def test_parser_of_calls_and_other_text_keeps_both(
    format_: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """Arguments that were handed on stay with their call; what cannot follow them is content."""
    assert check_every_split(partial(auto, format_), text) == Joined(content, calls=calls)


# -- when parts come


@pytest.mark.parametrize(
    ("format_", "head"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": '),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": '),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": '),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
    ],
)
def test_parser_hands_on_every_character_of_arguments_at_once(format_: str, head: str) -> None:
    parser = auto(format_)
    assert parser.push(head) == []
    for index, character in enumerate(r'{"x": [-1.5e3, null, "a\"\u00e9"]}'):
        first, *rest = parser.push(character)
        if index == 0:
            assert first.call is not None and (first.call.index, first.call.name, first.call.arguments) == (0, "f", "")
            (first,) = rest
        assert first == AnswerPart(call=CallDelta(0, arguments=character))


@pytest.mark.parametrize(
    ("format_", "head"),
    [
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>"),
        ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=x>"),
        ("gemma4", '<|tool_call>call:f{x:<|"|>'),
    ],
)
def test_parser_hands_on_every_character_of_texts_at_once(format_: str, head: str) -> None:
    parser = auto(format_, tools=TYPED)
    assert joined(parser.push(head)).calls == [("f", '{"x": "')]
    for character in 'a\n"\\é<':
        parts = parser.push(character)
        assert (
            "".join(part.call.arguments for part in parts if part.call)
            == json.dumps(character, ensure_ascii=False)[1:-1]
            or character == "<"
        )


@pytest.mark.parametrize(("format_", "marker"), [(name, markers[0]) for name, markers in MARKERS.items()])
def test_parser_holds_back_blanks_and_beginnings_of_a_marker_alone(format_: str, marker: str) -> None:
    parser, text, shown = auto(format_), f"a {marker[:-1]} {marker[0]}{marker[:2]}b \n", ""
    for size, character in enumerate(text, 1):
        shown += joined(parser.push(character)).content
        held = text[len(shown) : size]
        assert text.startswith(shown) and marker.startswith(held.lstrip(" \n"))
    assert shown + joined(parser.finish()).content == text


@pytest.mark.parametrize(
    "text", ["a", "{}", '{"answer": 1', '{"name": 1,', '{"name": "Bob"', '{"name": "f", "parameters": [', "[1]"]
)
def test_llama_parser_lets_go_of_other_json_once_it_can_be_no_call(text: str) -> None:
    parser = auto("llama3_json")
    assert joined([part for character in text for part in parser.push(character)]).content == text


def test_time_for_a_text_at_once_is_that_for_its_pieces() -> None:
    times = []
    for pieces in ([HARMONY] * 8000, [HARMONY * 8000]):
        parser, start = auto("harmony"), time.process_time()
        parts = [part for piece in pieces for part in parser.push(piece)]
        times.append(time.process_time() - start)
        assert sum(part.call is not None and part.call.id is not None for part in parts) == 8000
    assert times[1] < 3 * times[0] + 0.2


@pytest.mark.parametrize("format_", sorted(FORMATS))
def test_parser_reads_blanks_without_end_once(format_: str) -> None:
    """A model may repeat line ends up to its limit; reading all of them again at each token took 12 s."""
    parser, blanks = auto(format_, reasoning=None if format_ == "harmony" else "think"), "\n" * 16
    shown, start = joined(parser.push("<think></think>I look.")).content, time.process_time()
    for _ in range(16_000):
        assert parser.push(blanks) == []
    shown += joined([*parser.push("b"), *parser.finish()]).content
    assert shown.endswith(f"I look.{blanks * 16_000}b") and time.process_time() - start < 3


@pytest.mark.parametrize(
    ("format_", "head", "piece"),
    [
        ("qwen3_coder", "<tool_call><function=", "aaaa"),
        ("glm45", "<tool_call>f<arg_key>", "aaaa"),
        ("gemma4", "<|tool_call>call:f{x:", "1111"),
        ("harmony", "<|channel|>", "aaaa"),
    ],
)
def test_time_for_a_long_run_of_what_is_held_back_grows_with_its_length(format_: str, head: str, piece: str) -> None:
    parser, start = auto(format_), time.process_time()
    parts = [part for text in (head, *[piece] * 20_000) for part in parser.push(text)]
    found = joined([*parts, *parser.finish()])
    assert time.process_time() - start < 2  # 3 to 10 if every push looks at all of it
    assert found.calls or found.content in (head + piece * 20_000, "")


# -- negative controls


class PieceByPiece:
    """A wrong parser: it looks for the markers in each piece alone."""

    def push(self, text: str) -> list[AnswerPart]:
        start, marker, rest = text.partition("<tool_call>")
        body = json.loads(rest.partition("</tool_call>")[0]) if marker else {}
        call = CallDelta(0, "1", body["name"], json.dumps(body["arguments"])) if marker else None
        return [part for part in (AnswerPart(start), AnswerPart(call=call)) if part != AnswerPart()]

    def finish(self) -> list[AnswerPart]:
        return []


def test_check_of_splits_of_a_parser_without_memory_fails() -> None:
    with pytest.raises(AssertionError):
        check_every_split(PieceByPiece, EXAMPLE)


def test_check_of_splits_of_a_parser_that_holds_no_beginnings_of_markers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[[], OutputParser] = partial(auto, "hermes")
    check_every_split(make, EXAMPLE)
    monkeypatch.setattr(text_reader, "_size_without", lambda text, marker: len(text))
    with pytest.raises(AssertionError):
        check_every_split(make, EXAMPLE)
