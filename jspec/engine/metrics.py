"""Counters of speculation, for one request or for an engine: records that add."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class LowAcceptanceWarning(UserWarning):
    """A drafter's tokens are hardly ever accepted: something about it does not fit the target or the prompts."""


@dataclass
class Metrics:
    """Counts over rounds. The prefill's token belongs to no round.

    Attributes:
        num_drafts: rounds.
        num_draft_tokens: drafted tokens that were verified.
        num_accepted_tokens: drafted tokens that were emitted.
        accepted_at: ``accepted_at[i]`` counts the rounds that accepted more than i draft tokens.
        rounds_at: rounds by the depth that they drafted, which differs where it is adapted; 0: plain decoding.
        num_tokens: tokens emitted, the prefill's included.
        num_first_tokens: those of them that were the first of a request.
        time_to_first_token: seconds from `add` to the first token, added up over requests.
        decode_seconds: seconds from the first to the last token.
        num_prompt_tokens: tokens of the prompts that were begun.
        num_cached_tokens: those of them whose rows were found in kept pages.
        num_preemptions: times that a request had to give its pages to another.
        finished: requests that ended, by the reason.
        pages_in_use: of an engine, now.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    rounds_at: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_first_tokens: int = 0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    pages_in_use: int = 0

    def count_round(self, *, depth: int, drafted: int, accept_len: int, emitted_drafts: int) -> None:
        """Take one round into account; depth is its program's, whatever the request's cap."""
        self.num_drafts += 1
        self.rounds_at[depth] = self.rounds_at.get(depth, 0) + 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += emitted_drafts
        if accept_len > len(self.accepted_at):
            self.accepted_at += [0] * (accept_len - len(self.accepted_at))
        for position in range(accept_len):
            self.accepted_at[position] += 1

    def __add__(self, other: Metrics) -> Metrics:
        longest = max(len(self.accepted_at), len(other.accepted_at))
        pads = [m.accepted_at + [0] * (longest - len(m.accepted_at)) for m in (self, other)]
        return Metrics(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            accepted_at=[a + b for a, b in zip(*pads, strict=True)],
            rounds_at=_sums(self.rounds_at, other.rounds_at),
            num_tokens=self.num_tokens + other.num_tokens,
            num_first_tokens=self.num_first_tokens + other.num_first_tokens,
            time_to_first_token=self.time_to_first_token + other.time_to_first_token,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_preemptions=self.num_preemptions + other.num_preemptions,
            finished=_sums(self.finished, other.finished),
            pages_in_use=self.pages_in_use + other.pages_in_use,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round on average, the bonus token counted (tau); 1 before the first round."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_rate(self) -> float:
        """Emitted share of the draft tokens."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """``[i]``: share of rounds that accepted more than i draft tokens."""
        return [count / max(self.num_drafts, 1) for count in self.accepted_at]

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts' tokens whose rows were found in kept pages."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def time_per_output_token(self) -> float:
        """Seconds a token after the first."""
        return self.decode_seconds / max(self.num_tokens - self.num_first_tokens, 1)


def _sums(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
