"""The newest inputs of a causal convolution for every slot, and the convolution of new tokens with them.

A token's input is in row ``position % rows`` of its slot, so those of accepted draft tokens of a chain are in place
already, and those of rejected ones are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jspec.core.records import AcceptedPath, LayerState, PromptBatch, SlotView, TokenBatch
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.slot_rows import ancestor_mask, move_slot_rows
from pallas_kernels.layers.partial_sums import sum_f32
from pallas_kernels.recurrent.records import EVERY

Inputs = Float[Array, "batch tokens channels"]


class _Rows(NamedTuple):
    inputs: Float[Array, "slots rows channels"]
    # The inputs before the last multiple of `EVERY` tokens of each slot, with which a prefix that ends there begins,
    # and those of the prefix cache; None: no states are copied.
    at_boundary: Float[Array, "slots count channels"] | None
    copies: Float[Array, "copies count channels"] | None


class ConvState(_Rows, LayerState):
    """The newest inputs of a layer's convolution."""

    __slots__ = ()

    @classmethod
    def zeros(cls, pool: PoolShape, channels: int, taps: int) -> ConvState:
        """Make the state of a layer: rows for the nodes of a round, and for the committed inputs that these read."""
        inputs, at_boundary, copies = (
            jnp.zeros((count, rows, channels), pool.state_dtype)
            for count, rows in (
                (pool.slots, pool.round_rows + taps - 1),
                (pool.slots, taps - 1),
                (pool.copies, taps - 1),
            )
        )
        return cls(inputs, at_boundary, copies) if pool.copies else cls(inputs, None, None)

    def specs(self, axis: str) -> P:
        """Divide the channels; `LayerState.specs`."""
        return P(None, None, axis)

    @classmethod
    def commit(cls, states: Sequence[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        """Move the inputs of an accepted path; `LayerState.commit`."""
        moved = [state._replace(inputs=move_slot_rows([state.inputs], view, path)[0]) for state in states]
        return cls.with_boundaries(moved, view, path)

    @classmethod
    def with_boundaries(cls, moved: list[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        """Keep the inputs before the last multiple of `EVERY` tokens that a round has reached, if states are copied.

        Args:
            moved: states of all layers whose rows have moved.
            view: the slots of the batch, before their lengths advance.
            path: the tokens that the round commits.
        """
        if not moved[0].num_copies:
            return moved
        position = (view.lengths + path.counts) // EVERY * EVERY
        slots = jnp.where(position > view.lengths, view.slots, len(moved[0].inputs))
        keep = partial(cls._kept, slots=slots, position=position)
        return jax.lax.cond(jnp.any(position > view.lengths), lambda of: list(map(keep, of)), lambda of: of, moved)

    def _kept(self, slots: Int[Array, "batch"], position: Int[Array, "batch"]) -> Self:
        """Keep the inputs before a multiple of `EVERY` tokens that the tokens of some slots have reached."""
        assert self.at_boundary is not None
        rows = _committed(self, slots, position, self.at_boundary.shape[1])
        return self._replace(at_boundary=self.at_boundary.at[slots].set(rows, mode="drop"))

    @property
    def num_copies(self) -> int:
        return 0 if self.copies is None else self.copies.shape[0]

    def saved(self, slot: Int[Array, ""], entry: Int[Array, ""]) -> Self:
        """Keep a slot's inputs at a multiple of `EVERY` tokens; `LayerState.saved`."""
        assert self.copies is not None and self.at_boundary is not None
        return self._replace(copies=self.copies.at[entry].set(self.at_boundary[slot]))

    def loaded(self, slot: Int[Array, ""], entry: Int[Array, ""], position: Int[Array, ""]) -> Self:
        """Enter the inputs before a multiple of `EVERY` tokens; `LayerState.loaded`."""
        assert self.copies is not None and self.at_boundary is not None
        rows = self.copies[entry]
        place = (position - len(rows) + jnp.arange(len(rows))) % self.inputs.shape[1]
        return self._replace(
            inputs=self.inputs.at[slot, place].set(rows), at_boundary=self.at_boundary.at[slot].set(rows)
        )


def taps_of(
    state: ConvState, x: Inputs, taps: int, batch: TokenBatch
) -> tuple[Float[Array, "batch tokens taps channels"], ConvState]:
    """Return the inputs that the convolution of each new token adds up, and keep those that later tokens need.

    Args:
        state: the newest inputs of every slot.
        x: inputs of the batch's tokens, not packed.
        taps: number of inputs of a token, the last one its own. Before a text there are zeros.
        batch: positions and slots of the tokens, and which see which.

    Returns:
        The inputs, and the state with the new ones.
    """
    # Rows are written after the committed ones have been read: else they are copied.
    x = x.astype(state.inputs.dtype)
    if isinstance(batch, PromptBatch):
        kept = _newest_of_pieces(x, batch, taps - 1)
        past, kept = jax.lax.optimization_barrier((batch.of_piece(_past(state, batch, taps - 1)), kept))
        earlier, state = _of_prompts(past, x, batch, taps), _written_of_prompts(state, x, kept, batch)
    else:
        past, x = jax.lax.optimization_barrier((_past(state, batch, taps - 1), x))
        earlier, state = _of_nodes(past, x, batch, taps), _written(state, x, batch)
    return jnp.stack([*earlier[::-1], x], axis=2), state  # of each token: the inputs ..., 2, 1, 0 tokens before it


def convolved(
    inputs: Float[Array, "*rows taps channels"], weight: Float[Array, "channels taps"]
) -> Float[Array, "*rows channels"]:
    """Return the sums of a causal convolution in float32, each channel by itself."""
    return sum_f32(inputs[..., tap, :] * weight[:, tap].astype(jnp.float32) for tap in range(weight.shape[1]))


def _committed(
    state: ConvState, slots: Int[Array, "sequences"], lengths: Int[Array, "sequences"], count: int
) -> Float[Array, "sequences count channels"]:
    """Return the newest committed inputs, the oldest of them first; zeros before the text."""
    positions = lengths[:, None] - count + jnp.arange(count)
    inputs = state.inputs.at[slots[:, None], positions % state.inputs.shape[1]].get(mode="fill", fill_value=0)
    return jnp.where((positions >= 0)[..., None], inputs, 0)


def _past(state: ConvState, batch: TokenBatch, count: int) -> Float[Array, "sequences count channels"]:
    """Return the committed inputs before the tokens of each sequence, or of each piece of a prompt."""
    if isinstance(batch, PromptBatch):
        if batch.slots is None:
            return jnp.zeros((len(batch.starts), count, state.inputs.shape[-1]), state.inputs.dtype)
        return _committed(state, batch.slots, batch.starts, count)
    assert batch.slots is not None, "rounds have slots"
    return _committed(state, batch.slots, batch.first_row, count)


def _of_nodes(past: Array, x: Inputs, batch: TokenBatch, taps: int) -> list[Array]:
    count = taps - 1
    every = jnp.concatenate([past, x], axis=1)
    if batch.bits is None and batch.paths is None:
        return [every[:, count - age : count - age + x.shape[1]] for age in range(1, taps)]
    places = input_places(batch, taps)
    return [jnp.take_along_axis(every, places[..., age, None], axis=1) for age in range(count)]


def input_places(batch: TokenBatch, taps: int) -> Int[Array, "batch tokens earlier"]:
    """Return where the inputs 1, 2, ... tokens before each node of a round are.

    The first ``taps - 1`` places are those of the newest committed inputs, the oldest first, then come the nodes.
    """
    count, is_seen = taps - 1, ancestor_mask(batch)
    depth = batch.positions - batch.first_row[:, None]
    places = []
    for age in range(1, taps):
        node = jnp.argmax(is_seen & (depth[:, None, :] == (depth - age)[:, :, None]), axis=-1)
        places.append(jnp.where(depth >= age, count + node, jnp.clip(count + depth - age, 0, count - 1)))
    return jnp.stack(places, axis=-1)


def _of_prompts(past: Array, x: Inputs, batch: PromptBatch, taps: int) -> list[Array]:
    """Return the inputs 1, 2, ... tokens before each token, if ``past`` has those before the piece of each block.

    The blocks of a piece are consecutive, so a token follows the one before it among all rows of the batch. The first
    block of a piece, if it is not the last one, has at least ``taps - 1`` tokens.
    """
    flat, token = x.reshape(-1, x.shape[-1]), jnp.arange(x.shape[1])
    row = jnp.arange(len(flat)).reshape(x.shape[:2])
    earlier = []
    for age in range(1, taps):
        # Clamped rows, which the condition excludes, cost less than branches.
        before = flat.at[jnp.maximum(row - age, 0)].get(mode="promise_in_bounds")
        older = past[:, jnp.minimum(taps - 1 - age + token, taps - 2)]
        is_older = (batch.is_first[:, None] & (token < age))[..., None]
        earlier.append(jnp.where(is_older, older, before))
    return earlier


def _written(state: ConvState, x: Inputs, batch: TokenBatch) -> ConvState:
    """Return the state with the inputs of the nodes of a round."""
    assert batch.slots is not None, "rounds have slots"
    slots, rows = state.inputs.shape[:2]
    position = batch.first_row[:, None] + jnp.arange(x.shape[1])
    place = jnp.where(batch.valid, batch.slots[:, None], slots), position % rows
    return state._replace(inputs=state.inputs.at[place].set(x, mode="drop"))


def _newest_of_pieces(x: Inputs, batch: PromptBatch, count: int) -> Float[Array, "pieces count channels"]:
    """Return the last inputs of each piece, undefined before its first one."""
    row = batch.newest[:, None] - jnp.arange(count)[::-1]
    return x.reshape(-1, x.shape[-1])[jnp.maximum(row, 0)]


def _written_of_prompts(
    state: ConvState, x: Inputs, kept: Float[Array, "pieces count channels"], batch: PromptBatch
) -> ConvState:
    """Return the state with the last inputs of each piece."""
    if batch.slots is None:
        return state
    (slots, rows), count = state.inputs.shape[:2], kept.shape[1]
    if state.num_copies:
        state = state._replace(at_boundary=_at_boundary_of_prompts(state, x, batch, count))
    position = batch.ends[:, None] - 1 - jnp.arange(count)[::-1]
    place = jnp.where(position >= batch.starts[:, None], batch.slots[:, None], slots), position % rows
    return state._replace(inputs=state.inputs.at[place].set(kept, mode="drop"))


def _at_boundary_of_prompts(
    state: ConvState, x: Inputs, batch: PromptBatch, count: int
) -> Float[Array, "slots count channels"]:
    """Return the inputs before the last multiple of `EVERY` tokens of each slot after pieces of prompts."""
    assert batch.slots is not None and state.at_boundary is not None
    position, start = batch.ends // EVERY * EVERY, batch.starts[:, None]
    wanted = position[:, None] - count + jnp.arange(count)
    of_piece = x.reshape(-1, x.shape[-1]).at[batch.first[:, None] + wanted - start].get(mode="clip")
    past = _committed(state, batch.slots, batch.starts, count)
    older = jnp.take_along_axis(past, jnp.clip(wanted - start + count, 0, count - 1)[..., None], axis=1)
    rows = jnp.where((wanted >= start)[..., None], of_piece, older)
    is_new = (position > batch.starts) | (batch.starts == 0)
    slots = jnp.where(is_new, batch.slots, len(state.at_boundary))
    return state.at_boundary.at[slots].set(rows, mode="drop")
