"""Grammars as tables of transitions between states, one column per class of tokens. Host only, no jax.

The library outlines_core compiles a regular expression to an automaton over bytes; this module turns it into an
automaton over the tokenizer's tokens. Tokens with the same transition from every state form a class. States from
which no final state can be reached by allowed tokens are removed.
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
MAX_WORK = 2**27  # most cells of an intermediate table, before useless states and classes are removed


@dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over tokens; the start state is 0.

    Attributes:
        source: the request's field and its value, for error messages.
        class_of: token class of each token, [vocab] int16.
        next: next state by state and token class, [states, classes] int16; `NOWHERE`: the token is not allowed. Stop
            ids are allowed in final states and do not change the state.
    """

    source: str
    class_of: np.ndarray = field(repr=False)
    next: np.ndarray = field(repr=False)

    def follow(self, tokens: Iterable[int], state: int = 0) -> int:
        """The state after the given tokens, from a given state; `NOWHERE` if the tokens violate the grammar."""
        for token in tokens:
            if state != NOWHERE:
                state = int(self.next[state, self.class_of[token]])
        return state


class TokenTexts:
    """The tokens' bytes, grouped by byte position, in the order in which `compile_grammar` reads them.

    Args:
        texts: bytes of each token; None for a token without text.
        vocab_size: size of the model's vocabulary; ids that the tokenizer lacks get no text.

    Attributes:
        size: size of the vocabulary.
        has_text: whether each token has a text, [vocab].
        positions: for each byte position, the ids of the tokens that are long enough, and their bytes at the position.
    """

    def __init__(self, texts: Sequence[bytes | None], vocab_size: int) -> None:
        self.size = vocab_size
        found = [(token, text) for token, text in enumerate(texts[:vocab_size]) if text]
        self.has_text = np.zeros(vocab_size, bool)
        self.has_text[[token for token, _ in found]] = True
        self.positions: list[tuple[np.ndarray, np.ndarray]] = []
        while found:
            position = len(self.positions)
            ids, values = np.array([token for token, _ in found]), np.array([text[position] for _, text in found])
            self.positions.append((ids, values))
            found = [(token, text) for token, text in found if len(text) > position + 1]


def regex_of_schema(schema: str | Mapping[str, Any], build: Build = regex_dfa.build) -> str:
    """Make the regular expression that matches the JSON texts of a schema.

    The texts contain the schema's properties in the schema's order, and no other properties. If the schema does not
    specify a type, items or properties, outlines_core chooses these, with bounded depth.

    Args:
        build: builds the automata of the schema's patterns.

    Raises:
        ValueError: the schema is invalid, a part of it would be ignored (`jspec.engine.grammar.json_schema`), or its
            depth has no bound.
        ImportError: outlines_core is missing.
    """
    regex_from_schema = regex_dfa.library().json_schema.build_regex_from_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        json_schema.check(json.loads(text), lambda pattern: _is_plain(pattern, build))
    except json.JSONDecodeError as error:
        raise ValueError(f"json_schema: expected JSON, got {text}: {error}") from error
    try:
        regex, deeper = (regex_from_schema(text, max_recursion_depth=depth) for depth in (3, 4))
    except (ValueError, TypeError) as error:
        raise ValueError(f"json_schema: expected a schema that outlines_core knows, got {text}: {error}") from error
    if regex != deeper:
        raise ValueError(
            f"json_schema: expected a schema of bounded depth, got {text}, which is recursive; write out as many "
            "levels as are wanted"
        )
    return regex


