"""Reads lines of JSON as documents: token ids, and which of them count in the loss.

A line has one of three shapes. All tokens of a ``text`` count. Of ``prompt`` and ``completion``, those of the
completion count. Of ``messages``, which the target's chat template formats, those of the assistant count. Other keys
are ignored. Lines that are too short, or in which no token counts, are left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from jspec.core.progress import progress_bar
from jspec.core.shorten import short
from jspec.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SHAPES = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
SHOWN = 5  # most lines that an error or a warning shows
LEAST = 3  # least tokens of a document: a feature, the token after it, and a token to predict


class Document(NamedTuple):
    """One document, or a part of a long one."""

    tokens: Integer[np.ndarray, "size"]
    counted: Bool[np.ndarray, "size"]  # whether each token is one that the target would generate


class DataError(ValueError):
    """Lines of a data file that cannot be read; the message names the file and the lines."""


def check_file(path: Path) -> None:
    """Raise FileNotFoundError if there is no such file of data."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of JSON lines, got no such file; check --data")


def read_lines(path: Path, update: Callable[[int], Any] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line that is not empty, from 1, and its JSON value, or the error that it raised.

    Args:
        path: file of JSON lines.
        update: function that is told the bytes of each line when it is read; None: none.
    """
    check_file(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if update is not None:
                update(len(line))
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield number, DataError(f"no JSON ({short(str(error), 80)})")


def read_documents(path: Path, tokenizer: Tokenizer, vocab: int) -> Iterator[tuple[int, Document]]:
    """Yield the number of each line, from 1, and its document.

    Lines of fewer than `LEAST` tokens, and lines in which no token counts, are left out; a warning names them.

    Args:
        path: file of JSON lines.
        tokenizer: the target's tokenizer.
        vocab: size of the target's vocabulary.

    Raises:
        DataError: lines are not of the three shapes, or have tokens outside of the vocabulary, or all are left out; it
            is raised at the end of the file, and names the first bad lines.
        FileNotFoundError: there is no such file.
    """
    check_file(path)
    bad: list[str] = []
    left_out: list[int] = []
    count = 0
    with progress_bar(path.stat().st_size, f"reading {path.name}", "bytes") as bar:
        for number, value in read_lines(path, bar.update):
            count += 1
            try:
                document = _document(value, tokenizer, vocab)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
                continue
            if len(document.tokens) < LEAST or not document.counted.any():
                left_out.append(number)
            else:
                yield number, document
    refuse(path, bad, count)
    _tell_left_out(path, left_out, count)


def _tell_left_out(path: Path, left_out: Sequence[int], count: int) -> None:
    """Warn of lines that were left out; raise DataError if no others are in the file."""
    if not left_out:
        return
    more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
    lines = f"{', '.join(map(str, left_out[:SHOWN]))}{more}"
    if len(left_out) == count:
        raise DataError(
            f"{path}: expected lines of {LEAST} tokens or more, of which some count, got none (lines {lines}); give "
            "longer texts or answers"
        )
    logger.warning(
        "%s: %d of %d lines are left out, because they have fewer than %d tokens or none that counts: lines %s",
        path, len(left_out), count, LEAST, lines,
    )  # fmt: skip


def refuse(path: Path, bad: Sequence[str], count: int) -> None:
    """Raise DataError if a file has no lines or bad ones.

    Args:
        path: the file.
        bad: number and fault of each bad line.
        count: number of lines.
    """
    if bad:
        more = f"; {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise DataError(
            f"{path}: expected lines {SHAPES}, got {len(bad)} bad of {count}: {'; '.join(bad[:SHOWN])}{more}; "
            "correct or remove them"
        )
    if not count:
        raise DataError(f"{path}: expected lines {SHAPES}, got an empty file")


def parse(value: Any, *, is_answered: bool = True) -> dict[str, Any]:
    """Return the keys of a line's JSON value that make up its shape.

    Args:
        value: the value, or the error that reading it raised.
        is_answered: whether the line must have an answer; if not, ``prompt`` may stand alone, and ``messages`` need
            none of the assistant.

    Raises:
        DataError: it has none of the shapes.
    """
    match value:
        case DataError():
            raise value
        case {"messages": list(messages)}:
            _check_messages(messages, "assistant" if is_answered else "user")
            return {"messages": messages}
        case {"prompt": str(prompt), "completion": str(completion)}:
            return {"prompt": prompt, "completion": completion}
        case {"text": str(text)}:
            return {"text": text}
        case {"prompt": str(prompt)} if not is_answered:
            return {"prompt": prompt}
        case _:
            keys = ", ".join(map(short, value)) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"expected one of the shapes, got {short(keys, 80) or 'no keys'}")


def _check_messages(messages: list[Any], role: str) -> None:
    """Raise DataError if messages are no objects with a role, or none is of a role."""
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
        raise DataError('messages: expected objects with "role" and "content"')
    if not any(message["role"] == role for message in messages):
        raise DataError(f"messages: expected one of the role {role}, got none")


def _document(value: Any, tokenizer: Tokenizer, vocab: int) -> Document:
    """Make a document of a line's JSON value; raise ValueError if it has none of the three shapes."""
    match parse(value):
        case {"messages": messages}:
            tokens, counted = _conversation(messages, tokenizer)
        case {"prompt": prompt, "completion": completion}:
            before = tokenizer.encode(prompt)
            after = tokenizer.encode(completion, add_special_tokens=False)
            tokens, counted = [*before, *after], [False] * len(before) + [True] * len(after)
        case {"text": text}:
            tokens = tokenizer.encode(text)
            counted = [True] * len(tokens)
    ids = np.asarray(tokens, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        raise DataError(f"token id {ids.max()}: expected ids below {vocab}, the target's vocabulary; check --tokenizer")
    return Document(ids.astype(np.uint32), np.asarray(counted, bool))


def _conversation(messages: list[Any], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Format a conversation up to its last answer, and mark the assistant's tokens."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    tokens = tokenizer.chat(messages[: answers[-1] + 1], add_generation_prompt=False)
    counted = [False] * len(tokens)
    for index in answers:
        before = tokenizer.chat(messages[:index])
        whole = tokenizer.chat(messages[: index + 1], add_generation_prompt=False)
        if tokens[: len(whole)] != whole or whole[: len(before)] != before:
            raise DataError(
                f"messages: expected a chat template that only appends, but message {index + 1} changes what is "
                "before it; give the conversation as prompt and completion"
            )
        counted[len(before) : len(whole)] = [True] * (len(whole) - len(before))
    return tokens, counted
