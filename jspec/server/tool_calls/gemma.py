"""Tool calls as Gemma 4 writes them: ``<|tool_call>call:f{x:1,city:<|"|>Paris<|"|>}<tool_call|>``.

Texts stand between two markers, without escapes; names in objects stand as they are, or as texts.
"""

from __future__ import annotations

import json
import re

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.json_scanner import value_text
from jspec.engine.reading.text_reader import Reader, Reading

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (START, END, QUOTE)
MAX_LEVELS = 50  # most objects and lists inside one another
NAME = re.compile(r"[\w.-]*")
KEY = re.compile(r'[^:,{}\[\]"<\n]*')
SCALAR = re.compile(r"[\w.+-]*")


def read(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read an answer with any number of calls, and text between them."""
    while (yield from reader.pass_until(START)):
        yield from reader.skip_blanks()
        if not (yield from reader.take("call:")):
            continue
        name = yield from reader.take_run(NAME)
        if name not in calls.schemas or not (yield from reader.take("{")):
            continue
        calls.begin(name)
        if not (yield from _stream_members(reader, calls, 1, "{", "}")):
            calls.break_off()
            continue
        yield from reader.skip_blanks()
        if (yield from reader.take(END)):
            reader.commit()
        yield from reader.drop_blanks_at_end()


def _stream_members(reader: Reader, calls: AnswerCalls, level: int, opening: str, closing: str) -> Reading[bool]:
    """Hand on what follows the opening bracket of an object or a list as JSON; return whether it is complete."""
    before = opening
    yield from reader.skip_blanks()
    while not (yield from reader.take(closing)):
        if before == ", " and not (yield from reader.take(",")):
            return False
        yield from reader.skip_blanks()
        if opening == "{":
            key = yield from _read_key(reader)
            if key is None:
                return False
            before += f"{json.dumps(key, ensure_ascii=False)}: "
        if not (yield from _stream_value(reader, calls, level, before)):
            return False
        before = ", "
        yield from reader.skip_blanks()
    reader.commit()
    calls.add(closing if before == ", " else f"{opening}{closing}")
    return True


def _read_key(reader: Reader) -> Reading[str | None]:
    """Read the name of a member and the colon after it; return None if there is none."""
    if (yield from reader.take(QUOTE)):
        key = yield from reader.take_until(QUOTE)
    else:
        key = (yield from reader.take_run(KEY)).strip()
    yield from reader.skip_blanks()
    return key if (yield from reader.take(":")) else None


def _stream_value(reader: Reader, calls: AnswerCalls, level: int, before: str) -> Reading[bool]:
    """Hand on a value, after the JSON before it; return whether it is complete."""
    yield from reader.skip_blanks()
    if (yield from reader.take(QUOTE)):
        reader.commit()
        calls.add(before)
        return (yield from calls.stream_text(QUOTE))
    for opening, closing in ("{}", "[]"):
        if level < MAX_LEVELS and (yield from reader.take(opening)):
            reader.commit()
            calls.add(before)
            return (yield from _stream_members(reader, calls, level + 1, opening, closing))
    word = yield from reader.take_run(SCALAR)
    is_cut = reader.ended and reader.at == len(reader.text)
    text = word if is_cut else value_text("null" if word == "None" else word)  # the chat template writes None
    if text is None:
        return False
    reader.commit()
    calls.add(f"{before}{text}")
    return not is_cut
