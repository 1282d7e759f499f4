"""Test how a request's tools are read, and which parser an answer gets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jspec.engine.grammar import json_schema
from jspec.engine.text.tokenizer import HFTokenizer
from jspec.server.tool_calls.choose import check_name, parser_for
from jspec.server.tool_calls.tools import read_choice
from tests.support.answers import TOOLS, Joined, check_every_split, parsed, tool
from tests.support.tokenizer_folders import PUBLISHED

pytestmark = pytest.mark.once

HERMES = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FOUND = Joined(calls=[("f", "{}")])
EXAMPLES = {  # a chat template, and a call in its format
    "{{ '<tool_call>' }}": HERMES,
    "{{ '[TOOL_CALLS]' }}": "[TOOL_CALLS]f[ARGS]{}",
    "{{ '<|python_tag|>' }}": '<|python_tag|>{"name": "f", "parameters": {}}',
    'Respond in the format {"name": function name, ...}.': '<|python_tag|>{"name": "f", "parameters": {}}',  # Llama 3.2
    "{{ '<|python_start|>' }} {{ '<|python_tag|>' }}": "[f()]",
    "[func_name1(params_name1=params_value1)] <|python_tag|>": "[f()]",
    "{{ '<tool_call>' }} {{ '<arg_key>' }}": "<tool_call>f\n</tool_call>",
    "{{ '<seed:tool_call>\n<function=' }} {{ '<parameter=' }}": "<seed:tool_call><function=f></function>",
    "{{ '<tool_call>\n<function=' }} {{ '<parameter=' }}": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "{{ '<|tool_call>call:' }} {{ '<|channel>thought\n' }}": "<|tool_call>call:f{}<tool_call|>",
}
# How the chat templates of GLM-4.5 to 4.7, Seed-OSS, Qwen3-Coder and Gemma 4 write a call.
WRITTEN = {
    "glm45": """<tool_call>{{ f.name }}
{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>""",
    "glm47": """<tool_call>{{ f.name }}{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>\
<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>""",
    "seed_oss": """<seed:tool_call>
<function={{ f.name }}>
{% for key, value in f.arguments.items() %}<parameter={{ key }}>{{ value | string }}</parameter>
{% endfor %}</function>
</seed:tool_call>""",
    "qwen3_coder": """<tool_call>
<function={{ f.name }}>
{% for key, value in f.arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>""",
    "gemma4": """{% macro shown(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is mapping %}\
{{ '{' }}{% for key, item in value | dictsort %}{{ key }}:{{ shown(item) }}{{ '' if loop.last else ',' }}{% endfor %}\
{{ '}' }}{% elif value is boolean %}{{ value | lower }}{% elif value is iterable %}[{% for item in value %}\
{{ shown(item) }}{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ value }}{% endif %}{% endmacro %}\
<|tool_call>call:{{ f.name }}{{ shown(f.arguments) }}<tool_call|>""",
}
ARGUMENTS: dict[str, Any] = {
    "city": 'Zürich "5"\n',
    "code": "  if x < 1:\n\treturn [1]\n",
    "digits": "12",
    "days": [1, -2.5, {"a": [True, None, "x"]}],
    "exact": False,
    "note": None,
    "size": 10**20,
}


def type_of(value: Any) -> dict[str, Any]:
    return {"type": next(name for name, has in json_schema.TYPES.items() if has(value))}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("template", EXAMPLES)
def test_parser_for_a_chat_template_reads_its_format_alone(template: str) -> None:
    for other, text in EXAMPLES.items():
        expected = FOUND if text == EXAMPLES[template] else Joined(text)
        assert parsed(lambda: parser_for(template, None, read_choice(TOOLS, "auto"), None), [text]) == expected, other


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_a_template_writes_are_read_as_they_were(name: str) -> None:
    """The template is rendered by transformers; the schema alone tells texts from other values."""
    template = f"{{% set f = messages[0].tool_calls[0].function %}}{WRITTEN[name]}"
    function = {"name": "f", "arguments": ARGUMENTS}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    (text,), _ = render_jinja_template([[message]], chat_template=template)
    tools = [tool("f", {"properties": {key: type_of(value) for key, value in ARGUMENTS.items()}})]
    answer = f"Look:\n{text}{text}"
    found = check_every_split(lambda: parser_for(template, None, read_choice(tools, "auto"), None), answer)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("f", ARGUMENTS)] * 2
    assert found.content == "Look:"


def test_parser_for_a_name_overrides_the_chat_template() -> None:
    template = "{{ '[TOOL_CALLS]' }}"
    assert parsed(lambda: parser_for(template, "hermes", read_choice(TOOLS, None), None), [HERMES]) == FOUND
    assert parsed(lambda: parser_for(template, None, read_choice(TOOLS, None), None), [HERMES]) == Joined(HERMES)


def test_parser_for_the_template_of_qwen_reads_its_own_calls(data: Path) -> None:
    own = HFTokenizer(data / PUBLISHED["chat"])
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "Zürich", "n": [1, None]}}}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    texts = []
    for messages in (turns, [*turns, {"role": "assistant", "content": "Look:", "tool_calls": [call, call]}]):
        ids = own.chat(messages, tools=TOOLS, add_generation_prompt=len(messages) == 1)
        texts.append(own._tokenizer.decode(ids))
    prompt, whole = texts
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    assert whole.startswith(prompt) and answer.count("<tool_call>") == 2
    make = partial(parser_for, own._tokenizer.chat_template, None, read_choice(TOOLS, "auto"), None)
    found = check_every_split(make, answer)
    assert [(name, json.loads(text)) for name, text in found.calls] == [("f", call["function"]["arguments"])] * 2
    assert found.content == "Look:"


@pytest.mark.parametrize("template", [None, "{{ messages }}", "<tool_call><function=f>"])
def test_parser_for_an_unknown_template_raises_and_names_the_formats(template: str | None) -> None:
    with pytest.raises(
        ValueError,
        match=r"^tools: expected .* hermes, llama3_json, mistral, pythonic, harmony, gemma4, .*, got .*required",
    ):
        parser_for(template, None, read_choice(TOOLS, "auto"), None)
    for choice in ("none", "required", named("f")):
        parser_for(template, None, read_choice(TOOLS, choice), None)
    parser_for(template, None, read_choice(None, None), None)


def test_parser_for_an_unknown_name_raises_and_names_the_formats() -> None:
    for check in (lambda: check_name("qwen"), lambda: parser_for(None, "qwen", read_choice(None, None), None)):
        with pytest.raises(
            ValueError, match=r"^tool_parser: expected one of hermes, .*pythonic, harmony, .*, got 'qwen'$"
        ):
            check()
    check_name(None)


def test_parser_for_no_tools_returns_text_as_content() -> None:
    for tools, choice in ((None, None), ([], None), (TOOLS, "none"), (None, "none")):
        assert check_every_split(
            partial(parser_for, None, "hermes", read_choice(tools, choice), None), HERMES
        ) == Joined(HERMES)


def test_parser_for_a_named_tool_returns_the_whole_text_as_its_arguments() -> None:
    make = partial(parser_for, None, None, read_choice(TOOLS, named("get_time")), "think", prompt="<think>")
    text = '{"x" : [1, {"y": "}"}]}'
    assert check_every_split(make, f" {text}\n") == Joined(calls=[("get_time", text)])
    assert check_every_split(make, text[:9]) == Joined(calls=[("get_time", text[:9])])
    assert check_every_split(make, f"{text} b") == Joined(" b", calls=[("get_time", text)])
    assert check_every_split(make, "[1]") == Joined("[1]")


def test_parser_for_required_calls_reads_one_call_or_an_array() -> None:
    make = partial(parser_for, None, None, read_choice(TOOLS, "required"), None)
    one, other = '{"name": "f", "arguments": {"x": 1}}', '{"name":"get_time","arguments":{}}'
    assert check_every_split(make, one) == Joined(calls=[("f", '{"x": 1}')])
    assert check_every_split(make, f"[{one}, {other} ]") == Joined(calls=[("f", '{"x": 1}'), ("get_time", "{}")])
    called = Joined(calls=[("f", '{"x": 1}')])
    for size in range(other.index("{}")):  # cut before the arguments of the second call
        assert check_every_split(make, f"[{one}, {other[:size]}") == called
    for rest in (', {"a": 1}]', ", [", " a"):  # what is no call at all
        assert check_every_split(make, f"[{one}{rest}") == Joined(rest, calls=called.calls)


@pytest.mark.parametrize(
    ("format_", "start", "separator"), [("mistral", "[TOOL_CALLS][", ","), ("llama3_json", "", ";")]
)
def test_list_of_calls_cut_inside_a_later_call_has_the_whole_calls_alone(
    format_: str, start: str, separator: str
) -> None:
    one, other = '{"name": "f", "arguments": {"x": 1}}', f'{separator} {{"name": "get_time"'
    make = partial(parser_for, None, format_, read_choice(TOOLS, None), None)
    for size in range(len(other) + 1):
        assert check_every_split(make, f"{start}{one}{other[:size]}") == Joined(calls=[("f", '{"x": 1}')])
        parser = make()
        parser.push(f"{start}{one}{other[:size]}")
        parser.finish()
        assert parser.has_broken_call is ("{" in other[:size])
    wrong = f'{separator} {{"name": "h"'  # the negative control
    assert check_every_split(make, f"{start}{one}{wrong}, ") == Joined(f"{wrong}, ", calls=[("f", '{"x": 1}')])


def test_parser_for_allowed_tools_leaves_calls_of_others_in_the_content() -> None:
    allowed = {"mode": "auto", "tools": [named("get_time")]}
    make = partial(
        parser_for, None, "hermes", read_choice(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}), None
    )
    assert check_every_split(make, HERMES) == Joined(HERMES)
    assert check_every_split(make, HERMES.replace('"f"', '"get_time"')) == Joined(calls=[("get_time", "{}")])


def test_ids_of_calls_differ_and_those_of_mistral_have_nine_letters() -> None:
    ids = {"hermes": set[str](), "mistral": set[str]()}
    for name, text in (("hermes", HERMES), ("mistral", "[TOOL_CALLS]f[ARGS]{}")):
        for _ in range(20):
            parser = parser_for(None, name, read_choice(TOOLS, "auto"), None)
            first = next(part.call for part in [*parser.push(text), *parser.finish()] if part.call)
            assert first.id is not None
            ids[name].add(first.id)
    assert len(ids["hermes"]) == len(ids["mistral"]) == 20
    assert all(one.startswith("call_") for one in ids["hermes"])
    assert all(len(one) == 9 and one.isalnum() for one in ids["mistral"])


@pytest.mark.parametrize(
    ("tools", "choice", "error"),
    [
        ({"a": 1}, None, r"tools: expected a list of at most 128 tools, got \{'a': 1\}"),
        ([tool(f"f{i}") for i in range(129)], None, "tools: expected a list of at most 128 tools, got 129 tools"),
        ([{"type": "web_search"}], None, r"tools\[0\]: expected .*'web_search'"),
        ([tool("f"), {"type": "function"}], None, r"tools\[1\]: expected "),
        ([tool("f g")], None, r"tools\[0\]\.function\.name: expected 1 to 64 letters.*'f g'"),
        ([tool("")], None, r"tools\[0\]\.function\.name: "),
        ([tool("f" * 65)], None, r"tools\[0\]\.function\.name: "),
        ([tool("f"), tool("f")], None, r"tools\[1\]\.function\.name: expected names that differ, got f twice"),
        ([tool("f", {"type": "string"})], None, r"tools\[0\]\.function\.parameters: expected .*object"),
        ([tool("f", [1])], None, r"tools\[0\]\.function\.parameters: "),
        (None, "auto", "tool_choice: expected tools beside it, got 'auto'"),
        ([], "required", "tool_choice: expected tools beside it"),
        (TOOLS, "any", "tool_choice: expected one of none, auto, required, .*got 'any'"),
        (TOOLS, 1, "tool_choice: expected one of none, auto, required"),
        (TOOLS, {"type": "function", "name": "f"}, "tool_choice: expected "),
        (TOOLS, named("h"), r"tool_choice: expected names of the request's tools \(f, get_weather, get_time\), got h"),
        (TOOLS, {"type": "allowed_tools"}, r"tool_choice\.allowed_tools: expected a dict with the mode"),
        (
            TOOLS,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            r"tool_choice\.\S+\.tools: ",
        ),
    ],
)
def test_wrong_tools_or_choices_raise_and_name_the_field(tools: Any, choice: Any, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        read_choice(tools, choice)


def test_tool_without_parameters_takes_none() -> None:
    choice = read_choice([tool("f"), tool("g", {})], None)
    assert choice.mode == "auto" and not choice.is_forced
    assert choice.schemas["f"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert choice.schemas["g"] == {"type": "object"}
