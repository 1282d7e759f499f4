"""Reads lines of JSON as documents: token ids, and which of them count in the loss.

All tokens of a ``text`` count. Of ``prompt`` and ``completion``, those of the completion count. Of ``messages`` with
``tools``, which the target's chat template formats as for `Engine.chat` and the server, those of the assistant count,
except of messages with the weight 0. ``conversations`` are messages in ShareGPT's form. Other keys are ignored. Lines
that are too short, or in which no token counts, are left out.
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
from jspec.engine.input.chat_input import format_conversations
from jspec.engine.reading import reasoning
from jspec.engine.reading.answers import template_of
from jspec.engine.text.tokenizer import Tokenizer
from jspec.train.shapes import SHAPES, DataError, parse

logger = logging.getLogger(__name__)

ANSWER_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # keys of a message that may have texts
SHOWN = 5  # most lines that an error or a warning shows
LEAST = 3  # least tokens of a document: a feature, the token after it, and a token to predict


class Document(NamedTuple):
    """One document, or a part of a long one."""

    tokens: Integer[np.ndarray, "size"]
    counted: Bool[np.ndarray, "size"]  # whether each token is one that the target would generate

    @classmethod
    def of(cls, tokens: Sequence[int], start: int) -> Document:
        """Make a document in which the tokens from ``start`` on count."""
        ids = np.asarray(tokens, np.int64)
        return cls(ids.astype(np.uint32), np.arange(len(ids)) >= start)

    def to_json(self) -> dict[str, Any]:
        """Return the document as JSON values, for `from_json`."""
        edges = np.flatnonzero(np.diff(np.pad(self.counted.astype(int), 1)))
        return {"token_ids": self.tokens.tolist(), "answers": edges.reshape(-1, 2).tolist()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Document:
        document = cls.of(value["token_ids"], len(value["token_ids"]))
        for start, end in value["answers"]:
            document.counted[start:end] = True
        return document


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
    """Yield the number of each line, from 1, and each of its documents.

    A conversation is one document if each answer is rendered as a continuation of what is before it. Otherwise, as
    where the template removes the reasoning of earlier answers, an answer begins another document.

    Lines of fewer than `LEAST` tokens, and lines in which no token counts, are left out; a warning names them.

    Args:
        path: file of JSON lines.
        tokenizer: the target's tokenizer.
        vocab: size of the target's vocabulary.

    Raises:
        DataError: lines are not of the shapes, or have tokens outside of the vocabulary, or all are left out; it
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
                documents = _documents(value, tokenizer, vocab)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
                continue
            useful = [one for one in documents if len(one.tokens) >= LEAST and one.counted.any()]
            if not useful:
                left_out.append(number)
            yield from ((number, document) for document in useful)
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


def chat(tokenizer: Tokenizer, line: Mapping[str, Any], size: int, **options: Any) -> list[int]:
    """Return the token ids of the first messages of a line, as `Engine.chat` and the server render them.

    Args:
        line: what `jspec.train.shapes.parse` returns of a line with messages.
        size: number of messages.
        options: further options of the chat template.
    """
    messages = [{key: value for key, value in one.items() if key != "weight"} for one in line["messages"][:size]]
    try:
        (ids,) = format_conversations(tokenizer, [messages], {"tools": line["tools"], **options})
    except TypeError as error:
        raise DataError(str(error)) from None
    return ids


def _documents(value: Any, tokenizer: Tokenizer, vocab: int) -> list[Document]:
    """Make the documents of a line's JSON value; raise ValueError if it has none of the shapes."""
    match line := parse(value):
        case {"documents": documents}:
            made = [Document.from_json(document) for document in documents]
        case {"messages": _}:
            made = _conversation(line, tokenizer)
        case {"prompt": prompt, "completion": completion}:
            before = tokenizer.encode(prompt)
            made = [Document.of([*before, *tokenizer.encode(completion, add_special_tokens=False)], len(before))]
        case {"text": text}:
            made = [Document.of(tokenizer.encode(text), 0)]
    for document in made:
        if len(document.tokens) and document.tokens.max() >= vocab:
            raise DataError(
                f"token id {document.tokens.max()}: expected ids below {vocab}, the target's vocabulary; check "
                "--tokenizer"
            )
    return made


