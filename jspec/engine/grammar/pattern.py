r"""Translates the regular expressions of JSON schemas (ECMA-262) to the syntax of outlines_core.

A schema's expression may match anywhere in a text, while outlines_core matches the whole text. In ECMA-262, `\d` and
`\w` are ASCII, `.` matches no line end, and `[a&&b]` is a plain set. Look-around, back-references, flags, and `^` or
`$` inside an expression have no exact translation and are refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jspec.engine.grammar.expression import MAX_POINT, NoTable, RegexPart, choice, literal, one_of, repeated, sequence

Ranges = list[tuple[int, int]]
DIGITS: Ranges = [(0x30, 0x39)]
LETTERS: Ranges = [*DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
LINE_ENDS: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
BLANKS: Ranges = [
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
ESCAPED_IN_JSON: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
# Blanks in only one of ECMA-262 and Python's `re`, which many validators use. Neither `\s` nor `\S` matches them, so
# that both languages accept the text.
BLANKS_SOMEWHERE: Ranges = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
SETS = {"d": DIGITS, "w": LETTERS, "s": BLANKS}
WIDE_SETS = {**SETS, "s": [*BLANKS, *BLANKS_SOMEWHERE]}
CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|0(?![0-9])")
CATEGORY = re.compile(r"p\{([LMN][a-z]?)\}")  # letters, marks and numbers; JSON escapes none of them
TIMES = re.compile(r"\{([0-9]{1,6})(,)?([0-9]{1,6})?\}|[*+?]")


class Pattern(NamedTuple):
    """A pattern in outlines_core's syntax.

    Attributes:
        part: expression that matches every whole text in which the pattern is found.
        is_plain: whether none of these texts has a character that JSON escapes (quote, backslash, control character).
    """

    part: RegexPart
    is_plain: bool


class Unsupported(ValueError):
    """Error: a pattern has no exact translation."""


def read(pattern: str) -> Pattern:
    """Translate the pattern of a JSON schema.

    Raises:
        Unsupported: the pattern is invalid, too large, or has no exact translation; the message says why.
    """
    reader = _Reader(pattern)
    try:
        return Pattern(reader.whole(), reader.is_plain)
    except (NoTable, RecursionError):
        raise Unsupported(f"expected fewer repetitions and levels, got {pattern!r:.200}") from None


def _complement(ranges: Ranges) -> Ranges:
    first, gaps = 0, []
    for low, high in sorted(ranges):
        if low > first:
            gaps.append((first, low - 1))
        first = max(first, high + 1)
    return [*gaps, (first, MAX_POINT)] if first <= MAX_POINT else gaps


class _Reader:
    """Reads one pattern from its beginning to its end."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._position = pattern, 0
        self.is_plain = True

    def _sees(self, text: str) -> bool:
        return self._pattern.startswith(text, self._position)

    def _may_take(self, text: str) -> bool:
        is_there = self._sees(text)
        self._position += len(text) * is_there
        return is_there

    def _take(self) -> str:
        if self._position == len(self._pattern):
            raise self._error("more")
        self._position += 1
        return self._pattern[self._position - 1]

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self._pattern, self._position)
        self._position = match.end() if match else self._position
        return match

    def _error(self, expected: str) -> Unsupported:
        return Unsupported(f"expected {expected} at character {self._position}, got {self._pattern!r:.200}")

    def whole(self) -> RegexPart:
        """Read the whole pattern: alternatives, each with its anchors."""
        alternatives = [self._anchored()]
        while self._may_take("|"):
            alternatives.append(self._anchored())
        if self._position < len(self._pattern):
            raise self._error("the end")
        return choice(alternatives)

    def _anchored(self) -> RegexPart:
        anything = repeated(one_of([], is_negated=True), 0, None)
        is_first = self._may_take("^")
        middle = self._sequence()
        is_last = self._may_take("$")
        self.is_plain &= is_first and is_last
        return sequence(*([] if is_first else [anything]), middle, *([] if is_last else [anything]))

    def _choice(self) -> RegexPart:
        alternatives = [self._sequence()]
        while self._may_take("|"):
            alternatives.append(self._sequence())
        return choice(alternatives)

    def _sequence(self) -> RegexPart:
        parts: list[RegexPart] = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)$":
            parts.append(self._repeated())
        return sequence(*parts)

    def _repeated(self) -> RegexPart:
        atom, times = self._atom(), self._match(TIMES)
        if times is None:
            return atom
        least, comma, most = times.groups()
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(times.group())
        if bounds is None:
            bounds = int(least), int(most) if most else None if comma else int(least)
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise self._error("ascending numbers of repetitions")
        self._may_take("?")  # a lazy repetition matches the same texts
        return repeated(atom, *bounds)

    def _atom(self) -> RegexPart:
        letter = self._take()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._set()
        if letter == ".":
            return self._one_of(LINE_ENDS, is_negated=True)
        if letter == "\\":
            ranges, categories = self._escape()
            return self._one_of(ranges, categories)
        if letter in "*+?{}]^":
            self._position -= 1
            raise self._error("a character or its escape")
        return self._one_of([(ord(letter), ord(letter))])

    def _group(self) -> RegexPart:
        if self._may_take("?") and not (self._may_take(":") or self._match(re.compile(r"<[A-Za-z_]\w*>"))):
            raise self._error("a group without look-around and flags")
        inner = self._choice()
        if not self._may_take(")"):
            raise self._error("')'")
        return inner

    def _set(self) -> RegexPart:
        is_negated, ranges, categories = self._may_take("^"), Ranges(), list[str]()
        if self._sees("]"):
            raise self._error("a character in the brackets")
        while not self._may_take("]"):
            first, others = self._set_member(is_negated=is_negated)
            if self._sees("-") and not self._sees("-]"):
                self._take()
                last, _ = self._set_member(is_negated=is_negated)
                if [len(first), len(last)] != [1, 1] or first[0][0] != first[0][1] or last[0][0] < first[0][1]:
                    raise self._error("two ascending characters around '-'")
                first = [(first[0][0], last[0][1])]
            ranges += first
            categories += others
        return self._one_of(ranges, categories, is_negated=is_negated)

    def _set_member(self, *, is_negated: bool) -> tuple[Ranges, list[str]]:
        letter = self._take()
        if letter == "\\":
            return ([(0x8, 0x8)], []) if self._may_take("b") else self._escape(is_negated=is_negated)
        return [(ord(letter), ord(letter))], []

    def _escape(self, *, is_negated: bool = False) -> tuple[Ranges, list[str]]:
        """Read an escape after its backslash; return its ranges of code points and its names of categories.

        Args:
            is_negated: whether the escape stands in a negated set; blanks of only one language then belong to it.
        """
        category, code = self._match(CATEGORY), self._match(CODE)
        if category is not None:
            return [], [category[1]]
        if code is not None:
            point = int(next(filter(None, code.groups()), "0"), 16)
            if point > MAX_POINT or 0xD800 <= point < 0xE000:
                raise self._error("the number of a character")
            return [(point, point)], []
        letter = self._take()
        if letter.lower() in SETS:
            sets = WIDE_SETS if letter.isupper() != is_negated else SETS
            return _complement(sets[letter.lower()]) if letter.isupper() else sets[letter], []
        if letter in CONTROLS:
            return [(CONTROLS[letter], CONTROLS[letter])], []
        if letter.isalnum() or letter == "_":
            raise self._error("an escape that a schema's patterns may hold")
        return [(ord(letter), ord(letter))], []

    def _one_of(self, ranges: Ranges, categories: list[str] | None = None, *, is_negated: bool = False) -> RegexPart:
        """Return the expression that matches one character of a set; clear `is_plain` if JSON escapes any of them."""
        matched = _complement(ranges) if is_negated else ranges
        self.is_plain &= not any(
            low <= last and first <= high for low, high in matched for first, last in ESCAPED_IN_JSON
        )
        if any(0xD800 <= end < 0xE000 for pair in ranges for end in pair):
            raise self._error("ends of ranges that are characters")
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not is_negated and not categories:
            return literal(chr(ranges[0][0]))
        return one_of(ranges, categories or [], is_negated=is_negated)
