"""Reads and renders the messages of a chat request, and collects those of requests in other forms."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from jspec.engine.input.chat_input import format_conversations, join_parts, read_kind, read_messages
from jspec.engine.text.chat_template import UnreadVariable
from jspec.engine.text.tokenizer import Tokenizer
from jspec.server.ask.values import listing
from jspec.server.http.errors import refused

MAX_MESSAGES, READER = 2048, "server"
SENT_BY_HABIT = ("reasoning_effort", "enable_thinking", "thinking")  # variables that clients send to any model

logger = logging.getLogger("jspec.server")


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Read a conversation as `jspec.engine.input.chat_input.read_messages` does."""
    values = listing(MAX_MESSAGES)(name, value)
    try:
        return read_messages(values, name, READER)
    except (TypeError, ValueError) as error:
        raise refused(error, {}) from error


def render_messages(tokenizer: Tokenizer | None, messages: Any, options: dict[str, Any]) -> list[int]:
    """Return the token ids of a conversation as `jspec.engine.input.chat_input.format_conversations` does.

    A variable of `SENT_BY_HABIT` that the chat template never reads is left out; a warning tells of the first one.
    """
    while True:
        try:
            (ids,) = format_conversations(tokenizer, [messages], options)
        except UnreadVariable as error:
            if error.name not in SENT_BY_HABIT:
                raise
            _warn_unread(error.name)
            variables = {name: value for name, value in options["chat_template_kwargs"].items() if name != error.name}
            options = {**options, "chat_template_kwargs": variables}
        else:
            return ids


@cache
def _warn_unread(name: str) -> None:
    logger.warning("requests have %s, which the model's chat template never reads: it has no effect", name)


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
