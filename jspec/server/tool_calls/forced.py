"""Answers that `jspec.server.tool_calls.grammar` has forced to be tool calls, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.text_reader import Reader, Reading
from jspec.engine.text.conversation import calls_as_texts


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
    """Return a conversation for a chat template that reads no tools: the first message of the user lists them."""
    told = calls_as_texts([dict(message) for message in messages])
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        first = next((index for index, message in enumerate(told) if message["role"] == "user"), 0)
        content = told[first].get("content") or ""
        told[first]["content"] = f"Tools that can be called:\n{listed}\n\n{content}"
    return told
