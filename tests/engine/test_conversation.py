"""Test that chat templates get conversations in the form that they read, and that what they leave out is an error."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jspec.engine.input.chat_input import read_messages
from jspec.engine.text.chat_template import ChatTemplate
from tests.engine.test_chat_template import Templated

pytestmark = pytest.mark.once

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
KNOWN = "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NAMED = "{% for m in messages if m.role in ['developer', 'user'] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = """{% for m in messages %}<{{ m.role }}>{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"""
CALL_PARTS = PARTS.replace(
    "{% endfor %}{% endfor %}",
    """{% endfor %}{% for call in m.tool_calls or [] %}
{{- call.function.name + call.function.arguments }}{% endfor %}{% endfor %}""",
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% if loop.last %}{{ messages[0].content }};{% endif %}"
)
LATE_SYSTEM += "{{ m.content }}{% endif %}{% endfor %}"
LATE = LATE_SYSTEM.replace("{% endif %}{% endfor", "{% elif m.role != 'system' %}{{ m.content }}{% endif %}{% endfor")
ANSWERS = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
ESCAPED = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"


def calls(write: str) -> str:
    """Return a template that writes the arguments of tool calls by a Jinja expression."""
    each = f"{{% for call in m.tool_calls or [] %}}{{{{ call.function.name }}}}:{{{{ {write} }}}}{{% endfor %}}"
    return f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{each}{{% endfor %}}"


JOINED = calls("'' + call.function.arguments")  # raises an error for an object
PLAIN = calls("call.function.arguments")  # would write an object in Python's notation
OBJECT = calls("call.function.arguments | tojson")
ITEMS = calls("call.function.arguments.items() | map('join', '=') | join(',')")
ADDED = calls("(call.function.arguments | last) + (call.function.arguments.values() | last)")  # takes texts alone
WITHOUT_CONTENT = """{% for m in messages %}{% if m.content is none %}{% for call in m.tool_calls %}
{{- call.function.name + call.function.arguments }}{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}
{%- endfor %}"""
NEEDS_CONTENT = OBJECT.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
ONE_CALL = """{% for m in messages %}<{{ m.role }}>{% if m.tool_calls is defined %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('one call') }}{% endif %}{{ m.thinking }}{{ m.tool_calls[0].function | tojson }}{% else %}
{{- m.content }}{% endif %}{% endfor %}"""
ALONE = ONE_CALL.replace("m.tool_calls | length != 1", "m.content and m.thinking")
FIRST_CALL = ONE_CALL.replace("m.tool_calls | length != 1", "false")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"

DEVELOPER: Any = {"role": "developer", "content": "BE BRIEF"}
SYSTEM: Any = {"role": "system", "content": "BE BRIEF"}
USER: Any = {"role": "user", "content": "hi"}
NO: Any = {"role": "assistant", "content": "no"}
TEXTS: Any = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
JSON = '{"x":  1, "é": "a b"}'


def part(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def asks(arguments: Any, **content: Any) -> dict[str, Any]:
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", **content, "tool_calls": [call]}


def asks_nothing() -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}


CALLS: Any = [{**asks(JSON)["tool_calls"][0], "id": name} for name in "ab"]
BOTH: Any = {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": CALLS}
SO: Any = {"role": "assistant", "content": "so"}
RESULTS: Any = [{"role": "tool", "tool_call_id": name, "content": name * 2} for name in "ba"]
FOLDED: Any = {"role": "user", "content": "BE BRIEF\n\nhi"}
OBJECTS: Any = [{**call, "function": {"name": "f", "arguments": {"x": 1, "é": "a b"}}} for call in CALLS]
FIRST: Any = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": OBJECTS[:1]}
SECOND: Any = {"role": "assistant", "content": "", "tool_calls": OBJECTS[1:]}
TOLD: Any = [  # calls and results as texts
    {"role": "assistant", "content": f'so\n[{", ".join([f"""{{"name": "f", "arguments": {JSON}}}"""] * 2)}]'},
    {"role": "user", "content": "Result of f:\nbb\n\nResult of f:\naa\n\nhi"},
]
APART: Any = [SO, FIRST, RESULTS[1], SECOND, RESULTS[0]]


@pytest.fixture(scope="module")
def renderer() -> ChatTemplate:
    return ChatTemplate("folder")


@pytest.mark.parametrize(
    ("template", "messages", "form"),
    [
        (KNOWN, [DEVELOPER, USER], [SYSTEM, USER]),
        (TURNS, [DEVELOPER, USER], [SYSTEM, USER]),
        (NAMED, [DEVELOPER, USER], [DEVELOPER, USER]),
        (TURNS + "{# 'critic' #}", [{"role": "critic", "content": "no"}], [{"role": "critic", "content": "no"}]),
        (TURNS, [TEXTS], [{"role": "user", "content": "a\nb"}]),
        (PARTS, [SYSTEM, USER], [part(SYSTEM), part(USER)]),
        (PARTS, [TEXTS], [part({"role": "user", "content": "a\nb"})]),
        (FIRST_PART, [TEXTS], [part({"role": "user", "content": "a\nb"})]),
        (LATE_SYSTEM, [SYSTEM, USER], [SYSTEM, USER]),
        (ESCAPED, [{"role": "tool", "content": '{"é":\n"x"}'}], [{"role": "tool", "content": '{"é":\n"x"}'}]),
        (ANSWERS, [{"role": "assistant", "content": "<think>a</think> "}, USER], None),
        (OBJECT, [asks(JSON, content=None)], [asks({"x": 1, "é": "a b"}, content="")]),
        (OBJECT, [asks("", content="so")], [asks({}, content="so")]),
        (OBJECT, [asks(r'{"\udCff": ["\ud83d\ude00 \uD800", 1]}')], [asks({"\ufffd": ["😀 \ufffd", 1]}, content="")]),
        (OBJECT, [asks_nothing()], [asks({}, content="")]),
        (JOINED, [asks_nothing()], [asks("{}", content="")]),
        (ADDED, [asks(JSON)], [asks({"x": 1, "é": "a b"}, content="")]),
        (OBJECT, [asks("{broken")], [asks("{broken", content="")]),
        (OBJECT, [asks("[1]")], [asks("[1]", content="")]),
        (ITEMS, [asks(JSON)], [asks({"x": 1, "é": "a b"}, content="")]),
        (JOINED, [asks(JSON)], [asks(JSON, content="")]),
        (JOINED, [asks({"x": 1, "é": "b"})], [asks('{"x": 1, "é": "b"}', content="")]),
        (PLAIN, [asks(JSON)], [asks(JSON, content="")]),
        (WITHOUT_CONTENT, [USER, asks(JSON, content="")], [USER, asks(JSON, content=None)]),
        (NEEDS_CONTENT, [asks(JSON)], [asks({"x": 1, "é": "a b"}, content="")]),
        *((template, [USER, BOTH, *RESULTS, USER], [USER, *APART, USER]) for template in (ONE_CALL, FIRST_CALL)),
        (NO_SYSTEM + ONE_CALL, [SYSTEM, USER, BOTH, *RESULTS], [FOLDED, *APART]),
        (ONE_CALL, [USER, {**BOTH, "content": None}], [USER, FIRST, SECOND]),
        (ALONE, [USER, {**BOTH, "tool_calls": CALLS[:1]}, RESULTS[0]], [USER, SO, FIRST, RESULTS[0]]),
        (ALONE, [{**asks(JSON), "content": "so"}], [{**asks({"x": 1, "é": "a b"}), "content": "so"}]),
        (NAMED, [SYSTEM, USER], [FOLDED]),
        (NO_SYSTEM + TURNS, [DEVELOPER, USER, NO, USER], [FOLDED, NO, USER]),
        (NO_SYSTEM + PARTS, [SYSTEM, USER], [part(FOLDED)]),
        (NO_SYSTEM + CALL_PARTS, [SYSTEM, USER, asks(JSON)], [part(FOLDED), part(asks(JSON, content=""))]),
        (LATE, [SYSTEM, USER, NO], [FOLDED, NO]),
        (TURNS, [{**USER, "tool_calls": [], "name": None}], [USER]),
        (TURNS, [SYSTEM, USER, BOTH, *RESULTS, USER], [SYSTEM, USER, *TOLD]),
        (NO_SYSTEM + TURNS, [SYSTEM, USER, BOTH, *RESULTS, USER], [FOLDED, *TOLD]),
        (PARTS, [USER, BOTH, *RESULTS, USER], [part(USER), *map(part, TOLD)]),
        (TURNS, [USER, {"role": "assistant", "content": None, "refusal": "no"}], [USER, NO]),
        (TURNS, [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [USER, NO]),
    ],
)
def test_template_gets_the_form_that_it_reads(
    renderer: ChatTemplate, template: str, messages: list[Any], form: list[Any] | None
) -> None:
    (expected,), _ = render_jinja_template([messages if form is None else form], chat_template=template)
    assert renderer.render(Templated(template), read_messages(messages, "messages")) == expected


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (KNOWN, [USER, {"role": "tool", "content": "3"}], r"messages\[1\]: .* a message of the role tool, which it"),
        (KNOWN, [USER, {"role": "tool", "content": " "}, {"role": "tool", "content": "e"}], r"messages\[2\]: "),
        (NAMED, [SYSTEM, NO, USER], r"messages\[0\]: .* role system"),
        (ONE_CALL, [USER, BOTH, {**RESULTS[0], "tool_call_id": "c"}], "one call"),
        (ONE_CALL, [USER, {**BOTH, "tool_calls": [CALLS[0]] * 2}, RESULTS[1]], "one call"),
        (FIRST_CALL, [USER, BOTH, {"role": "tool", "content": "c"}], r"messages\[1\]\.tool_calls\[1\]: "),
        (ONE_CALL.replace("m.content }}", "m.content if 'lost' not in m.content }}"),
         [USER, BOTH, *RESULTS, {**USER, "content": "lost"}], r"messages\[4\]: "),
        (NAMED, [USER, {"role": "assistant", "content": "hi"}], r"messages\[1\]: "),  # the text of the user's too
        (TURNS, [USER, {"role": "boss", "content": "hi"}], r"messages\[1\]\.role: expected one of .*, got 'boss'"),
        (TURNS + "{{ tools }}", [USER, asks(JSON)], r"messages\[1\]\.tool_calls\[0\]: .* a tool call, which it leaves"),
        (calls("1"), [asks(JSON)], r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: .* the arguments of"),
        (ITEMS, [asks("{broken")], r"messages\[0\]\.tool_calls\[0\].*: expected JSON text of an"),
        ("{% for m in messages %}{{ m.content[0] }}{% endfor %}", [USER], r"messages\[0\]: "),  # a letter, or a part
        (LATE_SYSTEM, [USER, SYSTEM], r"messages\[1\]: "),
        (TURNS, [{"role": 1, "content": "a"}], r"messages\[0\]\.role: expected a text, got 1"),
        (TURNS, [{"role": "assistant"}], r"messages\[0\]\.content: expected a text or a list"),
        (TURNS, [part({"role": "user", "content": 1})], r"messages\[0\]\.content\[0\]\.text: expected a text, got 1"),
        (TURNS, [asks(5)], r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: expected a dict or JSON text"),
        (TURNS, [{**NO, "function_call": {"name": "f"}}], r"messages\[0\]\.function_call: expected tool_calls instead"),
        (TURNS, [{**NO, "audio": {"id": "1"}}], r"messages\[0\]\.audio: .* has no audio input"),
        (TURNS, [{**USER, "tool_calls": ["f"]}], r"messages\[0\]\.tool_calls\[0\]\.function: expected a tool call"),
        *(
            (TURNS, [{"role": "user", "content": [{"type": kind}]}], rf"content\[0\]\.type: .* has no {medium} input")
            for kind, medium in {
                "image_url": "image", "input_image": "image", "input_audio": "audio", "video_url": "video",
                "file": "file", "document": "document",
            }.items()
        ),
    ],
)  # fmt: skip
def test_part_that_the_template_leaves_out_is_an_error_that_names_it(
    renderer: ChatTemplate, template: str, messages: list[Any], error: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        renderer.render(Templated(template), read_messages(messages, "messages"))


def test_template_that_leaves_out_the_same_in_two_forms_is_not_asked_for_all(
    renderer: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[str] = []
    ask = renderer._ask
    monkeypatch.setattr(renderer, "_ask", lambda task: tasks.append(task) or ask(task))
    for template, messages, most in (
        ("{{ messages | length }}", [SYSTEM, USER], 4),
        ("{{ tools }}{{ messages | length }}", [SYSTEM, USER, asks(JSON), RESULTS[0]], 8 + 2),
        ("{{ tools }}{{ messages | length }}", [SYSTEM, USER, BOTH, *RESULTS], 4 + 3 * 2),
        ("{{ tools }}{{ raise_exception('no') }}", [SYSTEM, USER, BOTH, *RESULTS], 4 + 3 * 2),
    ):
        tasks.clear()
        with pytest.raises(ValueError, match=r"messages\[0\]: .* leaves out|no$"):
            renderer.render(Templated(template), read_messages(messages, "messages"))
        assert len(tasks) == most
