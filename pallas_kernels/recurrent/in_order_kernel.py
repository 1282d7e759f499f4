"""The gated delta rule token after token in one kernel for Hopper GPUs; `gated_delta` has the rule.

A CTA has `ROWS` value channels of the state of one value head of one sequence in registers. It advances the state by
the records of the tokens after it, then by the tokens of the sequence. Both take the same step of the same loop, so the
bits of a state depend on those of the state before and of the token alone: not on rounds, trees or the pieces of a
prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.hopper import HEIGHT as ROWS
from pallas_kernels.layers.hopper import SHARED_BYTES
from pallas_kernels.recurrent.record_ring import RecordRing
from pallas_kernels.recurrent.records import EVERY, SlotStates
from pallas_kernels.recurrent.warpgroup import Warpgroup, launch, lowered_once, tiled

UNIT = 32  # key channels are a multiple
GROUP = 4  # heads whose decays and rates are loaded together: a load begins at a multiple of 16 bytes
WIDEST = 128  # channels of a key head whose state fits into registers


class Sequences(NamedTuple):
    """The sequences to advance; all arrays are int32."""

    slots: Int[Array, "sequences"]  # distinct; nothing is computed for one that does not exist
    is_new: Int[Array, "sequences"]  # 1: the sequence begins with a state of zeros
    positions: Int[Array, "sequences"]  # a position in the block of records that the state waits for
    records: Int[Array, "sequences"]  # number of records that are read of the block
    first: Int[Array, "sequences"]  # row of the sequence's first token
    counts: Int[Array, "sequences"]  # number of tokens, in successive rows
    kept: Int[Array, "sequences"]  # number of tokens after which the state is stored; -1: it is not


class TokenRows(NamedTuple):
    """The inputs of the tokens of all sequences, row after row."""

    queries: Float[Array, "rows key_heads key_dim"]
    keys: Float[Array, "rows key_heads key_dim"]
    values: Float[Array, "rows heads value_dim"]
    decays: Float[Array, "rows padded"]  # log decays of the heads, padded to a multiple of `GROUP`; float32
    rates: Float[Array, "rows padded"]  # below 0: the value is not corrected


class TreePaths(NamedTuple):
    """The ancestors of each token of trees; all arrays are int32."""

    # Of each token of a sequence, padded to `block_for` them: the number of its ancestors, then how many of these the
    # state after the token in the row before has: all, or 0.
    counts: Int[Array, "sequences 2 block"]
    ancestors: Int[Array, "rows tokens"]  # indices among the tokens of the sequence, the root first


def unsupported(key_dim: int, value_dim: int) -> str | None:
    """Return a text that says which limit of the kernel a head exceeds; None if it has a form for the head."""
    if key_dim % UNIT or key_dim > WIDEST or value_dim % ROWS:
        return (
            f"heads must have at most {WIDEST} key channels, a multiple of {UNIT}, and a multiple of {ROWS} value "
            f"channels, got {key_dim} and {value_dim}"
        )
    return None


@lowered_once("block", "keeps")
def advance(
    state: SlotStates,
    ring: RecordRing,
    decays: Float[Array, "sequences every padded"],
    sequences: Sequences,
    rows: TokenRows,
    paths: TreePaths | None,
    *,
    block: int = EVERY,
    keeps: bool = True,
    interpret: Any = False,
) -> tuple[Float[Array, "rows heads value_dim"], Float[Array, "rows heads value_dim"], SlotStates | None]:
    """Advance the states of some slots by records, and by the tokens of sequences.

    Args:
        state: states of all slots [slots, ...], overwritten in place if donated and ``keeps``.
        ring: records of all slots.
        decays: log decays of the block of records of each sequence, padded as those of tokens.
        sequences: which records and rows each sequence has.
        rows: the tokens.
        paths: ancestors of the tokens, which form trees; None: each token follows the one in the row before.
        block: number of tokens that are loaded at a time: `EVERY`, or `block_for` all tokens of a sequence.
        keeps: whether states are stored; False: ``sequences.kept`` is not read.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.

    Returns:
        The outputs, and the corrected values rounded to the dtype of tokens, both in float32; they are undefined in
        rows without a token. Last the states of all slots, None if they are not stored.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (_, heads, value_dim, key_dim), dtype = state.shape, rows.keys.dtype
    group = Warpgroup(plgpu, dtype, interpret)

    def run(refs, *memory):
        _InOrderCta(group, refs, _InOrderMemory(*memory), block, keeps).run()

    size = EVERY + block
    memory: list[Any] = [plgpu.SMEM((size, channels), dtype) for channels in (key_dim, key_dim, ROWS)]
    memory += [plgpu.SMEM((size, GROUP), jnp.float32)] * 2
    memory.append(plgpu.Barrier(num_arrivals=5, num_barriers=2))
    if paths is not None:
        memory += [plgpu.SMEM((2, block), jnp.int32), tiled(plgpu, (ROWS, key_dim), jnp.float32)]
    out = [jax.ShapeDtypeStruct(rows.values.shape, jnp.float32)] * 2
    grid = {"part": value_dim // ROWS, "head": heads, "sequence": len(sequences.slots)}
    states: Any = jax.new_ref(state) if keeps else state
    inputs = states, ring.keys, ring.values, decays, *rows, *sequences, *(paths or ())
    outputs, corrected = launch(plgpu, run, "delta_in_order", grid, out, memory, inputs, interpret)
    return outputs, corrected, jax.freeze(states) if keeps else None


def block_for(tokens: int, key_dim: int, dtype: Any) -> int:
    """Return the number of rows to load at a time so that all tokens of a round are loaded at once.

    Raises:
        NotImplementedError: the tokens do not fit into shared memory.
    """
    block = -(-tokens // EVERY) * EVERY
    row = (2 * key_dim + ROWS) * jnp.dtype(dtype).itemsize + 8 * GROUP
    if (EVERY + block) * row + 8 * block + 4 * ROWS * key_dim > SHARED_BYTES:
        raise NotImplementedError(
            f"deterministic: the kernel of the gated delta rule has no room for a round of {tokens} tokens; draft fewer"
        )
    return block


class _InOrderMemory(NamedTuple):
    """The shared memory of a CTA: rows of two blocks; for trees the ancestors' counts, and the state before all tokens.

    Block 0 and every second one after it begin at row 0, the others at row `EVERY`.
    """

    queries: Any  # [EVERY + block, key_dim]
    keys: Any
    values: Any  # [EVERY + block, ROWS]
    decays: Any  # [EVERY + block, GROUP]
    rates: Any
    arrived: Any
    counts: Any = None  # [2, block]
    begin: Any = None  # [ROWS, key_dim]


class _InOrderCta:
    """The operations of one CTA. Block 0 has the records, further ones have the tokens."""

    def __init__(self, group, refs, memory, block, keeps):
        self.group, self.plgpu, self.memory = group, group.plgpu, memory
        self.block, self.keeps = block, keeps
        (self.state, self.ring_keys, self.ring_values, self.decays), refs = refs[:4], refs[4:]
        self.rows, sequences, refs = TokenRows(*refs[:5]), Sequences(*refs[5:12]), refs[12:]
        self.paths, (self.outputs, self.corrected) = TreePaths(*refs[:-2]) if len(refs) > 2 else None, refs[-2:]
        part, self.head, self.index = (jax.lax.axis_index(axis) for axis in ("part", "head", "sequence"))
        self.key_head = jax.lax.div(self.head, self.state.shape[1] // self.rows.keys.shape[1])
        self.channels = pl.ds(part * ROWS, ROWS)
        self.member = jax.lax.rem(self.head, GROUP)  # place of the head in its group
        self.group_heads = pl.ds(self.head - self.member, GROUP)
        self.sequence = Sequences(*(of[self.index] for of in sequences))

    def run(self):
        slot, counts = self.sequence.slots, self.sequence.counts

        @pl.when((slot >= 0) & (slot < self.state.shape[0]))
        def _():
            self.fetch_records()
            pl.when(counts > 0)(lambda: self.fetch_tokens(jnp.int32(1)))
            state = self.group.load(self.state.at[slot, self.head, self.channels])
            state = jnp.where(jnp.broadcast_to(self.sequence.is_new == 1, state.shape), 0.0, state)
            blocks = jax.lax.div(counts + self.block - 1, self.block)
            jax.lax.fori_loop(0, blocks + 1, self.run_block, state)

    def fetch_records(self):
        """Begins to load block 0; records have no queries and no rates: keys and decays, or counts, are loaded."""
        blocks, slot = self.ring_keys.shape[1] // EVERY, self.sequence.slots
        rows = pl.ds(jax.lax.rem(jax.lax.div(self.sequence.positions, EVERY), blocks) * EVERY, EVERY)
        keys = self.ring_keys.at[slot, rows, self.key_head]
        values = self.ring_values.at[slot, rows, self.head, self.channels]
        decays = self.decays.at[self.index, :, self.group_heads]
        *places, rates = (of.at[pl.ds(0, EVERY)] for of in self.memory[:5])
        last, place = (decays, rates) if self.paths is None else (self.paths.counts.at[self.index], self.memory.counts)
        self.copy((keys, keys, values, decays, last), (*places, place), 0)

    def fetch_tokens(self, index):
        """Begins to load a block of tokens."""
        rows = pl.ds(self.sequence.first + (index - 1) * self.block, self.block)
        queries, keys = (of.at[rows, self.key_head] for of in self.rows[:2])
        values = self.rows.values.at[rows, self.head, self.channels]
        decays, rates = (of.at[rows, self.group_heads] for of in self.rows[3:])
        stage = jax.lax.rem(index, 2)
        places = [of.at[pl.ds(stage * EVERY, self.block)] for of in self.memory[:5]]
        self.copy((queries, keys, values, decays, rates), places, stage)

    def copy(self, sources, places, stage):
        for source, place in zip(sources, places, strict=True):
            self.plgpu.copy_gmem_to_smem(source, place, self.memory.arrived.at[stage])

    def run_block(self, index, state):
        """Advances the state by the rows of a block."""
        sequence = self.sequence
        self.plgpu.barrier_wait(self.memory.arrived.at[jax.lax.rem(index, 2)])
        before = (index - 1) * self.block
        count = jnp.where(index == 0, sequence.records, jnp.minimum(sequence.counts - before, self.block))
        state = jax.lax.fori_loop(0, count, lambda row, state: self.take(index, row, state), state)
        self.keep(state, (index == 0) & (sequence.kept == 0))
        if self.paths is not None:

            @pl.when(index == 0)
            def _():
                self.memory.begin[...] = state

        self.plgpu.commit_smem()  # the rows have been read
        pl.when((index + 1) * self.block < sequence.counts)(lambda: self.fetch_tokens(index + 2))
        return state

    def keep(self, state, is_kept):
        """Stores the state of the slot, or does nothing."""
        if self.keeps:

            @pl.when(is_kept)
            def _():
                self.state[self.sequence.slots, self.head, self.channels] = state

    def take(self, index, row, state):
        """Advances the state by a row of a block, in a tree that of its parent."""
        if (paths := self.paths) is None:
            return self.step(index, row, state)
        is_token = index > 0
        depth, shared = (jnp.where(is_token, self.memory.counts[of, row], 0) for of in range(2))
        is_other = is_token & (shared == 0)
        state = jnp.where(jnp.broadcast_to(is_other, state.shape), self.group.read(self.memory.begin), state)

        def follow(age, state):
            place = self.sequence.first + row, age
            return self.step(index, jax.lax.cond(age < depth, lambda: paths.ancestors[place], lambda: row), state)

        return jax.lax.fori_loop(shared, depth + 1, follow, state)

    def step(self, index, row, state):
        """Advances the state by a row of a block, and stores the token's output and corrected value.

        The value of a record is corrected already, that of a token without a rate never is. All else is computed for
        them too: a step without it would be compiled otherwise, and might round otherwise.
        """
        is_token, place = index > 0, jax.lax.rem(index, 2) * EVERY + row
        queries, keys, values, decays, rates = self.memory[:5]
        key = self.group.per_column(keys.at[place]).astype(jnp.float32)
        value = self.group.load(values.at[place], self.group.layout.reduce(1)).astype(jnp.float32)
        state, rate = state * jnp.exp(decays[place, self.member]), rates[place, self.member]
        wanted = (value - jnp.sum(state * key, axis=1)) * rate
        wanted = wanted.astype(self.group.dtype).astype(jnp.float32)
        is_corrected = is_token & jnp.logical_not(rate < 0)  # a rate that is not a number shows
        corrected = jnp.where(jnp.broadcast_to(is_corrected, value.shape), wanted, value)
        state = state + jax.lax.broadcast_in_dim(corrected, state.shape, [0]) * key
        output = jnp.sum(state * self.group.per_column(queries.at[place]).astype(jnp.float32), axis=1)

        @pl.when(is_token)
        def _():
            target = self.sequence.first + (index - 1) * self.block + row, self.head, self.channels
            self.outputs[target] = output
            self.corrected[target] = corrected

        self.keep(state, is_token & ((index - 1) * self.block + row + 1 == self.sequence.kept))
        return state
