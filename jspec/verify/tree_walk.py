"""Functions of draft trees that the accept rules share, such as siblings and the longest accepted path."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.records import Draft


class AcceptResult(NamedTuple):
    """The result of an accept function: the last accepted node, and the probabilities of the token after it."""

    last_node: Int[Array, "batch"]  # the last accepted node
    residual_probs: Float[Array, "batch vocab"]  # probabilities of the token after the last accepted node
    accept_probs: Float[Array, "batch nodes"]  # acceptance probability of each tried node; it may exceed 1


def candidates(draft: Draft) -> Bool[Array, "batch nodes"]:
    """Return whether a rule may accept each node; False for the root, padding nodes and nodes beyond the draft cap."""
    return draft.valid & (draft.parents >= 0)


def siblings(draft: Draft) -> Bool[Array, "batch nodes nodes"]:
    """Return the sibling mask; ``[b, n, m]`` is True if n and m are different `candidates` with the same parent."""
    is_candidate = candidates(draft)
    same = draft.parents[:, :, None] == draft.parents[:, None]
    other = ~jnp.eye(draft.parents.shape[1], dtype=bool)
    return same & other & is_candidate[:, :, None] & is_candidate[:, None]


def ranks(draft: Draft) -> Int[Array, "batch nodes"]:
    """Return how many siblings have a lower node index than each node; 0 for the root and for padding nodes."""
    return jnp.sum(jnp.tril(siblings(draft)), axis=-1, dtype=jnp.int32)


def child_probs(probs: Float[Array, "batch nodes vocab"], draft: Draft) -> Float[Array, "batch nodes"]:
    """Return the probability of each node's token after the node's parent; undefined for the root.

    Args:
        probs: probabilities of the token after each node.
    """
    row = jnp.arange(probs.shape[0])[:, None]
    return probs[row, jnp.maximum(draft.parents, 0), draft.tokens]


def at_node(rows: Array, node: Int[Array, "batch"]) -> Array:
    """Gather the entry ``rows[b, node[b]]`` for each batch row b; ``rows`` is [batch, nodes, ...]."""
    index = node.reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]
