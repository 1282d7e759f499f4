"""The substitution of a round's nodes: each reads the corrected values of its ancestors, which come before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

BLOCK = 8  # nodes among whose columns a node's is searched


def substituted(group, tables, rest, outputs, count):
    """Returns the outputs and corrected values of one block of nodes after another, pairs of [`HEIGHT`, `BLOCK`].

    Args:
        group: the warpgroup.
        tables: what the value of each node counts in those of others, then in their outputs [2 nodes or more, nodes].
        rest: values of the nodes without what they read of others [`HEIGHT`, nodes], a multiple of `BLOCK`.
        outputs: outputs of the nodes without what they read of others.
        count: number of nodes that may be tokens.
    """
    nodes, blocks = tables.shape[1], []
    for first in range(0, nodes, BLOCK):
        columns = pl.ds(first, nodes - first)  # nodes before do not read those of the block

        def take(node, carry, first=first, columns=columns):
            rest, outputs = carry
            value = group.column(rest, node - first, BLOCK).astype(group.dtype).astype(jnp.float32)
            weights, scores = (group.per_column(tables.at[row, columns]) for row in (node, nodes + node))
            return rest - value * weights, outputs + value * scores

        rest, outputs = jax.lax.fori_loop(first, min(first + BLOCK, count), take, (rest, outputs))
        blocks.append((outputs[:, :BLOCK], rest[:, :BLOCK].astype(group.dtype)))
        if first + BLOCK < nodes:
            rest, outputs = rest[:, BLOCK:], outputs[:, BLOCK:]
    return blocks
