"""Makes log-probability records for users from the arrays of a step, on the host."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # so that requests need no jax
    from jspec.core.records import LogProbs


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability (natural logarithm) of one token, given all tokens before it.

    Attributes:
        rank: rank of the token; 1 is the likeliest.
        top: log-probabilities of the likeliest tokens by token id, largest first, as many as requested. Tokens with
            probability 0 are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


def token_logprobs(scores: Any, row: Any, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Make a log-probability record for each token.

    Args:
        scores: a `jspec.core.records.LogProbs` of numpy arrays.
        row: index into the leading axes of ``scores``; its first entries belong to the tokens.
        tokens: token ids.
        num_top: number of likeliest tokens to report at each token.
    """
    size = len(tokens)
    chosen, ranks, top, top_ids = (f[row][:size] for f in (scores.chosen, scores.ranks, scores.top, scores.top_ids))
    fields = (chosen, ranks, top[:, :num_top], top_ids[:, :num_top])
    return [
        TokenLogprob(token, logprob, rank, {i: p for i, p in zip(ids, top, strict=True) if p > -math.inf})
        for token, logprob, rank, top, ids in zip(tokens, *(field.tolist() for field in fields), strict=True)
    ]


class PromptLogprobs:
    """The log-probabilities of one prompt's tokens, shared by all completions of the prompt.

    Steps only store arrays here. The caller's thread makes the records when it asks for them, so that a long prompt
    does not keep other requests waiting.

    Args:
        prompt_token_ids: tokens of the prompt.
        num_top: number of likeliest tokens to report at each token.

    Attributes:
        chosen: log-probability of each token but the first, [tokens - 1] float32; NaN where it was not computed yet.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_top: int) -> None:
        self._tokens, self._num_top = prompt_token_ids, num_top
        self.chosen = np.full(len(prompt_token_ids) - 1, np.nan, np.float32)
        self._records: list[TokenLogprob | None] = [None] * len(prompt_token_ids)
        self._pieces: list[tuple[int, int, LogProbs]] = []  # arrays whose records are not made yet
        self._lock = threading.Lock()  # threads may ask for the records at the same time

    def add(self, start: int, count: int, scores: LogProbs) -> None:
        """Store the log-probabilities of one piece of the prompt.

        Args:
            start: position of the piece's first token in the prompt.
            count: number of tokens in the piece.
            scores: log-probabilities of the token after each token of the piece, as numpy arrays.
        """
        self._pieces.append((start, count, scores))
        end = min(start + count, len(self.chosen))  # a preempted request also computes rows after the prompt
        if start < end:
            self.chosen[start:end] = scores.chosen[: end - start]

    def records(self) -> list[TokenLogprob | None]:
        """Return one record per prompt token; None for the first token and for tokens that were not computed yet."""
        with self._lock:
            while self._pieces:
                start, count, scores = self._pieces.pop(0)
                tokens = self._tokens[start + 1 : start + 1 + count]  # the prompt's last token has no successor
                self._records[start + 1 : start + 1 + len(tokens)] = token_logprobs(scores, ..., tokens, self._num_top)
            return self._records
