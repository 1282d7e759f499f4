"""Replaces the answers of a data file by the target's own, which a draft head must learn to guess.

Published recipes all train on the target's answers. They come from our own engine, with drafting; each is sampled with
a seed of its line, so the file does not depend on which answers run side by side.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jspec.core.progress import progress_bar
from jspec.draft.suffix import Suffix
from jspec.engine.callers.api import Engine
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.text.tokenizer import Tokenizer
from jspec.models.decoder import Model
from jspec.train.config import TrainConfig
from jspec.train.data import LEAST, DataError, parse, read_lines, refuse

logger = logging.getLogger(__name__)

SLOTS = 64  # answers that run side by side
CHUNK = 4 * SLOTS  # lines that are in memory


def regenerate(
    data: Path, out: Path, target: Model, tokenizer: Tokenizer, eos: Sequence[int], config: TrainConfig
) -> Path:
    """Write a data file whose answers are the target's, or go on with one that was interrupted; return its path.

    A line of ``text``, or of ``prompt`` with or without ``completion``, becomes ``prompt`` and ``completion``; the text
    is the prompt. In ``messages``, each of the assistant's answers is replaced, one after the other; messages that end
    with the user's get one more.

    Args:
        data: file of JSON lines (`jspec.train.data`).
        out: file to write; lines that it has already are kept.
        target: the target.
        tokenizer: its tokenizer.
        eos: tokens that end answers.
        config: options of the run: `max_tokens` and `temperature` of an answer, and `length`, which prompt and answer
            may have together; lines whose prompts are longer, or shorter than `LEAST` tokens, are left out.

    Raises:
        DataError: lines are bad; nothing is generated then.
    """
    lines = _check(data)
    numbers = [json.loads(line)["line"] for line in _whole_lines(out)]
    after, answers = numbers[-1] if numbers else 0, len(numbers)
    options: dict[str, Any] = dict(slots=SLOTS, max_len=config.length, eos_ids=tuple(eos), prefix_cache=False)
    options["controls"] = False  # no request has penalties, a bias or a grammar
    with (
        Engine(target, drafter=Suffix("chain:4"), tokenizer=tokenizer, **options) as engine,
        out.open("a", encoding="utf-8") as file,
        progress_bar(lines, "regenerating answers", "lines") as bar,
    ):
        bar.update(len(numbers))
        rest = ((number, value) for number, value in read_lines(data) if number > after)
        while chunk := list(islice(rest, CHUNK)):
            answered = _answer(chunk, engine, tokenizer, config)
            answers += len(answered)
            for number, value in answered:
                file.write(json.dumps({"line": number, **value}) + "\n")
            file.flush()
            bar.update(len(chunk))
    if skipped := lines - answers:
        logger.warning(
            "%d of %d lines were left out: their prompts have fewer than %d tokens, or leave no room for an answer "
            "within length", skipped, lines, LEAST,
        )  # fmt: skip
    return out


def _check(data: Path) -> int:
    """Return the number of lines of a data file; raise DataError if lines have none of the shapes."""
    bad, count = [], 0
    for number, value in read_lines(data):
        count += 1
        try:
            parse(value, is_answered=False)
        except DataError as error:
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
    """Return the number of each line and the line with the target's answers; lines whose prompts do not fit are out."""
    talks = {number: _Talk(value, tokenizer) for number, value in chunk}
    while True:
        asked = {number: talk.prompt for number, talk in talks.items() if talk.waits}
        fits = {number: ids for number, ids in asked.items() if LEAST <= len(ids) <= config.length - LEAST}
        talks = {number: talk for number, talk in talks.items() if number in fits or not talk.waits}
        if not fits:
            return [(number, talk.line) for number, talk in talks.items()]
        fixed: dict[str, Any] = dict(temperature=config.temperature)
        params = [SamplingParams(max_tokens=config.max_tokens, seed=number, **fixed) for number in fits]
        for number, done in zip(fits, engine.generate(list(fits.values()), params), strict=True):
            if done.text is None or done.error is not None:
                raise DataError(f"line {number}: expected an answer of the target, got an error ({done.error})")
            talks[number].add(done.text)


class _Talk:
    """One line, whose answers are replaced one after the other.

    Attributes:
        waits: whether an answer is to be made.
        prompt: token ids before this answer.
        line: the line with the answers so far.
    """

    def __init__(self, value: Any, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.waits = tokenizer, True
        self._turns: Iterator[Any] = iter(())
        match parse(value, is_answered=False):
            case {"messages": messages}:
                self.line: dict[str, Any] = {"messages": []}
                self._turns = iter(messages)
                self._next_turn()
            case {"prompt": text} | {"text": text}:
                self.line, self.prompt = {"prompt": text}, tokenizer.encode(text)

    def _next_turn(self) -> None:
        """Take over messages up to the next answer of the assistant, or the end; there may be no more to answer."""
        for message in self._turns:
            if message["role"] == "assistant":
                break
            self.line["messages"].append(message)
        else:
            self.waits = bool(self.line["messages"]) and self.line["messages"][-1]["role"] == "user"
        if self.waits:
            self.prompt = self._tokenizer.chat(self.line["messages"])

    def add(self, answer: str) -> None:
        """Enter the target's answer."""
        if "messages" in self.line:
            self.line["messages"].append({"role": "assistant", "content": answer})
            self._next_turn()
        else:
            self.line["completion"], self.waits = answer, False
