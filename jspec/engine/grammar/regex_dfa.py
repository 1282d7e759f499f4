"""Compiles regular expressions to automata, and tries out grammars, in a separate process with limits.

The time and the memory to compile a grammar may be exponential in its length, and are not known beforehand. Therefore
`jspec.engine.grammar.builder` starts a separate process, which runs this file as a script. The process serves one task
after another, and ends if a task takes too much time or memory. This file must import nothing of jspec, and no jax.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

NOWHERE = -1
BEGIN, END = "\U0010fffe", "\U0010ffff"  # code points that Unicode reserves as noncharacters
MISSING = "expected the library outlines_core, which is not installed; pip install -e '.[grammar]' in jspec's folder"
MAX_STATES = 2**15 - 1  # states and classes are int16 on the device
MAX_WORK = 2**27  # most cells of a table before useless states and classes are removed
MAX_KEPT = 2**28  # bytes; a process that holds more serves no other task
ALL_TOKENIZATIONS = '\n%llguidance {"no_forcing": true}\n'  # else each text has only one tokenisation

Automaton = tuple[Int[np.ndarray, "states 256"], Bool[np.ndarray, "states"]]
Table = tuple[Int[np.ndarray, "vocab"], Int[np.ndarray, "states classes"]]


class TooLarge(ValueError):
    """Error: a grammar exceeds the limits of time, memory or cells."""


class NoText(ValueError):
    """Error: the allowed tokens can write no text of a grammar."""


def library() -> Any:
    """Import outlines_core and return the module.

    Raises:
        ImportError: outlines_core is missing; the message names the remedy.
    """
    try:
        import outlines_core
    except ImportError as error:
        raise ImportError(MISSING) from error
    return outlines_core


def build(regex: str) -> Automaton:
    """Compile a regular expression to an automaton over bytes, whose start state is 0.

    outlines_core gets the expression between two marks. Without the first mark its time may be exponential, because it
    also prepares for matches that begin inside a text. Without the second mark it omits transitions from final to
    non-final states. With the marks, a state of the expression is final if it has a transition by the second mark.

    Returns:
        The next state by state and byte, [states, 256] (`NOWHERE`: none), and whether each state is final, [states].

    Raises:
        ValueError: the expression is invalid; the message is that of outlines_core.
        ImportError: outlines_core is missing.
    """
    outlines, stop_id = library(), 256
    vocabulary = outlines.Vocabulary(stop_id, {bytes([byte]): [byte] for byte in range(256)})
    _check_closed(regex)
    index = outlines.Index(f"{BEGIN}(?:{regex}){END}", vocabulary)
    names, step = _transitions(index, stop_id)
    is_after_end, reached = np.isin(names, [*index.get_final_states()]), np.arange(len(names))
    for byte in END.encode():
        reached = np.where(reached == NOWHERE, NOWHERE, step[reached, byte])
    start = 0
    for byte in BEGIN.encode():
        start = int(step[start, byte]) if start != NOWHERE else NOWHERE
    if start == NOWHERE:
        raise ValueError("no text matches")
    step[(step != NOWHERE) & is_after_end[step]] = NOWHERE
    is_final = (reached != NOWHERE) & is_after_end[reached]
    order = np.arange(len(step))
    order[[0, start]] = start, 0  # swap two states
    moved = order[step[order]]
    return np.where(step[order] == NOWHERE, NOWHERE, moved), is_final[order]


def _check_closed(regex: str) -> None:
    r"""Refuse an unbalanced ")", which the group around the expression would hide.

    Raises:
        ValueError: the expression closes a group that it did not open.
    """
    depth, brackets, position = 0, 0, 0
    while position < len(regex):
        letter = regex[position]
        if letter == "\\":
            position += 1
        elif letter == "[":
            brackets += 1
            position += regex.startswith("^", position + 1)
            position += regex.startswith("]", position + 1)  # a "]" at the beginning of a set is a character
        elif letter == "]":
            brackets = max(brackets - 1, 0)
        elif letter in "()" and not brackets:
            depth += 1 if letter == "(" else -1
            if depth < 0:
                raise ValueError(f"Failed to build DFA: unopened group at character {position}")
        position += 1


def _transitions(index: Any, stop_id: int) -> tuple[Int[np.ndarray, "states"], Int[np.ndarray, "states 256"]]:
    """Return the names of an automaton's states, and its next states as indices into the names.

    The start state is first.
    """
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    names = np.array([*dict.fromkeys([index.get_initial_state(), *transitions, *index.get_final_states()])])
    in_order = np.argsort(names)
    step = np.full((len(names), 256), NOWHERE, np.int32)
    for number, name in enumerate(names.tolist()):
        row = transitions.get(name, {})
        row.pop(stop_id, None)
        targets = np.fromiter(row.values(), np.int64, len(row))
        step[number, np.fromiter(row, np.int64, len(row))] = in_order[np.searchsorted(names, targets, sorter=in_order)]
    return names, step


class TokenBytes:
    """The bytes of all tokens, grouped by their position in the token, as `table_of` reads them.

    Args:
        texts: bytes of each token; None for a token without text.
        vocab_size: size of the model's vocabulary; ids that the tokenizer lacks get no text.

    Attributes:
        size: size of the vocabulary.
        has_text: whether each token has a text, [vocab].
        positions: for each byte position, the ids of the tokens that have a byte there, and these bytes.
    """

    def __init__(self, texts: Sequence[bytes | None], vocab_size: int) -> None:
        self.size = vocab_size
        tokens = [(token, text) for token, text in enumerate(texts[:vocab_size]) if text]
        self.has_text = np.zeros(vocab_size, bool)
        self.has_text[[token for token, _ in tokens]] = True
        self.positions: list[tuple[np.ndarray, np.ndarray]] = []
        while tokens:
            position = len(self.positions)
            ids, values = np.array([token for token, _ in tokens]), np.array([text[position] for _, text in tokens])
            self.positions.append((ids, values))
            tokens = [(token, text) for token, text in tokens if len(text) > position + 1]


def table_of(
    regex: str, texts: TokenBytes, stop_ids: Collection[int], banned: Collection[int], cells: int | None
) -> Table:
    """Compile a regular expression to a table over tokens; the expression must match the whole text.

    Args:
        regex: the expression.
        texts: bytes of all tokens.
        stop_ids: tokens that end a request; allowed exactly in final states.
        banned: tokens that are never allowed.
        cells: largest product of states and token classes; None: no limit.

    Returns:
        The class of each token, [vocab] int16, and the next state by state and class, [states, classes] int16.

    Raises:
        ValueError: the expression is invalid.
        TooLarge: the table has too many cells.
        NoText: the allowed tokens can write no text of the expression.
        ImportError: outlines_core is missing.
    """
    step, is_final = build(regex)
    is_allowed = texts.has_text.copy()
    is_allowed[[*stop_ids, *banned]] = False
    table, class_of = _over_tokens(step, texts, is_allowed)
    stop_column = np.where(is_final, np.arange(len(table)), NOWHERE)
    class_of[sorted({*stop_ids} - {*banned})] = table.shape[1]
    table = _trim(np.column_stack([table, stop_column]), is_final)
    table, merged = np.unique(table, axis=1, return_inverse=True)
    if cells is not None:
        check_size(table.shape[0], table.shape[1], cells)
    class_of = merged.reshape(-1)[class_of]
    return class_of.astype(np.int16), table.astype(np.int16)


def _over_tokens(step: np.ndarray, texts: TokenBytes, is_allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert an automaton over bytes to an automaton over tokens.

    A column contains the state after a byte string, for each state before it. All tokens advance by one byte at a time.
    Tokens whose bytes so far give equal columns share one column, so each pair of a column and a class of bytes is
    computed once.

    Returns:
        The next state by state and class, [states, classes], and the class of each token, [vocab].
    """
    byte_columns, byte_class = np.unique(step, axis=1, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    nowhere, start = np.full(len(step), NOWHERE, np.int32), np.arange(len(step), dtype=np.int32)
    columns, known = [nowhere, start], {nowhere.tobytes(): 0, start.tobytes(): 1}
    column_of = is_allowed.astype(np.int64)
    for ids, values in texts.positions:
        pairs, pair_of = np.unique(column_of[ids] * 256 + byte_class[values], return_inverse=True)
        numbers = []
        for column, byte in zip(*(part.tolist() for part in np.divmod(pairs, 256)), strict=True):
            following = np.where(columns[column] == NOWHERE, NOWHERE, byte_columns[columns[column], byte])
            number = known.setdefault(following.tobytes(), len(columns))
            if number == len(columns):
                columns.append(following)
                if len(columns) * len(step) > MAX_WORK:
                    raise TooLarge(_too_large(len(step), len(columns), MAX_WORK))
            numbers.append(number)
        column_of[ids] = np.array(numbers)[pair_of]
    used, class_of = np.unique(column_of, return_inverse=True)
    return np.stack([columns[column] for column in used], axis=1), class_of.reshape(-1)


def _trim(table: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Remove states that the start cannot reach or that reach no final state, and renumber the others."""
    size = len(table)
    rows, _ = np.nonzero(table != NOWHERE)
    sources, targets = np.divmod(np.unique(rows * size + table[table != NOWHERE]), size)
    can_end = _closure(is_final, targets, sources)
    if not can_end[0]:
        raise NoText("none of its texts can be written in the allowed tokens; allow more of them")
    is_usable = can_end[sources] & can_end[targets]
    is_kept = can_end & _closure(np.arange(size) == 0, sources[is_usable], targets[is_usable])
    numbers = np.where(is_kept, np.cumsum(is_kept) - 1, NOWHERE)
    kept = table[is_kept]
    return np.where(kept == NOWHERE, NOWHERE, numbers[kept])


def _closure(states: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return whether each state can be reached from the given ones along the edges ``sources -> targets``."""
    order = np.argsort(sources, kind="stable")
    targets, first = targets[order], np.searchsorted(sources[order], np.arange(len(states) + 1)).tolist()
    reached, newest = states.copy(), np.flatnonzero(states).tolist()
    while newest:
        state = newest.pop()
        following = targets[first[state] : first[state + 1]]
        fresh = following[~reached[following]]
        reached[fresh] = True
        newest += fresh.tolist()
    return reached


def check_size(states: int, classes: int, cells: int) -> None:
    """Refuse a table that does not fit into a table on the device.

    Raises:
        TooLarge: the table is too large; the message names its size and the limit.
    """
    if states * classes > cells or max(states, classes) > MAX_STATES:
        raise TooLarge(_too_large(states, classes, cells))


def _too_large(states: int, classes: int, cells: int) -> str:
    return (
        f"its table takes {states} states x {classes} classes of tokens = {states * classes}, allowed are {cells} "
        f"(grammar_cells of the engine) and {MAX_STATES} states; lower its repetitions and lengths, or raise the cells"
    )


class _Bytes:
    """A tokenizer with one token for each byte, for llguidance.

    Args:
        size: number of token ids before the one that ends a text; ids above 255 have no text.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, size: int) -> None:
        self.eos_token_id = size
        self.special_token_ids = list(range(256, size + 1))
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(f"none{i}".encode() for i in range(256, size + 1))]

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def try_lark(lark: str, vocab_size: int = 256) -> None:
    """Compile a context-free grammar with llguidance, compute its first mask over bytes and take one byte.

    Args:
        vocab_size: number of the token ids that the grammar may name; at least 256 are allowed.

    Raises:
        ValueError: llguidance refuses the grammar.
        NoText: the grammar has no text.
        ImportError: llguidance is missing.
    """
    import llguidance

    end = max(vocab_size, 256)
    tokens: Any = _Bytes(end)
    tokenizer = llguidance.LLTokenizer(tokens, n_vocab=end + 1, eos_token=[end], slices=[])
    matcher = llguidance.LLMatcher
    parser = matcher(tokenizer, matcher.grammar_from_lark(lark + ALL_TOKENIZATIONS), log_level=0)
    if parser.is_error():
        raise ValueError(reason(parser))
    mask = np.frombuffer(parser.compute_bitmask(), np.uint8)
    if parser.is_error():
        raise NoText(reason(parser))
    first = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    if len(first) and first[0] < 256 and not (parser.consume_token(int(first[0])) and parser.rollback(1)):
        raise ValueError(f"its tokens cannot be followed and taken back ({reason(parser)}); take fewer optional parts")


def reason(parser: Any) -> str:
    """Return the first line of an llguidance parser's error message, at most 200 characters."""
    return parser.get_error().strip().split("\n")[0][:200]


ERRORS: tuple[type[Exception], ...] = (TooLarge, NoText, ImportError, ValueError)
MEMORY = "memory"  # kind of answer to a task that exceeds the memory limit


def serve(limit: int) -> None:
    """Read pickled tasks from stdin and write pickled answers to stdout, until stdin ends.

    Before the tasks, stdin has a pickled pair (bytes of each token, size of the vocabulary), or None. A task is (name,
    arguments, limit of CPU time in seconds). An answer is (None, result) or (type name of the error, message).

    Args:
        limit: memory limit in bytes.
    """
    limit_memory(limit)
    vocabulary: list[Any] = [pickle.load(sys.stdin.buffer)]
    used = 0
    while used <= MAX_KEPT:  # only the end of the process frees the memory of a large task
        try:
            name, args, seconds = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        limit_cpu(seconds)
        kind, answer = _answer(name, args, vocabulary)
        limit_cpu(0)
        pickle.dump((kind, answer), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
        used = MAX_KEPT + 1 if kind == MEMORY else held_memory()


def _answer(name: str, args: tuple[Any, ...], vocabulary: list[Any]) -> tuple[str | None, Any]:
    try:
        if name == "table":
            vocabulary[:] = [item if isinstance(item, TokenBytes) else TokenBytes(*item) for item in vocabulary]
            return None, table_of(args[0], vocabulary[0], *args[1:])
        tasks: dict[str, Callable[..., Any]] = {"build": build, "lark": try_lark}
        return None, tasks[name](*args)
    except MemoryError:
        return MEMORY, ""
    except ERRORS as error:
        return next(kind.__name__ for kind in ERRORS if isinstance(error, kind)), str(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a panic inside a library; it has no base class to catch
            raise
        return "ValueError", f"the library failed: {error!s:.200}"


def limit_memory(limit: int) -> None:
    """Limit the memory of this process to a number of bytes, and forbid core files, where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_cpu(seconds: float) -> None:
    """Let the system end this process after some seconds of CPU time, where it can; 0: no limit."""
    if hasattr(signal, "ITIMER_PROF"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def held_memory() -> int:
    """Return the bytes of memory that this process holds; 0 if the system does not report them.

    `ru_maxrss` would include the parent process's memory.
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
