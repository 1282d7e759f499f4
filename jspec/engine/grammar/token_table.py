"""Grammars as tables: which tokens may follow, and where they lead. Host only, no jax.

A regular expression becomes an automaton over bytes (by the library outlines_core), and that one over the tokenizer's
tokens. Tokens that lead from every state to the same one form a class: so a table of states and classes holds it all.
What leads nowhere is taken out: from every state left there is a way to a final one, in tokens that may come.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jspec.engine.grammar import json_schema, regex_dfa
from jspec.engine.grammar.regex_dfa import NOWHERE, Automaton, Build, TooLarge

MAX_STATES = 2**15 - 1  # states and classes are int16 on the device
MAX_WORK = 2**27  # numbers of a table on its way, before states and classes that lead nowhere are out


@dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over tokens; it starts in state 0.

    Attributes:
        source: the field it was asked for by, and what that held.
        class_of: [vocab] int16, the class of each token.
        next: [states, classes] int16, the state behind a token; `NOWHERE`: it may not come. The tokens that end a
            request may come in final states, which they leave as they are.
    """

    source: str
    class_of: np.ndarray = field(repr=False)
    next: np.ndarray = field(repr=False)

    def follow(self, tokens: Iterable[int], state: int = 0) -> int:
        """The state behind some tokens, `NOWHERE` if they violate the grammar."""
        for token in tokens:
            if state != NOWHERE:
                state = int(self.next[state, self.class_of[token]])
        return state


class TokenTexts:
    """The tokens' bytes, place by place, as `compile_grammar` goes through them.

    Args:
        texts: of each token, None where it has none.
        vocab_size: of the model; ids beyond the tokenizer's have no text.
    """

    def __init__(self, texts: Sequence[bytes | None], vocab_size: int) -> None:
        self.size = vocab_size
        found = [(token, text) for token, text in enumerate(texts[:vocab_size]) if text]
        self.has_text = np.zeros(vocab_size, bool)
        self.has_text[[token for token, _ in found]] = True
        self.places: list[tuple[np.ndarray, np.ndarray]] = []  # tokens that are so long, and their byte there
        while found:
            place = len(self.places)
            ids, letters = np.array([token for token, _ in found]), np.array([text[place] for _, text in found])
            self.places.append((ids, letters))
            found = [(token, text) for token, text in found if len(text) > place + 1]


def regex_of_schema(schema: str | Mapping[str, Any], build: Build = regex_dfa.build) -> str:
    """The regular expression of a JSON schema's texts.

    Properties come in the schema's order, and no others. What a schema leaves open (a type, items, properties) is what
    outlines_core makes of it, of a bounded depth too.

    Args:
        build: makes automata, of the schema's patterns.

    Raises:
        ValueError: no schema, one of which a part would be dropped (`jspec.engine.grammar.json_schema`), or one
        without a bound to its
            depth.
        ImportError: outlines_core is missing.
    """
    of_schema = regex_dfa.library().json_schema.build_regex_from_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        json_schema.check(json.loads(text), lambda pattern: _is_plain(pattern, build))
    except json.JSONDecodeError as error:
        raise ValueError(f"json_schema: expected JSON, got {text}: {error}") from error
    try:
        regex, deeper = (of_schema(text, max_recursion_depth=depth) for depth in (3, 4))
    except (ValueError, TypeError) as error:
        raise ValueError(f"json_schema: expected a schema that outlines_core knows, got {text}: {error}") from error
    if regex != deeper:
        raise ValueError(
            f"json_schema: expected a schema of bounded depth, got {text}, which holds itself; write out as many "
            "levels as are wanted"
        )
    return regex


def _is_plain(regex: str, build: Build) -> bool:
    """Whether its texts can stand in a JSON string as they are."""
    step, _ = _automaton(f"json_schema: pattern {regex!r}", regex, build)
    return bool(np.all(step[:, [*range(0x20), *b'"\\']] == NOWHERE))


def compile_grammar(
    source: str,
    regex: str,
    texts: TokenTexts,
    stop_ids: Collection[int],
    banned: Collection[int] = (),
    build: Build = regex_dfa.build,
) -> Grammar:
    """The table of the texts that match a regular expression as a whole.

    Args:
        source: for messages.
        stop_ids: tokens that end a request; as text they do not come.
        banned: tokens that may not come.
        build: makes automata.

    Raises:
        ValueError: no regular expression, or none of its texts can be written in the tokens that may come.
        ImportError: outlines_core is missing.
    """
    step, is_final = _automaton(source, regex, build)
    may_come = texts.has_text.copy()
    may_come[[*stop_ids, *banned]] = False
    table, class_of = _over_tokens(source, step, texts, may_come)
    ends = np.where(is_final, np.arange(len(table)), NOWHERE)
    class_of[[token for token in stop_ids if token not in banned]] = table.shape[1]
    table = _useful(source, np.column_stack([table, ends]), is_final)
    table, merged = np.unique(table, axis=1, return_inverse=True)
    class_of = merged.reshape(-1)[class_of]
    return Grammar(source, class_of.astype(np.int16), table.astype(np.int16))


