"""Suffix drafting, which drafts the most frequent continuations of the newest tokens in one or in all texts."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.records import PromptBatch, SlotView
from jspec.core.shorten import short
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.base import Params
from jspec.draft.elsewhere import NO_WEIGHTS, refuses_device
from jspec.draft.lookup import (
    Found,
    History,
    LookupDrafter,
    LookupState,
    check_size,
    history_rows,
    new_history,
    newest_tokens,
    write_roots,
)
from jspec.draft.matches import GAP
from jspec.models.parts.kv_pool import PoolShape

SCOPES = ("request", "engine")
CORPUS_TOKENS = 2**20


@final
class Suffix(LookupDrafter):
    """Drafts the most frequent continuations among the best matches of the newest tokens.

    Longer matches are better. Of equally long matches, those in the request's own text are better, then later ones.
    Siblings are ordered by their number of matches, then by their best match.

    scope="request" searches the request's own text. scope="engine" also searches the texts of all other slots, even of
    finished requests, and a corpus of earlier requests. The corpus is the last ``corpus_tokens`` tokens of their texts,
    with one gap after each text. A text is appended to the corpus when its slot is reused.
    **With scope="engine", tokens of one user's request may be drafted for another user's request.** The output is still
    the target's, but a fast answer may reveal that a text was seen before; use "request" if users must not learn this
    about each other.
    scope="engine" needs accept="coupled". Other rules need a draft that is independent of the row's random draws. A
    draft depends on them if an earlier request with the same seed drew its tokens.

    Costs: a round compares ``max_n`` tokens per position and row. With "request" it reads 4 bytes per position of
    ``max_len`` and row. With "engine" the text has slightly more than ``corpus_tokens + slots * max_len`` positions. A
    round copies this text once (8 bytes per position); for each row it reads 4 bytes per position, and writes and reads
    up to 4 more. Each prefill shifts the corpus (16 bytes per token). The corpus takes 4 bytes per token.

    Args:
        tree: draft tree of any kind, or its text such as "chain:4".
        max_n: largest length of a match in tokens, including the root (the newest token).
        min_n: smallest length of a match in tokens, including the root.
        corpus_tokens: size of the corpus in tokens, for scope="engine".
        scope: texts to search, "request" or "engine".

    Raises:
        ValueError: ``1 <= min_n <= max_n`` does not hold, the scope is unknown, or corpus_tokens < 1. An engine also
            raises ValueError if scope="engine" is used without accept="coupled".

    Source: SuffixDecoding, arXiv:2411.04975, which walks suffix trees on the host and counts all occurrences. This
        class compares all positions on the device and counts only the best matches.
    """

    @refuses_device(NO_WEIGHTS)
    def __init__(
        self,
        tree: Tree | str = DEFAULT_TREE,
        *,
        max_n: int = 16,
        min_n: int = 1,
        corpus_tokens: int = CORPUS_TOKENS,
        scope: str = "request",
    ) -> None:
        super().__init__(tree, max_n=max_n, min_n=min_n)
        if not isinstance(scope, str) or scope not in SCOPES:
            raise ValueError(f"Suffix: scope: expected one of {SCOPES}, got {short(scope)}")
        if type(corpus_tokens) is not int or corpus_tokens < 1:
            raise ValueError(
                f'Suffix: corpus_tokens: expected an int >= 1, got {short(corpus_tokens)}; scope="request" needs none'
            )
        self.corpus_tokens = corpus_tokens
        self.scope = scope

    def init(self, params: Params, pool: PoolShape) -> LookupState:
        if self.scope == "request":
            return super().init(params, pool)
        state = LookupState(history=new_history(pool, self.tree), places=self.new_places(pool))
        check_size("Suffix", self.max_n, self.corpus_tokens + state.history.size, "corpus_tokens")
        return replace(state, corpus=jnp.full(self.corpus_tokens, GAP, jnp.int32))

    def prefill(
        self, params: Params, state: LookupState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> LookupState:
        if state.corpus is not None:
            state = replace(state, corpus=append_to_corpus(state.corpus, state.history, view, batch))
        return super().prefill(params, state, view, batch, features)

    def look_up(self, state: LookupState, view: SlotView) -> tuple[Found, LookupState]:
        if self.scope == "engine" and not view.accept.is_draft_independent:
            raise ValueError(
                f'Suffix: scope="engine" expects accept="coupled", got {view.accept.name!r}; use scope="request"'
            )
        history = write_roots(state.history, view)
        query = newest_tokens(history, view, self.max_n)
        text, interval = search_text(history, state.corpus, view)
        state = replace(state, history=history)
        return self.find_tree(state, view, text, query, by_count=True, preferred=interval)


def search_text(
    history: History, corpus: Int[Array, "corpus"] | None, view: SlotView
) -> tuple[Int[Array, "texts searched"], Int[Array, "batch 2"] | None]:
    """Return the text to search, and the interval [begin, end) of positions of each row's own text.

    Args:
        history: tokens of each slot.
        corpus: texts of earlier requests; None: each row searches only its own text, and the interval is None.
        view: the slots of the batch.
    """
    if corpus is None:
        return history_rows(history, view.slots), None
    interval = corpus.size + view.slots[:, None] * history.shape[1] + jnp.array([0, history.shape[1]])
    return jnp.concatenate([corpus, history.reshape(-1)])[None], interval


def append_to_corpus(
    corpus: Int[Array, "corpus"], history: History, view: SlotView, batch: PromptBatch
) -> Int[Array, "corpus"]:
    """Append the texts of the slots' previous requests to the corpus, for pieces that are the first of a new request.

    A piece is the first one if the slot's history does not contain the tokens before it. A previous text that is a
    cached prefix of the new text is not appended, because the new text contains it.

    The oldest tokens of the corpus are dropped to make room for each text and one gap. If the texts are longer than the
    corpus, their last tokens are kept.
    """
    old = history_rows(history, view.slots)
    sizes = jnp.sum(old >= 0, axis=1, dtype=jnp.int32)
    is_first = batch.starts == 0
    if view.token_history is not None:
        is_prefix = jnp.all((old < 0) | (old == view.token_history[:, : old.shape[1]]), axis=1)
        is_first = ~(is_prefix & (sizes <= batch.starts))
    ends = jnp.cumsum(jnp.where(is_first & (sizes > 0), sizes + 1, 0))  # of each text, after those before it
    position = jnp.arange(corpus.size) + ends[-1]  # in the corpus followed by the texts
    after = position - corpus.size
    row = jnp.minimum(jnp.searchsorted(ends, after, side="right"), old.shape[0] - 1)
    column = after - jnp.where(row > 0, ends[row - 1], 0)
    added = old.at[row, column].get(mode="fill", fill_value=GAP)
    return jnp.where(after < 0, corpus[jnp.minimum(position, corpus.size - 1)], added)
