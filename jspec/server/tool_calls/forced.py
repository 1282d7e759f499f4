"""Answers that `jspec.server.tool_calls.grammar` has forced to be tool calls, and nothing else."""

from __future__ import annotations

import json
import re
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


def is_in(chat_template: str | None) -> bool:
    """Return whether a chat template reads tools."""
    return chat_template is not None and re.search(r"\btools\b", chat_template) is not None


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with the tools in the first message of the user, for templates that read no tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)
    content = messages[first].get("content") or ""
    told = {**messages[first], "content": f"Tools that can be called:\n{listed}\n\n{content}"}
    return [*map(dict, messages[:first]), told, *map(dict, messages[first + 1 :])]
