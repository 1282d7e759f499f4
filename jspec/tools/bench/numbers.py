"""Numbers as the bench's command line takes them: joined by commas."""

from __future__ import annotations


def ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
