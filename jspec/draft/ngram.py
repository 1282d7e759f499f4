"""N-gram drafting, or prompt lookup: what followed the newest tokens when they stood in the text before."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax.numpy as jnp
from jaxtyping import Array

from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, Params
from jspec.draft.lookup import (
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
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape

DEFAULT_TREE = Tree.chain(5)


@final
class NGram(Drafter):
    """Drafts what came after the longest, then most recent match of the newest tokens in the request's own text.

    Among siblings the continuation of the better match comes first. A chain follows the best match; where that runs
    into the root it goes on with the next match that began alike.

    A round reads a row's text once, 4 bytes a position of ``max_len``, and compares ``max_n`` tokens a position.

    Args:
        tree: any.
        max_n: tokens compared at most, the root included.
        min_n: tokens that must agree.

    Raises:
        ValueError: not ``1 <= min_n <= max_n``.

    Source: prompt lookup decoding (A. Saxena, 2023); "Inference with Reference", arXiv:2304.04487. Ours merges
        several matches into a tree and takes the most recent match where those take the first.
    """

    reads_text = True

    def __init__(self, tree: Tree = DEFAULT_TREE, *, max_n: int = 4, min_n: int = 1) -> None:
        check_lengths("NGram", max_n, min_n)
        self.tree = tree
        self.max_n = max_n
        self.min_n = min_n

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def init(self, params: Params, pool: PoolShape) -> History:
        history = new_history(pool, self.tree)
        check_size("NGram", self.max_n, history.shape[1], "max_len")
        return history

    def prefill(
        self, params: Params, state: History, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> History:
        return take_chunk(state, view, batch)

    def draft(self, params: Params, state: History, view: SlotView) -> tuple[Draft, History]:
        history = take_roots(state, view)
        text = rows_of(history, view.slots)
        ends = find(text, newest(history, view, self.max_n), min_n=self.min_n, count=match_count(self.tree))
        draft = plant(view, merge(continuations(text, ends, self.tree.depth), by_count=False), self.tree)
        if self.tree.is_chain:  # it is drawn from the best match alone, with certainty
            draft = replace(draft, scores=jnp.zeros_like(draft.scores))
        return draft, history

    def commit(
        self, params: Params, state: History, view: SlotView, draft: Draft, verdict: Verdict, features: Array | None
    ) -> History:
        return take_verdict(state, view, verdict)

    def write_pending_rows(self, params: Params, state: History, view: SlotView) -> History:
        return take_roots(state, view)
