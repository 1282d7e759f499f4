"""Test that all routes, `Engine.chat` and training data render a conversation as transformers renders its form."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from jspec import Engine, SamplingParams
from jspec.engine.input.grammar_input import GrammarInput
from jspec.server.ask import messages as ask_messages
from jspec.train.data import read_documents
from tests.support import serving, tokenizer_folders

TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] and not
(m.role == 'system' and not loop.first) and not m.content.startswith('lost') %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}
<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ARGUMENTS = '{"x": 1}'  # the template takes JSON text alone
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
FORM: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a\nb"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    {"role": "user", "content": "So?"},
]
JSON = {"Content-Type": "application/json"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
MESSAGES: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    *FORM[3:],
]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT = {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]}
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{**part, "type": "input_text"} for part in PARTS]},
    {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "call_1", "output": "3"},
    {"role": "user", "content": "So?"},
]
RESPONSE: Any = {"input": ITEMS, "tools": [{"type": "function", **TOOL}], "max_output_tokens": 1}
BLOCKS: list[Any] = [
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": 1}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "3"},
            {"type": "text", "text": "So?"},
        ],
    },
]
ANTHROPIC_TOOL = {"name": "f", "input_schema": TOOL["parameters"]}
MESSAGE: Any = {"system": "Be brief.", "messages": BLOCKS, "tools": [ANTHROPIC_TOOL], "max_tokens": 1}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return serving.small_engine(serving.SLOTS, serving.MAX_LEN, TEMPLATE)


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with serving.running(engine, tool_parser="hermes") as server, server.http() as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The token ids that transformers makes of the form that the template reads."""
    folder = tokenizer_folders.write(Path(mkdtemp()) / "chat", "chat")
    theirs = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"chat_template": TEMPLATE, "tools": CHAT["tools"], "return_dict": False}
    return theirs.apply_chat_template(FORM, add_generation_prompt=True, **options)


def test_all_routes_render_the_conversation_alike(http: httpx.Client, engine: Engine, expected: list[int]) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert post("/tokenize", **CHAT)["tokens"] == expected
    assert post("/v1/chat/completions", **CHAT, max_tokens=1, return_token_ids=True)["prompt_token_ids"] == expected
    assert post("/v1/responses", **RESPONSE)["usage"]["input_tokens"] == len(expected)
    usage = post("/v1/messages", **MESSAGE)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(expected)
    assert usage["cache_read_input_tokens"] > len(expected) - 32, "all but the last pages are those of the other routes"
    assert post("/v1/messages/count_tokens", **MESSAGE)["input_tokens"] == len(expected)
    (done,) = engine.chat(MESSAGES, SamplingParams(max_tokens=1), tools=CHAT["tools"])
    assert done.prompt_token_ids == expected


