"""Test the limits of the parser of Python lists of calls, and when it lets go of other lists."""

from __future__ import annotations

from functools import partial

import pytest

from jspec.server.tool_calls import pythonic
from tests.support.answers import Joined, auto, joined, parsed, split

pytestmark = pytest.mark.once


@pytest.mark.parametrize("text", ["[1, ", "[get_p", "[fx", "[f(1)", "[f(x=y,", "[f(x=1)]."])
def test_pythonic_parser_lets_go_of_a_list_once_it_can_be_no_calls(text: str) -> None:
    parser = auto("pythonic")
    assert joined([part for character in text for part in parser.push(character)]).content == text.rstrip(" \n")


@pytest.mark.parametrize(
    "value",
    [
        *("-" * 50_000 + "1", "f" + "()" * 20_000, "a" + ".a" * 20_000, "a" + "[0]" * 15_000, "not " * 15_000 + "a"),
        *("1" + "+1" * 20_000, "[" * 30_000, "(" * 51 + ")" * 51, "9" * 5000, "0x" + "e+0x" * 9999),
        "'" + "a" * 2**16 + "'",
    ],
    ids=lambda value: value[:6],
)
def test_pythonic_parser_of_a_deep_or_long_value_returns_it_as_content(value: str) -> None:
    text = f"[f(x={value})]"
    assert parsed(partial(auto, "pythonic"), [text]) == Joined(text)
    assert parsed(partial(auto, "pythonic"), split(text, range(0, len(text), 1000))) == Joined(text)


def test_pythonic_parser_of_the_deepest_value_finds_the_call() -> None:
    depth = pythonic.MAX_LEVELS - 2
    value = "[" * depth + "]" * depth
    assert parsed(partial(auto, "pythonic"), [f"[f(x={value})]"]).calls == [("f", f'{{"x": {value}}}')]
    assert parsed(partial(auto, "pythonic"), [f"[f(x=[{value}])]"]).calls == []
