"""Groups the parts of an answer into blocks: reasoning, text and tool calls, as the newer APIs have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import uuid4

from jspec.engine.reading.text_reader import AnswerPart

Kind = Literal["reasoning", "content", "call"]
REASONING: Kind = "reasoning"
CONTENT: Kind = "content"
CALL: Kind = "call"
Step = Literal["begin", "add", "end"]


@dataclass
class AnswerBlock:
    """One block of an answer.

    Attributes:
        index: number of the block in the answer, from 0.
        kind: what it is.
        id: an id of its own.
        text: its text so far; of a call the arguments, which are JSON.
        call_id, name: id and tool of a call.
    """

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)


class AnswerBlocks:
    """The blocks of an answer while it arrives.

    Attributes:
        all: the blocks so far.
    """

    def __init__(self) -> None:
        self.all: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    def add(self, part: AnswerPart) -> Iterator[tuple[Step, AnswerBlock, str]]:
        """Add a part; yield what it does to which block, and the text that it adds."""
        kind: Kind = CALL if part.call else REASONING if part.reasoning else CONTENT
        text = part.call.arguments if part.call else part.reasoning or part.content
        is_new_call = part.call is not None and part.call.id is not None
        if self._open is None or self._open.kind != kind or is_new_call:
            yield from self.end()
            self._open = AnswerBlock(len(self.all), kind)
            if part.call:
                self._open.call_id, self._open.name = part.call.id or "", part.call.name or ""
            self.all.append(self._open)
            yield "begin", replace(self._open), ""  # a copy, because the block has text before this is written
        if text:
            self._open.text += text
            yield "add", self._open, text

    def end(self) -> Iterator[tuple[Step, AnswerBlock, str]]:
        """End the open block, if there is one."""
        block, self._open = self._open, None
        if block is not None:
            yield "end", block, ""
