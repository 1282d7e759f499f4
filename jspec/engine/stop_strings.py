"""Stop strings: text that ends a request and is cut off with all behind it. Host only."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Looks for the first stop string in a text that comes in pieces; where the pieces are cut does not matter.

    The match that ends first counts, for the text can be cut there without waiting for more; of several that end at the
    same character the one that is named first, as in vLLM. No text is handed out that a match may still take back, and
    all other text at once.

    Attributes:
        found: the stop string that was met; nothing is handed out any more then.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # of each, the longest beginning with which the text ends
        self._held = ""  # as long as the longest of these

    def __bool__(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take the text's next piece; returns what is certain by now.

        Args:
            may_end: False: a match that ends in this piece does not count.
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
        certain = len(held) - max(self._matched)
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """What was held back, for the text has ended."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, may_end: bool) -> bool:
        """Whether a stop string ends with this character and counts."""
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
    """``[n]``: characters of the longest text, shorter than n, with which the first n both begin and end."""
    borders, size = [0, 0], 0
    for character in stop[1:]:
        while size and stop[size] != character:
            size = borders[size]
        size += stop[size] == character
        borders.append(size)
    return borders
