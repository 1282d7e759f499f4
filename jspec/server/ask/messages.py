"""Reads the messages of a chat request, and collects those that requests in other forms are translated into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jspec.engine.input.chat_input import join_parts, read_kind, read_messages
from jspec.server.ask.values import listing
from jspec.server.http.errors import refused

MAX_MESSAGES, READER = 2048, "server"


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Read a conversation as `jspec.engine.input.chat_input.read_messages` does."""
    values = listing(MAX_MESSAGES)(name, value)
    try:
        return read_messages(values, name, READER)
    except (TypeError, ValueError) as error:
        raise refused(error, {}) from error


def join_texts(name: str, value: Any, kinds: Mapping[str, str]) -> str:
    """Return a text, or the texts of parts, as `jspec.engine.input.chat_input.join_parts` does."""
    try:
        return join_parts(value, name, kinds, READER)
    except TypeError as error:
        raise refused(error, {}) from error


def kind_of_part(name: str, part: Mapping[str, Any], kinds: Iterable[str]) -> str:
    """Return the type of a part, which must be one of some."""
    try:
        return read_kind(part, name, kinds, READER)
    except TypeError as error:
        raise refused(error, {}) from error


class Translation:
    """The messages of chat completions that a request in another form makes.

    Attributes:
        messages: the messages.
        names: the field of the request that each part of them came from, for errors about that part.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}

    @property
    def last(self) -> dict[str, Any]:
        """The last message; {} if there is none."""
        return self.messages[-1] if self.messages else {}

    def add(self, field: str, **message: Any) -> None:
        """Add a message that came from a field of the request."""
        self.names[f"messages[{len(self.messages)}]"] = field
        self.messages.append(message)

    def add_call(self, field: str, call: str, name: str, arguments: str, *, key: str) -> None:
        """Add a tool call to the last message, which is the assistant's.

        Args:
            field: the field of the request that it came from.
            call: id of the call.
            name: name of the tool.
            arguments: its arguments, as JSON text.
            key: key in the field under which the arguments were.
        """
        calls = self.last.setdefault("tool_calls", [])
        path = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names |= {path: field, f"{path}.function": field, f"{path}.function.arguments": f"{field}.{key}"}
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})
