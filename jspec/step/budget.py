"""Selects the draft nodes that a round with a budget verifies.

Such a round verifies fewer nodes than its batch drafted: those of highest probability among all rows of the batch. So a
row whose draft is likely to be accepted gets more nodes than a row whose draft is not (arXiv:2607.05147 gives each
request a draft length in this way).

The selection depends on the drafted tokens. Therefore it leaves the output unchanged only under an accept rule whose
output does not depend on the draft (`jspec.core.accept_rule.AcceptRule.is_draft_independent`).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jspec.core.packing import NO_ROW, Packing
from jspec.core.records import Draft


def apply_budget(
    draft: Draft, active: Bool[Array, "batch"], count: int, *, is_chain: bool = False
) -> tuple[Draft, Packing]:
    """Select the nodes to verify: the roots of active rows, then the nodes whose paths are most probable.

    The probability of a node's path is the drafter's own. In a chain it is the product of the drafter's confidences, if
    the drafter has a confidence head; siblings in a tree have the same confidence. A path is never more probable than
    that of the node's parent, and of equal nodes the shallower one is selected, so all ancestors of a selected node are
    selected.

    Args:
        draft: drafted trees.
        active: whether each row is active.
        count: number of nodes to select in the whole batch.
        is_chain: whether the trees are chains.

    Returns:
        The draft with all other nodes marked as invalid, and the packing of the selected nodes.
    """
    with jax.named_scope("select"):
        batch, nodes = draft.tokens.shape
        scores = draft.scores
        if is_chain and draft.confidence is not None:
            scores = jnp.cumsum(jnp.log(draft.confidence), axis=1)
        usable = draft.valid & active[:, None] & ~jnp.isnan(scores)
        scores = jnp.where(usable, scores, -jnp.inf).at[:, 0].set(jnp.where(active, jnp.inf, -jnp.inf))
        by_node = scores.T.reshape(-1)  # node after node: a node comes before its descendants in any row
        best = jnp.argsort(-by_node, stable=True)[:count].astype(jnp.int32)
        rows = jnp.sort(best % batch * nodes + best // batch)
        places = jnp.full(batch * nodes, NO_ROW, jnp.int32).at[rows].set(jnp.arange(count, dtype=jnp.int32))
        places = places.reshape(batch, nodes)
        return replace(draft, valid=draft.valid & (places < count)), Packing(rows=rows, places=places)