def _automaton(source: str, regex: str, build: Build) -> Automaton:
    try:
        return build(regex)
    except TooLarge as error:
        raise ValueError(f"{source}: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"{source}: expected a regular expression without look-around, anchors and back-references (the whole "
            f"text is matched anyway): {error}"
        ) from error


def _over_tokens(
    source: str, step: np.ndarray, texts: TokenTexts, may_come: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The state behind each class of tokens, [states, classes], and the class of each token.

    All tokens are followed byte by byte from all states at once; those that are alike so far are followed as one.
    """
    letters, letter_of = np.unique(step, axis=1, return_inverse=True)
    letter_of = letter_of.reshape(-1)
    nowhere, start = np.full(len(step), NOWHERE), np.arange(len(step))
    columns, known = [nowhere, start], {nowhere.tobytes(): 0, start.tobytes(): 1}
    column_of = may_come.astype(np.int64)
    for ids, place in texts.places:
        pairs, where = np.unique(column_of[ids] * 256 + letter_of[place], return_inverse=True)
        found = []
        for column, letter in zip(*(part.tolist() for part in np.divmod(pairs, 256)), strict=True):
            behind = np.where(columns[column] == NOWHERE, NOWHERE, letters[columns[column], letter])
            number = known.setdefault(behind.tobytes(), len(columns))
            if number == len(columns):
                columns.append(behind)
            found.append(number)
        if len(columns) * len(step) > MAX_WORK:
            raise ValueError(f"{source}: {_too_large(len(step), len(columns), MAX_WORK)}")
        column_of[ids] = np.array(found)[where]
    used, class_of = np.unique(column_of, return_inverse=True)
    return np.stack([columns[column] for column in used], axis=1), class_of.reshape(-1)


def _useful(source: str, table: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """The table of the states that can be come to and from which a final one can be."""
    size = len(table)
    rows, _ = np.nonzero(table != NOWHERE)
    before, behind = np.divmod(np.unique(rows * size + table[table != NOWHERE]), size)
    lives = _closure(is_final, behind, before)
    if not lives[0]:
        raise ValueError(f"{source}: none of its texts can be written in the tokens that may come; allow more of them")
    is_kept = lives & _closure(
        np.arange(size) == 0, *(side[lives[before] & lives[behind]] for side in (before, behind))
    )
    numbers = np.where(is_kept, np.cumsum(is_kept) - 1, NOWHERE)
    kept = table[is_kept]
    return np.where(kept == NOWHERE, NOWHERE, numbers[kept])


def _closure(states: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """States, and all that edges lead to from them."""
    order = np.argsort(sources, kind="stable")
    targets, first = targets[order], np.searchsorted(sources[order], np.arange(len(states) + 1)).tolist()
    found, newest = states.copy(), np.flatnonzero(states).tolist()
    while newest:
        state = newest.pop()
        behind = targets[first[state] : first[state + 1]]
        fresh = behind[~found[behind]]
        found[fresh] = True
        newest += fresh.tolist()
    return found


def check_size(grammar: Grammar, cells: int) -> None:
    """Refuse a table that the device has no room for.

    Raises:
        ValueError: naming what it takes and what there is.
    """
    states, classes = grammar.next.shape
    if states * classes > cells or max(states, classes) > MAX_STATES:
        raise ValueError(f"{grammar.source}: {_too_large(states, classes, cells)}")


def _too_large(states: int, classes: int, cells: int) -> str:
    return (
        f"its table takes {states} states x {classes} classes of tokens = {states * classes}, allowed are {cells} "
        f"(grammar_cells of the engine) and {MAX_STATES} states; lower its repetitions and lengths, or raise that"
    )


class TablePool:
    """Which grammar each of the device's tables holds.

    Requests share a table; one that no running request uses is given away, the longest unused first. There are as many
    as slots, so there is always one.
    """

    def __init__(self, tables: int) -> None:
        self._tables = tables
        self._held: OrderedDict[Grammar, int] = OrderedDict()  # the longest unused first

    def place(self, grammar: Grammar, in_use: Collection[Grammar]) -> tuple[int, bool]:
        """The table for a grammar, and whether it is still to be loaded there.

        Args:
            in_use: grammars of running requests.
        """
        is_new = grammar not in self._held
        if is_new:
            table = len(self._held)
            if table == self._tables:
                table = self._held.pop(next(held for held in self._held if held not in in_use))
            self._held[grammar] = table
        self._held.move_to_end(grammar)
        return self._held[grammar], is_new

    def forget(self) -> None:
        """The tables are empty."""
        self._held.clear()
