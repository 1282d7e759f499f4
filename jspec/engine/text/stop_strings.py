"""Finds stop strings (texts that end a request) in the output. Runs on the host."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy


class StopStringMatcher:
    """Finds the first stop string in a text that arrives in pieces; a match may span several pieces.

    The match that ends first counts, because the text can be cut there without waiting for more text. If several
    matches end at one character, the stop string that is listed first counts, as in vLLM. Text that may be part of a
    match is held back; all other text is returned at once.

    Attributes:
        found: the stop string that was found; None: no match yet. After a match no more text is returned.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # for each stop string: length of its longest prefix with which the text ends
        self._held = ""  # the held-back end of the text; its length is max(self._matched)

    def copy(self) -> StopStringMatcher:
        """Return a matcher with a copy of this matcher's state; both share the tables of the stop strings."""
        if not self._stops:
            return self
        other = copy(self)
        other._matched = list(self._matched)
        return other

    def __bool__(self) -> bool:
        """Return whether any stop strings were given."""
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add a piece of text; return the text that can no longer be part of a match.

        Args:
            text: the next piece.
            may_end: whether to count a match that ends in this piece.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        for end, character in enumerate(text, 1 + len(self._held)):
            if self._advance(character, may_end):
                assert self.found is not None
                self._held = ""
                return held[: end - len(self.found)]
        size = len(held) - max(self._matched)
        self._held = held[size:]
        return held[:size]

    def finish(self) -> str:
        """Return the held-back text; call this when the text has ended."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, may_end: bool) -> bool:
        """Add one character to all partial matches; return whether the character completes a match that counts."""
        for index, (stop, borders) in enumerate(self._stops):
            size = self._matched[index]
            while size and stop[size] != character:
                size = borders[size]
            size += stop[size] == character
            if size == len(stop):
                if may_end:
                    self.found = stop
                    return True
                size = borders[size]
            self._matched[index] = size
        return False


def _borders(stop: str) -> list[int]:
    """Return for each n the length of the longest proper prefix of ``stop[:n]`` that is also a suffix of it."""
    borders, size = [0, 0], 0
    for character in stop[1:]:
        while size and stop[size] != character:
            size = borders[size]
        size += stop[size] == character
        borders.append(size)
    return borders
