"""Tool calls as Llama 3.1 to 3.3 write them: ``{"name": ..., "parameters": {...}}``, several with ";" between them.

The calls are at the answer's beginning, or after ``<|python_tag|>``.
"""

from __future__ import annotations

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.text_reader import Reader, Reading


def read(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read an answer with calls and text."""
    has_more = is_bare = True
    while has_more:
        yield from reader.skip_blanks()
        if (yield from calls.read_list(";", is_bare=is_bare)):
            yield from reader.drop_blanks_at_end()
        has_more, is_bare = (yield from reader.pass_until("<|python_tag|>")), False
