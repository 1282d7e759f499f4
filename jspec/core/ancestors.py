"""Computes ancestor masks, node depths and paths of draft trees."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jspec.core.records import AncestorMask, Draft
from pallas_kernels.attention.ancestor_bits import WORD, ancestor_bits


def ancestors(parents: Int[Array | np.ndarray, "batch nodes"]) -> AncestorMask:
    """Return the ancestor mask of each row's tree, bool [batch, nodes, nodes].

    Element ``[b, n, m]`` is True if node m is node n itself or an ancestor of node n in the tree of row b.

    Args:
        parents: parent of each node, ``parents[b, i] < i``; -1 for the root and for padding nodes. If this is a numpy
            array, the mask is a numpy array too, computed while the program is traced.
    """
    if isinstance(parents, np.ndarray):
        rows, nodes = parents.shape
        ancestor_mask = np.tile(np.eye(nodes, dtype=bool), (rows, 1, 1))
        for node, parent in enumerate(parents.T):
            ancestor_mask[:, node] |= ancestor_mask[np.arange(rows), parent] & (parent >= 0)[:, None]
        return ancestor_mask
    bit = jnp.arange(parents.shape[1], dtype=jnp.uint32)
    words = jnp.take(ancestor_bits(parents), bit // WORD, axis=-1)
    return (words >> (bit % WORD)) & 1 == 1


def depths(ancestor_mask: AncestorMask) -> Int[Array, "batch nodes"]:
    """Return the depth of each node in its tree; 0 for the root and for padding nodes."""
    return jnp.asarray(_depths(ancestor_mask))


def _depths(ancestor_mask: AncestorMask) -> Int[Array | np.ndarray, "batch nodes"]:
    return ancestor_mask.sum(axis=-1, dtype=np.int32) - 1


def by_depth(ancestor_mask: AncestorMask, depth: int) -> Int[Array, "batch nodes depth1"]:
    """Return the path to each node: its ancestors from the root down, then the node itself, then -1.

    The path of a padding node contains only the padding node.

    Args:
        ancestor_mask: ancestors of each node, as `ancestors` returns them.
        depth: depth of the tree; a path has ``depth + 1`` entries.
    """
    step, node_depth = np.arange(depth + 1)[:, None], _depths(ancestor_mask)
    is_at_depth = ancestor_mask[:, :, None] & (node_depth[:, None] == step)[:, None]
    is_at_depth |= (node_depth == 0)[:, :, None, None] & ancestor_mask[:, :, None] & (step == 0)
    return jnp.where(is_at_depth.any(axis=-1), is_at_depth.argmax(axis=-1), -1).astype(jnp.int32)


def longest_accepted_path(
    matches: Bool[Array, "batch nodes"], draft: Draft, ancestor_mask: AncestorMask
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"]]:
    """Accept each node that matches and whose ancestors all match.

    Args:
        matches: whether each node passes the rule's test; the root counts as True, a padding node as False.

    Returns:
        Whether each node is accepted, and the deepest accepted node [batch].
    """
    is_root = jnp.arange(matches.shape[1]) == 0
    matches = (matches & (draft.parents >= 0)) | is_root
    accepted = jnp.all(matches[:, None] | ~ancestor_mask, axis=-1)
    deepest = jnp.argmax(jnp.where(accepted, depths(ancestor_mask), -1), axis=-1).astype(jnp.int32)
    return accepted, deepest
