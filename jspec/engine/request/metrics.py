"""Counters of tokens, rounds and times, for one request or for a whole engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Fields of `Metrics` that count by key.
COUNTS = ("num_draft_tokens_per_source", "num_accepted_tokens_per_source", "num_rounds_per_depth", "finished")


class LowAcceptanceWarning(UserWarning):
    """A warning that few draft tokens are accepted, so the drafter does not fit the target or the prompts."""


@dataclass
class Metrics:
    """The counters of one request, or their sums over requests. A request's first token belongs to no round.

    Attributes:
        num_drafts: number of rounds.
        num_draft_tokens: number of draft tokens that were verified.
        num_accepted_tokens: number of draft tokens that were accepted and emitted.
        num_draft_tokens_per_source: those of ``num_draft_tokens`` that the "head" and the "lookup" of a `Beside`
            drafted; empty with another drafter. A token that both drafted in a tree counts as the head's,
            and one of a text that a thinking budget forces as that of whose node it takes.
        num_accepted_tokens_per_source: those of ``num_accepted_tokens`` of each source.
        num_accepted_per_position: entry i is the number of rounds that accepted more than i draft tokens; those after
            the end of a request count here, so that the shares of late positions are not too low.
        num_rounds_per_depth: number of rounds for each draft depth; depth 0 is plain decoding.
        num_tokens: number of emitted tokens, including each first token of a request.
        num_first_tokens: number of emitted tokens that were the first of a request.
        queue_seconds: seconds from queueing to the dispatch of the first prefill.
        time_to_first_token: seconds from queueing to the first token.
        decode_seconds: seconds from the first to the last token.
        num_prompt_tokens: number of tokens in the prompts of admitted requests.
        num_cached_tokens: number of prompt tokens whose cache rows were found in the prefix cache.
        num_preemptions: number of times that a request lost its pages to another request.
        finished: number of ended requests for each finish reason.
        pages_in_use: number of pages that requests hold now; only set for an engine.
        num_state_hits: number of requests that began at a recurrent state of the prefix cache; only set for an engine.
        num_states_evicted: number of such states that were overwritten by others; only set for an engine.
        states_kept: number of such states now; only set for an engine.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_source: dict[str, int] = field(default_factory=dict)
    num_accepted_tokens_per_source: dict[str, int] = field(default_factory=dict)
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_rounds_per_depth: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_first_tokens: int = 0
    queue_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    pages_in_use: int = 0
    num_state_hits: int = 0
    num_states_evicted: int = 0
    states_kept: int = 0

    def count_round(
        self,
        *,
        depth: int,
        drafted: int,
        accept_len: int,
        emitted_drafts: int,
        lookup_drafted: int | None = None,
        head_accepted: int | None = None,
    ) -> None:
        """Add one round to the counters.

        Args:
            depth: draft depth of the compiled round, which may exceed the request's own limit.
            drafted: number of draft tokens that were verified.
            accept_len: number of accepted draft tokens, including any after the request's end.
            emitted_drafts: number of accepted draft tokens that were emitted.
            lookup_drafted: number of verified draft tokens of a look-up beside a head; None: there is one source.
            head_accepted: number of accepted draft tokens of the head, which come before those of the look-up.
        """
        self.num_drafts += 1
        self.num_rounds_per_depth[depth] = self.num_rounds_per_depth.get(depth, 0) + 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += emitted_drafts
        if accept_len > len(self.num_accepted_per_position):
            self.num_accepted_per_position += [0] * (accept_len - len(self.num_accepted_per_position))
        for position in range(accept_len):
            self.num_accepted_per_position[position] += 1
        if lookup_drafted is not None and head_accepted is not None:
            verified = {"head": drafted - lookup_drafted, "lookup": lookup_drafted}
            of_head = min(emitted_drafts, head_accepted)
            accepted = {"head": of_head, "lookup": emitted_drafts - of_head}
            self.num_draft_tokens_per_source = _sums(self.num_draft_tokens_per_source, verified)
            self.num_accepted_tokens_per_source = _sums(self.num_accepted_tokens_per_source, accepted)

    def __add__(self, other: Metrics) -> Metrics:
        longest = max(len(self.num_accepted_per_position), len(other.num_accepted_per_position))
        pads = [m.num_accepted_per_position + [0] * (longest - len(m.num_accepted_per_position)) for m in (self, other)]
        return Metrics(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            **{name: _sums(getattr(self, name), getattr(other, name)) for name in COUNTS},
            num_accepted_per_position=[a + b for a, b in zip(*pads, strict=True)],
            num_tokens=self.num_tokens + other.num_tokens,
            num_first_tokens=self.num_first_tokens + other.num_first_tokens,
            queue_seconds=self.queue_seconds + other.queue_seconds,
            time_to_first_token=self.time_to_first_token + other.time_to_first_token,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_preemptions=self.num_preemptions + other.num_preemptions,
            pages_in_use=self.pages_in_use + other.pages_in_use,
            num_state_hits=self.num_state_hits + other.num_state_hits,
            num_states_evicted=self.num_states_evicted + other.num_states_evicted,
            states_kept=self.states_kept + other.states_kept,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """The mean number of tokens per round (tau), the target's own token included; 1 before the first round."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_rate(self) -> float:
        """The share of verified draft tokens that were accepted and emitted, from 0 to 1."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """A list whose entry i is the share of rounds that accepted more than i draft tokens."""
        return [count / max(self.num_drafts, 1) for count in self.num_accepted_per_position]

    @property
    def prefix_hit_rate(self) -> float:
        """The share of prompt tokens whose cache rows were found in the prefix cache, from 0 to 1."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def time_per_output_token(self) -> float:
        """The mean time per output token after a request's first token, in seconds."""
        return self.decode_seconds / max(self.num_tokens - self.num_first_tokens, 1)


def _sums(first: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    return {key: first.get(key, 0) + other.get(key, 0) for key in first | other}
