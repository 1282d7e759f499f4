"""Splits an answer into reasoning, between ``<think>`` and ``</think>``, and what follows."""

from __future__ import annotations

from jspec.server.reading.json_scanner import BLANKS
from jspec.server.reading.text_reader import Reader, Reading

OPEN, CLOSE = "<think>", "</think>"


def is_used_by(chat_template: str | None) -> bool:
    """Return whether a chat template is that of a model that reasons between the two markers."""
    return chat_template is not None and CLOSE in chat_template


def begins_in(prompt: str) -> bool:
    """Return whether the answer to a prompt begins inside reasoning, because the prompt ends with ``<think>``.

    Args:
        prompt: the rendered prompt, or its end.
    """
    return prompt.rstrip(BLANKS).endswith(OPEN)


def read(reader: Reader, *, is_inside: bool) -> Reading[None]:
    """Pass on the reasoning with which an answer begins; leave the rest to be read.

    Blanks beside the markers are dropped. Markers at other places are text.

    Args:
        is_inside: whether the answer begins inside reasoning. It may repeat ``<think>``.
    """
    yield from reader.skip_blanks()
    if not (yield from reader.take(OPEN)) and not is_inside:
        reader.at = 0
        return
    reader.reasoning_end = None
    yield from reader.skip_blanks()
    reader.commit()
    if (yield from reader.pass_until(CLOSE, is_reasoning=True)):
        reader.commit()
        reader.reasoning_end = reader.num_dropped
        yield from reader.skip_blanks()
        reader.commit()
