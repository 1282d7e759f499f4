"""Replaces the answers of a data file by the target's own, which a draft head must learn to guess.

Published recipes all train on the target's answers. They come from our own engine, with drafting; each is sampled with
a seed of its line, so the file does not depend on which answers run side by side.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jspec.core.progress import progress_bar
from jspec.draft.suffix import Suffix
from jspec.engine.callers.api import Engine
from jspec.engine.request.request import Completion
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.text.tokenizer import Tokenizer
from jspec.models.decoder import Model
from jspec.train.config import TrainConfig
from jspec.train.data import LEAST, Document, add_answer, chat, read_lines, refuse
from jspec.train.shapes import DataError, parse

logger = logging.getLogger(__name__)

SLOTS = 64  # answers that run side by side
CHUNK = 4 * SLOTS  # lines that are in memory


def regenerate(
    data: Path, out: Path, target: Model, tokenizer: Tokenizer, eos: Sequence[int], config: TrainConfig
) -> Path:
    """Write a data file whose answers are the target's, or go on with one that was interrupted; return its path.

    A line has the token ids of its documents: those of the prompts, and those that the target generated. A text, or a
    prompt with or without completion, gets an answer. In messages, each of the assistant's answers is replaced, one
    after the other; messages that end with the user's get one more.

    Args:
        data: file of JSON lines (`jspec.train.data`).
        out: file to write; lines that it has already are kept.
        target: the target.
        tokenizer: its tokenizer.
        eos: tokens that end answers.
        config: options of the run: `max_tokens` and `temperature` of an answer, and `length`, which prompt and answer
            may have together; lines whose prompts are longer, or shorter than `LEAST` tokens, are left out.

    Raises:
        DataError: lines are bad, or the chat template refuses them; nothing is generated then.
    """
    lines = _check(data, tokenizer)
    known = [(one["line"], one.get("is_cut", False)) for one in map(json.loads, _whole_lines(out))]
    after, answers, cut = known[-1][0] if known else 0, len(known), sum(is_cut for _, is_cut in known)
    options: dict[str, Any] = dict(slots=SLOTS, max_len=config.length, eos_ids=tuple(eos), prefix_cache=False)
    options["controls"] = False  # no request has penalties, a bias or a grammar
    with (
        Engine(target, drafter=Suffix("chain:4"), tokenizer=tokenizer, **options) as engine,
        out.open("a", encoding="utf-8") as file,
        progress_bar(lines, "regenerating answers", "lines") as bar,
    ):
        bar.update(len(known))
        rest = ((number, value) for number, value in read_lines(data) if number > after)
        while chunk := list(islice(rest, CHUNK)):
            answered = _answer(chunk, engine, tokenizer, config)
            answers += len(answered)
            cut += sum(value["is_cut"] for _, value in answered)
            for number, value in answered:
                file.write(json.dumps({"line": number, **value}) + "\n")
            file.flush()
            bar.update(len(chunk))
    _tell(lines, lines - answers, cut)
    return out


def _tell(lines: int, skipped: int, cut: int) -> None:
    """Warn of lines that were left out, and of conversations that ended early."""
    if skipped:
        logger.warning(
            "%d of %d lines were left out: their prompts have fewer than %d tokens, or leave no room for an answer "
            "within length", skipped, lines, LEAST,
        )  # fmt: skip
    if cut:
        logger.warning(
            "%d of %d conversations end before their last answer: the chat template cannot take an answer back, or the "
            "next prompt leaves no room within length", cut, lines,
        )  # fmt: skip


def _check(data: Path, tokenizer: Tokenizer) -> int:
    """Return the number of lines of a data file; raise DataError if lines have none of the shapes or no prompt."""
    bad, count = [], 0
    for number, value in read_lines(data):
        count += 1
        try:
            line = parse(value, is_answered=False)
            prompt_of(line, asked_at(line)[-1], tokenizer)
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    refuse(data, bad, count)
    return count


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that are whole, and cut a last one that is not."""
    text = path.read_bytes() if path.is_file() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    return whole.decode("utf-8").splitlines()