def _is_plain(regex: str, build: Build) -> bool:
    """Whether every matching text can stand in a JSON string unescaped."""
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
    """Compile a regular expression, which must match the whole text, to a table.

    Args:
        source: the request's field and its value, for error messages.
        texts: the tokens' bytes.
        stop_ids: tokens that end a request; allowed only in final states.
        banned: tokens that are never allowed.
        build: builds automata over bytes.

    Raises:
        ValueError: the regular expression is invalid, or none of its texts can be written in the allowed tokens.
        ImportError: outlines_core is missing.
    """
    step, is_final = _automaton(source, regex, build)
    is_allowed = texts.has_text.copy()
    is_allowed[[*stop_ids, *banned]] = False
    table, class_of = _over_tokens(source, step, texts, is_allowed)
    stop_column = np.where(is_final, np.arange(len(table)), NOWHERE)
    class_of[[token for token in stop_ids if token not in banned]] = table.shape[1]
    table = _trim(source, np.column_stack([table, stop_column]), is_final)
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
    source: str, step: np.ndarray, texts: TokenTexts, is_allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Convert an automaton over bytes to an automaton over tokens.

    A column contains, for each start state, the state after a byte string. All tokens advance by one byte at a time.
    Tokens whose bytes so far lead to equal columns share one column, so each pair of a column and a class of bytes is
    computed once.

    Returns:
        The next state, [states, classes], and the class of each token, [vocab].
    """
    byte_columns, byte_class = np.unique(step, axis=1, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    nowhere, start = np.full(len(step), NOWHERE), np.arange(len(step))
    columns, known = [nowhere, start], {nowhere.tobytes(): 0, start.tobytes(): 1}
    column_of = is_allowed.astype(np.int64)
    for ids, values in texts.positions:
        pairs, pair_of = np.unique(column_of[ids] * 256 + byte_class[values], return_inverse=True)
        found = []
        for column, byte in zip(*(part.tolist() for part in np.divmod(pairs, 256)), strict=True):
            following = np.where(columns[column] == NOWHERE, NOWHERE, byte_columns[columns[column], byte])
            number = known.setdefault(following.tobytes(), len(columns))
            if number == len(columns):
                columns.append(following)
            found.append(number)
        if len(columns) * len(step) > MAX_WORK:
            raise ValueError(f"{source}: {_too_large(len(step), len(columns), MAX_WORK)}")
        column_of[ids] = np.array(found)[pair_of]
    used, class_of = np.unique(column_of, return_inverse=True)
    return np.stack([columns[column] for column in used], axis=1), class_of.reshape(-1)


def _trim(source: str, table: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Remove states that cannot be reached from the start or cannot reach a final state; renumber the rest."""
    size = len(table)
    rows, _ = np.nonzero(table != NOWHERE)
    sources, targets = np.divmod(np.unique(rows * size + table[table != NOWHERE]), size)
    can_end = _closure(is_final, targets, sources)
    if not can_end[0]:
        raise ValueError(f"{source}: none of its texts can be written in the allowed tokens; allow more of them")
    is_usable = can_end[sources] & can_end[targets]
    is_kept = can_end & _closure(np.arange(size) == 0, sources[is_usable], targets[is_usable])
    numbers = np.where(is_kept, np.cumsum(is_kept) - 1, NOWHERE)
    kept = table[is_kept]
    return np.where(kept == NOWHERE, NOWHERE, numbers[kept])


def _closure(states: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Whether each state is one of the given states or reachable from them along the edges ``sources -> targets``."""
    order = np.argsort(sources, kind="stable")
    targets, first = targets[order], np.searchsorted(sources[order], np.arange(len(states) + 1)).tolist()
    found, newest = states.copy(), np.flatnonzero(states).tolist()
    while newest:
        state = newest.pop()
        following = targets[first[state] : first[state + 1]]
        fresh = following[~found[following]]
        found[fresh] = True
        newest += fresh.tolist()
    return found


def check_size(grammar: Grammar, cells: int) -> None:
    """Refuse a table that is larger than the tables on the device.

    Raises:
        ValueError: the table is too large; the message names its size and the limit.
    """
    states, classes = grammar.next.shape
    if states * classes > cells or max(states, classes) > MAX_STATES:
        raise ValueError(f"{grammar.source}: {_too_large(states, classes, cells)}")


def _too_large(states: int, classes: int, cells: int) -> str:
    return (
        f"its table takes {states} states x {classes} classes of tokens = {states * classes}, allowed are {cells} "
        f"(grammar_cells of the engine) and {MAX_STATES} states; lower its repetitions and lengths, or raise the cells"
    )


class TablePool:
    """Tracks which grammar each of the device's tables holds.

    Requests with the same grammar share a table. If all tables are taken, the least recently used grammar that no
    running request has is replaced; there are as many tables as slots, so such a grammar always exists.
    """

    def __init__(self, tables: int) -> None:
        self._tables = tables
        self._held: OrderedDict[Grammar, int] = OrderedDict()  # table of each grammar, least recently used first

    def place(self, grammar: Grammar, in_use: Collection[Grammar]) -> tuple[int, bool]:
        """Choose the table of a grammar; return its index, and whether the grammar must be loaded into the table.

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

    def clear(self) -> None:
        """Mark all tables as empty."""
        self._held.clear()
