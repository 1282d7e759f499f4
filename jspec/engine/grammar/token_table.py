"""Holds a grammar as a table of transitions between states, with one column for each class of tokens.

This runs on the host, without jax. The library outlines_core compiles a regular expression to an automaton over bytes,
which `jspec.engine.grammar.regex_dfa` converts to an automaton over tokens. Tokens with equal transitions from every
state form a class. States from which allowed tokens reach no final state are removed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from jspec.engine.grammar.regex_dfa import NOWHERE, NoText, TooLarge

DIGITS = {"d": "[0-9]", "D": "[^0-9]"}
Run = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over tokens; the start state is 0.

    Attributes:
        source: the request's field and its value, for error messages.
        class_of: token class of each token, [vocab] int16.
        next: next state by state and token class, [states, classes] int16; `NOWHERE`: the tokens are not allowed. Stop
            ids are allowed in final states and do not change the state.
    """

    source: str
    class_of: np.ndarray = field(repr=False)
    next: np.ndarray = field(repr=False)

    def follow(self, tokens: Iterable[int], state: int = 0) -> int:
        """Return the state after tokens that follow the given state; `NOWHERE` if they violate the grammar."""
        for token in tokens:
            if state != NOWHERE:
                state = int(self.next[state, self.class_of[token]])
        return state


def compile_grammar(source: str, regex: str, run: Run, *args: Any, **options: Any) -> Grammar:
    r"""Compile a regular expression to a table; the expression must match the whole text.

    `\d` and `\D` mean ASCII digits and all other characters.

    Args:
        source: the request's field and its value, for error messages.
        regex: the expression.
        run: function that runs the task "table", a `jspec.engine.grammar.builder.Builder`.
        args: further arguments of `jspec.engine.grammar.regex_dfa.table_of`: stop ids, banned tokens, cells.
        options: further arguments of ``run``.

    Raises:
        TooLarge: the table is too large, or compiling takes too much time or memory.
        ValueError: the regular expression is invalid, or the allowed tokens can write none of its texts.
        ImportError: outlines_core is missing.
    """
    try:
        return Grammar(source, *run("table", with_ascii_digits(regex), *args, **options))
    except (TooLarge, NoText) as error:
        raise type(error)(f"{source}: {error}") from None
    except ValueError as error:
        raise ValueError(
            f"{source}: expected a regular expression without look-around, anchors and back-references (the whole "
            f"text is matched anyway): {_reason(regex) or error!s:.200}"
        ) from None


def _reason(regex: str) -> str | None:
    """Return what Python's own parser finds wrong in an expression, with the place; None: nothing."""
    try:
        re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


def with_ascii_digits(regex: str) -> str:
    r"""Return a regular expression with `\d` and `\D` replaced by sets of ASCII digits and of all other characters.

    In outlines_core, `\d` means the digits of all scripts.
    """
    return re.sub(r"\\(.)", lambda escape: DIGITS.get(escape[1], escape[0]), regex, flags=re.DOTALL)


Content = TypeVar("Content")


class TablePool(Generic[Content]):
    """Records what each of several tables on the device holds, such as which grammar.

    Requests with equal contents share a table. If all tables are taken, a new content replaces the least recently used
    one among those that no running request has. Running requests have fewer than there are tables: of grammars there
    are as many tables as slots, and for adapters the scheduler sees to it.
    """

    def __init__(self, tables: int) -> None:
        self._tables = tables
        self._held: OrderedDict[Content, int] = OrderedDict()  # least recently used first

    def place(self, content: Content, in_use: Collection[Content]) -> tuple[int, bool]:
        """Choose a table; return its index, and whether the content must be loaded into it.

        Args:
            in_use: contents that running requests have.
        """
        is_new = content not in self._held
        if is_new:
            table = len(self._held)
            if table == self._tables:
                table = self._held.pop(next(held for held in self._held if held not in in_use))
            self._held[content] = table
        self._held.move_to_end(content)
        return self._held[content], is_new

    def clear(self) -> None:
        """Mark all tables as empty."""
        self._held.clear()