def _answer(
    chunk: Sequence[tuple[int, Any]], engine: Engine, tokenizer: Tokenizer, config: TrainConfig
) -> list[tuple[int, dict[str, Any]]]:
    """Return the number of each line and its documents with the target's answers; lines without an answer are out."""
    talks = {number: _Talk(value, tokenizer) for number, value in chunk}
    while True:
        asked = {number: talk.prompt for number, talk in talks.items() if talk.prompt is not None}
        fits = {number: ids for number, ids in asked.items() if LEAST <= len(ids) <= config.length - LEAST}
        for number in asked.keys() - fits.keys():
            talks[number].end_early()
        if not fits:
            return [(number, talk.to_json()) for number, talk in talks.items() if talk.made]
        fixed: dict[str, Any] = dict(temperature=config.temperature)
        params = [SamplingParams(max_tokens=config.max_tokens, seed=number, **fixed) for number in fits]
        for number, done in zip(fits, engine.generate(list(fits.values()), params), strict=True):
            if done.text is None or done.error is not None:
                raise DataError(f"line {number}: expected an answer of the target, got an error ({done.error})")
            talks[number].add(done)


class _Talk:
    """One line, whose answers are replaced one after the other.

    Attributes:
        prompt: token ids before the answer that is to be made; None: all are made.
        made: documents with the answers so far.
        is_cut: whether it ended before its last answer.
    """

    def __init__(self, value: Any, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._line = tokenizer, parse(value, is_answered=False)
        self._asked = iter(asked_at(self._line))
        self.is_cut = False
        self.made: list[Document] = []
        self.prompt: list[int] | None = prompt_of(self._line, next(self._asked), tokenizer)

    def add(self, done: Completion) -> None:
        """Enter the target's answer.

        A conversation goes on with the answer's text. It ends where the text lacks special tokens inside the answer,
        in whose place the chat template would put others, or where the chat template refuses the text.
        """
        assert self.prompt is not None and done.text is not None
        add_answer(self.made, [*self.prompt, *done.token_ids], len(self.prompt))
        index, self.prompt = next(self._asked, None), None
        if index is None:
            return
        inside = done.token_ids[:-1] if done.finish_reason == "eos" else done.token_ids
        messages = self._line["messages"]
        answered = max(at for at in asked_at(self._line) if at < index)
        if not messages[answered].get("tool_calls"):  # whose results follow
            messages[answered] = {"role": "assistant", "content": done.text}
        try:
            self.prompt = prompt_of(self._line, index, self._tokenizer)
        except ValueError:
            self.end_early()
        if not self._tokenizer.hidden_ids.isdisjoint(inside):
            self.end_early()

    def end_early(self) -> None:
        """Make no more answers."""
        self.is_cut, self.prompt = True, None

    def to_json(self) -> dict[str, Any]:
        """Return the documents as JSON values."""
        return {"documents": [one.to_json() for one in self.made], "is_cut": self.is_cut}


def asked_at(line: dict[str, Any]) -> list[int]:
    """Return the number of messages before each answer of a line that is to be made; other lines have one answer.

    Raises:
        DataError: there is none.
    """
    if "documents" in line:
        raise DataError("documents: expected texts or messages, got answers of a target; train without regenerate")
    if "messages" not in line:
        return [0]
    messages = line["messages"]
    asked = [at for at, one in enumerate(messages) if one["role"] == "assistant" and one.get("weight", 1)]
    asked += [len(messages)] * (messages[-1]["role"] in ("user", "tool"))
    if not asked:
        raise DataError("messages: expected an answer to make, got none; give one a weight, or end with the user's")
    return asked


def prompt_of(line: dict[str, Any], index: int, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids before an answer of a line."""
    if "messages" in line:
        return chat(tokenizer, line, index)
    return tokenizer.encode(line["prompt"] if "prompt" in line else line["text"])
