"""The tokens that nested grammars allow, by recursive descent without automaton, table or library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# The grammars that the readers below parse, as a request states them.
LISTS = 'start: "{" (item ("," item)*)? "}"\nitem: start | /[ab]+/\n'
PAIRS = 'start: pair+\npair: "1" | "{" pair+ "}"\n'
OBJECTS = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[ab]*$"}, "b": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["b"],
    "additionalProperties": False,
}


class Over(Exception):
    """An exception: the text ended but more bytes must follow, so it is a prefix of a text that fits."""


class Text:
    """A text read from its beginning, byte by byte."""

    def __init__(self, text: bytes) -> None:
        self._text, self._place = text, 0

    @property
    def is_over(self) -> bool:
        return self._place == len(self._text)

    def sees(self, letters: bytes) -> bool:
        """Return whether the next byte is one of ``letters``."""
        if self.is_over:
            raise Over
        return self._text[self._place] in letters

    def take(self, letters: bytes) -> None:
        """Consume one byte.

        Raises:
            ValueError: the byte is not one of ``letters``.
        """
        if not self.sees(letters):
            raise ValueError(f"byte {self._place}")
        self._place += 1

    def take_all(self, letters: bytes) -> None:
        for letter in letters:
            self.take(bytes([letter]))

    def may_take(self, letters: bytes) -> None:
        if self.sees(letters):
            self.take(letters)


Reader = Callable[[Text], None]


def lists(text: Text) -> None:
    """Read lists of words and lists, such as `{}` or `{a,{ab},b}`."""
    text.take(b"{")
    if text.sees(b"}"):
        return text.take(b"}")
    while True:
        if text.sees(b"{"):
            lists(text)
        else:
            text.take(b"ab")
            while text.sees(b"ab"):
                text.take(b"ab")
        if text.sees(b"}"):
            return text.take(b"}")
        text.take(b",")


def pairs(text: Text) -> None:
    """Read one or more pairs, such as `1` or `{1}1{{1}}`."""
    _pair(text)
    while not text.is_over:
        _pair(text)


def _pair(text: Text) -> None:
    if text.sees(b"1"):
        return text.take(b"1")
    text.take(b"{")
    _pair(text)
    while not text.sees(b"}"):
        _pair(text)
    return text.take(b"}")


def objects(text: Text) -> None:
    """Read JSON such as `{"a":"ab","b":[{"b":[]}]}`; "a" is optional, and at most one blank is between two tokens."""
    text.take(b"{")
    text.may_take(b" ")
    text.take(b'"')
    if text.sees(b"a"):
        text.take_all(b'a"')
        text.may_take(b" ")
        text.take(b":")
        text.may_take(b" ")
        text.take(b'"')
        while not text.sees(b'"'):
            text.take(b"ab")
        text.take(b'"')
        text.may_take(b" ")
        text.take(b",")
        text.may_take(b" ")
        text.take(b'"')
    text.take_all(b'b"')
    text.may_take(b" ")
    text.take(b":")
    text.may_take(b" ")
    text.take(b"[")
    text.may_take(b" ")
    while not text.sees(b"]"):
        objects(text)
        text.may_take(b" ")
        if not text.sees(b"]"):
            text.take(b",")
            text.may_take(b" ")
            if text.sees(b"]"):
                raise ValueError("nothing after a comma")
    text.take(b"]")
    text.may_take(b" ")
    text.take(b"}")


def fits(read: Reader, text: bytes) -> tuple[bool, bool]:
    """Return whether a text is a prefix of one that fits, and whether it fits as a whole."""
    rest = Text(text)
    try:
        read(rest)
    except Over:
        return True, False
    except ValueError:
        return False, False
    return rest.is_over, rest.is_over


def allowed(read: Reader, texts: Sequence[bytes | None], text: bytes, ends: Collection[int]) -> set[int]:
    """Return the ids of tokens that may follow a text."""
    others = {token for token, piece in enumerate(texts) if piece and token not in ends}
    may_end = set(ends) if fits(read, text)[1] else set()
    return may_end | {token for token in others if fits(read, text + (texts[token] or b""))[0]}
