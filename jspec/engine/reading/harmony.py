"""Answers in harmony, the format of gpt-oss: messages with a header each, of which a channel says what they are.

``<|channel|>analysis<|message|>`` begins reasoning, ``<|channel|>final<|message|>`` text. A message to a tool has
``to=functions.NAME`` before or after the channel, mostly "commentary", and JSON as its body; on that channel without a
tool it is text too. ``<|start|>assistant`` begins each message but the first, whose beginning is in the prompt.

Source: OpenAI's description of the format, https://github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.text_reader import AnswerPart, Reader, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)  # a message that lacks its end has the next one's start
MARKERS = (*ENDS, CHANNEL, CONSTRAIN, MESSAGE)
ANALYSIS, TOOLS = "analysis", "functions."
WORD = re.compile(r"[\w.-]*")


class MessageHeader(NamedTuple):
    """What the header of a message says; "" is nothing."""

    channel: str
    recipient: str


def read(reader: Reader, calls: AnswerCalls, prompt: str = "") -> Reading[None]:
    """Read an answer in messages; text without a header is content.

    Args:
        prompt: the rendered prompt, or its end, which may have the header of the first message and more of it.
    """
    begun = _begun_header(prompt)
    reader.text, reader.num_dropped, goes_on = begun + reader.text, -len(begun), begun != ""
    seen = set[bool]()  # whether the message was reasoning, of those whose text was passed on
    while not (reader.ended and not reader.text):
        header = yield from _read_header(reader)
        is_reasoning = header is not None and header.channel == ANALYSIS
        if header is None:
            is_cut = reader.at == len(reader.text) and reader.text.startswith((START, CHANNEL))
            # The prompt's header, of another role, is no content; what is cut off in a header has no text.
            reader.at = len(begun) if goes_on else reader.at if is_cut else 0
            reader.commit()
        elif header.recipient.startswith(TOOLS):
            yield from _read_call(reader, calls, seen, header.recipient.removeprefix(TOOLS))
            is_reasoning = False
        else:
            yield from _begin_text(reader, seen, is_reasoning=is_reasoning, goes_on=goes_on)
        yield from _pass_body(reader, is_reasoning=is_reasoning)
        goes_on = False


def _begun_header(prompt: str) -> str:
    """Return the header of the message that a prompt has begun and not ended; "" if its body has not begun."""
    _, start, message = prompt.rpartition(START)
    header, marker, body = message.partition(MESSAGE)
    return header + marker if start and marker and not any(end in body for end in ENDS) else ""


def _read_header(reader: Reader) -> Reading[MessageHeader | None]:
    """Read the header of a message; return None if no message begins here."""
    yield from reader.skip_blanks()
    yield from reader.take(START)
    yield from reader.take("assistant")
    channel, recipient = "", (yield from _read_recipient(reader))
    if (yield from reader.take(CHANNEL)):
        channel = yield from reader.take_run(WORD)
        recipient = (yield from _read_recipient(reader)) or recipient
        yield from reader.take(CONSTRAIN)
        yield from reader.take_run(WORD)  # the type of the body
    yield from reader.skip_blanks()
    return MessageHeader(channel, recipient) if (yield from reader.take(MESSAGE)) else None


def _read_recipient(reader: Reader) -> Reading[str]:
    yield from reader.skip_blanks()
    recipient = (yield from reader.take_run(WORD)) if (yield from reader.take("to=")) else ""
    yield from reader.skip_blanks()
    return recipient


def _read_call(reader: Reader, calls: AnswerCalls, seen: set[bool], name: str) -> Reading[None]:
    """Read a call after its header; that of a tool that the request does not have is text with its header."""
    if name not in calls.schemas:
        if False in seen:
            reader.parts.append(AnswerPart(content="\n"))
        seen.add(False)
        reader.pass_on(reader.at)
        return
    yield from reader.skip_blanks()
    reader.commit()
    yield from calls.stream_arguments(name)
    yield from reader.drop_blanks_at_end()


def _begin_text(reader: Reader, seen: set[bool], *, is_reasoning: bool, goes_on: bool) -> Reading[None]:
    """Begin the body of a message of text or reasoning, with a line end before it if an earlier message was the same.

    Args:
        goes_on: whether the prompt has the beginning of the body, whose next blanks then belong to it.
    """
    if is_reasoning:
        reader.begin_reasoning()
    reader.commit()
    if not goes_on:
        yield from reader.skip_blanks()
        reader.commit()
    if is_reasoning in seen:
        reader.parts.append(AnswerPart(reasoning="\n") if is_reasoning else AnswerPart(content="\n"))
    seen.add(is_reasoning)


def _pass_body(reader: Reader, *, is_reasoning: bool) -> Reading[None]:
    """Pass on the body of a message, or what is left of it, and remove its end."""
    has_end = yield from reader.pass_until(*ENDS, is_reasoning=is_reasoning)
    if not is_reasoning:
        reader.commit()
    elif has_end:
        yield from reader.end_reasoning()