def test_variables_that_clients_send_to_any_model_are_warned_of_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    ask_messages._warn_unread.cache_clear()
    user = [{"role": "user", "content": "a"}]
    plain = http.post("/tokenize", json={"messages": user}).json()["tokens"]
    variables = {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}}
    for _ in range(2):
        assert http.post("/tokenize", json={"messages": user, **variables}).json()["tokens"] == plain
        for path, body in (
            ("/v1/chat/completions", {"messages": user, "reasoning_effort": "low", "max_tokens": 1, **variables}),
            ("/v1/responses", {"input": "a", "reasoning": {"effort": "low"}, "max_output_tokens": 1}),
            ("/v1/messages", {"messages": user, "max_tokens": 1, **variables}),
        ):
            assert http.post(path, json=body).status_code == 200
    told = [record.getMessage().split(",")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(told) == [f"requests have {name}" for name in ("enable_thinking", "reasoning_effort", "thinking")]
    other = {"messages": user, "chat_template_kwargs": {"enable_thinkin": True, "thinking": True}}
    assert http.post("/tokenize", json=other).json()["error"]["param"] == "chat_template_kwargs.enable_thinkin"


def test_training_data_is_rendered_as_the_routes_render_it(engine: Engine, expected: list[int], tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({**CHAT, "messages": [*MESSAGES, {"role": "assistant", "content": "Three"}]}))
    assert engine.tokenizer is not None
    ((_, document),) = read_documents(file, engine.tokenizer, serving.VOCAB)
    assert document.tokens[: len(expected)].tolist() == expected


@pytest.mark.parametrize(("text", "unit", "most"), [("a" * 700, "tokens", 511), ("a" * 70_000, "characters", 65_536)])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": 0}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 0]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 0}]}, "messages"),
        ("/v1/responses", {"input": 0}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": 0}], "max_tokens": 1}, "messages"),
    ],
)
def test_prompt_that_is_too_long_is_told_in_the_words_of_each_api(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, text: str, unit: str, most: int
) -> None:
    answer = http.post(path, content=json.dumps(body).replace("0", json.dumps(text)), headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    if path == "/v1/messages":
        words = re.fullmatch(rf"prompt is too long: (\d+) {unit} > {most} maximum", error["message"])
    else:
        words = re.search(rf"maximum context length is 512 tokens.*at most {most} {unit}, got (\d+);", error["message"])
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert words and int(words[1]) > most


def test_prompt_and_answer_that_need_more_than_all_pages_are_told_in_the_words_of_each_api() -> None:
    small = serving.small_engine(1, 512, TEMPLATE, pages=5)
    with serving.running(small) as server, server.http() as http:
        user = {"messages": [{"role": "user", "content": "a"}]}
        errors = [
            http.post(path, json={**body, **limit}).json()["error"]
            for path, body, limit in (
                ("/v1/completions", {"prompt": "a"}, {"max_tokens": 400}),
                ("/v1/chat/completions", user, {}),  # without a limit the answer may have all that max_len leaves
                ("/v1/responses", {"input": "a"}, {"max_output_tokens": 400}),
                ("/v1/messages", user, {"max_tokens": 400}),
            )
        ]
    words = re.compile(r"maximum context length is (\d+) tokens.* got (\d+) \+ (\d+) > (\d+); shorten it, or lower")
    for error, param, answer in zip(errors, ("prompt", "messages", "input"), (400, None, 400), strict=False):
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        most, prompt, asked, again = map(int, words.search(error["message"]).groups())  # type: ignore[union-attr]
        assert most == again < prompt + asked and asked == (512 - prompt if answer is None else answer)
    told = r"input length and `max_tokens` exceed context limit: \d+ \+ 400 > \d+, decrease input length"
    assert re.match(told, errors[3]["message"]) and errors[3]["type"] == "invalid_request_error"


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """Return a copy of a JSON value with another value at a path."""
    if not path:
        return new
    copied = copy.copy(value)
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


def test_grammar_whose_library_is_absent_names_the_field_that_asks_for_it(
    http: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(self: Any, *arguments: Any) -> None:
        raise ImportError("regex and json_schema need a library")

    monkeypatch.setattr(GrammarInput, "of", absent)
    asked = {"structured_outputs": {"regex": "a"}}
    error = http.post("/v1/completions", json={"prompt": "a", **asked}).json()["error"]
    assert error["param"] == "structured_outputs" and "need a library" in error["message"]


LOST = [{"type": "text", "text": "lost"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://a"}}
CHOICE = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", changed(CHAT, ("messages", 3, "role"), "boss"), "messages[3].role"),
        ("/v1/chat/completions", changed(CHAT, ("messages", 3, "content"), LOST), "messages[3]"),
        ("/v1/chat/completions", changed(CHAT, ("messages", 4, "role"), "system"), "messages[4]"),
        ("/v1/chat/completions", changed(CHAT, ("messages", 1, "content", 1), IMAGE), "messages[1].content[1].type"),
        ("/tokenize", changed(CHAT, ("messages", 3, "role"), "boss"), "messages[3].role"),
        ("/tokenize", changed(CHAT, ("messages", 3, "content"), "lost"), "messages[3]"),
        ("/v1/responses", changed(RESPONSE, ("input", 3, "output"), "lost"), "input[3]"),
        ("/v1/responses", changed(RESPONSE, ("input", 4, "role"), "developer"), "input[4]"),
        ("/v1/responses", changed(RESPONSE, ("input", 1, "content", 0, "type"), "input_image"),
         "input[1].content[0].type"),
        ("/v1/responses", changed(RESPONSE, ("tools", 0, "name"), "a b"), "tools[0].name"),
        ("/v1/responses", {**RESPONSE, "tool_choice": CHOICE}, "tool_choice.tools"),
        ("/v1/responses", {**RESPONSE, "tool_choice": changed(CHOICE, ("tools",), 5)}, "tool_choice.tools"),
        ("/v1/responses", {**RESPONSE, "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ("/v1/messages", changed(MESSAGE, ("messages", 2, "content", 0, "content"), LOST), "messages[2].content[0]"),
        ("/v1/messages", changed(MESSAGE, ("messages", 2, "content", 1, "text"), "lost"), "messages[2].content[1]"),
        ("/v1/messages", {**MESSAGE, "system": "lost"}, "system"),
        ("/v1/messages", changed(MESSAGE, ("messages", 0, "content", 0, "type"), "document"),
         "messages[0].content[0].type"),
        ("/v1/messages", changed(MESSAGE, ("tools", 0, "input_schema"), {"type": "array"}), "tools[0].input_schema"),
        ("/v1/messages/count_tokens", {**MESSAGE, "system": "lost"}, "system"),
    ],
)  # fmt: skip
def test_error_about_a_part_of_the_conversation_names_the_clients_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error.get("param", param)) == (400, param)
    assert error["message"].startswith(f"{param}: expected ")


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each value in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths(value[key], (*path, key))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("/v1/responses", {**RESPONSE, "tool_choice": changed(CHOICE, ("tools", 0, "name"), "f")}),
        ("/v1/messages", {**MESSAGE, "tool_choice": {"type": "tool", "name": "f"}}),
        ("/v1/messages/count_tokens", MESSAGE),
    ],
)
@pytest.mark.parametrize("wrong", [5, "a b", {"type": "a"}])
def test_wrong_value_anywhere_gives_an_error_that_names_a_field_on_its_path(
    http: httpx.Client, path: str, body: dict[str, Any], wrong: Any
) -> None:
    num_refused = 0
    for at in paths(body):
        sent = changed(body, at, wrong)
        answer = http.post(path, json=sent)
        assert answer.status_code in (200, 400), (at, answer.text)
        if answer.status_code == 400:
            num_refused += 1
            field = re.findall(r"[^.\[\]]+", answer.json()["error"]["message"].split(": ")[0])
            assert is_inside(sent, field) or is_inside(body, field), (at, answer.text)
    assert num_refused > 10


def is_inside(value: Any, field: list[str]) -> bool:
    """Return whether a JSON value has a field, or could have it beside others."""
    for name in field[:-1]:
        if isinstance(value, list) and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return False
    return isinstance(value, dict | list)
