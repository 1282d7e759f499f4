"""Log-probabilities as the user gets them. No jax here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """What the target makes of one token, given all tokens before it; natural logarithms.

    Attributes:
        rank: 1 for the likeliest token; so many less one are likelier.
        top: the likeliest tokens that were asked for, best first, without those that cannot come.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


def token_logprobs(scores: Any, row: Any, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """One for each of some tokens.

    Args:
        scores: a `jspec.core.records.LogProbs` in numpy.
        row: index of the row of it in which the tokens have the first places.
        count: of likeliest tokens.
    """
    size = len(tokens)
    chosen, ranks, top, top_ids = (f[row][:size] for f in (scores.chosen, scores.ranks, scores.top, scores.top_ids))
    fields = (chosen, ranks, top[:, :count], top_ids[:, :count])
    return [
        TokenLogprob(token, logprob, rank, {i: p for i, p in zip(ids, top, strict=True) if p > -math.inf})
        for token, logprob, rank, top, ids in zip(tokens, *(field.tolist() for field in fields), strict=True)
    ]
