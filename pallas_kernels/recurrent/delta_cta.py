"""A CTA of the kernels of the gated delta rule (`delta_kernel`): what it loads, and its operations."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layers.hopper import HEIGHT as ROWS
from pallas_kernels.recurrent.records import EVERY
from pallas_kernels.recurrent.substitution import BLOCK, substituted
from pallas_kernels.recurrent.warpgroup import first_rows, tiled

UNIT = 8  # nodes are padded to a multiple
COLUMNS = 32  # columns of the state that are in registers at a time


class CtaMemory(NamedTuple):
    """The shared memory of a CTA; the state, keys and node rows are in blocks of `COLUMNS` columns."""

    state: Any  # [blocks, ROWS, COLUMNS]
    keys: Any  # of the records [blocks, EVERY, COLUMNS]
    values: Any  # of the records [EVERY, ROWS]
    behind: Any  # [EVERY + UNIT]
    blocks_arrived: Any  # barriers on which the blocks of columns arrive
    records_arrived: Any  # barrier on which `values` and `behind` arrive
    node_rows: Any = None  # keys of the nodes, then queries [blocks, 2 nodes, COLUMNS]
    node_values: Any = None  # [nodes, ROWS]
    tables: Any = None  # [2 nodes + 3, nodes]
    nodes_arrived: Any = None  # barrier on which `node_values` and `tables` arrive
    outputs: Any = None  # [nodes, ROWS]
    corrected: Any = None  # [nodes, ROWS]


def memory_of(plgpu, ring, nodes):
    """Returns the shared memory of a CTA for some number of nodes."""
    key_dim, dtype = ring.keys.shape[3], ring.keys.dtype
    blocks = key_dim // COLUMNS
    memory = [
        tiled(plgpu, (blocks, ROWS, COLUMNS), jnp.float32),
        tiled(plgpu, (blocks, EVERY, COLUMNS), dtype, COLUMNS),
        tiled(plgpu, (EVERY, ROWS), dtype),
        plgpu.SMEM((EVERY + UNIT,), jnp.float32),
        plgpu.Barrier(num_arrivals=4 if nodes else 2, num_barriers=blocks),
        plgpu.Barrier(num_arrivals=2),
    ]
    if nodes:
        memory += [
            tiled(plgpu, (blocks, 2 * nodes, COLUMNS), dtype, COLUMNS),
            tiled(plgpu, (nodes, ROWS), dtype),
            plgpu.SMEM((2 * nodes + 3, nodes), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            tiled(plgpu, (nodes, ROWS), jnp.float32),
            plgpu.SMEM((nodes, ROWS), dtype),
        ]
    return memory


class Place(NamedTuple):
    """The piece of a state that a CTA computes, and where its records are."""

    sequence: Any
    head: Any
    part: Any  # which `ROWS` of the value channels
    slot: Any
    position: Any  # a position in the block of records

    @property
    def channels(self):
        """Value channels."""
        return pl.ds(self.part * ROWS, ROWS)


class Cta:
    """The loads of a CTA, and its operations on arrays [`ROWS`, n] in registers."""

    def __init__(self, group, refs, memory, nodes=None, outputs=None):
        self.group, self.plgpu, self.memory = group, group.plgpu, memory
        self.state, self.keys, self.values, self.behind = refs
        self.nodes, self.outputs = nodes, outputs
        self.blocks = self.state.shape[3] // COLUMNS

    def place(self, slots, positions):
        """Returns the place of the CTA."""
        part, head, sequence = (jax.lax.axis_index(name) for name in ("part", "head", "sequence"))
        return Place(sequence, head, part, slots[sequence], positions[sequence])

    def load(self, place):
        """Begins to load all that is read at a place."""
        self.load_records(place)
        for block in range(self.blocks):
            self.load_block(place, block)
        if self.nodes is not None:
            self.load_nodes(place)

    def _copy(self, loads, arrived):
        for source, target in loads:
            self.plgpu.copy_gmem_to_smem(source, target, arrived)

    def _block(self, place):
        blocks = self.keys.shape[1] // EVERY
        return pl.ds(jax.lax.rem(jax.lax.div(place.position, EVERY), blocks) * EVERY, EVERY)

    def load_records(self, place):
        """Begins to load the values of the block of records that has a position, and their factors."""
        slot = jnp.minimum(place.slot, self.state.shape[0] - 1)
        loads = [
            (self.values.at[slot, self._block(place), place.head, place.channels], self.memory.values),
            (self.behind.at[place.sequence, place.head], self.memory.behind),
        ]
        self._copy(loads, self.memory.records_arrived)

    def load_block(self, place, block):
        """Begins to load some columns of the state, of the records' keys, and of the nodes."""
        memory, columns = self.memory, pl.ds(block * COLUMNS, COLUMNS)
        slot = jnp.minimum(place.slot, self.state.shape[0] - 1)
        key_head = jax.lax.div(place.head, self.state.shape[1] // self.keys.shape[2])
        loads = [
            (self.state.at[slot, place.head, place.channels, columns], memory.state.at[block]),
            (self.keys.at[slot, self._block(place), key_head, columns], memory.keys.at[block]),
        ]
        if self.nodes is not None:
            count = self.nodes.tables.shape[3]
            rows = place.sequence, self._node_rows(place), key_head, columns
            loads += [
                (of.at[rows], memory.node_rows.at[block, pl.ds(first, count)])
                for first, of in ((0, self.nodes.keys), (count, self.nodes.queries))
            ]
        self._copy(loads, memory.blocks_arrived.at[block])

    def load_nodes(self, place):
        """Begins to load the values and tables of nodes."""
        rows = place.sequence, self._node_rows(place), place.head, place.channels
        loads = [
            (self.nodes.values.at[rows], self.memory.node_values),
            (self.nodes.tables.at[place.sequence, place.head], self.memory.tables),
        ]
        self._copy(loads, self.memory.nodes_arrived)

    def _node_rows(self, place):
        return first_rows(place.position, self.nodes.tables.shape[3])

    def records(self):
        """Returns the decayed values of the records, as two parts, and the factor of the state."""
        self.plgpu.barrier_wait(self.memory.records_arrived)
        after = self.group.per_column(self.memory.behind.at[pl.ds(0, EVERY)])
        values = self.group.read_transposed(self.memory.values).astype(jnp.float32)
        return self.group.parts(jnp.where(after > 0, values, 0.0) * after), self.memory.behind[EVERY]

    def newest(self, records, block):
        """Returns some columns of the state at the newest of the records."""
        values, total = records
        self.plgpu.barrier_wait(self.memory.blocks_arrived.at[block])
        state = self.group.read(self.memory.state.at[block])
        keys = self.memory.keys.at[block]
        return state * total + self.group.product(*((part, keys) for part in values))

    def verify(self, place, count):
        """Computes the nodes of a place, and writes the corrected values of the first ``count`` into the ring."""
        seen, read = self.seen_and_read(self.records())
        self.store(self.blocks_of(seen, read), place, count)

    def seen_and_read(self, records):
        """Returns the products of the newest state with the keys and with the queries of nodes, [`ROWS`, nodes]."""
        rows, count = self.memory.node_rows, self.nodes.tables.shape[3]
        if self.group.interpret:  # the interpreter has no `wgmma` with an operand in registers
            total = jnp.zeros((ROWS, 2 * count), jnp.float32)
            for block in range(self.blocks):
                parts = self.group.parts(self.newest(records, block))
                total += sum(self.group.dot(part, rows[block].T) for part in parts)
        else:

            def run(sums):
                for block in range(self.blocks):
                    newest = self.newest(records, block)  # waits for the products before, too
                    self.group.multiply(sums, *((part, rows.at[block].T) for part in self.group.parts(newest)))
                self.plgpu.wgmma_wait(0)
                return sums[...]

            total = pl.run_scoped(run, self.plgpu.ACC((ROWS, 2 * count), jnp.float32))
        return total[:, :count], total[:, count:]

    def blocks_of(self, seen, read):
        """Returns the outputs and corrected values of one block of nodes after another (`substituted`)."""
        nodes, row = seen.shape[1], lambda index: self.group.per_column(self.memory.tables.at[index])
        self.plgpu.barrier_wait(self.memory.nodes_arrived)
        values = self.group.read_transposed(self.memory.node_values).astype(jnp.float32)
        rest, outputs = values * row(2 * nodes) - seen * row(2 * nodes + 1), read * row(2 * nodes + 2)
        return substituted(self.group, self.memory.tables, rest, outputs, self.nodes.keys.shape[1])

    def store(self, blocks, place, count):
        """Stores the outputs of nodes, and the corrected values of the first ``count``."""
        memory, plgpu = self.memory, self.plgpu
        for index, (outputs, corrected) in enumerate(blocks):
            rows = pl.ds(index * BLOCK, BLOCK)
            self.group.store_transposed(memory.outputs.at[rows], outputs)
            self.group.store_transposed(memory.corrected.at[rows], corrected, is_tiled=False)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.outputs, self.outputs.at[place.sequence, :, place.head, place.channels])
        self.write_values(place, count)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write_values(self, place, count):
        """Begins to write the corrected values of the first nodes into the rows of a slot."""
        rows, most = self.values.shape[1], self.nodes.keys.shape[1]

        def write(first, size):
            row = jax.lax.rem(place.position + first, rows)
            target = self.values.at[place.slot, pl.ds(row, size), place.head, place.channels]
            self.plgpu.copy_smem_to_gmem(self.memory.corrected.at[pl.ds(first, size)], target)

        def write_each(first, size):
            jax.lax.fori_loop(first, jnp.minimum(first + size, count), lambda node, _: write(node, 1), None)

        for first in range(0, most, UNIT):
            size = min(UNIT, most - first)
            is_whole = (first + size <= count) & (jax.lax.rem(place.position + first, rows) + size <= rows)
            pl.when(is_whole)(partial(write, first, size))
            pl.when(~is_whole)(partial(write_each, first, size))
