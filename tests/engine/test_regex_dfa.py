"""Test automata of regular expressions over bytes against the library regex."""

from __future__ import annotations

import itertools
import time

import pytest

from jspec.engine.grammar.regex_dfa import NOWHERE, build
from jspec.engine.grammar.token_table import with_ascii_digits
from tests.reference import regular
from tests.support.tables import table

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")

BYTES: list[bytes | None] = [*(bytes([byte]) for byte in range(256)), None]


@pytest.mark.parametrize("regex", ["a|é", "(ab){2,3}c*", "(a|b)*a(a|b){2}", "", "a?", "(a|b|(é))*c", "[ab]{2}(é)?"])
def test_automaton_accepts_the_texts_that_the_regex_library_matches(regex: str) -> None:
    step, is_final = build(regex)
    for size in range(6):
        for letters in itertools.product("abcé", repeat=size):
            text, state = "".join(letters).encode(), 0
            for byte in text:
                state = NOWHERE if state == NOWHERE else int(step[state, byte])
            assert (state != NOWHERE and is_final[state]) == regular.matches(regex, text), text


def test_automaton_of_a_repetition_takes_time_in_proportion_to_its_length() -> None:
    """Without the marks, outlines_core takes twice the time for each further repetition, and hours for forty."""
    start = time.process_time()
    step, _ = build('"(?:[^"\\\\\\x{10FFFE}]|\\\\")' + '{0,200}"')
    assert 200 < len(step) < 3000 and time.process_time() - start < 5


@pytest.mark.parametrize("regex", ["(", "a)(b", "a)", "[a", "(?=a)b", r"(a)\1", r"a\b"])
def test_automaton_of_an_invalid_expression_raises(regex: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        build(regex)


@pytest.mark.parametrize("regex", ["[)](a)", r"\)(a)", "[])](a)", "[^])](a)", "[a[)]](a)"])
def test_automaton_of_an_expression_with_a_literal_bracket_is_built(regex: str) -> None:
    assert build(regex)[1].any()


def test_grammar_table_of_digits_allows_only_0_to_9() -> None:
    r"""Negative control: if `\d` is not replaced, the table allows the first byte of other scripts' digits."""
    for regex, count in ((r"\d", 10), (r"[\d]", 10), (r"[\dé]", 11), (r"\\d", 1)):
        own = table(regex, BYTES, 257, stop_ids=(256,))
        assert (own.next[0, own.class_of] >= 0).sum() == count
    assert (build(r"\d")[0][0] != NOWHERE).sum() > 10
    assert with_ascii_digits(r"\\\D\d\\d") == r"\\[^0-9][0-9]\\d"
