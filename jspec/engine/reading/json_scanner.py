"""Checks JSON text that arrives in pieces, character by character, without building values."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

BLANKS = " \t\n\r"
LITERALS = ("true", "false", "null")
MAX_DIGITS = 1000  # most characters of a number

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a string that stand for themselves
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]*)?)?")


class JsonScanner:
    """Finds the end of one JSON value, or the first character that no JSON value can have there.

    A string may have control characters, which models write, but JSON does not; `escaped` writes them as JSON.

    Attributes:
        raw: positions of control characters in strings of the text that was pushed last.
        has_ended: whether the value is complete. A number is, once another character has come.
        has_failed: whether the text is no JSON.

    Source: RFC 8259.
    """

    def __init__(self) -> None:
        self.has_ended = self.has_failed = False
        self.raw: list[int] = []
        self._closers: list[str] = []  # of the arrays and objects that are open
        self._read = self._value  # reads what may come next: (text, position) to the position after it
        self._scalar_text = ""  # the number or literal that has begun
        self._is_key = False  # whether the string that has begun is a key
        self._hex_left = 0  # digits that the escape \u still needs

    def push(self, text: str, at: int) -> int:
        """Read ``text`` from position ``at``; return the position after the value, or at the wrong character."""
        self.raw = []
        while at < len(text) and not (self.has_ended or self.has_failed):
            at = self._read(text, at)
        return at

    def _fail(self, at: int) -> int:
        self.has_failed = True
        return at

    def _value(self, text: str, at: int) -> int:
        character = text[at]
        if character in BLANKS:
            return at + 1
        if character == '"':
            self._read = self._string
        elif character == "{":
            self._closers.append("}")
            self._read = self._first_key
        elif character == "[":
            self._closers.append("]")
            self._read = self._first_item
        else:
            self._scalar_text, self._read = "", self._scalar
            return at
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        if text[at] == "]":
            return self._close(at)
        self._read = self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._is_key, self._read = True, self._string
        elif text[at] not in BLANKS:
            return self._fail(at)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._read = self._value
        elif text[at] not in BLANKS:
            return self._fail(at)
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == self._closers[-1]:
            return self._close(at)
        if text[at] == ",":
            self._read = self._key if self._closers[-1] == "}" else self._value
        elif text[at] not in BLANKS:
            return self._fail(at)
        return at + 1

    def _close(self, at: int) -> int:
        self._closers.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        if self._closers:
            self._read = self._after_value
        else:
            self.has_ended = True

    def _string(self, text: str, at: int) -> int:
        plain = PLAIN.match(text, at)
        assert plain is not None
        at = plain.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._read = self._escape
        elif text[at] != '"':
            self.raw.append(at)
        elif self._is_key:
            self._is_key, self._read = False, self._colon
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_left, self._read = 4, self._hex
        elif text[at] in '"\\/bfnrt':
            self._read = self._string
        else:
            return self._fail(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._hex_left -= 1
        if not self._hex_left:
            self._read = self._string
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        longer = self._scalar_text + text[at]
        if _may_be_scalar(longer):
            self._scalar_text = longer
            return at + 1
        if self._scalar_text in LITERALS or NUMBER.fullmatch(self._scalar_text):
            self._end_value()
            return at
        return self._fail(at)


def escaped(text: str, raw: Sequence[int]) -> str:
    """Return a text with its characters at some positions, in rising order, escaped as in a JSON string."""
    pieces, start = [], 0
    for at in raw:
        pieces += [text[start:at], json.dumps(text[at])[1:-1]]
        start = at + 1
    return "".join([*pieces, text[start:]])


def is_object(text: str) -> bool:
    """Return whether a text is a whole JSON object."""
    scanner = JsonScanner()
    return text.startswith("{") and scanner.push(text, 0) == len(text) and scanner.has_ended


def value_text(text: str) -> str | None:
    """Return a JSON value with control characters in its strings escaped; None: the text is no JSON value."""
    scanner, value = JsonScanner(), text.strip(BLANKS)
    size = scanner.push(f"{value} ", 0)  # a blank ends a number
    return escaped(value, scanner.raw) if scanner.has_ended and size == len(value) else None


def _may_be_scalar(text: str) -> bool:
    """Return whether a text is a number or a literal, or the beginning of one."""
    if text[0] in "tfn":
        return any(literal.startswith(text) for literal in LITERALS)
    return len(text) <= MAX_DIGITS and NUMBER_BEGUN.fullmatch(text) is not None
