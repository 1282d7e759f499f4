"""Test that all routes, `Engine.chat` and training data render a conversation as transformers renders its form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from jspec import Engine, SamplingParams
from jspec.train.data import read_documents
from tests.support import serving, tokenizer_folders

TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<|im_start|>{{ m.role }}
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
RESPONSE = {"input": ITEMS, "tools": [{"type": "function", **TOOL}]}
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
MESSAGE = {"system": "Be brief.", "messages": BLOCKS, "tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}


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
    assert post("/v1/responses", **RESPONSE, max_output_tokens=1)["usage"]["input_tokens"] == len(expected)
    usage = post("/v1/messages", **MESSAGE, max_tokens=1)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(expected)
    assert usage["cache_read_input_tokens"] > len(expected) - 32, "all but the last pages are those of the other routes"
    assert post("/v1/messages/count_tokens", **MESSAGE)["input_tokens"] == len(expected)
    (done,) = engine.chat(MESSAGES, SamplingParams(max_tokens=1), tools=CHAT["tools"])
    assert done.prompt_token_ids == expected


def test_training_data_is_rendered_as_the_routes_render_it(engine: Engine, expected: list[int], tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({**CHAT, "messages": [*MESSAGES, {"role": "assistant", "content": "Three"}]}))
    assert engine.tokenizer is not None
    ((_, document),) = read_documents(file, engine.tokenizer, serving.VOCAB)
    assert document.tokens[: len(expected)].tolist() == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "boss", "content": "hi"}]}, "messages[5].role"),
        ("/tokenize", {"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
    ],
)
def test_error_about_a_part_of_the_conversation_names_the_clients_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error.get("param", param)) == (400, param)
    assert error["message"].startswith(f"{param}: expected ")
