"""Pieces of prompts in the chunks of `pallas_kernels.recurrent.prompt_chunks`, and what is kept of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.prompt_blocks import BLOCK
from jspec.core.records import PromptBatch
from jspec.models.parts.slot_rows import is_token
from pallas_kernels.recurrent import delta_rounds
from pallas_kernels.recurrent.prompt_chunks import Chunks, run_chunks
from pallas_kernels.recurrent.prompt_kernel import CHUNK, ChunkedPieces
from pallas_kernels.recurrent.record_ring import RecordRing, block_of
from pallas_kernels.recurrent.records import EVERY, DeltaTokens, Records, SlotStates


def has_kernel(ring: RecordRing, batch: PromptBatch) -> bool:
    """Return whether the kernels run on the device, and have a form for this prefill."""
    return batch.slots is not None and not batch.deterministic and delta_rounds.has_kernel(ring)


def run_prompts(
    state: SlotStates, ring: RecordRing, new: DeltaTokens, batch: PromptBatch, *, interpret: Any = False
) -> tuple[Float[Array, "batch heads tokens value_dim"], SlotStates, RecordRing]:
    """Run the pieces of a prefill with the kernels for Hopper GPUs.

    Args:
        state: states of all slots.
        ring: records of all slots.
        new: inputs of the tokens.
        batch: the pieces.
        interpret: False, or jax's parameters for interpreting the kernels and detecting races.

    Returns:
        The outputs in float32, 0 for padding, and states and records of all slots with those of the pieces' tokens.
    """
    assert batch.slots is not None, "kernels keep states by slot"
    plan = _ChunkPlan.of(batch, len(state))
    queries, keys = jax.lax.optimization_barrier(new[:2])  # each is normed once, before it is gathered
    new = new._replace(queries=queries, keys=keys)
    outputs, corrected, state = run_chunks(state, plan.chunks(new, ring), plan.pieces, plan.used, interpret=interpret)
    # Records are written after they have been read: else they are copied.
    outputs, corrected, ring = jax.lax.optimization_barrier((outputs, corrected, ring))
    ring = plan.kept(new, corrected, ring)
    chunk, row = plan.places()
    rows = jnp.where(is_token(batch)[..., None], outputs.at[chunk, row].get(mode="clip"), 0)
    heads, value_dim = state.shape[1:3]
    return jnp.swapaxes(rows.reshape(*rows.shape[:2], heads, value_dim), 1, 2), state, ring


class _ChunkPlan(NamedTuple):
    """The chunks of a prefill's pieces, the first of which begins where the state of the piece's slot stands.

    The last multiple of `EVERY` tokens of a piece and the tokens behind it are therefore in its last chunk.
    """

    batch: PromptBatch
    pieces: ChunkedPieces
    used: Int[Array, ""]  # number of chunks
    origin: Int[Array, "pieces"]  # position of the first token of each piece's first chunk
    piece: Int[Array, "chunks"]  # piece of each chunk
    position: Int[Array, "chunks tokens"]

    @classmethod
    def of(cls, batch: PromptBatch, slots: int) -> _ChunkPlan:
        """Lay out the chunks of a batch for states of ``slots`` slots."""
        assert batch.slots is not None
        starts, ends = batch.starts, batch.ends
        origin = starts // EVERY * EVERY
        counts = jnp.where((starts < ends) & (batch.slots < slots), -((origin - ends) // CHUNK), 0)
        last = jnp.cumsum(counts)
        blocks, rows = batch.tokens.shape
        index = jnp.arange(most_chunks(blocks, rows, len(starts)))
        piece = jnp.minimum(jnp.sum(index[:, None] >= last, axis=1), len(starts) - 1)
        first = last - counts
        position = (origin[piece] + (index - first[piece]) * CHUNK)[:, None] + jnp.arange(CHUNK)
        integers = (of.astype(jnp.int32) for of in (batch.slots, starts == 0, first, counts))
        return cls(batch, ChunkedPieces(*integers), last[-1].astype(jnp.int32), origin, piece, position)

    def chunks(self, new: DeltaTokens, ring: RecordRing) -> Chunks:
        """Return the tokens of the chunks, and the records behind the state in the first one of each piece."""
        assert self.batch.slots is not None
        batch, (starts, ends) = self.batch, (of[self.piece][:, None] for of in (self.batch.starts, self.batch.ends))
        is_used = jnp.arange(len(self.piece)) < self.used
        exists = (self.position >= starts) & (self.position < ends) & is_used[:, None]
        source = batch.first[self.piece][:, None] + self.position - starts
        source = jnp.where(exists, source, batch.tokens.size)
        queries, keys, values, decays, rates = jax.tree.map(
            lambda rows: _by_token(rows).at[source].get(mode="fill", fill_value=0), new
        )
        window, row = ring.window(self.batch.slots, batch.starts), jnp.arange(EVERY)
        is_behind = (row < (batch.starts - self.origin)[:, None]) & (self.pieces.counts > 0)[:, None]
        place = jnp.where(is_behind, self.pieces.first[:, None], len(keys)), row
        keys, values, decays = (
            rows.at[place].set(jnp.swapaxes(of, 1, 2), mode="drop")
            for rows, of in zip((keys, values, decays), window, strict=True)
        )
        is_folded = self.position < ends // EVERY * EVERY
        return Chunks(queries, keys, values, decays, rates, self.position < starts, is_folded)

    def kept(
        self, new: DeltaTokens, corrected: Float[Array, "pieces heads value_dim tokens"], ring: RecordRing
    ) -> RecordRing:
        """Return the records with those of the tokens behind the last multiple of `EVERY` of each piece."""
        batch, position = self.batch, block_of(self.batch.ends)
        assert batch.slots is not None
        is_kept = (position >= batch.starts[:, None]) & (position < batch.ends[:, None])
        source = jnp.clip(batch.first[:, None] + position - batch.starts[:, None], 0, batch.tokens.size - 1)
        keys, decays = (jnp.swapaxes(_by_token(rows)[source], 1, 2) for rows in (new.keys, new.decays))
        row = (position - self.origin[:, None]) % CHUNK
        values = jnp.swapaxes(jnp.take_along_axis(corrected, row[:, None, None], axis=3), 2, 3).astype(new.values.dtype)
        slots = jnp.where(is_kept & (self.pieces.counts > 0)[:, None], batch.slots[:, None], len(ring.keys))
        return ring.written(slots, position, Records(keys, values, decays))

    def places(self) -> tuple[Int[Array, "batch tokens"], Int[Array, "batch tokens"]]:
        """Return the chunk of each token of the batch, and its place in it."""
        index = self.batch.positions - self.batch.of_piece(self.origin)[:, None]
        return self.batch.of_piece(self.pieces.first)[:, None] + index // CHUNK, index % CHUNK


def most_chunks(blocks: int, rows: int, pieces: int) -> int:
    """Return the largest number of chunks of at most ``pieces`` pieces with ``blocks`` blocks of ``rows`` tokens.

    A piece of n tokens has at most ``(n + EVERY + CHUNK - 2) // CHUNK`` chunks. Pieces of one block each have the most;
    then blocks are added where the fewest make another chunk, which is in pieces of one chunk.
    """
    before, pieces = EVERY + CHUNK - 2, min(pieces, blocks)
    if rows > BLOCK or CHUNK % rows:
        return (blocks * rows + pieces * before) // CHUNK
    chunks = (rows + before) // CHUNK
    second = -(-((chunks + 1) * CHUNK - before) // rows) - 1
    longer = min(pieces, (blocks - pieces) // second)
    return chunks * pieces + longer + (blocks - pieces - second * longer) // (CHUNK // rows)


def _by_token(rows: Float[Array, "batch heads tokens *dim"]) -> Float[Array, "rows heads *dim"]:
    rows = jnp.swapaxes(rows, 1, 2)
    return rows.reshape(-1, *rows.shape[2:])
