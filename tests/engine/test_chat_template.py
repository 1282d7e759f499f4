"""Test rendering of chat templates in a process: the text of transformers, and errors for hostile templates."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jspec.engine.text import template_process
from jspec.engine.text.chat_template import ChatTemplate

pytestmark = pytest.mark.once

MESSAGES = [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "naïve 😀 \ud800 {{ 7 * 7 }}"}]
PLAIN = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% set lead = message.content | trim %}{% endif %}
<|{{ message['role'] }}|>{{ message.content }}{{ message.name | default('none') | tojson }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% generation %}{% endgeneration %}{% endif %}"""
HOSTILE = {
    "a long loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "seconds of CPU"),
    "a large power": ("{{ (9 ** 999999) ** 9999 }}", "seconds of CPU|OverflowError|MemoryError|ValueError"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    "a doubled text": (
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "MemoryError|GiB",
    ),
    "wide padding": ("{{ 'a'.center(10 ** 12) }}", "MemoryError"),
    "a long text": ("{{ 'a' * 3000000 }}", "expected 10[0-9]* characters, got 3000000"),
    "a division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "an undefined name": ("{{ a.b.c }}", "UndefinedError: 'a' is undefined"),
    "wrong syntax": ("{% if %}", "TemplateSyntaxError"),
    "an error of its own": (
        "{{ raise_exception('roles must alternate' * 99) }}",
        "TemplateError: roles must alternate",
    ),
    "Python's classes": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
}


@dataclass
class Templated:
    """The part of a transformers tokenizer that a chat template needs."""

    chat_template: str
    special_tokens_map: dict[str, str] = field(default_factory=lambda: {"bos_token": "<s>"})

    def get_chat_template(self, name: str | None, tools: object) -> str:
        return self.chat_template


@pytest.fixture(scope="module")
def renderer() -> ChatTemplate:
    return ChatTemplate("folder", seconds=0.5)


def test_chat_template_renders_the_text_that_transformers_renders(renderer: ChatTemplate) -> None:
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=PLAIN, add_generation_prompt=True, bos_token="<s>")
    assert renderer.render(Templated(PLAIN), [*MESSAGES]) == expected
    assert "{{ 7 * 7 }}" in expected and '"none"' in expected
    without = [{**message, "name": None} for message in MESSAGES]
    assert renderer.render(Templated(PLAIN), without) == expected, "None counts as missing"


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_chat_template_raises_value_error_and_the_next_one_renders(renderer: ChatTemplate, kind: str) -> None:
    template, message = HOSTILE[kind]
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"messages: the chat template failed: .*({message})") as caught:
        renderer.render(Templated(template), MESSAGES)
    assert len(str(caught.value)) < 500 and time.perf_counter() - start < 60
    assert renderer.render(Templated("{{ messages | length }}"), []) == "0"


def test_hostile_chat_template_with_variables_is_limited_too(renderer: ChatTemplate) -> None:
    nested = "{% if a %}" * 3000 + "{% endif %}" * 3000
    for template, kind in ((nested, "RecursionError"), ("{% if %}", "TemplateSyntaxError")):
        with pytest.raises(ValueError, match=f"messages: the chat template failed: .*{kind}"):
            renderer.render(Templated(template), MESSAGES, chat_template_kwargs={"a": 1})
    assert renderer.render(Templated("{{ a }}"), [], chat_template_kwargs={"a": 1}) == "1"


def test_chat_template_that_loops_long_lets_other_threads_run(renderer: ChatTemplate) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="seconds of CPU"):
            renderer.render(Templated(HOSTILE["a long loop"][0]), MESSAGES)

    slow, num_turns = threading.Thread(target=run), 0
    slow.start()
    while slow.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20, "this thread had no turns"


def test_chat_template_with_messages_that_json_cannot_represent_raises(renderer: ChatTemplate) -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TypeError, match=r"expected messages, tools and other values that JSON can represent.*object"):
        renderer.render(Templated(PLAIN), [{"role": "user", "name": object()}])
    with pytest.raises(TypeError, match=r"values that JSON can represent.*set"):
        renderer.render(Templated("{{ tools }}"), MESSAGES, tools=[{"a": {1}}])
    with pytest.raises(ValueError, match="nested"):
        renderer.render(Templated(PLAIN), [{"role": "user", "name": nested}])


def test_chat_template_after_its_process_was_killed_renders_again() -> None:
    one = ChatTemplate("folder")
    assert one.render(Templated("{{ bos_token }}"), []) == "<s>"
    process = one._process
    assert process is not None
    os.kill(process.pid, 9)
    process.wait()
    assert one.render(Templated("{{ bos_token }}"), []) == "<s>"
    last = one._process
    del one
    assert last is not None and last.wait(timeout=60) != 0, "the process ends with its owner"


def test_variables_of_a_template_are_looked_up_once() -> None:
    template_process._variables.cache_clear()
    for wanted in (["tools"], ["lost"], ["tools", "bos_token"]):
        unread = template_process._unread("{% set seen = tools %}{{ bos_token }}{{ seen }}{{ messages }}", wanted)
        assert unread == ({"unread": "lost", "read": "bos_token, tools"} if wanted == ["lost"] else {})
    assert template_process._variables.cache_info().misses == 1


def test_conversation_and_its_copy_have_twice_the_time_of_one_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[str] = []
    renderer = ChatTemplate("folder", seconds=3.0)
    monkeypatch.setattr(renderer, "_ask", lambda task: tasks.append(task) or {"texts": ["", ""]})
    assert renderer.render(Templated(""), []) == ""
    (task,) = map(json.loads, tasks)
    assert len(task[1]["conversations"]) == 2 and task[-1] == 6.0
