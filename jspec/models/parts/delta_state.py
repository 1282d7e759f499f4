"""The state of a layer with the gated delta rule for every slot: a recurrent state, and records of the tokens behind.

A slot of n committed tokens has the state after its first ``n - n % EVERY`` tokens, and a record for each token behind.
`pallas_kernels.recurrent.gated_delta` has the rule and the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jspec.core.prompt_blocks import BLOCK
from jspec.core.records import AcceptedPath, LayerState, PromptBatch, SlotView, TokenBatch
from jspec.models.parts import delta_prompts
from jspec.models.parts.conv_state import ConvState
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.slot_rows import ancestor_mask, is_token, move_slot_rows
from pallas_kernels.dispatch import HOPPER, Kernel, dispatch
from pallas_kernels.recurrent import in_order_tokens
from pallas_kernels.recurrent.delta_rounds import fold_round, has_kernel, verify_and_write
from pallas_kernels.recurrent.gated_delta import chunk_of, fold, run_chunk, verify
from pallas_kernels.recurrent.inputs_kernel import BLOCK as KEY_CHANNELS
from pallas_kernels.recurrent.record_ring import RecordRing, states_of
from pallas_kernels.recurrent.records import EVERY, DeltaTokens, Records

Outputs = Float[Array, "batch heads tokens value_dim"]


class _StateAndRecords(NamedTuple):
    state: Float[Array, "slots heads value_dim key_dim"]  # float32
    records: RecordRing
    inputs: ConvState
    copies: Float[Array, "copies heads value_dim key_dim"] | None  # states of the prefix cache; None: there are none


class DeltaState(_StateAndRecords, LayerState):
    """The states and records of one layer."""

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
        records = RecordRing.zeros(pool.slots, heads, dims, pool.round_rows, pool.state_dtype)
        state, copies = (jnp.zeros((count, heads[1], *dims[::-1]), jnp.float32) for count in (pool.slots, pool.copies))
        return cls(state, records, inputs, copies if pool.copies else None)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.state.shape[0]

    def specs(self, axis: str) -> Any:
        """Divide the heads; `LayerState.specs`."""
        heads: Any = P(None, axis)
        records: Any = P(None, None, axis)
        return type(self)(heads, records, self.inputs.specs(axis), heads)  # type: ignore[arg-type]

    @property
    def has_kernel(self) -> bool:
        return has_kernel(self.records) and self.records.keys.shape[3] == KEY_CHANNELS

    @property
    def num_copies(self) -> int:
        return 0 if self.copies is None else self.copies.shape[0]

    def saved(self, slot: Int[Array, ""], entry: Int[Array, ""]) -> Self:
        """Keep a slot's state; `LayerState.saved`."""
        assert self.copies is not None
        copies = self.copies.at[entry].set(self.state[slot])
        return self._replace(copies=copies, inputs=self.inputs.saved(slot, entry))

    def loaded(self, slot: Int[Array, ""], entry: Int[Array, ""], position: Int[Array, ""]) -> Self:
        """Enter a kept state; `LayerState.loaded`."""
        assert self.copies is not None
        state = self.state.at[slot].set(self.copies[entry])
        return self._replace(state=state, inputs=self.inputs.loaded(slot, entry, position))

    @classmethod
    def commit(cls, states: Sequence[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        """Move the records of an accepted path, and fold as many as have become complete; `LayerState.commit`."""
        rows = [move_slot_rows([*state.records, state.inputs.inputs], view, path) for state in states]
        inputs = [state.inputs._replace(inputs=of[-1]) for state, of in zip(states, rows, strict=True)]
        moved = [
            state._replace(records=RecordRing(*of[:-1]), inputs=new)
            for state, of, new in zip(states, rows, ConvState.with_boundaries(inputs, view, path), strict=True)
        ]
        for index in range((EVERY - 1 + path.longest) // EVERY):  # a round may complete several blocks of records
            first = (view.lengths // EVERY + index) * EVERY
            slots = jnp.where(first + EVERY <= view.lengths + path.counts, view.slots, moved[0].slots)
            fold = partial(cls._folded, slots=slots, first=first, **view.numerics.options)
            moved = jax.lax.cond(
                jnp.any(slots < moved[0].slots), lambda of, fold=fold: list(map(fold, of)), lambda of: of, moved
            )
        return moved

    def _folded(self, slots: Int[Array, "batch"], first: Int[Array, "batch"], **options: Any) -> Self:
        """Fold the records of `EVERY` tokens from position ``first`` on; slots that do not exist are dropped."""
        return self._replace(state=fold_round(self.state, self.records, slots, first, **options))


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
    slots, lengths = batch.slots, batch.first_row
    outputs, records = verify_and_write(
        state.state, state.records, slots, lengths, new, ancestor_mask(batch), batch.valid, **batch.numerics.options
    )
    return outputs, state._replace(records=records)


def _run_prompts(state: DeltaState, new: DeltaTokens, batch: PromptBatch) -> tuple[Outputs, DeltaState]:
    def kernel(state: DeltaState, new: DeltaTokens, batch: PromptBatch, *, interpret: Any) -> tuple[Array, DeltaState]:
        outputs, states, records = delta_prompts.run_prompts(
            state.state, state.records, new, batch, interpret=interpret
        )
        return outputs, state._replace(state=states, records=records)

    kernels = [
        Kernel(HOPPER, _run_in_order, not (batch.deterministic and in_order_tokens.has_kernel(state.records))),
        Kernel(HOPPER, kernel, not delta_prompts.has_kernel(state.records, batch)),
    ]
    return dispatch(batch.numerics.options["implementation"], kernels, _run_blocks, state, new, batch)


def _run_in_order(
    state: DeltaState, new: DeltaTokens, batch: PromptBatch, *, interpret: Any
) -> tuple[Outputs, DeltaState]:
    pieces = in_order_tokens.Pieces(batch.slots, batch.starts, batch.ends, batch.first)
    outputs, records, states = in_order_tokens.run_pieces(state.state, state.records, new, pieces, interpret=interpret)
    outputs = jnp.where(is_token(batch)[:, None, :, None], outputs, 0)
    return outputs, state if batch.slots is None else _kept(state._replace(state=states), records, batch)


def _run_blocks(state: DeltaState, new: DeltaTokens, batch: PromptBatch) -> tuple[Outputs, DeltaState]:
    """Run the blocks of all pieces one after another; the first block of a piece takes the state of its slot."""
    is_used, whole = is_token(batch), batch.of_piece(batch.ends) // EVERY * EVERY
    advance = partial(fold, deterministic=batch.deterministic)
    if batch.slots is None:
        begin = kept = jnp.zeros((1, *state.state.shape[1:]), jnp.float32)
    else:
        is_new = (batch.starts == 0)[:, None, None, None]
        kept = jnp.where(is_new, 0, states_of(state.state, batch.slots))
        begin = jnp.where(is_new, 0, advance(kept, state.records.window(batch.slots, batch.starts)))
    count, blocks = batch.tokens.shape[1], _Blocks.of(new, batch, is_used, whole)
    causal = jnp.tri(blocks.size, dtype=bool)[None]
    if not batch.deterministic:
        blocks = blocks._replace(tokens=chunk_of(blocks.tokens))

    def run(carry: tuple[Array, Array], block: _Blocks) -> tuple[tuple[Array, Array], Any]:
        current, kept = carry
        current = jnp.where(block.is_first, begin.at[block.piece].get(mode="clip"), current)
        tokens = jax.tree.map(lambda values: values[None], block.tokens)
        if batch.deterministic:
            outputs, records = verify(current[None], None, tokens, causal, deterministic=True)
        else:
            outputs, records = run_chunk(current[None], tokens)
        is_before = (block.first + jnp.arange(causal.shape[1]) < block.whole)[None]
        until = advance(current[None], records.masked(is_before))  # the state at the last multiple of `EVERY`
        kept = kept.at[jnp.where(block.first < block.whole, block.piece, len(kept))].set(until[0], mode="drop")
        current = advance(until, records.masked(~is_before))[0]
        return (current, kept), (outputs[0], records.map(lambda rows: rows[0]))

    start = jnp.zeros(state.state.shape[1:], jnp.float32), kept
    (_, kept), results = jax.lax.scan(run, start, blocks)
    outputs, records = jax.tree.map(partial(_joined, count=count, size=causal.shape[1]), results)
    if batch.slots is None:
        return outputs, state
    state = state._replace(state=state.state.at[batch.slots].set(kept, mode="drop"))
    return outputs, _kept(state, records, batch)


class _Blocks(NamedTuple):
    """The tokens of a prefill in blocks of at most `BLOCK`, with an axis for the blocks."""

    tokens: Any  # `DeltaTokens`, or the `DeltaChunk` made of them
    piece: Int[Array, "blocks"]
    is_first: Array  # whether a block is the first of its piece
    first: Int[Array, "blocks"]  # position of its first token
    whole: Int[Array, "blocks"]  # last multiple of `EVERY` tokens of its piece

    @property
    def size(self) -> int:
        """Number of tokens of a block."""
        return self.tokens.decays.shape[-1]

    @classmethod
    def of(cls, new: DeltaTokens, batch: PromptBatch, is_used: Array, whole: Array) -> _Blocks:
        """Cut the blocks of a batch; tokens that are padding get zeros, which change no state."""
        count = batch.tokens.shape[1]
        size = min(count, BLOCK)
        parts = -(-count // size)

        def cut(rows: Array) -> Array:
            used = is_used.reshape(len(rows), 1, -1, *(1,) * (rows.ndim - 3))
            rows = jnp.where(used, rows, 0)
            rows = jnp.pad(rows, [(0, 0), (0, 0), (0, parts * size - count)] + [(0, 0)] * (rows.ndim - 3))
            rows = rows.reshape(*rows.shape[:2], parts, size, *rows.shape[3:])
            return jnp.moveaxis(rows, 2, 1).reshape(-1, rows.shape[1], size, *rows.shape[4:])

        part = jnp.tile(jnp.arange(parts), len(batch.tokens))
        first = jnp.repeat(batch.first_row, parts) + part * size
        is_first = jnp.repeat(batch.is_first, parts) & (part == 0)
        tokens = jax.tree.map(cut, new)
        return cls(tokens, jnp.repeat(batch.piece, parts), is_first, first, jnp.repeat(whole, parts))


def _joined(rows: Array, *, count: int, size: int) -> Array:
    """Return what was computed in blocks of ``size`` tokens [batch, heads, count, ...]."""
    parts = -(-count // size)
    rows = jnp.moveaxis(rows.reshape(-1, parts, *rows.shape[1:]), 1, 2)
    return rows.reshape(*rows.shape[:2], parts * size, *rows.shape[4:])[:, :, :count]


def _kept(state: DeltaState, records: Records, batch: PromptBatch) -> DeltaState:
    """Write the records of each piece's tokens that come after its last multiple of `EVERY` tokens."""
    assert batch.slots is not None
    is_kept = is_token(batch) & (batch.positions >= (batch.of_piece(batch.ends) // EVERY * EVERY)[:, None])
    slots = jnp.where(is_kept, batch.of_piece(batch.slots, state.slots)[:, None], state.slots)
    return state._replace(records=state.records.written(slots, batch.positions, records))
