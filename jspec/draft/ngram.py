"""N-gram drafting (prompt lookup), which drafts the tokens that followed an earlier occurrence of the newest tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax.numpy as jnp

from jspec.core.records import SlotView
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.elsewhere import NO_WEIGHTS, refuses_device
from jspec.draft.lookup import Found, LookupDrafter, LookupState, history_rows, newest_tokens, write_roots


@final
class NGram(LookupDrafter):
    """Drafts the tokens that followed earlier occurrences of the newest tokens in the request's own text.

    Longer matches are better; of equally long matches, later ones are better. Siblings are ordered by their best match.
    A chain follows the best match. If the tokens after that match end at the root (the newest token), the chain goes on
    with the next best match that continues with the same tokens.

    A round reads each row's text once, 4 bytes per position of ``max_len``, and compares ``max_n`` tokens per position.

    Args:
        tree: draft tree of any kind, or its text such as "chain:4".
        max_n: largest length of a match in tokens, including the root.
        min_n: smallest length of a match in tokens, including the root.

    Raises:
        ValueError: ``1 <= min_n <= max_n`` does not hold.

    Source: prompt lookup decoding (A. Saxena, 2023); "Inference with Reference", arXiv:2304.04487. Both take the first
        match; this class takes the most recent match, and merges several matches into a tree.
    """

    @refuses_device(NO_WEIGHTS)
    def __init__(self, tree: Tree | str = DEFAULT_TREE, *, max_n: int = 4, min_n: int = 1) -> None:
        super().__init__(tree, max_n=max_n, min_n=min_n)

    def look_up(self, state: LookupState, view: SlotView) -> tuple[Found, LookupState]:
        history = write_roots(state.history, view)
        text = history_rows(history, view.slots)
        query = newest_tokens(history, view, self.max_n)
        found, state = self.find_tree(replace(state, history=history), view, text, query, by_count=False)
        if self.tree.is_chain:  # a chain follows only the best match, with probability 1
            draft = found.draft
            found = found._replace(draft=replace(draft, scores=jnp.zeros_like(draft.scores)))
        return found, state
