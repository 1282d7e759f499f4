"""Answers that `jspec.server.tool_calls.grammar` has forced to be tool calls, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.server.reading.text_reader import Reader, Reading
from jspec.server.tool_calls.calls import AnswerCalls


def read_named(reader: Reader, calls: AnswerCalls, name: str) -> Reading[None]:
    """Read the arguments of a call of the tool ``name``; text that follows is content."""
    yield from reader.skip_blanks()
    yield from calls.stream_arguments(name)
    yield from reader.drop_blanks_at_end()
    yield from reader.pass_all()


def read_required(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read ``{"name": ..., "arguments": {...}}``, or an array of such calls; text that follows is content."""
    yield from reader.skip_blanks()
    if not (yield from calls.read_array()):
        yield from calls.read_object()
    yield from reader.drop_blanks_at_end()
    yield from reader.pass_all()


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation for a chat template that reads no tools.

    The tools stand in the first message of the user. Earlier calls are texts of the assistant, in the form in which
    `jspec.server.tool_calls.grammar` forces them, and their results are texts of the user.
    """
    told = _calls_as_text(messages)
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        first = next((index for index, message in enumerate(told) if message["role"] == "user"), 0)
        content = told[first].get("content") or ""
        told[first] = {**told[first], "content": f"Tools that can be called:\n{listed}\n\n{content}"}
    return told


def _calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with calls and results as texts; results and the user's next message are one message.

    Many templates want the roles user and assistant in turns.
    """
    told: list[dict[str, Any]] = []
    names: dict[Any, str] = {}  # of tools, by the id of the call
    follows_result = False
    for message in messages:
        made, is_result = dict(message), message["role"] == "tool"
        content = message.get("content") or ""
        if calls := made.pop("tool_calls", None):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            made["content"] = f"{content}\n[{', '.join(map(_call_text, calls))}]".lstrip("\n")
        if is_result:
            name = names.get(message.get("tool_call_id"), message.get("name") or "the tool")
            made = {"role": "user", "content": f"Result of {name}:\n{content}"}
        if follows_result and made["role"] == "user":
            told[-1]["content"] += f"\n\n{made.get('content') or ''}"
        else:
            told.append(made)
        follows_result = is_result
    return told


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'
