"""The geometry of drafted trees that all accept rules share: ancestors, siblings, the walk from the root."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.records import Draft, Reach
from pallas_kernels.ancestor_bits import WORD, ancestor_bits


class Ruling(NamedTuple):
    """What a sampling rule makes of a draft; the last token is still to be drawn."""

    best: Int[Array, "batch"]  # the last accepted node
    last_law: Float[Array, "batch vocab"]  # of the token behind it
    accept_probs: Float[Array, "batch nodes"]  # of each node in its turn, may exceed 1; else without meaning


def ancestors(parents: Int[Array | np.ndarray, "batch nodes"]) -> Reach:
    """Who stands on the way from the root to each node: ``[b, n, m]`` is True when m is n or an ancestor of n.

    Args:
        parents: -1 for the root and for padding nodes (which have themselves alone), else ``parents[i] < i``. Of a
            numpy array all is worked out while the program is traced, and numpy's comes back.
    """
    if isinstance(parents, np.ndarray):
        rows, nodes = parents.shape
        reach = np.tile(np.eye(nodes, dtype=bool), (rows, 1, 1))
        for own, above in enumerate(parents.T):
            reach[:, own] |= reach[np.arange(rows), above] & (above >= 0)[:, None]
        return reach
    node = jnp.arange(parents.shape[1], dtype=jnp.uint32)
    words = jnp.take(ancestor_bits(parents), node // WORD, axis=-1)
    return (words >> (node % WORD)) & 1 == 1


def depths(reach: Reach) -> Int[Array, "batch nodes"]:
    """Edges between the root and each node; 0 for the root and for padding nodes."""
    return jnp.asarray(_edges(reach))


def _edges(reach: Reach) -> Int[Array | np.ndarray, "batch nodes"]:
    return reach.sum(axis=-1, dtype=np.int32) - 1


def by_depth(reach: Reach, depth: int) -> Int[Array, "batch nodes depth1"]:
    """The node that stands at each depth on the way to each node, itself the last; -1 beyond. Padding has itself alone.

    Args:
        depth: of the tree.
    """
    step, edges = np.arange(depth + 1)[:, None], _edges(reach)
    is_there = reach[:, :, None] & (edges[:, None] == step)[:, None]
    is_there |= (edges == 0)[:, :, None, None] & reach[:, :, None] & (step == 0)
    return jnp.where(is_there.any(axis=-1), is_there.argmax(axis=-1), -1).astype(jnp.int32)


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


def walk(
    matches: Bool[Array, "batch nodes"], draft: Draft, reach: Reach
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"]]:
    """Keep the nodes whose whole way from the root matches; the root stands always, a padding node never.

    Returns:
        Nodes that stand, and the deepest of them.
    """
    is_root = jnp.arange(matches.shape[1]) == 0
    matches = (matches & (draft.parents >= 0)) | is_root
    accepted = jnp.all(matches[:, None] | ~reach, axis=-1)
    best = jnp.argmax(jnp.where(accepted, depths(reach), -1), axis=-1).astype(jnp.int32)
    return accepted, best


def at_node(rows: Array, node: Int[Array, "batch"]) -> Array:
    """``rows[b, node[b]]``, for rows of any rank from 2 on."""
    index = node.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]
