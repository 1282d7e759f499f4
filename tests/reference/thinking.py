"""A thinking budget on the host, read off the whole text: which token of the forced text must follow it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

START, END = 14, 10  # tokens of the markers in `tests.support.lettered.THINKING_TEXTS`


def last(tokens: Sequence[int], token: int) -> int:
    """Return the last place of a token; -1: it has none."""
    return max((place for place, each in enumerate(tokens) if each == token), default=-1)


def thoughts(prompt: Sequence[int], output: Sequence[int]) -> list[int] | None:
    """Return the tokens of the reasoning in which a text ends; None: it ends outside."""
    begin, closed = last(prompt, START), last(prompt, END)
    if begin <= closed:
        if START not in output:
            return None
        begin = len(prompt) + list(output).index(START)
    found = [*prompt, *output][begin + 1 :]
    return None if END in found else found


def forced(prompt: Sequence[int], output: Sequence[int], budget: int, text: Sequence[int]) -> int | None:
    """Return the token that must follow; None: any may."""
    found = thoughts(prompt, output)
    if found is None:
        return None
    over = len(found) - max(budget, len(thoughts(prompt, []) or []))
    return text[over] if 0 <= over < len(text) else None


def edited(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], budget: int | None, text: Sequence[int]):
    """Return the logits [vocab] of a request with a budget; None: it has none."""
    token = None if budget is None else forced(prompt, output, budget, text)
    return logits if token is None else np.where(np.arange(len(logits)) == token, 0.0, -np.inf)


def answer(prompt: Sequence[int], output: list[int]) -> list[int] | None:
    """Return the tokens that a grammar reads which waits for the reasoning's end; None: this has not come."""
    if thoughts(prompt, output) is not None:
        return None
    reasons = thoughts(prompt, []) is not None or output[:1] == [START]
    return output[output.index(END) + 1 :] if reasons else output
