"""Tables of regular expressions, compiled in this process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jspec.engine.grammar import regex_dfa
from jspec.engine.grammar.regex_dfa import TokenBytes
from jspec.engine.grammar.token_table import Grammar, compile_grammar


def table(
    regex: str,
    texts: Sequence[bytes | None],
    vocab_size: int,
    *,
    stop_ids: Collection[int],
    banned: Collection[int] = (),
    cells: int | None = None,
) -> Grammar:
    """Compile a regular expression over the tokens' bytes."""
    own = TokenBytes(texts, vocab_size)

    def run(name: str, regex: str, *args: Any) -> Any:
        return regex_dfa.table_of(regex, own, *args)

    return compile_grammar("regex", regex, run, stop_ids, banned, cells)
