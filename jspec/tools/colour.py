"""Colours for drafted tokens in a terminal."""

from __future__ import annotations

import os
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from jspec import Chunk

COLOUR, RESET = "\033[36m", "\033[0m"  # cyan


def has_colours(out: TextIO) -> bool:
    """Return whether a stream is a terminal and the environment variable NO_COLOR is not set."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def legend() -> str:
    """Return a line that says which tokens have a colour."""
    return f"{COLOUR}cyan: drafted and accepted{RESET}; plain: the target's own"


def painted(chunk: Chunk) -> str:
    """Return a chunk's text with drafted tokens in colour; "" without a tokenizer."""
    pieces, text = chunk.pieces or [], chunk.text or ""
    tokens = zip(chunk.from_draft, pieces, strict=True)
    groups = [(drafted, "".join(piece for _, piece in group)) for drafted, group in groupby(tokens, itemgetter(0))]
    tail = text[sum(map(len, pieces)) :]  # text that the engine kept back until the end of the request
    return "".join(f"{COLOUR}{part}{RESET}" if drafted and part else part for drafted, part in groups) + tail
