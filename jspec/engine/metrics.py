"""Counters of speculation, for one request or for an engine: records that add."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class LowAcceptanceWarning(UserWarning):
    """Hardly any draft tokens are accepted: the drafter does not fit the target or the prompts."""


@dataclass
class Metrics:
    """Counters of one request, or their sum over requests. The prefill's token belongs to no round.

    Attributes:
        num_drafts: rounds.
        num_draft_tokens: draft tokens that were verified.
        num_accepted_tokens: draft tokens that were emitted.
        num_accepted_per_position: entry i counts the rounds that accepted more than i draft tokens.
        num_rounds_per_depth: rounds by the depth of their draft, which an adaptive engine varies; 0: plain decoding.
        num_tokens: tokens emitted, the prefill's included.
        num_first_tokens: tokens that were the first of a request.
        time_to_first_token: seconds from queueing to the first token.
        decode_seconds: seconds from the first to the last token.
        num_prompt_tokens: tokens of the prompts that were admitted.
        num_cached_tokens: prompt tokens whose rows were found in the prefix cache.
        num_preemptions: times that a request lost its pages to another.
        finished: requests that ended, by reason.
        pages_in_use: pages that requests hold now; of an engine only.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_rounds_per_depth: dict[int, int] = field(default_factory=dict)
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
        """Count one round.

        Args:
            depth: depth of the program, whatever the request's cap.
            drafted: draft tokens that were verified.
            accept_len: draft tokens accepted.
            emitted_drafts: accepted draft tokens before the request's end.
        """
        self.num_drafts += 1
        self.num_rounds_per_depth[depth] = self.num_rounds_per_depth.get(depth, 0) + 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += emitted_drafts
        if accept_len > len(self.num_accepted_per_position):
            self.num_accepted_per_position += [0] * (accept_len - len(self.num_accepted_per_position))
        for position in range(accept_len):
            self.num_accepted_per_position[position] += 1

    def __add__(self, other: Metrics) -> Metrics:
        longest = max(len(self.num_accepted_per_position), len(other.num_accepted_per_position))
        pads = [m.num_accepted_per_position + [0] * (longest - len(m.num_accepted_per_position)) for m in (self, other)]
        return Metrics(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            num_accepted_per_position=[a + b for a, b in zip(*pads, strict=True)],
            num_rounds_per_depth=_sums(self.num_rounds_per_depth, other.num_rounds_per_depth),
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
        """Mean tokens per round, the bonus token included (tau); 1 before the first round."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were emitted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Entry i: share of the rounds that accepted more than i draft tokens."""
        return [count / max(self.num_drafts, 1) for count in self.num_accepted_per_position]

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens whose rows were found in the prefix cache."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def time_per_output_token(self) -> float:
        """Seconds per token after the first."""
        return self.decode_seconds / max(self.num_tokens - self.num_first_tokens, 1)


def _sums(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
