"""Tool calls as Hermes and Qwen models write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.text_reader import Reader, Reading


def read(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read an answer with any number of calls, each between its own two markers, and text between them."""
    while (yield from reader.pass_until("<tool_call>")):
        yield from reader.skip_blanks()
        if not (yield from calls.read_object()):
            continue
        yield from reader.skip_blanks()
        if (yield from reader.take("</tool_call>")):
            reader.commit()
        yield from reader.drop_blanks_at_end()
