"""Parts of regular expressions, with the size of the automaton that each needs. The syntax is outlines_core's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_SIZE = 2**15  # about as many states as a table may have
MAX_POINT = 0x10FFFF
# Two code points that are not and will never be characters: `regex_dfa` puts one before a text and one after it.
MARKS = (MAX_POINT - 1, MAX_POINT)


class NoTable(Exception):
    """Error: a schema that no table follows; a parser may follow it."""


class Part(NamedTuple):
    """A part of a regular expression.

    Attributes:
        text: the expression, which may be repeated or joined to others as it is.
        size: estimated number of states, with repetitions written out.
    """

    text: str
    size: int


def literal(text: str) -> Part:
    """The expression that matches one text."""
    if any(ord(letter) in MARKS for letter in text):
        raise NoTable
    return _checked("".join(map(_escaped, text)), len(text.encode()))


def _escaped(letter: str) -> str:
    if letter.isalnum() or ord(letter) > 0x7F or letter in ' "<>:,_':
        return letter
    return f"\\x{{{ord(letter):X}}}"


def one_of(ranges: Iterable[tuple[int, int]], others: Iterable[str] = (), *, is_negated: bool = False) -> Part:
    """The expression that matches one character.

    Args:
        ranges: first and last code points.
        others: names of Unicode categories.
        is_negated: whether the character is in none of them; then it is none of `MARKS` either.
    """
    ranges = [*ranges, MARKS] if is_negated else [*ranges]
    inner = "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges)
    inner += "".join(f"\\p{{{name}}}" for name in others)
    is_ascii = not is_negated and not others and all(last < 0x80 for _, last in ranges)
    return _checked(f"[{'^' if is_negated else ''}{inner}]", 1 if is_ascii else 10)


def sequence(*parts: Part) -> Part:
    """The expression that matches texts of the parts, one after another."""
    return _checked("".join(part.text for part in parts), sum(part.size for part in parts))


def choice(parts: Sequence[Part]) -> Part:
    """The expression that matches the texts of any of the parts."""
    if len(parts) == 1:
        return parts[0]
    return _checked(f"(?:{'|'.join(part.text for part in parts)})", sum(part.size for part in parts))


def repeated(part: Part, least: int, most: int | None) -> Part:
    """The expression that matches texts of a part, ``least`` to ``most`` times; None: without an upper limit."""
    if most is not None and most < least:
        raise NoTable
    written = f"{{{least},{'' if most is None else most}}}"
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), written)
    return _checked(f"(?:{part.text}){times}", part.size * max(least, most or 1, 1))


def _checked(text: str, size: int) -> Part:
    size = max(size, len(text) // 16)
    if size > MAX_SIZE:
        raise NoTable
    return Part(text, size)
