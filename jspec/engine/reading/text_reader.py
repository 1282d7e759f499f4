"""Reads the text of an answer while it arrives in pieces, and lists what was found in it.

A format is a generator over a `Reader`: it yields where it needs more text, and goes on when more has come. What it
decides depends on the text alone, never on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jspec.engine.reading.json_scanner import BLANKS, JsonScanner, escaped

PIECE = 2**10  # most characters that are read at once, because each step of a format copies and searches them all
T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where more text is needed, and returns a T


@dataclass(frozen=True)
class CallDelta:
    """The next piece of a tool call.

    Attributes:
        index: number of the call in the answer, from 0.
        id, name: the call's id and the tool's name, in the call's first piece only; None in later ones.
        arguments: the next piece of the arguments, which are JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class AnswerPart:
    """One step of an answer, in order; one of the three attributes is set."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass
class AnswerSpan:
    """A part of an answer, by numbers of characters; ``end`` is None while the part has not ended."""

    start: int
    end: int | None = None


class OutputParser(Protocol):
    """Splits the text of one answer into content, reasoning and tool calls.

    Attributes:
        reasoning, has_broken_call: those of `Reader`.
    """

    @property
    def reasoning(self) -> Sequence[AnswerSpan]: ...

    @property
    def has_broken_call(self) -> bool: ...

    def push(self, text: str) -> list[AnswerPart]:
        """Add text of any length; return what it has decided."""
        ...

    def finish(self) -> list[AnswerPart]:
        """End the text; return what was held back."""
        ...


class Reader:
    """The text of an answer that is not passed on yet.

    Attributes:
        text: the text that is held back.
        at: position in ``text`` up to which the format has read; what is before it may still become content.
        ended: whether no more text comes.
        reasoning: where the answer has reasoning, the markers included.
        has_broken_call: whether a call broke off in its arguments.
        parts: what was found and not yet handed to the caller.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self.parts: list[AnswerPart] = []
        self.reasoning: list[AnswerSpan] = []
        self.has_broken_call = False
        self.num_dropped = 0  # characters
        self._tried = 0  # no marker that begins before this position counts

    def pass_on(self, size: int, *, is_reasoning: bool = False) -> None:
        """Pass on the first ``size`` characters of the text as content or reasoning."""
        piece = self.text[:size]
        self.drop(size)
        if piece:
            self.parts.append(AnswerPart(reasoning=piece) if is_reasoning else AnswerPart(content=piece))

    def drop(self, size: int) -> None:
        """Remove the first ``size`` characters of the text."""
        self.text, self.at, self._tried = self.text[size:], 0, max(self._tried - size, 0)
        self.num_dropped += size

    def commit(self) -> None:
        """Remove what was read, because it can no longer become content."""
        self.drop(self.at)

    def begin_reasoning(self) -> None:
        """Note that reasoning begins with what is held back."""
        self.reasoning.append(AnswerSpan(self.num_dropped))

    def end_reasoning(self) -> Reading[None]:
        """Note that reasoning ends with what was read; remove that and the blanks after it."""
        self.commit()
        self.reasoning[-1].end = self.num_dropped
        yield from self.skip_blanks()
        self.commit()

    def pass_until(self, *markers: str, is_reasoning: bool = False) -> Reading[bool]:
        """Pass text on up to a marker and the blanks before it, which stay held back; then ``at`` is the marker's end.

        If the format finds after it that it does not want the marker, it calls this again, and the marker is text.

        Args:
            markers: the first of them that comes counts; none is the beginning of another.

        Returns:
            False if the text ends without a marker. All of it is passed on then.
        """
        blanks = 0  # characters at the beginning of what is held back that are known to be blank
        while True:
            start, marker = self.find(*markers, start=self._tried)
            if not marker and self.ended:
                self.pass_on(start, is_reasoning=is_reasoning)
                return False
            size = len(self.text[blanks:start].rstrip(BLANKS))
            end = blanks + size if size else 0
            self._tried = max(self._tried, start)
            self.pass_on(end, is_reasoning=is_reasoning)
            blanks = start - end
            if marker:
                self.at, self._tried = blanks + len(marker), blanks + 1
                return True
            yield

    def find(self, *markers: str, start: int = 0) -> tuple[int, str]:
        """Return where the first marker begins, at ``start`` or later, and the marker.

        If there is none yet, return where the earliest one may begin (the end, if the text has ended), and "".
        """
        found = [(at, marker) for marker in markers if (at := self.text.find(marker, start)) >= 0]
        size = len(self.text) if self.ended else min(_size_without(self.text, marker) for marker in markers)
        return min(found, default=(size, ""))

    def pass_all(self) -> Reading[None]:
        """Pass all text on as content, as it arrives."""
        while not self.ended:
            self.pass_on(len(self.text))
            yield
        self.pass_on(len(self.text))

    def skip_blanks(self) -> Reading[None]:
        """Read blanks up to the next other character or the text's end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in BLANKS:
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return
            yield

    def take(self, literal: str) -> Reading[bool]:
        """Read a literal text and return True; if the text goes on otherwise, read nothing and return False."""
        while not self.text.startswith(literal, self.at):
            if self.ended or not literal.startswith(self.text[self.at :][: len(literal)]):
                return False
            yield
        self.at += len(literal)
        return True

    def take_one(self, literals: Sequence[str]) -> Reading[bool]:
        """Read the first of several literal texts with which the text goes on; return whether there is one."""
        for literal in literals:
            if (yield from self.take(literal)):
                return True
        return False

    def take_run(self, letters: re.Pattern[str]) -> Reading[str]:
        """Read the characters that a pattern of any number of them allows, up to the first other one; return them."""
        start = self.at
        while True:
            match = letters.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def take_until(self, *markers: str) -> Reading[str | None]:
        """Read text up to a marker, the first of some that comes, and the marker; return the text; None: none comes."""
        start = self.at
        while True:
            size, marker = self.find(*markers, start=start)
            if marker:
                text, self.at = self.text[self.at : size], size + len(marker)
                return text
            if self.ended:
                return None
            start = max(size, start)
            yield

    def json_value(self) -> Reading[str | None]:
        """Read a JSON value that other text must follow; return its text, or None if this is no JSON value.

        Control characters in its strings are escaped.
        """
        scanner, start, raw = JsonScanner(), self.at, list[int]()
        while True:
            self.at = scanner.push(self.text, self.at)
            raw += [at - start for at in scanner.raw]
            if scanner.has_ended:
                return escaped(self.text[start : self.at], raw)
            if scanner.has_failed or self.ended:
                return None
            yield

    def drop_blanks_at_end(self) -> Reading[None]:
        """Remove the text that is held back if it is blank and nothing follows."""
        self.at = 0
        yield from self.skip_blanks()
        if self.at == len(self.text):
            self.commit()


class TextParser:
    """Runs a format on a text that arrives in pieces: an `OutputParser`.

    Args:
        read: the format; it passes on all text before it returns.
    """

    def __init__(self, read: Callable[[Reader], Reading[None]]) -> None:
        self._reader = Reader()
        self._steps = read(self._reader)

    @property
    def reasoning(self) -> Sequence[AnswerSpan]:
        return self._reader.reasoning

    @property
    def has_broken_call(self) -> bool:
        return self._reader.has_broken_call

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for start in range(0, len(text), PIECE):
            self._reader.text += text[start : start + PIECE]
            parts += self._run()
        return parts

    def finish(self) -> list[AnswerPart]:
        self._reader.ended = True
        parts = self._run()
        assert not self._reader.text, "a format must pass on all text"
        return parts

    def _run(self) -> list[AnswerPart]:
        next(self._steps, None)
        parts, self._reader.parts = self._reader.parts, []
        return parts


def _size_without(text: str, marker: str) -> int:
    """Return the size of a text without the longest beginning of a marker with which it ends."""
    starts = range(max(len(text) - len(marker) + 1, 0), len(text))
    return next((start for start in starts if marker.startswith(text[start:])), len(text))
