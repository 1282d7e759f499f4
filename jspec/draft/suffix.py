"""Suffix drafting: draft the most frequent continuations of the newest tokens, in one text or in the engine's texts."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.records import Draft, SlotView, TokenBatch
from jspec.core.tree import Tree
from jspec.draft.base import Params
from jspec.draft.lookup import (
    DEFAULT_TREE,
    GAP,
    History,
    LookupDrafter,
    LookupState,
    check_size,
    history_rows,
    new_history,
    newest_tokens,
    write_roots,
)
from jspec.models.kv_cache import PoolShape

SCOPES = ("request", "engine")
CORPUS_TOKENS = 2**20


@final
class Suffix(LookupDrafter):
    """Drafts the continuations that most of the best matches of the newest tokens have.

    Among siblings the one with more matches comes first, among equals the one of the better match.

    scope="request" searches the request's own text. scope="engine" also searches the texts of all other slots, finished
    ones included, and a corpus: the last ``corpus_tokens`` tokens (with one gap a text) of earlier requests. A text
    moves to the corpus when its slot is reused. **Tokens of one user's request may then be drafted for another's.** The
    output stays the target's own, but its speed may reveal that a text was seen before: use "request" where users must
    not learn that about each other. scope="engine" needs accept="coupled": under the other rules a draft that repeats
    tokens which an earlier request drew with the same seed would not be independent of the draws.

    A step compares ``max_n`` tokens a position and row. With "request" it reads 4 bytes a position of ``max_len``
    and row. With "engine" the text has ``corpus_tokens + slots * max_len`` positions and a little more: a step
    copies it once, 8 bytes a position, and for every row reads 4 bytes a position and writes and reads up to 4 more;
    a prompt's chunk shifts the corpus, 16 bytes a token. The corpus takes 4 bytes a token.

    Args:
        tree: any tree.
        max_n: largest number of tokens compared, the root included.
        min_n: smallest number of tokens that must agree.
        corpus_tokens: size of the corpus of scope="engine".
        scope: "request" or "engine".

    Raises:
        ValueError: not ``1 <= min_n <= max_n``, an unknown scope, corpus_tokens < 1; when an engine is made,
            scope="engine" with an accept rule other than "coupled".

    Source: SuffixDecoding, arXiv:2411.04975, which walks suffix trees on the host and counts all occurrences; this
        version compares all positions on the device and counts the best matches only.
    """

    def __init__(
        self,
        tree: Tree = DEFAULT_TREE,
        *,
        max_n: int = 16,
        min_n: int = 1,
        corpus_tokens: int = CORPUS_TOKENS,
        scope: str = "request",
    ) -> None:
        super().__init__(tree, max_n=max_n, min_n=min_n)
        if scope not in SCOPES:
            raise ValueError(f"Suffix: scope: expected one of {SCOPES}, got {scope!r}")
        if type(corpus_tokens) is not int or corpus_tokens < 1:
            raise ValueError(
                f'Suffix: corpus_tokens: expected an int >= 1, got {corpus_tokens!r}; scope="request" needs none'
            )
        self.corpus_tokens = corpus_tokens
        self.scope = scope

    def init(self, params: Params, pool: PoolShape) -> LookupState:
        if self.scope == "request":
            return super().init(params, pool)
        state = LookupState(history=new_history(pool, self.tree))
        check_size("Suffix", self.max_n, self.corpus_tokens + state.history.size, "corpus_tokens")
        return replace(state, corpus=jnp.full(self.corpus_tokens, GAP, jnp.int32))

    def prefill(
        self, params: Params, state: LookupState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> LookupState:
        if state.corpus is not None:
            state = replace(state, corpus=append_to_corpus(state.corpus, state.history, view, batch))
        return super().prefill(params, state, view, batch, features)

    def draft(self, params: Params, state: LookupState, view: SlotView) -> tuple[Draft, LookupState]:
        if self.scope == "engine" and not view.accept.is_draft_independent:
            raise ValueError(
                f'Suffix: scope="engine" expects accept="coupled", got {view.accept.name!r}; use scope="request"'
            )
        history = write_roots(state.history, view)
        query = newest_tokens(history, view, self.max_n)
        text, own = search_text(history, state.corpus, view)
        draft = self.find_tree(view, text, query, by_count=True, preferred=own)
        return draft, replace(state, history=history)


def search_text(
    history: History, corpus: Int[Array, "corpus"] | None, view: SlotView
) -> tuple[Int[Array, "texts searched"], Int[Array, "batch 2"] | None]:
    """The text to search, and the interval of it that is the row's own (None: all of it)."""
    if corpus is None:
        return history_rows(history, view.slots), None
    own = corpus.size + view.slots[:, None] * history.shape[1] + jnp.array([0, history.shape[1]])
    return jnp.concatenate([corpus, history.reshape(-1)])[None], own


def append_to_corpus(
    corpus: Int[Array, "corpus"], history: History, view: SlotView, batch: TokenBatch
) -> Int[Array, "corpus"]:
    """On a request's first chunk, append to the corpus the text that its slot still holds.

    A chunk is not the first one if its slot holds the tokens before it. A text that the new one begins with, because
    it is in the prefix cache, is not appended.

    The oldest tokens make room for the text and the gap after it; of a text longer than the corpus the last tokens
    are kept.
    """
    old = history_rows(history, view.slots)
    sizes = jnp.sum(old >= 0, axis=1, dtype=jnp.int32)
    is_first = batch.first_row == 0
    if view.token_history is not None:
        is_prefix = jnp.all((old < 0) | (old == view.token_history[:, : old.shape[1]]), axis=1)
        is_first = ~(is_prefix & (sizes <= batch.first_row))
    shifts = jnp.where(is_first & (sizes > 0), sizes + 1, 0)
    for row in range(old.shape[0]):  # a prefill has one row
        both = jnp.concatenate([corpus, old[row]])
        corpus = jax.lax.dynamic_slice_in_dim(both, shifts[row], corpus.size)
    return corpus
