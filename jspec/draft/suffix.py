"""Suffix drafting: what most often followed the newest tokens, in the request's text or in all that the engine saw."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, Params
from jspec.draft.lookup import (
    GAP,
    History,
    check_lengths,
    check_size,
    continuations,
    find,
    match_count,
    merge,
    new_history,
    newest,
    plant,
    rows_of,
    take_chunk,
    take_roots,
    take_verdict,
)
from jspec.draft.ngram import DEFAULT_TREE
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape

SCOPES = ("request", "engine")
CORPUS_TOKENS = 2**20


@struct.dataclass
class SuffixState:
    """The slots' texts, and those of requests whose slot has been taken by another since."""

    history: Int[Array, "slots positions"]
    corpus: Int[Array, "corpus"] | None  # oldest first, a gap after each text; None where the scope is a request


@final
class Suffix(Drafter):
    """Drafts what followed most of the best matches of the newest tokens.

    Among siblings the one with more matches comes first, among equals that of the better match.

    scope="request" searches the request's own text. scope="engine" searches the texts of all slots too, those that
    have finished included, and the last ``corpus_tokens`` tokens (with one gap a text) of requests before them; a
    text moves there when its slot is reused. **Tokens of one user's request may then be drafted for another's.** The
    output stays what the target alone would say, but how fast it comes may tell that a text was seen before: take
    "request" where users must not learn that of each other. It goes with accept="coupled" alone: under the other
    rules a draft that repeats what an earlier request drew with the same seed would not be independent of the draws.

    A round compares ``max_n`` tokens a position and row. With "request" it reads 4 bytes a position of ``max_len``
    and row. With "engine" the text has ``corpus_tokens + slots * max_len`` positions and a little more: a round
    copies it once, 8 bytes a position, and for every row reads 4 bytes a position and writes and reads up to 4 more;
    a chunk of a prompt moves the corpus on, 16 bytes a token. The corpus takes 4 bytes a token.

    Args:
        tree: any.
        max_n: tokens compared at most, the root included.
        min_n: tokens that must agree.
        corpus_tokens: size of the corpus of scope="engine".
        scope: "request" or "engine".

    Raises:
        ValueError: not ``1 <= min_n <= max_n``, an unknown scope, corpus_tokens < 1; when an engine is made,
            scope="engine" with an accept rule other than "coupled".

    Source: SuffixDecoding, arXiv:2411.04975, which walks suffix trees on the host and counts all occurrences; ours
        compares all positions on the device and counts the best matches only.
    """

    reads_text = True

    def __init__(
        self,
        tree: Tree = DEFAULT_TREE,
        *,
        max_n: int = 16,
        min_n: int = 1,
        corpus_tokens: int = CORPUS_TOKENS,
        scope: str = "request",
    ) -> None:
        check_lengths("Suffix", max_n, min_n)
        if scope not in SCOPES:
            raise ValueError(f"Suffix: scope: expected one of {SCOPES}, got {scope!r}")
        if type(corpus_tokens) is not int or corpus_tokens < 1:
            raise ValueError(
                f'Suffix: corpus_tokens: expected an int >= 1, got {corpus_tokens!r}; scope="request" needs none'
            )
        self.tree = tree
        self.max_n = max_n
        self.min_n = min_n
        self.corpus_tokens = corpus_tokens
        self.scope = scope

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def init(self, params: Params, pool: PoolShape) -> SuffixState:
        history = new_history(pool, self.tree)
        if self.scope == "request":
            check_size("Suffix", self.max_n, history.shape[1], "max_len")
            return SuffixState(history=history, corpus=None)
        check_size("Suffix", self.max_n, self.corpus_tokens + history.size, "corpus_tokens")
        return SuffixState(history=history, corpus=jnp.full(self.corpus_tokens, GAP, jnp.int32))

    def prefill(
        self, params: Params, state: SuffixState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> SuffixState:
        if state.corpus is not None:
            state = replace(state, corpus=keep_old(state.corpus, state.history, view, batch))
        return replace(state, history=take_chunk(state.history, view, batch))

    def draft(self, params: Params, state: SuffixState, view: SlotView) -> tuple[Draft, SuffixState]:
        if self.scope == "engine" and not view.accept.is_draft_independent:
            raise ValueError(
                f'Suffix: scope="engine" expects accept="coupled", got {view.accept.name!r}; use scope="request"'
            )
        history = take_roots(state.history, view)
        query = newest(history, view, self.max_n)
        text, own = searched(history, state.corpus, view)
        ends = find(text, query, min_n=self.min_n, count=match_count(self.tree), preferred=own)
        trie = merge(continuations(text, ends, self.tree.depth), by_count=True)
        return plant(view, trie, self.tree), replace(state, history=history)

    def commit(
        self,
        params: Params,
        state: SuffixState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> SuffixState:
        return replace(state, history=take_verdict(state.history, view, verdict))

    def write_pending_rows(self, params: Params, state: SuffixState, view: SlotView) -> SuffixState:
        return replace(state, history=take_roots(state.history, view))


def searched(
    history: History, corpus: Int[Array, "corpus"] | None, view: SlotView
) -> tuple[Int[Array, "texts searched"], Int[Array, "batch 2"] | None]:
    """The text to search, and, where it is not a row's own alone, the interval of it that is."""
    if corpus is None:
        return rows_of(history, view.slots), None
    own = corpus.size + view.slots[:, None] * history.shape[1] + jnp.array([0, history.shape[1]])
    return jnp.concatenate([corpus, history.reshape(-1)])[None], own


def keep_old(corpus: Int[Array, "corpus"], history: History, view: SlotView, batch: TokenBatch) -> Int[Array, "corpus"]:
    """Where a request's first chunk comes in, put the text that its slot still holds at the end of the corpus.

    A chunk is not the first one if its slot holds what comes before it. A text with which the new one begins, because
    it is cached, is not kept twice.

    As many of the oldest tokens leave as that text and the gap behind it take; of one longer than the corpus the last
    tokens stay.
    """
    old = rows_of(history, view.slots)
    sizes = jnp.sum(old >= 0, axis=1, dtype=jnp.int32)
    is_first = batch.first_row == 0
    if view.text is not None:
        begins = jnp.all((old < 0) | (old == view.text[:, : old.shape[1]]), axis=1) & (sizes <= batch.first_row)
        is_first = ~begins
    moves = jnp.where(is_first & (sizes > 0), sizes + 1, 0)
    for row in range(old.shape[0]):  # a prefill has one
        both = jnp.concatenate([corpus, old[row]])
        corpus = jax.lax.dynamic_slice_in_dim(both, moves[row], corpus.size)
    return corpus
