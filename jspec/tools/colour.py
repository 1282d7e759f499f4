"""Colours for drafted tokens in a terminal."""

from __future__ import annotations

import os
from itertools import groupby
from typing import TextIO

from jspec.engine.request import Chunk

COLOURS = {True: "\033[36m", False: "\033[33m"}  # drafted: cyan; the target's own: yellow
RESET = "\033[0m"


def has_colours(out: TextIO) -> bool:
    """Whether a stream is a terminal, and the environment does not ask for NO_COLOR."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def legend() -> str:
    """Return the meaning of the two colours, in these colours."""
    return f"{COLOURS[True]}drafted and accepted{RESET}, {COLOURS[False]}the target's own{RESET}"


def painted(chunk: Chunk) -> str:
    """Return a chunk's text with each token in the colour of its origin; "" without a tokenizer."""
    pieces, text = chunk.pieces or [], chunk.text or ""
    tokens = zip(chunk.from_draft, pieces, strict=True)
    groups = ((drafted, "".join(piece for _, piece in group)) for drafted, group in groupby(tokens, lambda one: one[0]))
    tail = text[sum(map(len, pieces)) :]  # text that the engine held back until the end
    return "".join(f"{COLOURS[drafted]}{part}{RESET}" for drafted, part in groups if part) + tail
