"""A thinking budget on the host, read off the whole text by looking for its markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Budget:
    """How one request reasons.

    Attributes:
        start, end: the markers.
        text: the text that ends the reasoning.
        budget: largest number of thoughts; None: no limit.
        has_grammar: whether the request has a grammar, which begins after the reasoning.
    """

    start: int
    end: int
    text: Sequence[int]
    budget: int | None
    has_grammar: bool = False

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends inside reasoning."""
        return last(prompt, self.start) > last(prompt, self.end)

    def thoughts(self, prompt: Sequence[int], output: Sequence[int]) -> int | None:
        """Return how many tokens of reasoning a text ends with; None: it ends outside reasoning."""
        whole, tokens = [*prompt, *output], list(output)
        if self.is_open(prompt):
            begin = last(prompt, self.start)
        elif self.budget is None or self.start not in (tokens[:1] if self.has_grammar else tokens):
            return None
        else:
            begin = len(prompt) + tokens.index(self.start)
        return None if self.end in whole[begin:] else len(whole) - begin - 1

    def forced(self, prompt: Sequence[int], output: Sequence[int]) -> int | None:
        """Return the token that must follow a text; None: any may."""
        count = self.thoughts(prompt, output)
        if count is None or self.budget is None:
            return None
        over = count - max(self.budget, self.thoughts(prompt, []) or 0)
        return self.text[over] if 0 <= over < len(self.text) else None

    def edited(self, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """Return the logits [vocab] after a text."""
        token = self.forced(prompt, output)
        return logits if token is None else np.where(np.arange(len(logits)) == token, 0.0, -np.inf)

    def answer(self, prompt: Sequence[int], output: list[int]) -> tuple[list[int] | None, set[int]]:
        """Return the part of an output that its grammar reads; None: it has not begun; and what may follow besides."""
        if self.thoughts(prompt, output) is not None:
            return None, {self.end}
        if self.is_open(prompt) or (self.budget is not None and output[:1] == [self.start]):
            return output[output.index(self.end) + 1 :], set()
        return output, {self.start} if self.budget is not None and not output else set()


def last(tokens: Sequence[int], token: int) -> int:
    """Return the last place of a token; -1: it has none."""
    return max((place for place, each in enumerate(tokens) if each == token), default=-1)
