"""Answers that `jspec.server.tool_calls.grammar` has forced to be tool calls, and nothing else."""

from __future__ import annotations

from jspec.server.reading.text_reader import Reader, Reading
from jspec.server.tool_calls.calls import AnswerCalls


def read_named(reader: Reader, calls: AnswerCalls, name: str) -> Reading[None]:
    """Read the arguments of a call of the tool ``name``; text that follows is content."""
    yield from reader.skip_blanks()
    yield from calls.stream_arguments(name)
    yield from reader.drop_blanks_at_end()
    yield from reader.pass_all()


def read_required(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read ``{"name": ..., "arguments": {...}}``, or an array of such calls; text that follows is content."""
    yield from reader.skip_blanks()
    if not (yield from calls.read_array()):
        yield from calls.read_object()
    yield from reader.drop_blanks_at_end()
    yield from reader.pass_all()
