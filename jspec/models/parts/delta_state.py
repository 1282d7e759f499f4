"""The state of a layer with the gated delta rule for every slot: a recurrent state, and records of the tokens behind.

A slot of n committed tokens has the state after its first ``n - n % EVERY`` tokens, and a record for each token behind.
`pallas_kernels.recurrent.gated_delta` has the rule and the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jspec.core.records import AcceptedPath, LayerState, PromptBatch, SlotView, TokenBatch
from jspec.models.parts.conv_state import ConvState
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.slot_rows import ancestor_mask, is_token, move_slot_rows
from pallas_kernels.recurrent.gated_delta import EVERY, DeltaTokens, Records, fold, verify

Outputs = Float[Array, "batch heads tokens value_dim"]


class _Arrays(NamedTuple):
    state: Float[Array, "slots heads key_dim value_dim"]  # float32
    keys: Float[Array, "slots key_heads rows key_dim"]
    values: Float[Array, "slots heads rows value_dim"]
    decays: Float[Array, "slots heads rows"]  # float32
    inputs: ConvState


class DeltaState(_Arrays, LayerState):
    """The states and records of one layer. The record of position p is in row ``p % rows``."""

    __slots__ = ()

    @classmethod
    def zeros(cls, pool: PoolShape, heads: tuple[int, int], dims: tuple[int, int], inputs: ConvState) -> DeltaState:
        """Make the state of a layer.

        Args:
            pool: number of slots, and of the rows that a round writes.
            heads: number of key heads and of value heads.
            dims: number of channels of a key head and of a value head.
            inputs: state of the layer's convolution.
        """
        rows = -(-(EVERY - 1 + pool.round_rows) // EVERY) * EVERY
        records = [(count, rows, dim) for count, dim in zip(heads, dims, strict=True)]
        return cls(
            jnp.zeros((pool.slots, heads[1], *dims), jnp.float32),
            *(jnp.zeros((pool.slots, *shape), pool.state_dtype) for shape in records),
            jnp.zeros((pool.slots, heads[1], rows), jnp.float32),
            inputs,
        )

    @property
    def rows(self) -> int:
        """Number of rows of records."""
        return self.decays.shape[2]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.state.shape[0]

    def specs(self, axis: str) -> DeltaState:  # type: ignore[override]
        """Divide the heads; `LayerState.specs`."""
        return DeltaState(*(P(None, axis),) * 4, self.inputs.specs(axis))  # type: ignore[arg-type]

    def window(self, slots: Int[Array, "batch"], lengths: Int[Array, "batch"]) -> Records:
        """Return the records of the committed tokens behind the states of some slots, and zeros for other rows."""
        position = lengths[:, None] // EVERY * EVERY + jnp.arange(EVERY)
        return self._at(slots, position).masked(position < lengths[:, None])

    def _at(self, slots: Int[Array, "batch"], position: Int[Array, "batch tokens"]) -> Records:
        place = slots[:, None], slice(None), position % self.rows
        of_rows = [rows.at[place].get(mode="fill", fill_value=0) for rows in (self.keys, self.values, self.decays)]
        return Records(*(jnp.swapaxes(rows, 1, 2) for rows in of_rows))

    def written(self, slots: Int[Array, "batch tokens"], position: Int[Array, "batch tokens"], new: Records) -> Self:
        """Return the state with the records of new tokens; those of slots that do not exist are dropped."""
        place = slots, slice(None), position % self.rows
        old = self.keys, self.values, self.decays
        rows = [a.at[place].set(jnp.swapaxes(b, 1, 2), mode="drop") for a, b in zip(old, new, strict=True)]
        return self._replace(**dict(zip(Records._fields, rows, strict=True)))

    @classmethod
    def commit(cls, states: Sequence[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        """Move the records of an accepted path, and fold as many as have become complete; `LayerState.commit`."""
        inputs = ConvState.commit([state.inputs for state in states], view, path)
        return [
            state._moved(view, path)._folded(view, path.counts, path.longest)._replace(inputs=of_layer)
            for state, of_layer in zip(states, inputs, strict=True)
        ]

    def _moved(self, view: SlotView, path: AcceptedPath) -> Self:
        keys, values, decays = (
            move_slot_rows(rows, view, path, axis=2) for rows in (self.keys, self.values, self.decays)
        )
        return self._replace(keys=keys, values=values, decays=decays)

    def _folded(self, view: SlotView, counts: Int[Array, "batch"], longest: int) -> Self:
        """Fold the blocks of `EVERY` records that new tokens complete; a round may complete several."""
        state, first = self.state, view.lengths // EVERY
        for index in range((EVERY - 1 + longest) // EVERY):
            is_complete = (view.lengths + counts) // EVERY > first + index

            def advance(state: Array, index: int = index, is_complete: Array = is_complete) -> Array:
                block = self._at(view.slots, ((first + index) * EVERY)[:, None] + jnp.arange(EVERY))
                old = state.at[view.slots].get(mode="fill", fill_value=0)
                slots = jnp.where(is_complete, view.slots, self.slots)
                return state.at[slots].set(fold(old, block), mode="drop")

            state = jax.lax.cond(jnp.any(is_complete), advance, lambda state: state, state)
        return self._replace(state=state)


def run_tokens(state: DeltaState, new: DeltaTokens, batch: TokenBatch) -> tuple[Outputs, DeltaState]:
    """Compute the outputs of a batch's tokens, and keep what later tokens need of them.

    Args:
        state: state of the layer.
        new: inputs of the tokens, not packed.
        batch: positions and slots of the tokens, and which see which.

    Returns:
        The outputs in float32, and the new state of the layer, whose convolution is the given one.
    """
    if isinstance(batch, PromptBatch):
        return _run_prompts(state, new, batch)
    assert batch.slots is not None, "rounds have slots"
    old = state.state.at[batch.slots].get(mode="fill", fill_value=0)
    outputs, records = verify(old, state.window(batch.slots, batch.first_row), new, ancestor_mask(batch))
    slots = jnp.where(batch.valid, batch.slots[:, None], state.slots)
    position = batch.first_row[:, None] + jnp.arange(batch.tokens.shape[1])
    return outputs, state.written(slots, position, records)


def _run_prompts(state: DeltaState, new: DeltaTokens, batch: PromptBatch) -> tuple[Outputs, DeltaState]:
    """Run the blocks of all pieces one after another; the first block of a piece takes the state of its slot."""
    tokens = batch.tokens.shape[1]
    is_used, whole = is_token(batch), batch.of_piece(batch.ends) // EVERY * EVERY
    new = DeltaTokens(*(_where(is_used, rows) for rows in new))
    is_new = (batch.starts == 0)[:, None, None, None]
    if batch.slots is None:
        begin = kept = jnp.zeros((1, *state.state.shape[1:]), jnp.float32)
    else:
        kept = jnp.where(is_new, 0, state.state.at[batch.slots].get(mode="fill", fill_value=0))
        begin = jnp.where(is_new, 0, fold(kept, state.window(batch.slots, batch.starts)))
    causal = jnp.tri(tokens, dtype=bool)[None]

    def block(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Array], Any]:
        current, kept = carry
        of_block, piece, is_first, first, end = inputs
        of_block = DeltaTokens(*(rows[None] for rows in of_block))
        current = jnp.where(is_first, begin.at[piece].get(mode="clip"), current)
        outputs, records = verify(current[None], None, of_block, causal)
        position = first + jnp.arange(tokens)
        is_before = (position < end)[None]
        until = fold(current[None], records.masked(is_before))  # the state at the last multiple of `EVERY`
        kept = kept.at[jnp.where(first < end, piece, len(kept))].set(until[0], mode="drop")
        current = fold(until, records.masked(~is_before))[0]
        return (current, kept), (outputs[0], Records(*(rows[0] for rows in records)))

    inputs = new, batch.piece, batch.is_first, batch.first_row, whole
    start = jnp.zeros(state.state.shape[1:], jnp.float32), kept
    (_, kept), (outputs, records) = jax.lax.scan(block, start, inputs)
    if batch.slots is None:
        return outputs, state
    return outputs, _kept_of_prompts(state, kept, records, batch, is_used & (batch.positions >= whole[:, None]))


def _kept_of_prompts(
    state: DeltaState, kept: Array, records: Records, batch: PromptBatch, is_kept: Array
) -> DeltaState:
    """Enter the states at the ends of pieces, and the records of the tokens behind them."""
    assert batch.slots is not None
    fresh = jnp.where(batch.starts == 0, batch.slots, state.slots)  # a new request sees no row of an earlier one
    cleared = {name: getattr(state, name).at[fresh].set(0, mode="drop") for name in Records._fields}
    state = state._replace(state=state.state.at[batch.slots].set(kept, mode="drop"), **cleared)
    slots = jnp.where(is_kept, batch.of_piece(batch.slots, state.slots)[:, None], state.slots)
    return state.written(slots, batch.positions, records)


def _where(is_used: Array, rows: Array) -> Array:
    """Return zeros for tokens that are padding, which then change no state."""
    return jnp.where(is_used.reshape(len(rows), 1, -1, *(1,) * (rows.ndim - 3)), rows, 0)
