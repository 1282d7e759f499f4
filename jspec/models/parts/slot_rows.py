"""Rows that a layer keeps for each slot: the row of a position, and what a commit moves.

The row of position p is ``p % rows``. The rows of committed tokens that are still read, those of the root and of the
nodes of a round are different ones, and a round's rows are those of its first row and the following positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jspec.core.records import AcceptedPath, PromptBatch, SlotView, TokenBatch
from pallas_kernels.attention.ancestor_bits import WORD
from pallas_kernels.recurrent.slot_rows import move_rows


def move_slot_rows(arrays: Sequence[Array], view: SlotView, path: AcceptedPath) -> list[Array]:
    """Move the rows of an accepted path to the places of committed tokens.

    Args:
        arrays: rows of all slots of one layer [slots, rows, ...], whose rows and channels may differ.
        view: the slots of the batch, before their lengths advance.
        path: the rows to move.
    """
    if path.source is None:
        return list(arrays)
    assert path.moved is not None
    first, depths = view.lengths[:, None], jnp.arange(path.source.shape[1])
    implementation = view.numerics.options["implementation"]
    return move_rows(arrays, view.slots, first + path.source, first + depths, path.moved, implementation=implementation)


def ancestor_mask(batch: TokenBatch) -> Bool[Array, "batch tokens tokens"]:
    """Return which tokens of its sequence each token follows, itself included."""
    count = batch.tokens.shape[1]
    if batch.bits is not None:
        bit = jnp.arange(count, dtype=jnp.uint32)
        words = jnp.take(batch.bits, bit // WORD, axis=-1)
        return (words >> (bit % WORD)) & 1 == 1
    if batch.paths is not None:
        return (batch.paths[..., None] == jnp.arange(count)).any(axis=2)
    return jnp.broadcast_to(jnp.tri(count, dtype=bool), (len(batch.tokens), count, count))


def is_token(batch: PromptBatch) -> Bool[Array, "batch tokens"]:
    """Return which rows of a prefill are tokens of a piece, whether or not their cache rows exist already."""
    is_in_block = batch.positions == batch.first_row[:, None] + jnp.arange(batch.positions.shape[1])
    return batch.is_used & is_in_block & (batch.piece < len(batch.starts))[:, None]
