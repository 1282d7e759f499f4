"""Test that the scanner takes a text exactly if Python's lenient json does, and stops at the first wrong character."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.engine.reading.json_scanner import JsonScanner, escaped

pytestmark = pytest.mark.once

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
CHARACTERS = '{}[]",:\\ \n\t\x0buntrefals0123456789.-+eE\u00e9\x00'


def scanned(text: str, cuts: list[int] | None = None) -> tuple[int, bool, bool]:
    """Return the position where a scanner stops in a text, whether the value has ended and whether it has failed."""
    scanner, at = JsonScanner(), 0
    for end in [*sorted(min(cut, len(text)) for cut in cuts or ()), len(text)]:
        at = scanner.push(text[:end], at)
    return at, scanner.has_ended, scanner.has_failed


def is_json(text: str) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse, strict=False)
    except ValueError:
        return False
    return True


@st.composite
def nearly_json(draw: Any) -> str:
    """Draw a JSON array or object in which some characters are replaced, added or removed, and a blank after it.

    It may become a number, which the blank ends.
    """
    value = draw(VALUES.filter(lambda value: isinstance(value, (list, dict))))
    text = json.dumps(value, indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(["", *CHARACTERS])) + text[place + draw(st.integers(0, 1)) :]
    return f"{text} "


@settings(max_examples=400, deadline=None)
@given(text=nearly_json(), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_scanner_of_any_text_ends_exactly_where_json_does(text: str, cuts: list[int]) -> None:
    at, has_ended, has_failed = found = scanned(text)
    assert is_json(text) == (has_ended and not text[at:].strip(" \t\n\r"))
    assert not has_ended or is_json(text[:at])
    assert not (has_ended and has_failed)
    scanner = JsonScanner()
    scanner.push(text, 0)
    written = escaped(text, scanner.raw)
    assert not has_ended or json.loads(written[: at - len(text)]) == json.loads(text[:at], strict=False)
    assert scanned(text, cuts) == found


@settings(max_examples=200, deadline=None)
@given(value=VALUES, data=st.data())
def test_scanner_of_the_beginning_of_json_waits_for_more(value: Any, data: st.DataObject) -> None:
    text = json.dumps([value])
    size = data.draw(st.integers(0, len(text) - 1))
    assert scanned(text[:size]) == (size, False, False)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ('{"a":1,}', 7),
        ("[1,,2]", 3),
        ("[01]", 2),
        ("[1.]", 3),
        ("[-]", 2),
        ("[1e+]", 4),
        ("[.5]", 1),
        ("[+1]", 1),
        ("[nul]", 4),
        ("[NaN]", 1),
        (r'["\x"]', 3),
        (r'["\u12g4"]', 6),
        ("[1}", 2),
        ('{"a" 1}', 5),
        ("{a:1}", 1),
        ("[\u0661]", 1),
        ("[" + "9" * 1001 + "]", 1001),
    ],
)
def test_scanner_fails_at_the_first_wrong_character(text: str, at: int) -> None:
    assert scanned(text) == (at, False, True)
    assert scanned(text, list(range(len(text)))) == (at, False, True)
