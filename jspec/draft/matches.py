"""Finds earlier occurrences of the newest tokens in a text, and the tokens that followed them.

A text is an int32 array of tokens, with `GAP` at every position without a token. There is a gap after the end of each
text. Matches and continuations do not extend over a gap.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

GAP = -1  # value at a position of a text without a token
UNKNOWN = -2  # value at a position of a query without a token; equals neither a token nor a gap
GROUPS = 2048  # up to about this length `lax.top_k` is one sort kernel on a GPU, for any k


class Matches(NamedTuple):
    """Earlier occurrences of the newest tokens in a text."""

    ends: Int[Array, "batch matches"]  # last position of each match, the best match first; -1 after the last match
    longest: Int[Array, "batch"]  # match length of the best match; 0: no match
    lengths: Int[Array, "batch matches"]  # match length of each match; 0 after the last match


def find_ngram_matches(
    text: Int[Array, "texts positions"],
    query: Int[Array, "batch max_n"],
    *,
    min_n: int,
    count: int,
    preferred: Int[Array, "batch 2"] | None = None,
    place: Int[Array, "batch"] | None = None,
) -> Matches:
    """Find earlier occurrences of the newest tokens in a text.

    The match length at a position is the number of consecutive tokens, counted backwards from the position, that equal
    the newest tokens. A match is a position with a match length of at least ``min_n`` and a token after it. Longer
    matches are better. Of equally long matches, those in the preferred interval are better, then later ones; with a
    place the first one from there on is best, and after those up to the end of the text come those before.

    Positions that are equal modulo `GROUPS` form a group, and only the best match of each group is kept. In texts of at
    most `GROUPS` positions every group has one position. In longer texts the best match is always kept, but a match is
    lost if a better match is a multiple of `GROUPS` positions away. A full sort would cost more than it gains.

    Costs per position and row: ``max_n`` comparisons, and up to 4 bytes of scratch memory.

    Args:
        text: one text per row, or a single text for all rows.
        query: newest tokens of each row, newest first (`newest_tokens`).
        min_n: smallest match length in tokens.
        count: number of matches to keep (M).
        preferred: interval [begin, end) of preferred positions of each row.
        place: position of each row from which on earlier matches are better; None: later matches are better.
    """
    size, max_n = text.shape[1], query.shape[1]
    groups = min(GROUPS, max(size, count))
    width = size + -size % groups
    # padded[:, max_n - 1 + p] is the token at position p; gaps precede and follow the text.
    padded = jnp.pad(text, ((0, 0), (max_n - 1, width - size + 1)), constant_values=GAP)
    position = jnp.arange(width)
    # The match length is the least `back` whose token differs. XLA fuses this chain of minima into one kernel.
    length = jnp.full((), max_n, jnp.int32)
    for back in range(max_n):
        start = max_n - 1 - back
        agrees = padded[:, start : start + width] == query[:, back, None]
        length = jnp.minimum(length, jnp.where(agrees, max_n, back))
    priority = 2 * length
    if preferred is not None:
        priority = priority + ((position >= preferred[:, :1]) & (position < preferred[:, 1:]))
    order = position if place is None else width - 1 - (position - place[:, None]) % width
    score = jnp.where((length >= min_n) & (padded[:, max_n:] >= 0), priority * width + order, -1)
    best, _ = jax.lax.top_k(jnp.max(score.reshape(score.shape[0], -1, groups), axis=1), count)
    ends = best % width if place is None else (place[:, None] - 1 - best) % width
    longest, lengths = (jnp.maximum(scores, 0) // (2 * width) for scores in (best[:, 0], best))
    return Matches(jnp.where(best >= 0, ends, -1), longest, lengths)


def continuations(
    text: Int[Array, "texts positions"], ends: Int[Array, "batch matches"], depth: int
) -> Int[Array, "batch depth matches"]:
    """Return the tokens after each match (its continuation); those after the first `GAP` have no meaning.

    Args:
        text: one text per row, or a single text for all rows.
        ends: last position of each match; -1 stands for no match, and its continuation is all gaps.
        depth: number of tokens to take.
    """
    texts, size = text.shape
    rows = jnp.arange(ends.shape[0]) % texts
    places = jnp.where(ends >= 0, ends, size)[:, None] + jnp.arange(1, depth + 1)[:, None]
    return text.at[rows[:, None, None], places].get(mode="fill", fill_value=GAP)