def _conversation(line: dict[str, Any], tokenizer: Tokenizer) -> list[Document]:
    """Return the documents of a conversation, in which the tokens of the assistant's answers count."""
    made: list[Document] = []
    for index, message in enumerate(line["messages"]):
        if message["role"] == "assistant" and message.get("weight", 1):
            whole = chat(tokenizer, line, index + 1, add_generation_prompt=False)
            start = _start(line, index, whole, tokenizer)
            if lost := _lost(message, whole, tokenizer):
                before = chat(tokenizer, line, index)
                whole, start = _generated(message, before, whole[start:], tokenizer), len(before)
                if not whole or _lost(message, whole, tokenizer):
                    raise DataError(
                        f"messages: expected an answer that the chat template writes whole, but it leaves out {lost} "
                        f"of message {index + 1}; write its reasoning into the content, between the model's markers, "
                        "or give the conversation as prompt and completion"
                    )
            add_answer(made, whole, start)
    return made


def _generated(message: Mapping[str, Any], before: list[int], rest: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt and of an answer as the target generates it, with reasoning in its content.

    Some templates remove the reasoning of every answer, although the target writes it.

    Args:
        before: the prompt, as the target gets it.
        rest: the answer as the template writes it, which tells how it ends.

    Returns:
        The tokens; [] if the content has no reasoning between markers, or the template leaves out other text too.
    """
    format_ = reasoning.FORMATS.get(reasoning.format_name(template_of(tokenizer)) or "")
    content, plain = (message.get("content") or "").strip(), tokenizer.with_special_tokens()
    closing = next((end for end in format_.closings if end in content), None) if format_ is not None else None
    if format_ is None or closing is None:
        return []
    answer, written = content.rpartition(closing)[2].strip(), plain.decode(rest).lstrip()
    if not answer or not written.startswith(answer):
        return []
    if reasoning.begun_in(format_, plain.decode(before)) is not None:  # the prompt has the opening marker
        for opening in format_.openings:
            content = content.removeprefix(opening).lstrip()
    return [*before, *tokenizer.encode(content + written[len(answer) :], add_special_tokens=False)]


def _start(line: dict[str, Any], index: int, whole: list[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens before an answer, which may begin otherwise than the prompt of a new answer ends."""
    before = chat(tokenizer, line, index)
    bare = chat(tokenizer, line, index, add_generation_prompt=False)
    if whole[: len(bare)] != bare and whole[: len(before)] != before:
        raise DataError(
            f"messages: expected a chat template that only appends, but message {index + 1} changes what is "
            "before it; give the conversation as prompt and completion"
        )
    differing = (at for at, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other)
    return next(differing, min(len(before), len(whole)))


def _lost(message: Mapping[str, Any], whole: list[int], tokenizer: Tokenizer) -> str:
    """Return the key of a text of an answer that is not in the tokens of the conversation up to it; "": all are."""
    plain = tokenizer.with_special_tokens()
    shown = "".join(plain.decode(whole).split())
    for key in ANSWER_TEXTS:
        if isinstance(text := message.get(key), str):
            text = plain.decode(plain.encode(text, add_special_tokens=False))
            if "".join(text.split()) not in shown:
                return key
    return ""


def add_answer(documents: list[Document], whole: Sequence[int], start: int) -> None:
    """Add an answer to the last of some documents, if what is before the answer goes on from it, or as a new one.

    Some templates remove the reasoning of earlier answers, so that a document cannot go on.

    Args:
        whole: tokens of the conversation, up to the end of the answer.
        start: number of the tokens before the answer.
    """
    last = documents[-1] if documents else Document.of([], 0)
    goes_on = start >= len(last.tokens) and list(whole[: len(last.tokens)]) == last.tokens.tolist()
    document = Document.of(whole, start)
    if goes_on and documents:
        document.counted[: len(last.counted)] = documents.pop().counted
    documents.append(document)
