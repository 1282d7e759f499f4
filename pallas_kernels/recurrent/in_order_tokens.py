"""The gated delta rule token after token for rounds, for folds and for prompts, by `in_order_kernel`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layers.hopper import multiprocessors
from pallas_kernels.recurrent.in_order_kernel import (
    GROUP,
    Sequences,
    TokenRows,
    TreePaths,
    advance,
    block_for,
    unsupported,
)
from pallas_kernels.recurrent.record_ring import RecordRing, block_of
from pallas_kernels.recurrent.records import EVERY, DeltaTokens, Records, SlotStates

Outputs = Float[Array, "batch heads tokens value_dim"]


def has_kernel(ring: RecordRing) -> bool:
    """Return whether the kernel runs on the device, and has a form for heads of this size."""
    return multiprocessors() is not None and unsupported(ring.keys.shape[3], ring.values.shape[3]) is None


def fold(
    state: SlotStates, ring: RecordRing, slots: Int[Array, "batch"], first: Int[Array, "batch"], *, interpret: Any
) -> SlotStates:
    """Advance states by blocks of records; arguments and result are those of `delta_rounds.fold_round`."""
    nothing = jnp.zeros_like(slots)
    every = jnp.full_like(slots, EVERY)
    sequences = _sequences(slots, nothing, first, every, nothing, nothing, nothing)
    keys, values = (jnp.zeros((1, *of.shape[2:]), of.dtype) for of in ring[:2])
    decays = _behind(ring, slots, first)
    rows = TokenRows(keys, keys, values, decays[0, :1], decays[0, :1])
    _, _, folded = advance(state, ring, decays, sequences, rows, None, interpret=interpret)
    assert folded is not None
    return folded


def verify(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    new: DeltaTokens,
    seen: Bool[Array, "batch tokens tokens"],
    *,
    interpret: Any,
) -> tuple[Outputs, Records]:
    """Compute the tokens of a round; arguments and result are those of `delta_rounds.verify_round`."""
    batch, _, count = new.decays.shape
    first, nothing = jnp.arange(batch) * count, jnp.zeros_like(slots)
    used = jnp.minimum(slots, len(state) - 1)
    counts = jnp.full_like(slots, count)
    sequences = _sequences(used, nothing, lengths, lengths % EVERY, first, counts, nothing)
    decays = _behind(ring, slots, lengths)
    block = block_for(count, state.shape[3], new.keys.dtype)
    paths = paths_of(seen, block) if count > 1 else None
    outputs, corrected, _ = advance(
        state, ring, decays, sequences, rows_of(new), paths, block=block, keeps=False, interpret=interpret
    )
    return _results(outputs, corrected, new)


class Pieces(NamedTuple):
    """The pieces of prompts that a prefill runs."""

    slots: Int[Array, "pieces"] | None  # distinct, but for those that do not exist; None: pieces begin with no text
    starts: Int[Array, "pieces"]  # position of the first token
    ends: Int[Array, "pieces"]
    first: Int[Array, "pieces"]  # row of the first token among all rows of the batch


def run_pieces(
    state: SlotStates, ring: RecordRing, new: DeltaTokens, pieces: Pieces, *, interpret: Any
) -> tuple[Outputs, Records, SlotStates]:
    """Run pieces of prompts.

    Args:
        state: states of all slots.
        ring: records of all slots.
        new: inputs of the tokens; those of a piece are in successive rows.
        pieces: the pieces.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.

    Returns:
        The outputs in float32 and the records of all tokens, undefined in rows without a token, and the states of all
        slots, those of the pieces after their last multiple of `EVERY` tokens.
    """
    _, starts, ends, first = pieces
    is_new, records, whole = starts == 0, starts % EVERY, ends // EVERY * EVERY
    before, slots = state, pieces.slots
    if slots is None:
        before, slots = jnp.zeros((1, *state.shape[1:]), state.dtype), jnp.zeros_like(starts)
        is_new, records = jnp.ones_like(is_new), jnp.zeros_like(records)
    decays = _behind(ring, slots, starts)
    slots = jnp.where(starts < ends, slots, len(before))
    kept = jnp.where(whole >= starts, whole - starts, -1)
    sequences = _sequences(slots, is_new, starts, records, first, ends - starts, kept)
    keeps = pieces.slots is not None
    outputs, corrected, after = advance(
        before, ring, decays, sequences, rows_of(new), None, keeps=keeps, interpret=interpret
    )
    return *_results(outputs, corrected, new), state if after is None else after


def rows_of(new: DeltaTokens) -> TokenRows:
    """Return the rows of tokens."""
    rates = jnp.full_like(new.decays, -1) if new.rates is None else new.rates
    queries, keys, values = (jnp.swapaxes(of, 1, 2).reshape(-1, of.shape[1], of.shape[3]) for of in new[:3])
    return TokenRows(queries, keys, values, *(_by_head(of).reshape(len(keys), -1) for of in (new.decays, rates)))


def _behind(
    ring: RecordRing, slots: Int[Array, "batch"], position: Int[Array, "batch"]
) -> Float[Array, "batch every padded"]:
    """Return the log decays of the blocks of records that have some positions."""
    return _by_head(ring.decays_at(slots, block_of(position)))


def _by_head(numbers: Float[Array, "batch heads tokens"]) -> Float[Array, "batch tokens padded"]:
    return jnp.pad(jnp.swapaxes(numbers, 1, 2), ((0, 0), (0, 0), (0, -numbers.shape[1] % GROUP)))


def paths_of(seen: Bool[Array, "batch tokens tokens"], block: int) -> TreePaths:
    """Return the ancestors of the tokens of trees, given which tokens each token follows, itself included."""
    count = seen.shape[1]
    depths = jnp.maximum(jnp.sum(seen, axis=2, dtype=jnp.int32) - 1, 0)
    index = jnp.arange(count, dtype=jnp.int32)
    is_ancestor = seen[:, :, None] & (depths[:, None, None] == index[:, None])  # [batch, token, depth, ancestor]
    ancestors = jnp.sum(jnp.where(is_ancestor, index, 0), axis=3)
    follows = jnp.any(seen & jnp.eye(count, k=-1, dtype=bool), axis=2)  # the token in the row before
    is_child = follows & (depths == jnp.pad(depths, ((0, 0), (1, 0)))[:, :-1] + 1)
    counts = jnp.stack([depths, jnp.where(is_child, depths, 0)], axis=1)
    return TreePaths(jnp.pad(counts, ((0, 0), (0, 0), (0, block - count))), ancestors.reshape(-1, count))


def _sequences(*fields: Array) -> Sequences:
    return Sequences(*(of.astype(jnp.int32) for of in fields))


def _results(
    outputs: Float[Array, "rows heads value_dim"], corrected: Float[Array, "rows heads value_dim"], new: DeltaTokens
) -> tuple[Outputs, Records]:
    # Records are written after the kernel has read the ring: else the ring is copied.
    outputs, corrected, keys, decays = jax.lax.optimization_barrier((outputs, corrected, new.keys, new.decays))
    outputs, corrected = (jnp.swapaxes(of.reshape(len(keys), -1, *of.shape[1:]), 1, 2) for of in (outputs, corrected))
    return outputs, Records(keys, corrected.astype(new.values.dtype), decays)
