"""Reads tool calls that are written as JSON, and hands their arguments on while they arrive."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from jspec.engine.reading.json_scanner import JsonScanner, escaped
from jspec.engine.reading.text_reader import AnswerPart, CallDelta, Reader, Reading

ARGUMENTS = ("arguments", "parameters")  # keys under which a call may have its arguments
BARE_KEYS = ("name", "arguments", "type", "id")  # keys of a call that no marker announces


def make_id() -> str:
    """Return a random id for a call."""
    return f"call_{secrets.token_hex(12)}"


class AnswerCalls:
    """The tool calls of one answer.

    A call has the name of a given tool, and a JSON object as arguments. Text that only begins like a call is left to
    the caller, who passes it on as content. The arguments of a call are handed on as they arrive, once its name is
    known; if they then turn out not to be JSON, or break off, the call keeps what came before the wrong character, and
    the rest is content. Control characters in strings of the arguments are escaped.

    Args:
        reader: the answer's text.
        schemas: the schema of the arguments of each tool, by name.
        new_id: makes the id of a call.
    """

    def __init__(self, reader: Reader, schemas: Mapping[str, Any], new_id: Callable[[], str] = make_id) -> None:
        self.schemas = schemas
        self._reader, self._new_id = reader, new_id
        self._count = 0

    def begin(self, name: str) -> None:
        """Begin a call; what was read so far is no content."""
        self._reader.commit()
        self._add(CallDelta(self._count, self._new_id(), name))
        self._count += 1

    def add(self, arguments: str) -> None:
        """Hand on the next piece of the newest call's arguments."""
        if arguments:
            self._add(CallDelta(self._count - 1, arguments=arguments))

    def _add(self, call: CallDelta) -> None:
        self._reader.parts.append(AnswerPart(call=call))

    def stream_text(self, *markers: str) -> Reading[bool]:
        """Hand on text up to a marker, the first of some that comes, as a JSON string; return whether one comes."""
        self.add('"')
        while True:
            size, marker = self._reader.find(*markers)
            self.add(json.dumps(self._reader.text[:size], ensure_ascii=False)[1:-1])
            self._reader.drop(size + len(marker))
            if marker or self._reader.ended:
                self.add('"' if marker else "")
                return marker != ""
            yield

    def break_off(self) -> None:
        """End the newest call, which is not complete; if the text has ended, what is left of it is no content."""
        self._reader.has_broken_call = True
        if self._reader.ended:
            self._reader.drop(len(self._reader.text))

    def stream_arguments(self, name: str) -> Reading[bool]:
        """Read a JSON object, the arguments of a call that begins here; return whether the object is complete."""
        reader, scanner = self._reader, JsonScanner()
        if not (yield from reader.take("{")):
            return False
        reader.at -= 1
        self.begin(name)
        while True:
            size = scanner.push(reader.text, 0)
            self.add(escaped(reader.text[:size], scanner.raw))
            reader.drop(size)
            if scanner.has_ended or scanner.has_failed or reader.ended:
                reader.has_broken_call |= not scanner.has_ended
                return scanner.has_ended
            yield

    def read_object(self, *, is_bare: bool = False) -> Reading[bool]:
        """Read a call ``{"name": ..., "arguments": {...}}``, which may have other keys; return whether it is one.

        Args:
            is_bare: whether no marker announces the call. Only `BARE_KEYS` are allowed then, so that other JSON is soon
                known to be none.
        """
        reader, values, begun = self._reader, dict[str, str](), False
        more = yield from reader.take("{")
        while more:
            key = yield from self._read_key()
            if key is None or key in values or (is_bare and key not in BARE_KEYS):
                return False
            if key == "arguments" and "name" in values:
                begun = yield from self.stream_arguments(json.loads(values["name"]))
                value = "{}" if begun else None
            else:
                value = yield from reader.json_value()
            if value is None or not self._may_have(key, value):
                return False
            values[key] = value
            yield from reader.skip_blanks()
            more = yield from reader.take(",")
        if not {"name", "arguments"} <= values.keys() or not (yield from reader.take("}")):
            return False
        if not begun:
            self.begin(json.loads(values["name"]))
            self.add(values["arguments"])
        reader.commit()
        return True

    def _read_key(self) -> Reading[str | None]:
        """Read a key, a colon and the blanks around them; return the key, or None if there is none."""
        reader = self._reader
        yield from reader.skip_blanks()
        text = yield from reader.json_value()
        if text is None or text[0] != '"':
            return None
        yield from reader.skip_blanks()
        if not (yield from reader.take(":")):
            return None
        yield from reader.skip_blanks()
        key = json.loads(text)
        return "arguments" if key in ARGUMENTS else key

    def _may_have(self, key: str, value: str) -> bool:
        """Return whether a call may have this JSON text under this key."""
        if key == "name":
            return value[0] == '"' and json.loads(value) in self.schemas
        return key != "arguments" or value[0] == "{"

    def read_list(self, separator: str, *, is_bare: bool = False) -> Reading[bool]:
        """Read calls with a separator between them; return whether there is one, and all are complete.

        What the text's end cuts off after the first call, before the arguments of the next one, is dropped.
        """
        reader = self._reader
        while (yield from self.read_object(is_bare=is_bare)):
            yield from reader.skip_blanks()
            if not (yield from reader.take(separator)):
                return True
            yield from reader.skip_blanks()
        if self._count and reader.ended and reader.at == len(reader.text):
            reader.has_broken_call |= "{" in reader.text
            reader.commit()
        return False

    def read_array(self) -> Reading[bool]:
        """Read a JSON array of calls, as far as it is one; return whether an array begins here."""
        reader = self._reader
        if not (yield from reader.take("[")):
            return False
        yield from reader.skip_blanks()
        if (yield from self.read_list(",")) and (yield from reader.take("]")):
            reader.commit()
        return True


def call_delta(call: CallDelta) -> dict[str, Any]:
    """Return a piece of a tool call as an entry of "tool_calls" of a stream."""
    function = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def whole_calls(deltas: list[CallDelta]) -> list[dict[str, Any]]:
    """Return the tool calls that pieces make, in the form of a whole message."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        new = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        calls.setdefault(delta.index, new)["function"]["arguments"] += delta.arguments
    return list(calls.values())
