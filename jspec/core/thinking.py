"""The reasoning of a request: its markers, its budget, and its state after any output. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jspec.core.prompt_blocks import NO_TOKEN

# States of a request's reasoning that are no count of its tokens.
ENDED = -1  # it has ended, or does not come
WAITS = -2  # it begins with the next start marker
WAITS_ONCE = -3  # it begins with the next token if this is the start marker
# States of a grammar that waits for the end of the reasoning (`jspec.sampling.grammar_mask`).
INSIDE = -2  # reasoning goes on; its end marker leads to the grammar's start
AT_START = -3  # the grammar's start, where reasoning may begin instead
MAX_FORCED = 64  # largest number of tokens of the text that ends it


@dataclass(frozen=True)
class Thinking:
    """How a request reasons; the defaults are no reasoning.

    The state after a text is the number of tokens after the start marker while reasoning goes on, else one of the
    negative numbers above. `jspec.sampling.thinking` follows it on the device.

    Attributes:
        start, end: the tokens with which reasoning begins and ends.
        forced: the tokens that end it once the budget is used up; the last one is ``end``.
        begun: state after the prompt.
        budget: count of tokens at which the end is forced, at least the count of the prompt; -1: never.
        grammar_waits: whether the request's grammar begins after the reasoning.
    """

    start: int = NO_TOKEN
    end: int = NO_TOKEN
    forced: tuple[int, ...] = ()
    begun: int = ENDED
    budget: int = -1
    grammar_waits: bool = False

    @property
    def held(self) -> int:
        """The state after the prompt that counts for the request's grammar; `ENDED` if this does not wait."""
        return self.begun if self.grammar_waits else ENDED

    def follow(self, state: int, token: int) -> int:
        """Return the state after a token."""
        if state >= 0:
            return ENDED if token == self.end else state + 1
        if token == self.start and state != ENDED:
            return 0
        return WAITS if state == WAITS else ENDED

    def after(self, output: Iterable[int]) -> int:
        """Return the state after an output."""
        state = self.begun
        for token in output:
            state = self.follow(state, token)
        return state

    def grammar_state(self, output: Sequence[int], follow: Callable[[Sequence[int]], int]) -> int:
        """Return the state of the request's grammar after an output.

        Args:
            follow: returns the grammar's state after the tokens that it reads.
        """
        state = self.held
        for count, token in enumerate(output):
            before, state = state, self.follow(state, token)
            if not is_thought(before, state):
                return follow(output[count:])
        return INSIDE if state >= 0 else AT_START if state == WAITS_ONCE else follow(())


def is_thought(before: int, after: int) -> bool:
    """Return whether a token belongs to reasoning, its markers included, from the states before and after it."""
    return before >= 0 or after >= 0


NO_THINKING = Thinking()
