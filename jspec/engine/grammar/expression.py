"""Makes parts of regular expressions in outlines_core's syntax, and estimates the size of their automata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_SIZE = 2**15  # largest size of a part; a table may have about as many states
MAX_POINT = 0x10FFFF
# Two code points that Unicode reserves as noncharacters: `regex_dfa` puts one before a text and one after it.
MARKS = (MAX_POINT - 1, MAX_POINT)


class NoTable(Exception):
    """Error: no table can follow a JSON schema, but a parser may."""


class RegexPart(NamedTuple):
    """A part of a regular expression.

    Attributes:
        text: the expression, which can be joined to other parts without brackets.
        size: estimated number of states of its automaton.
    """

    text: str
    size: int


def literal(text: str) -> RegexPart:
    """Return the expression that matches exactly one text."""
    if any(ord(letter) in MARKS for letter in text):
        raise NoTable
    return _checked("".join(map(_escaped, text)), len(text.encode()))


def _escaped(letter: str) -> str:
    if letter.isalnum() or ord(letter) > 0x7F or letter in ' "<>:,_':
        return letter
    return f"\\x{{{ord(letter):X}}}"


def one_of(ranges: Iterable[tuple[int, int]], others: Iterable[str] = (), *, is_negated: bool = False) -> RegexPart:
    """Return the expression that matches one character of a set.

    Args:
        ranges: first and last code point of each range of the set.
        others: names of Unicode categories that the set includes.
        is_negated: match the characters outside of the set instead, except `MARKS`.
    """
    ranges = [*ranges, MARKS] if is_negated else [*ranges]
    inner = "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges)
    inner += "".join(f"\\p{{{name}}}" for name in others)
    is_ascii = not is_negated and not others and all(last < 0x80 for _, last in ranges)
    return _checked(f"[{'^' if is_negated else ''}{inner}]", 1 if is_ascii else 10)


def sequence(*parts: RegexPart) -> RegexPart:
    """Return the expression that matches a text of each part, one after another."""
    return _checked("".join(part.text for part in parts), sum(part.size for part in parts))


def choice(parts: Sequence[RegexPart]) -> RegexPart:
    """Return the expression that matches the texts of any of the parts."""
    if len(parts) == 1:
        return parts[0]
    return _checked(f"(?:{'|'.join(part.text for part in parts)})", sum(part.size for part in parts))


def repeated(part: RegexPart, least: int, most: int | None) -> RegexPart:
    """Return the expression that matches ``least`` to ``most`` texts of a part in a row; ``most`` None: no limit."""
    if most is not None and most < least:
        raise NoTable
    written = f"{{{least},{'' if most is None else most}}}"
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), written)
    return _checked(f"(?:{part.text}){times}", part.size * max(least, most or 1, 1))


def _checked(text: str, size: int) -> RegexPart:
    size = max(size, len(text) // 16)
    if size > MAX_SIZE:
        raise NoTable
    return RegexPart(text, size)
