"""Drafts the text that ends a request's reasoning once its thinking budget is used up.

After the budget the target must emit this text token by token (`jspec.sampling.thinking`). A drafter does not know it,
so a round would emit one token of it. Therefore the nodes of one path, the deepest of each tree, get the tokens of the
text instead of those of the drafter, from the node on where the budget is used up. The round accepts them all.

A forced token has probability 1 in the target, so a draft of it is exact under every accept rule, as a point mass.
Beside and below these nodes every other node is padding, as the target cannot emit its token, or as it was drafted
behind another token.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jspec.core.ancestors import ancestors, depths
from jspec.core.records import Controls, Draft


def draft_forced_text(draft: Draft, row: Controls, *, is_chain: bool = False) -> Draft:
    """Return a draft in which a path of each row has the forced text of this row, if its budget is used up there.

    Args:
        draft: drafted trees.
        row: controls of each row (`Controls.rows`).
        is_chain: whether the trees are chains, of which a look-up leaves nodes without a match as padding.
    """
    if is_chain:
        draft = replace(
            draft, parents=np.tile(np.arange(-1, draft.tokens.shape[1] - 1, dtype=np.int32), (len(draft.tokens), 1))
        )
    mask = jnp.asarray(ancestors(draft.parents))
    depth, on_path = depths(mask), _deepest_path(draft, mask)
    begin = jnp.maximum(row.thinking_budget - row.thought, 0)[:, None]  # depth of the last node before the text
    place = (row.thought - row.thinking_budget)[:, None] + depth - 1  # of a node's token in the forced text
    at_begin = on_path & (depth == begin)
    has_ended = on_path & (depth > 0) & (depth <= begin) & (draft.tokens == row.think_markers[:, 1:])
    is_due = row.used & (row.thinking_budget >= 0) & (row.thought >= 0) & ~has_ended.any(axis=1)
    is_below = jnp.any(mask & at_begin[:, None], axis=-1) & (depth > begin) & is_due[:, None]
    is_forced = is_below & on_path & (place < row.forced_size[:, None])

    def at_place(values: Array) -> Array:
        return jnp.take_along_axis(values, jnp.clip(place, 0, values.shape[1] - 1), axis=1)

    def of_begin(values: Array) -> Array:
        return jnp.sum(jnp.where(at_begin, values, 0), axis=1, keepdims=True, dtype=values.dtype)

    is_valid = of_begin(draft.valid.astype(jnp.int32)) > 0
    drawn = jnp.ones_like(draft.valid) if draft.drawn is None else draft.drawn
    return replace(
        draft,
        tokens=jnp.where(is_forced, at_place(row.forced), draft.tokens),
        valid=jnp.where(is_forced, is_valid, draft.valid & ~is_below),
        scores=jnp.where(is_forced, of_begin(draft.scores), draft.scores),
        confidence=None if draft.confidence is None else jnp.where(is_forced, 1.0, draft.confidence),
        drawn=None if draft.probs is None else drawn & ~is_forced,
    )


def _deepest_path(draft: Draft, mask: Bool[Array, "batch nodes nodes"]) -> Bool[Array, "batch nodes"]:
    """Return whether each node is on the path from the root to the first of the deepest nodes."""
    is_node = (jnp.asarray(draft.parents) >= 0) | (jax.lax.broadcasted_iota(jnp.int32, draft.tokens.shape, 1) == 0)
    deepest = jnp.argmax(jnp.where(is_node, depths(mask), -1), axis=1)
    return jnp.take_along_axis(mask, deepest[:, None, None], axis=1)[:, 0]
