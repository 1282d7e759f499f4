"""Test chat templates in the styles of several model families: texts and errors are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from jspec.engine.input.chat_input import read_conversations, read_template_fields
from jspec.engine.text.tokenizer import HFTokenizer
from tests.support import tokenizer_folders

pytestmark = pytest.mark.once

# Tools as indented JSON in the first user message, a date with a default, one call a message, role "ipython".
HEADERS = """{{- bos_token }}
{%- if not date is defined %}{%- set date = strftime_now('%Y') %}{%- endif %}
{%- set lead = '' %}
{%- if messages[0].role == 'system' %}
    {%- set lead, messages = messages[0].content | trim, messages[1:] %}
{%- endif %}
{{- '[system]\\n' ~ lead ~ ' ' ~ date }}
{%- for message in messages %}
    {%- if loop.first and tools is not none %}
        {{- '\\n[user]\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n' }}{% endfor %}{{ message.content }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call a message, please') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '\\n[call]\\n{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '\\n[ipython]\\n' }}{{ message.content if message.content is string else message.content | tojson }}
    {%- else %}
        {{- '\\n[' + message['role'] + ']\\n' + message['content'] | trim }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n[assistant]\\n' }}{% endif %}"""

# Reasoning of earlier turns is removed, results of tools are grouped, and thinking can be turned off.
THINKING = """{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- if not (message.content is string and message.content.startswith('<r>')) %}
            {%- set ns.searching = false %}{%- set ns.last = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reason = message.reasoning_content | default('', true) %}
        {%- if '</think>' in content %}
            {%- set reason = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reason) %}
            {{- '<think>\\n' ~ reason ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<r>' ~ message.content ~ '</r>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}{{ message.content }}{% else %}
            {%- for part in message.content %}{{ part.text }}{% endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# Tools key by key before the last user message, and errors for roles that do not alternate.
BRACKETS = """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- if messages[0]['role'] == 'system' %}{% set lead, turns = messages[0]['content'], messages[1:] %}
{%- else %}{% set lead, turns = '', messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in turns | rejectattr('role', 'equalto', 'tool') if not message.tool_calls %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns, got ' ~ message['role'] ~ ' as ' ~ ns.index) }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[TOOLS] [' }}
            {%- for tool in tools %}{% set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {{- '"' + key + '": ' + (('"' + value + '"') if value is string else value | tojson) }}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}{{ '}}' }}{{ ']' if loop.last else ', ' }}
            {%- endfor %}{{ '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (lead ~ '\\n\\n' if loop.last and lead else '') ~ message['content'] ~ '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ (']' if loop.last else ', ') }}
        {%- endfor %}{{ eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[RESULT] ' ~ {'content': message.content, 'call_id': message.tool_call_id} | tojson ~ '[/RESULT]' }}
    {%- else %}{{ ' ' ~ message['content'] ~ eos_token }}{% endif %}
{%- endfor %}"""

# No system message, and the assistant has another name.
NO_SYSTEM = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\\n' }}{% if message['content'] is string %}{{ message['content'] | trim }}
{% elif message['content'] is iterable %}{% for part in message['content'] %}
{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}
{% endfor %}{% else %}{{ raise_exception('wrong content') }}{% endif %}{{ '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# Documents, thinking, a date, a loop with break and continue, and marked parts of the assistant.
DOCUMENTS = """{%- set thinking = thinking | default(false) %}
{{- '#system ' ~ strftime_now('%Y') ~ (' think' if thinking else '') }}
{%- if documents %}{% for document in documents %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- if not document.text %}{% continue %}{% endif %}
    {{- '\\n#document ' ~ document.title | default('untitled') ~ ': ' ~ document['text'] }}
{%- endfor %}{% endif %}
{%- if tools %}{{ '\\n#tools ' ~ tools | tojson(indent=2, sort_keys=true) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{% generation %}{{ '\\n#assistant ' ~ message.content }}{% endgeneration %}
    {%- else %}{{ '\\n#' ~ message.role ~ ' ' ~ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n#assistant ' }}{% endif %}"""

TEMPLATES = {
    "headers": HEADERS,
    "thinking": THINKING,
    "brackets": BRACKETS,
    "no system": NO_SYSTEM,
    "documents": DOCUMENTS,
}


def weather(city: str, unit: str = "C") -> float:
    """Tell today's temperature – "now".

    Args:
        city: name of the city, such as Zürich <ZH>
        unit: unit of the temperature (choices: ["C", "F"])

    Returns:
        the temperature
    """
    raise NotImplementedError


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def call(name: str = "abcdefghi") -> dict[str, Any]:
    return {"type": "function", "id": name, "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5}}}


SYSTEM = {"role": "system", "content": " Be brief – naïve 😀 "}
SCHEMA = {"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 3}'}
DOCS = [{"title": "T", "text": 'x "y"'}, {"text": ""}, {"text": "z"}]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one message": ([user(" Hi\n")], {}),
    "system message": ([SYSTEM, user("a"), assistant("b "), user("c")], {}),
    "thoughts of an earlier turn": ([user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")], {}),
    "reasoning field": ([user("a"), assistant("b", reasoning_content="hm")], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, user("a")], {"tools": [weather, SCHEMA]}),
    "calls": (
        [user("a"), assistant(None, tool_calls=[call()]), RESULT, assistant("3"), user("b")],
        {"tools": [SCHEMA]},
    ),
    "two calls": ([user("a"), assistant("", tool_calls=[call(), call("b" * 9)]), RESULT, RESULT], {"tools": [SCHEMA]}),
    "wrong id": ([user("a"), assistant("", tool_calls=[call("x")]), RESULT], {"tools": [SCHEMA]}),
    "parts": ([user([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])], {}),
    "two user messages": ([user("a"), user("b")], {}),
    "assistant goes on": ([user("a"), assistant("1, 2, ")], {"continue_final_message": True}),
    "parts go on": ([user("a"), assistant([{"type": "text", "text": "1,"}])], {"continue_final_message": True}),
    "no prompt": ([user("a"), assistant("b")], {"add_generation_prompt": False}),
    "no thinking": ([user("a")], {"chat_template_kwargs": {"enable_thinking": False}}),
    "thinking": ([user("a")], {"chat_template_kwargs": {"thinking": True}}),
    "date": ([user("a")], {"chat_template_kwargs": {"date": "1 May"}}),
    "documents": ([user("a")], {"documents": DOCS}),
    "no tools": ([user("a")], {"tools": []}),
}
UNREAD = {  # conversations with an option that the template never reads
    "headers": ("no thinking", "thinking", "documents"),
    "thinking": ("thinking", "date", "documents"),
    "brackets": ("no thinking", "thinking", "date", "documents"),
    "no system": (
        "tools",
        "calls",
        "two calls",
        "wrong id",
        "no thinking",
        "thinking",
        "date",
        "documents",
    ),
    "documents": ("no thinking", "date"),
}
LEFT_OUT = {"documents": ("calls", "two calls", "wrong id")}  # conversations with calls that the template never writes
# What templates get that refuse several calls in a message, or a system message.
APART = [user("a"), assistant("", tool_calls=[call()]), RESULT, RESULT, assistant("", tool_calls=[call("b" * 9)])]
FOLDED = [user(f"{SYSTEM['content']}\n\na"), assistant("b "), user("c")]
CHANGED = {"headers": {"two calls": APART}, "no system": {"system message": FOLDED}}
Tokenizers = tuple[HFTokenizer, Any]


@cache
def _files() -> dict[str, str]:
    made, config = tokenizer_folders.KINDS["chat"]()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", **config}
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(config)}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Tokenizers]:
    """Return a function that writes a folder with chat templates, and loads it here and in transformers."""

    def written(template: Any = None, **files: str) -> Tokenizers:
        own = {**_files(), **{name.replace("__", "/").replace("_jinja", ".jinja"): t for name, t in files.items()}}
        config = {**json.loads(own["tokenizer_config.json"]), "chat_template": template}
        own["tokenizer_config.json"] = json.dumps({key: value for key, value in config.items() if value is not None})
        for name, text in own.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return HFTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    return written


def plain_text(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def outcome(tokenizers: Tokenizers, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the token ids or the error text of a conversation here and in transformers."""
    ours, theirs = tokenizers
    own = dict(options)
    plain = [{**message, "content": plain_text(message["content"])} for message in messages]
    kwargs = {"add_generation_prompt": not own.get("continue_final_message"), **own}
    kwargs |= kwargs.pop("chat_template_kwargs", {})
    try:
        expected = theirs.apply_chat_template(plain, return_dict=False, **kwargs)
    except Exception as error:
        expected = str(error)[:100]
    try:
        (conversation,) = read_conversations(messages)
        got: Any = ours.chat(conversation, **read_template_fields(own))
    except ValueError as error:
        got = str(error)
    return got, expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_in_the_style_of_a_family_gives_the_tokens_of_transformers(name: str, make: Any) -> None:
    tokenizers, failed, distinct = make(TEMPLATES[name]), [], set()
    for case, (messages, options) in CONVERSATIONS.items():
        got, expected = outcome(tokenizers, messages, options)
        if changed := CHANGED.get(name, {}).get(case):
            assert isinstance(expected, str), "the template refuses the conversation as it is"
            _, expected = outcome(tokenizers, changed, options)
        if case in UNREAD[name]:
            assert isinstance(got, str) and "never reads" in got, (case, got)
        elif case in LEFT_OUT.get(name, ()):
            assert isinstance(got, str) and got.startswith("messages[1].tool_calls[0]: "), (case, got)
        elif isinstance(expected, str):
            assert isinstance(got, str) and expected in got, (case, got, expected)
            failed.append(case)
        else:
            assert got == expected, case
            distinct.add(tuple(got))
    assert len(distinct) > 5 and len(failed) < 9, "the conversations differ, and most are rendered"


@pytest.mark.parametrize(
    ("name", "case", "message"),
    [
        ("brackets", "two user messages", "user and assistant must take turns, got user as 1"),
        ("brackets", "wrong id", "ids have 9 letters"),
    ],
)
def test_chat_template_that_refuses_a_conversation_raises_with_its_own_words(
    name: str, case: str, message: str, make: Any
) -> None:
    got, expected = outcome(make(TEMPLATES[name]), *CONVERSATIONS[case])
    assert message in expected and "the chat template failed: " in got and message in got


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("thinking", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("thinking", {"tools": [SCHEMA]}),
        ("thinking", {"add_generation_prompt": False}),
        ("headers", {"chat_template_kwargs": {"date": "1 May"}}),
        ("headers", {"chat_template_kwargs": {"bos_token": "<s>"}}),
        ("documents", {"chat_template_kwargs": {"thinking": True}}),
        ("documents", {"documents": DOCS}),
    ],
)
def test_chat_template_without_an_option_gives_other_tokens(name: str, options: dict[str, Any], make: Any) -> None:
    """Negative control: an option that is dropped on the way to the template is noticed."""
    tokenizers = make(TEMPLATES[name])
    (got, expected), (bare, _) = outcome(tokenizers, [user("a")], options), outcome(tokenizers, [user("a")], {})
    assert got == expected != bare


def test_chat_with_an_option_that_the_template_never_reads_raises_naming_the_variables_it_reads(make: Any) -> None:
    tokenizer, _ = make("{{ messages }}{{ tools }}{{ enable_thinking }}{% if add_generation_prompt %}{% endif %}")
    with pytest.raises(ValueError, match=r"documents: .* \(add_generation_prompt, enable_thinking, tools\), got one"):
        tokenizer.chat([user("a")], documents=DOCS)
    with pytest.raises(ValueError, match=r"enable_thinkin: expected one of the variables"):
        tokenizer.chat([user("a")], chat_template_kwargs={"enable_thinkin": False})


CONTENT = "{{ messages[0].content }}"
NAMED = {"default": CONTENT, "tool_use": "{{ tools | tojson }}" + CONTENT, "rag": "{{ documents }}rag" + CONTENT}
LAYOUTS: dict[str, dict[str, Any]] = {
    "list in tokenizer_config.json": {"template": [{"name": n, "template": t} for n, t in NAMED.items()]},
    "files": {
        "chat_template_jinja": NAMED["default"],
        "additional_chat_templates__tool_use_jinja": NAMED["tool_use"],
        "additional_chat_templates__rag_jinja": NAMED["rag"],
    },
    "files beside an older entry": {
        "template": "old",
        "chat_template_jinja": NAMED["default"],
        "additional_chat_templates__tool_use_jinja": NAMED["tool_use"],
        "additional_chat_templates__rag_jinja": NAMED["rag"],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chat_with_named_templates_takes_the_template_that_transformers_takes(layout: str, make: Any) -> None:
    tokenizers = make(**LAYOUTS[layout])
    ours, _ = tokenizers
    for options, text in (
        ({}, "Hi"),
        ({"tools": [SCHEMA]}, json.dumps([SCHEMA]) + "Hi"),
        ({"chat_template": "rag", "documents": DOCS[:1]}, f"{DOCS[:1]}ragHi"),
        ({"chat_template": "default", "add_generation_prompt": False}, "Hi"),
        ({"chat_template": "{{ messages | length }}" + CONTENT}, "1Hi"),
    ):
        got, expected = outcome(tokenizers, [user("Hi")], options)
        assert got == expected and ours.decode(got) == text
    with pytest.raises(ValueError, match=r"chat_template: .* \(default, rag, tool_use\), got 'tools'"):
        ours.chat([user("Hi")], chat_template="tools")


def test_chat_with_a_single_template_file_takes_it(make: Any) -> None:
    ours, theirs = make("old", chat_template_jinja="{{ bos_token }}" + CONTENT)
    assert ours.chat([user("Hi")]) == theirs.apply_chat_template([user("Hi")], return_dict=False)
    assert ours.chat([user("Hi")]) == ours.encode("<|endoftext|>Hi")
    with pytest.raises(ValueError, match=r"chat_template: .* \(none, it has a single template\), got 'default'"):
        ours.chat([user("Hi")], chat_template="default")


def test_chat_with_named_templates_but_no_default_raises_naming_them(make: Any) -> None:
    ours, _ = make([{"name": "rag", "template": "x"}])
    with pytest.raises(ValueError, match=r"multiple chat templates with no default.*rag"):
        ours.chat([user("Hi")])


def test_chat_with_a_template_of_the_caller_needs_none_of_the_tokenizer(make: Any) -> None:
    ours, theirs = make()
    template = "{{ messages[0].content }}!"
    assert ours.chat([user("Hi")], chat_template=template) == theirs.encode("Hi!")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        ours.chat([user("Hi")])


def test_tools_given_as_functions_become_the_schemas_of_transformers() -> None:
    (schema, other) = read_template_fields({"tools": [weather, SCHEMA]})["tools"]
    assert (schema, other) == (get_json_schema(weather), SCHEMA)
    assert schema["function"]["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]
