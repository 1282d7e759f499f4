"""Grammars of a tokenizer whose tokens are the bytes, for tests of JSON schemas."""

from __future__ import annotations

from functools import cache
from typing import Any

from jspec import SamplingParams
from jspec.engine.grammar.cfg_matcher import LarkGrammar, Matcher
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.input.grammar_input import GrammarInput
from tests.support import lettered
from tests.support.random_schemas import BYTES, END


@cache
def maker() -> GrammarInput:
    return GrammarInput(lettered.Lettered(BYTES), 257, 2**18)


def compiled(schema: Any) -> Grammar | LarkGrammar:
    made = maker().of(SamplingParams(json_schema=schema), (END,), ())
    assert made is not None
    return made


def accepts(grammar: Grammar | LarkGrammar, text: str) -> bool:
    """Return whether a grammar over bytes allows a whole text."""
    ids = [*text.encode(), END]
    if isinstance(grammar, Grammar):
        return grammar.follow(ids) >= 0
    try:
        Matcher(grammar).follow(ids)
    except ValueError:
        return False
    return True
