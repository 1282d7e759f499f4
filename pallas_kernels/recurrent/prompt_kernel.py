"""The kernel for Hopper GPUs that runs through the chunks of prompts; `prompt_chunks` has the form that it computes.

A CTA runs through the chunks of a piece. It has `ROWS` value channels of the state of one value head in registers, and
loads a chunk while it computes the one before. Arrays of tokens lie across registers [channels, tokens], so that all
that is computed of a chunk is the first operand of the next product, without a way through shared memory. The tensor
cores get float32 operands as two bfloat16 numbers, high and low.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.hopper import HEIGHT as ROWS
from pallas_kernels.recurrent.records import SlotStates
from pallas_kernels.recurrent.warpgroup import Warpgroup, launch, lowered_once, tiled

CHUNK = ROWS  # tokens of a chunk
STAGES = 2  # chunks in shared memory


class ChunkedPieces(NamedTuple):
    """The pieces of prompts, whose chunks are consecutive."""

    slots: Int[Array, "pieces"]
    is_new: Int[Array, "pieces"]  # 1: the piece begins with a state of zeros
    first: Int[Array, "pieces"]  # first chunk
    counts: Int[Array, "pieces"]  # number of chunks


class ChunkTables(NamedTuple):
    """What `advance` reads of chunks besides the rows of their tokens."""

    # [read token, token], high and low; None: values are not corrected.
    inverse: Float[Array, "chunks heads 2 tokens tokens"] | None
    scores: Float[Array, "chunks heads 2 tokens tokens"]  # [read token, token], high and low
    # Of each token the decay from the chunk's beginning to it, 0 for one that reads no state, then the decay behind it,
    # 0 for one that does not advance the state; float32.
    decays: Float[Array, "chunks heads 2 tokens"]
    total: Float[Array, "chunks heads"]  # decay of the state


class _ChunkMemory(NamedTuple):
    """The shared memory of a CTA of `advance`: the rows and tables of `STAGES` chunks, and outputs."""

    queries: Any
    keys: Any
    values: Any
    scores: Any
    decays: Any
    outputs: Any
    arrived: Any
    inverse: Any = None


@lowered_once()
def advance(
    state: SlotStates,
    rows: tuple[Array, Array, Array],
    tables: ChunkTables,
    pieces: ChunkedPieces,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "chunks tokens channels"], Float[Array, "pieces heads value_dim tokens"], SlotStates]:
    """Compute the outputs of all chunks and the corrected values of each piece's last one, in float32, and states.

    Args:
        state: states of all slots [slots, ...], overwritten in place if donated.
        rows: queries, keys and values of the tokens of chunks [chunks, `CHUNK`, channels of all heads], bfloat16.
        tables: what else is read of chunks.
        pieces: the pieces, whose slots are distinct; nothing is computed of a piece without chunks.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.

    Returns:
        Outputs, and corrected values, which are rounded to bfloat16; those that no piece has are undefined. Last the
        states of all slots, those of the pieces after the last token that advances them.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (_, heads, value_dim, key_dim), dtype, chunks = state.shape, rows[0].dtype, len(rows[0])

    corrects = tables.inverse is not None

    def run(refs, *memory):
        state, *inputs, outputs, corrected = refs
        if not corrects:
            inputs.insert(3, None)  # the inverse
        _ChunkCta(Warpgroup(plgpu, dtype, interpret), state, inputs, (outputs, corrected), _ChunkMemory(*memory)).run()

    def staged(*shape):
        return tiled(plgpu, (STAGES, *shape), dtype)

    memory = _ChunkMemory(
        queries=staged(CHUNK, key_dim),
        keys=staged(CHUNK, key_dim),
        values=staged(CHUNK, ROWS),
        scores=staged(2, CHUNK, CHUNK),
        decays=plgpu.SMEM((STAGES, 2, CHUNK), jnp.float32),
        outputs=tiled(plgpu, (CHUNK, ROWS), jnp.float32),
        arrived=plgpu.Barrier(num_arrivals=5 + corrects, num_barriers=STAGES),
        inverse=staged(2, CHUNK, CHUNK),
    )
    out = (
        jax.ShapeDtypeStruct((chunks, CHUNK, heads * value_dim), jnp.float32),
        jax.ShapeDtypeStruct((len(pieces.slots), heads, value_dim, CHUNK), jnp.float32),
    )
    grid = {"part": value_dim // ROWS, "head": heads, "piece": len(pieces.slots)}
    states = jax.new_ref(state)
    inputs = states, *rows, *(tables if corrects else tables[1:]), *pieces
    used = memory if corrects else memory[:-1]
    outputs, corrected = launch(plgpu, run, "advance_chunks", grid, out, used, inputs, interpret)
    return outputs, corrected, jax.freeze(states)


class _ChunkCta:
    """The operations of one CTA of `advance`."""

    def __init__(self, registers, state, inputs, outputs, memory):
        self.registers, self.plgpu, self.memory = registers, registers.plgpu, memory
        self.state, (self.outputs, self.corrected) = state, outputs
        self.rows, self.tables, pieces = inputs[:3], ChunkTables(*inputs[3:7]), ChunkedPieces(*inputs[7:])
        part, self.head, self.piece = (jax.lax.axis_index(axis) for axis in ("part", "head", "piece"))
        _, heads, value_dim, key_dim = state.shape
        key_head = jax.lax.div(self.head, heads // (self.rows[1].shape[2] // key_dim))
        self.channels = pl.ds(part * ROWS, ROWS)
        self.value_columns = pl.ds(self.head * value_dim + part * ROWS, ROWS)
        self.key_columns = pl.ds(key_head * key_dim, key_dim)
        self.slot, self.is_new, self.first, self.count = (of[self.piece] for of in pieces)

    def run(self):
        @pl.when(self.count > 0)
        def _():
            for index in range(STAGES):
                pl.when(index < self.count)(partial(self.fetch, jnp.int32(index)))
            place = self.slot, self.head, self.channels
            state = self.registers.load(self.state.at[place])
            state = jnp.where(jnp.broadcast_to(self.is_new == 1, state.shape), 0.0, state)
            self.state[place] = jax.lax.fori_loop(0, self.count, self.chunk, state)
            self.plgpu.wait_smem_to_gmem(0)

    def fetch(self, index):
        """Begins to load a chunk."""
        memory, tables, chunk, stage = self.memory, self.tables, self.first + index, jax.lax.rem(index, STAGES)
        columns = self.key_columns, self.key_columns, self.value_columns
        sources = [rows.at[chunk, :, of] for rows, of in zip(self.rows, columns, strict=True)]
        targets = [memory.queries, memory.keys, memory.values]
        for table, target in zip(tables[:3], (memory.inverse, memory.scores, memory.decays), strict=True):
            if table is not None:
                sources.append(table.at[chunk, self.head])
                targets.append(target)
        for source, target in zip(sources, targets, strict=True):
            self.plgpu.copy_gmem_to_smem(source, target.at[stage], memory.arrived.at[stage])

    def chunk(self, index, state):
        """Computes a chunk, and returns the state after it."""
        registers, chunk, stage = self.registers, self.first + index, jax.lax.rem(index, STAGES)
        queries, keys, values, scores, decays = (of.at[stage] for of in self.memory[:5])
        total = self.tables.total[chunk, self.head]
        self.plgpu.barrier_wait(self.memory.arrived.at[stage])
        high, low = registers.parts(state)
        rows = [queries] if self.memory.inverse is None else [keys, queries]
        *seen, read = (registers.product((high, of.T), (low, of.T)) for of in rows)
        path, corrected = registers.per_column(decays.at[0]), registers.read_transposed(values)
        if self.memory.inverse is not None:
            inverse = self.memory.inverse.at[stage]
            high, low = registers.parts(corrected.astype(jnp.float32) - seen[0] * path)
            corrected = registers.product((high, inverse.at[0]), (low, inverse.at[0]), (high, inverse.at[1]))
            corrected = corrected.astype(registers.dtype)
        outputs = registers.product((corrected, scores.at[0]), (corrected, scores.at[1])) + read * path
        high, low = registers.parts(corrected.astype(jnp.float32) * registers.per_column(decays.at[1]))
        state = registers.product((high, keys), (low, keys), to=state * total)

        @pl.when(index == self.count - 1)
        def _():
            self.corrected[self.piece, self.head, self.channels] = corrected.astype(jnp.float32)

        self.store(chunk, outputs)
        pl.when(index + STAGES < self.count)(partial(self.fetch, index + STAGES))
        return state

    def store(self, chunk, outputs):
        """Begins to store outputs; the warpgroup has read its stage when this returns."""
        self.plgpu.wait_smem_to_gmem(0)
        self.registers.store_transposed(self.memory.outputs, outputs)
        self.plgpu.commit_smem()
        self.plgpu.copy_smem_to_gmem(self.memory.outputs, self.outputs.at[chunk, :, self.value_columns])
