"""Reads lines of JSON as documents: token ids, and which of them count in the loss.

A line has one of three shapes. All tokens of a ``text`` count. Of ``prompt`` and ``completion``, those of the
completion count. Of ``messages``, which the target's chat template formats, those of the assistant count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from jspec.core.progress import progress_bar
from jspec.core.shorten import short
from jspec.engine.tokenizer import Tokenizer

SHAPES = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
SHOWN = 5  # most bad lines that an error shows
LEAST = 3  # least tokens of a document: a feature, the token after it, and a token to predict


class Document(NamedTuple):
    """One document, or a part of a long one."""

    tokens: Integer[np.ndarray, "size"]
    counted: Bool[np.ndarray, "size"]  # whether each token is one that the target would generate


class DataError(ValueError):
    """Lines of a data file that cannot be read; the message names the file and the lines."""


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line that is not empty, from 1, and its JSON value, or the error that it raised."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of JSON lines, got no such file; check --data")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield number, DataError(f"no JSON ({short(str(error), 80)})")


def read_documents(path: Path, tokenizer: Tokenizer, vocab: int) -> Iterator[tuple[int, Document]]:
    """Yield the number of each line, from 1, and its document.

    Args:
        path: file of JSON lines.
        tokenizer: the target's tokenizer.
        vocab: size of the target's vocabulary.

    Raises:
        DataError: lines are not of the three shapes, have no tokens, or have tokens outside of the vocabulary; it is
            raised at the end of the file, and names the first bad lines.
        FileNotFoundError: there is no such file.
    """
    bad: list[str] = []
    count = 0
    with progress_bar(path.stat().st_size if path.is_file() else 0, f"reading {path.name}", "lines") as bar:
        for number, value in read_lines(path):
            count += 1
            bar.update()
            try:
                yield number, _document(value, tokenizer, vocab)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    refuse(path, bad, count)


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


def parse(value: Any) -> dict[str, Any]:
    """Return a line's JSON value, which has one of the three shapes.

    Raises:
        DataError: it has none of them.
    """
    match value:
        case DataError():
            raise value
        case {"messages": list(messages)}:
            if not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages):
                raise DataError('messages: expected objects with "role" and "content"')
            if not any(one["role"] == "assistant" for one in messages):
                raise DataError("messages: expected an answer of the role assistant, got none")
        case {"prompt": str(), "completion": str()} | {"text": str()}:
            pass
        case _:
            keys = ", ".join(map(short, value)) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"expected one of the shapes, got {short(keys, 80) or 'no keys'}")
    return value


def _document(value: Any, tokenizer: Tokenizer, vocab: int) -> Document:
    """Make a document of a line's JSON value; raise ValueError if it has none of the three shapes."""
    value = parse(value)
    if "messages" in value:
        tokens, counted = _conversation(value["messages"], tokenizer)
    elif "prompt" in value:
        before = tokenizer.encode(value["prompt"])
        own = tokenizer.encode(value["completion"], add_special_tokens=False)
        tokens, counted = [*before, *own], [False] * len(before) + [True] * len(own)
    else:
        tokens = tokenizer.encode(value["text"])
        counted = [True] * len(tokens)
    if len(tokens) < LEAST or not any(counted):
        raise DataError(f"expected {LEAST} tokens or more, of which some count, got {len(tokens)} and {sum(counted)}")
    ids = np.asarray(tokens, np.int64)
    if ids.min() < 0 or ids.max() >= vocab:
        raise DataError(f"token id {ids.max()}: expected ids below {vocab}, the target's vocabulary; check --tokenizer")
    return Document(ids.astype(np.uint32), np.asarray(counted, bool))


def _conversation(messages: list[Any], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Format a conversation up to its last answer, and mark the assistant's tokens."""
    answers = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
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
