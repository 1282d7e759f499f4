"""Keeps the most probable nodes of a drafted tree, so that a round verifies fewer nodes than it drafts.

`jspec.step.budget` shares nodes between the rows of a batch; here each row keeps the same number of nodes.

The choice depends on the drafted tokens. If these were drawn at random, unlikely tokens would be verified too seldom,
and the output would not have the target's distribution. So the tree must follow from the committed text (and under
"coupled" from the target's noise) alone, as a dynamic tree does under every accept rule.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.core.records import Draft
from pallas_kernels.sampling.best_tree import choose_nodes


def keep_best_nodes(draft: Draft, nodes: int, implementation: Any = "auto") -> Draft:
    """Return a drafted tree with its root and its nodes of highest score, in the order of their numbers.

    Args:
        draft: drafted trees, in which no node has a higher score than its parent.
        nodes: number of nodes to keep, the root included, at most as many as the trees have.
        implementation: as in `pallas_kernels.attention.paged_attention`.

    Raises:
        ValueError: the draft was drawn at random (``draft.probs``).
    """
    if draft.probs is not None:
        raise ValueError(
            'Beside: nodes: expected accept="coupled", "multi_candidate" or "typical", or a dynamic tree, because a '
            "choice among drawn tokens changes the output; pass nodes=None or another accept rule"
        )
    is_usable = draft.valid & ~jnp.isnan(draft.scores)
    scores = jnp.where(is_usable, draft.scores, -jnp.inf)[:, 1:]
    above = jnp.asarray(draft.parents)[:, 1:] - 1
    chosen, parents = choose_nodes(scores, above, nodes - 1, implementation=implementation)
    places = jnp.pad(1 + chosen, ((0, 0), (1, 0)))

    def take(field: Array | None) -> Array | None:
        return None if field is None else jnp.take_along_axis(field, places, axis=1)

    fields = {name: take(getattr(draft, name)) for name in ("tokens", "scores", "confidence", "from_lookup")}
    valid = jnp.take_along_axis(is_usable, places, axis=1)
    is_node = jax.lax.broadcasted_iota(jnp.int32, valid.shape, 1) > 0
    parents = jnp.where(valid & is_node, jnp.pad(parents, ((0, 0), (1, 0))), -1)
    return draft.replace(**fields, parents=parents, valid=valid)  # type: ignore[attr-defined]
