"""Ancestors and depths of the nodes of a draft tree."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.core.records import AncestorMask
from pallas_kernels.attention.ancestor_bits import WORD, ancestor_bits


def ancestors(parents: Int[Array | np.ndarray, "batch nodes"]) -> AncestorMask:
    """Who stands on the way from the root to each node: ``[b, n, m]`` is True when m is n or an ancestor of n.

    Args:
        parents: -1 for the root and for padding nodes (which have themselves alone), else ``parents[i] < i``. Of a
            numpy array all is worked out while the program is traced, and numpy's comes back.
    """
    if isinstance(parents, np.ndarray):
        rows, nodes = parents.shape
        ancestor_mask = np.tile(np.eye(nodes, dtype=bool), (rows, 1, 1))
        for own, above in enumerate(parents.T):
            ancestor_mask[:, own] |= ancestor_mask[np.arange(rows), above] & (above >= 0)[:, None]
        return ancestor_mask
    node = jnp.arange(parents.shape[1], dtype=jnp.uint32)
    words = jnp.take(ancestor_bits(parents), node // WORD, axis=-1)
    return (words >> (node % WORD)) & 1 == 1


def depths(ancestor_mask: AncestorMask) -> Int[Array, "batch nodes"]:
    """Edges between the root and each node; 0 for the root and for padding nodes."""
    return jnp.asarray(_edges(ancestor_mask))


def _edges(ancestor_mask: AncestorMask) -> Int[Array | np.ndarray, "batch nodes"]:
    return ancestor_mask.sum(axis=-1, dtype=np.int32) - 1


def by_depth(ancestor_mask: AncestorMask, depth: int) -> Int[Array, "batch nodes depth1"]:
    """The node that stands at each depth on the way to each node, itself the last; -1 beyond. Padding has itself alone.

    Args:
        depth: of the tree.
    """
    step, edges = np.arange(depth + 1)[:, None], _edges(ancestor_mask)
    is_there = ancestor_mask[:, :, None] & (edges[:, None] == step)[:, None]
    is_there |= (edges == 0)[:, :, None, None] & ancestor_mask[:, :, None] & (step == 0)
    return jnp.where(is_there.any(axis=-1), is_there.argmax(axis=-1), -1).astype(jnp.int32)
