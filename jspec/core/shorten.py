"""Shortens values for error messages."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any

LIMIT = 120  # default for the most characters of a shortened value


class _Shortener(reprlib.Repr):
    """Writes the first entries of a container, or both ends of a long text, in a time independent of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 6
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        """Write a large int as its number of bits, because Python refuses to write thousands of digits."""
        return repr(x) if x.bit_length() <= 256 else f"<int of {x.bit_length()} bits>"

    def repr_set(self, x: set[Any], level: int) -> str:
        """Write a few entries only, because reprlib would sort all of them."""
        return super().repr_set(x if len(x) <= self.maxset else {*islice(x, self.maxset)}, level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return super().repr_frozenset(x if len(x) <= self.maxset else frozenset(islice(x, self.maxset)), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Write a few entries only, because reprlib would sort all of them."""
        return super().repr_dict(x if len(x) <= self.maxdict else dict(islice(x.items(), self.maxdict)), level)


_shortener = _Shortener()


def short(value: object, limit: int = LIMIT) -> str:
    """Return ``repr(value)`` cut to at most ``limit`` characters, with the value's size if it was cut.

    The time does not depend on the length of texts, lists, tuples, sets and dicts.
    """
    try:
        text = _shortener.repr(value)
    except Exception as error:  # a failing repr must not hide the error that is being reported
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    note = ""
    if isinstance(value, (str, bytes, list, tuple, set, frozenset, dict)):
        shown = _shortener.maxstring if isinstance(value, (str, bytes)) else _shortener.maxlist
        note = f" (length {len(value)})" if len(value) > shown else ""
    room = limit - len(note)
    return (text if len(text) <= room else f"{text[: room - 3]}...") + note
