"""Tool calls as Mistral's models write them.

Older ones write ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, newer ones for each call
``[TOOL_CALLS]name[ARGS]{...}``, some with ``[CALL_ID]`` and an id of nine characters after the name.
"""

from __future__ import annotations

import re
import secrets
import string

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.text_reader import Reader, Reading

NAME, ID = re.compile(r"[\w.-]*"), re.compile(r"[a-zA-Z0-9]{0,9}")


def make_id() -> str:
    """Return a random id of nine letters and digits, which is what the models' chat templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def read(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read an answer with calls in either form, and text."""
    while (yield from reader.pass_until("[TOOL_CALLS]")):
        yield from reader.skip_blanks()
        if not (yield from calls.read_array()):
            yield from _read_named(reader, calls)
        yield from reader.drop_blanks_at_end()


def _read_named(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read ``name[ARGS]{...}``, as far as there is one."""
    name = yield from reader.take_run(NAME)
    if name not in calls.schemas:
        return
    if (yield from reader.take("[CALL_ID]")):
        yield from reader.take_run(ID)
    yield from reader.take("[ARGS]")
    yield from reader.skip_blanks()
    yield from calls.stream_arguments(name)
