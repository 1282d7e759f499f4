"""What a regular expression allows, by the library regex alone: no automaton, no table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import pytest


@cache
def _pattern(expression: str) -> object:
    regex = pytest.importorskip("regex")
    return regex.compile(expression.encode())


def matches(expression: str, text: bytes, *, partial: bool = False) -> bool:
    """Whether a text matches as a whole, or is the beginning of one that does; bytes that are UTF-8."""
    return _pattern(expression).fullmatch(text, partial=partial) is not None  # type: ignore[attr-defined]


def allowed(expression: str, texts: Sequence[bytes | None], text: bytes, ends: Collection[int]) -> set[int]:
    """The tokens that may follow a text, as long as every beginning of a match can be written to its end."""
    if matches(expression, text):
        may_end = set(ends)
    else:
        may_end = set()
    others = {token for token, piece in enumerate(texts) if piece and token not in ends}
    return may_end | {t for t in others if matches(expression, text + (texts[t] or b""), partial=True)}
