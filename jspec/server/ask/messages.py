"""Reads the messages of a chat request, and brings them into the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from jspec.core.shorten import short
from jspec.server.ask.values import listing, mapping, text
from jspec.server.http.errors import invalid

MAX_MESSAGES = 2048


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Read a conversation; return its messages with contents as texts and the arguments of tool calls as objects.

    Contents may be lists of parts {"type": "text", "text": ...}, which are joined with line ends, as vLLM does for
    templates that take texts.
    """
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(listing(MAX_MESSAGES)(name, value))]


def _message(name: str, value: Any) -> dict[str, Any]:
    message = {key: item for key, item in mapping(name, value).items() if item is not None}
    text(f"{name}.role", message.get("role"))
    if "tool_calls" in message:
        message["tool_calls"] = [
            _tool_call(f"{name}.tool_calls[{i}]", call)
            for i, call in enumerate(listing(MAX_MESSAGES)(f"{name}.tool_calls", message["tool_calls"]))
        ]
    if "content" in message or "tool_calls" not in message:
        message["content"] = _content(f"{name}.content", message.get("content"))
    return message


def _content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(name, f'expected a text or a list of parts {{"type": "text", "text": ...}}, got {short(value)}')
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{name}[{index}]", f'expected {{"type": "text", "text": ...}}, got {short(part)}')
    return "\n".join(part["text"] for part in value)


def _tool_call(name: str, value: Any) -> dict[str, Any]:
    """Return a tool call of an earlier answer; templates take its arguments as an object, the API as JSON text."""
    function = mapping(f"{name}.function", mapping(name, value).get("function"))
    text(f"{name}.function.name", function.get("name"))
    arguments = function.get("arguments")
    return {**value, "function": {**function, "arguments": _object_of(arguments)}}


def _object_of(arguments: Any) -> Any:
    """Return the object that a JSON text holds; anything else as it is, because a model may write wrong JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments
