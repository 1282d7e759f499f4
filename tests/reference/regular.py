"""The tokens that a regular expression allows, by the library regex without automaton or table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import pytest


@cache
def _pattern(expression: str) -> object:
    regex = pytest.importorskip("regex")
    return regex.compile(expression.encode())


def matches(expression: str, text: bytes, *, partial: bool = False) -> bool:
    """Return whether UTF-8 bytes match as a whole; with ``partial``, whether they are a prefix of a match."""
    return _pattern(expression).fullmatch(text, partial=partial) is not None  # type: ignore[attr-defined]


def allowed(expression: str, texts: Sequence[bytes | None], text: bytes, ends: Collection[int]) -> set[int]:
    """Return the tokens that may follow a text; every prefix of a match must have a completion by tokens."""
    if matches(expression, text):
        may_end = set(ends)
    else:
        may_end = set()
    others = {token for token, piece in enumerate(texts) if piece and token not in ends}
    return may_end | {t for t in others if matches(expression, text + (texts[t] or b""), partial=True)}
