"""The geometry of drafted trees that all accept rules share: ancestors, siblings, the walk from the root."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.ancestors import depths
from jspec.core.records import AncestorMask, Draft


class AcceptResult(NamedTuple):
    """What a sampling rule makes of a draft; the last token is still to be drawn."""

    best: Int[Array, "batch"]  # the last accepted node
    last_law: Float[Array, "batch vocab"]  # of the token behind it
    accept_probs: Float[Array, "batch nodes"]  # of each node in its turn, may exceed 1; else without meaning


def candidates(draft: Draft) -> Bool[Array, "batch nodes"]:
    """The nodes that a rule may accept: neither the root nor padding nor cut off."""
    return draft.valid & (draft.parents >= 0)


def siblings(draft: Draft) -> Bool[Array, "batch nodes nodes"]:
    """``[b, n, m]`` is True when m and n, another candidate, are children of one node."""
    is_candidate = candidates(draft)
    same = draft.parents[:, :, None] == draft.parents[:, None]
    other = ~jnp.eye(draft.parents.shape[1], dtype=bool)
    return same & other & is_candidate[:, :, None] & is_candidate[:, None]


def ranks(draft: Draft) -> Int[Array, "batch nodes"]:
    """Siblings that come before each node; 0 for the root and for padding nodes."""
    return jnp.sum(jnp.tril(siblings(draft)), axis=-1, dtype=jnp.int32)


def child_probs(law: Float[Array, "batch nodes vocab"], draft: Draft) -> Float[Array, "batch nodes"]:
    """The probability of each node's token under the law at its parent; the root's own is without meaning."""
    row = jnp.arange(law.shape[0])[:, None]
    return law[row, jnp.maximum(draft.parents, 0), draft.tokens]


def longest_accepted_path(
    matches: Bool[Array, "batch nodes"], draft: Draft, ancestor_mask: AncestorMask
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"]]:
    """Keep the nodes whose whole way from the root matches; the root stands always, a padding node never.

    Returns:
        Nodes that stand, and the deepest of them.
    """
    is_root = jnp.arange(matches.shape[1]) == 0
    matches = (matches & (draft.parents >= 0)) | is_root
    accepted = jnp.all(matches[:, None] | ~ancestor_mask, axis=-1)
    best = jnp.argmax(jnp.where(accepted, depths(ancestor_mask), -1), axis=-1).astype(jnp.int32)
    return accepted, best


def at_node(rows: Array, node: Int[Array, "batch"]) -> Array:
    """``rows[b, node[b]]``, for rows of any rank from 2 on."""
    index = node.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]
