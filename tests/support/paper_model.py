"""A language model of numpy, whose logits are random numbers that the whole text decides, and a sampler of its tokens.

It edits and cuts logits as `jspec.sampling` does, in the plainest way.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from jspec.core.config import MAX_LOGPROBS
from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import LogProbs
from jspec.core.thinking import AT_START, INSIDE, Thinking
from jspec.engine.grammar.token_table import NOWHERE
from jspec.sampling.penalties import LOOK_BACK
from tests.support.paper_state import PaperTable, Row

SHARPNESS = 2.0  # standard deviation of the logits


def logits_after(text: Sequence[int], vocab: int) -> np.ndarray:
    """Return the logits after a text; NaN if the text has a cache row that was never written."""
    tokens = np.asarray(text, np.int32)
    if tokens.min() < 0:
        return np.full(vocab, np.nan)
    return SHARPNESS * np.random.default_rng(zlib.crc32(tokens.tobytes())).standard_normal(vocab)


def edit(
    logits: np.ndarray, text: Sequence[int], controls: Row, table: PaperTable | None, stop_ids: np.ndarray
) -> np.ndarray:
    """Apply a request's penalties, bias, bad words, grammar and thinking budget to the logits after a text."""
    edited, output = logits.copy(), text[controls["prompt_size"] :]
    seen, counts = np.unique(text), np.bincount(output, minlength=len(logits))
    edited[seen] *= np.where(edited[seen] > 0, 1 / controls["repetition"], controls["repetition"])
    edited -= controls["frequency"] * counts + controls["presence"] * (counts > 0)
    edited += controls["bias"]
    if len(text) < controls["may_end_at"]:
        edited[stop_ids[stop_ids >= 0]] = -np.inf
    recent = np.array([*[NO_TOKEN] * LOOK_BACK, *text][-LOOK_BACK:])
    beginnings = controls["bad_beginnings"]
    ends = controls["bad_ends"][np.all((beginnings == recent) | (beginnings == NO_TOKEN), axis=1)]
    edited[ends[ends < len(logits)]] = -np.inf
    if table is not None and controls["grammar_state"] != NOWHERE:
        edited[~allowed_tokens(output, controls, table, stop_ids)] = -np.inf
    return force(edited, output, controls)


def force(logits: np.ndarray, output: Sequence[int], controls: Row) -> np.ndarray:
    """Allow only the token of the forced text that a thinking budget demands after an output, if it demands one."""
    thinking, state = Thinking(*controls["think_markers"].tolist()), int(controls["thought"])
    for token in new_tokens(output, controls):
        state = thinking.follow(state, token)
    place = state - controls["thinking_budget"]
    if controls["thinking_budget"] < 0 or state < 0 or not 0 <= place < controls["forced_size"]:
        return logits
    return np.where(np.arange(len(logits)) == controls["forced"][place], 0.0, -np.inf)


def new_tokens(output: Sequence[int], controls: Row) -> list[int]:
    """Return the tokens of an output that came after its controls were written."""
    return list(map(int, output[sum(controls["counts"] // 2) :]))


def allowed_tokens(output: Sequence[int], controls: Row, table: PaperTable, stop_ids: np.ndarray) -> np.ndarray:
    """Return for each token whether a grammar allows it after an output, the first part of which is in the state."""
    state, (start, end) = controls["grammar_state"], controls["think_markers"]
    for token in new_tokens(output, controls):
        if state == INSIDE or (state == AT_START and token == start):
            state = 0 if state == INSIDE and token == end else INSIDE
        else:
            state = table.next[max(state, 0), table.class_of[token]]
    tokens = np.arange(len(table.class_of))
    if state == INSIDE:
        return ~np.isin(tokens, stop_ids) | (tokens == end)
    return (table.next[max(state, 0), table.class_of] >= 0) | ((state == AT_START) & (tokens == start))


def sample(logits: np.ndarray, position: int, piece: Row) -> int:
    """Sample the token at a position from edited logits, by the parameters and the seed of a request."""
    if np.isnan(logits).any():
        return NO_TOKEN
    if piece["temperature"] == 0:
        return int(np.argmax(logits))
    noise = np.random.default_rng([*piece["seed"].tolist(), position]).gumbel(size=len(logits))
    return int(np.argmax(cut(logits / piece["temperature"], piece) + noise))


def cut(logits: np.ndarray, piece: Row) -> np.ndarray:
    """Apply top-k, top-p and min-p."""
    falling = np.sort(logits)[::-1]
    mass = np.cumsum(np.exp(falling - falling[0]))
    count = np.sum(mass - np.exp(falling - falling[0]) < piece["top_p"] * mass[-1])
    least = falling[min(count, piece["top_k"] or count) - 1]
    with np.errstate(divide="ignore"):
        least = max(least, falling[0] + np.log(piece["min_p"]))
    return np.where(logits >= least, logits, -np.inf)


def score(logits: np.ndarray, token: int) -> LogProbs:
    """Return the raw log-probabilities at one position."""
    scores = logits - logits.max()
    scores -= np.log(np.exp(scores).sum())
    top = np.argsort(-scores)[:MAX_LOGPROBS].astype(np.int32)
    scores = scores.astype(np.float32)
    rank = np.int32(1 + np.sum(scores > scores[token]))
    return LogProbs(chosen=scores[token], ranks=rank, top=scores[top], top_ids=top)  # type: ignore[arg-type]
