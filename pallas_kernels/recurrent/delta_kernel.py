"""The gated delta rule of a round in one kernel for Hopper GPUs; `gated_delta` has the rule.

A CTA has `ROWS` value channels of the state of one value head of one sequence, in registers. With the records behind
the state (`record_ring`) it first makes the state at the newest committed token:

    newest = e^total state + sum over records j of (e^after_j u_j) k_j^T

`fold` stores this. `verify` multiplies it by the keys and queries of all nodes, and substitutes node after node, since
a node comes after its ancestors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layers.hopper import HEIGHT as ROWS
from pallas_kernels.recurrent.record_ring import RecordRing
from pallas_kernels.recurrent.records import EVERY, SlotStates
from pallas_kernels.recurrent.warpgroup import Warpgroup, launch, tiled

MOST_NODES = 64
UNIT = 8  # nodes are padded to a multiple
COLUMNS = 32  # columns of the state that are in registers at a time


def behind_of(
    decays: Float[Array, "batch heads every"], exists: Bool[Array, "#batch #heads #every"]
) -> Float[Array, "batch heads factors"]:
    """Return by which factor each record of a block of `EVERY` positions has decayed since.

    Args:
        decays: log decays of the records.
        exists: which of the records are read.

    Returns:
        The factor of each record, 0 for one that is not read, then that of the state before all of them. The latter
        stands there `UNIT` times, so that the factors of a head begin at a multiple of 32 bytes.
    """
    decays = jnp.where(exists, decays, 0)
    is_behind = jnp.concatenate([~jnp.tri(EVERY, dtype=bool), jnp.ones((UNIT, EVERY), bool)])
    factors = jnp.exp(jnp.sum(jnp.where(is_behind, decays[..., None, :], 0), axis=-1))
    is_read = jnp.pad(jnp.broadcast_to(exists, decays.shape), ((0, 0), (0, 0), (0, UNIT)), constant_values=True)
    return jnp.where(is_read, factors, 0)


class Nodes(NamedTuple):
    """The new tokens of a round; more than `UNIT` are padded with zeros to a multiple of it."""

    keys: Float[Array, "batch tokens key_heads key_dim"]
    queries: Float[Array, "batch tokens key_heads key_dim"]
    values: Float[Array, "batch tokens heads value_dim"]
    # Of each token (last axis, padded): what the corrected value of each token counts in its value and in its output,
    # then its rate, and the factors of what its key, times its rate, and its query read of the state; float32.
    tables: Float[Array, "batch heads rows nodes"]


def fold(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    first: Int[Array, "batch"],
    behind: Float[Array, "batch heads factors"],
    *,
    interpret: Any = False,
) -> SlotStates:
    """Return the states of all slots, of which some are advanced by a block of records.

    Args:
        state: states of all slots [slots, ...], overwritten in place if donated.
        ring: records of all slots, bfloat16.
        slots: distinct slots to advance; those that do not exist are dropped.
        first: position of the first record of each block, a multiple of `EVERY`.
        behind: `behind_of` the block.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def run(group, refs, memory):
        state, keys, values, slots, first, behind = refs
        cta = _Cta(group, (state, keys, values, behind), memory)
        slot = slots[cta.sequence]

        @pl.when(slot < state.shape[0])
        def _():
            cta.start(slot, first[cta.sequence])
            behind = cta.load_behind()
            plgpu.barrier_wait(memory.arrived)
            records = cta.records(behind)
            for columns in cta.column_blocks():
                state[slot, cta.head, cta.channels, columns] = cta.newest(records, columns)

    states = jax.new_ref(state)
    inputs = states, ring.keys, ring.values, slots, first, behind
    _call(plgpu, run, "fold_records", state, ring, inputs, (), 0, interpret)
    return jax.freeze(states)


def verify(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    behind: Float[Array, "batch heads factors"],
    nodes: Nodes,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "batch nodes heads value_dim"], Float[Array, "batch nodes heads value_dim"]]:
    """Compute the outputs of nodes in float32, and their corrected values, both padded as `Nodes.tables`.

    Args:
        state: states of all slots [slots, ...].
        ring: records of all slots, bfloat16.
        slots: slot of each sequence; the results of one that does not exist are undefined.
        lengths: number of committed tokens.
        behind: `behind_of` the committed tokens behind the state.
        nodes: the new tokens.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def run(group, refs, memory):
        (state, keys, values, slots, lengths, behind), nodes = refs[:6], Nodes(*refs[6:10])
        outputs, corrected = refs[10:]
        cta = _Cta(group, (state, keys, values, behind), memory)
        cta.start(jnp.minimum(slots[cta.sequence], state.shape[0] - 1), lengths[cta.sequence], nodes)
        behind = cta.load_behind()
        plgpu.barrier_wait(memory.arrived)
        seen, read = cta.seen_and_read(cta.records(behind))
        cta.store(cta.substituted(seen, read, nodes.keys.shape[1]), (outputs, corrected))

    (batch, _, heads, value_dim), count = nodes.values.shape, nodes.tables.shape[3]
    inputs = state, ring.keys, ring.values, slots, lengths, behind, *nodes
    results = [
        jax.ShapeDtypeStruct((batch, count, heads, value_dim), dtype) for dtype in (jnp.float32, ring.keys.dtype)
    ]
    return tuple(_call(plgpu, run, "gated_delta", state, ring, inputs, results, count, interpret))


class _Memory(NamedTuple):
    """The shared memory of a CTA, and the barrier on which all that is loaded arrives."""

    state: Any  # [ROWS, key_dim]
    keys: Any  # of the records [EVERY, key_dim]
    values: Any  # of the records [EVERY, ROWS]
    arrived: Any
    node_keys: Any = None  # [nodes, key_dim]
    node_queries: Any = None
    node_values: Any = None  # [nodes, ROWS]; later the corrected ones
    outputs: Any = None  # [nodes, ROWS]
    tables: Any = None  # [2 nodes + 3, nodes]


def _call(plgpu, run, name, state, ring, inputs, results, nodes, interpret):
    """Runs a kernel in a CTA for each sequence, value head and `ROWS` value channels."""
    (_, heads, value_dim, key_dim), dtype = state.shape, ring.keys.dtype
    memory = [
        tiled(plgpu, (ROWS, key_dim), jnp.float32),
        tiled(plgpu, (EVERY, key_dim), dtype, COLUMNS),
        tiled(plgpu, (EVERY, ROWS), dtype),
        plgpu.Barrier(num_arrivals=7 if nodes else 3),
    ]
    if nodes:
        memory += [tiled(plgpu, (nodes, key_dim), dtype, COLUMNS)] * 2
        memory += [tiled(plgpu, (nodes, ROWS), dtype), tiled(plgpu, (nodes, ROWS), jnp.float32)]
        memory.append(plgpu.SMEM((2 * nodes + 3, nodes), jnp.float32))
    grid = {"part": value_dim // ROWS, "head": heads, "sequence": inputs[3].shape[0]}
    group = Warpgroup(plgpu, dtype, interpret)
    return launch(
        plgpu, lambda refs, *scoped: run(group, refs, _Memory(*scoped)), name, grid, results, memory, inputs, interpret
    )


class _Cta:
    """The place of a CTA, and its operations on arrays [`ROWS`, n] in registers."""

    def __init__(self, group, refs, memory):
        self.group, self.plgpu, self.memory = group, group.plgpu, memory
        self.state, self.keys, self.values, self.behind = refs
        part, self.head, self.sequence = (jax.lax.axis_index(name) for name in ("part", "head", "sequence"))
        self.key_head = jax.lax.div(self.head, self.state.shape[1] // self.keys.shape[2])
        self.channels = pl.ds(part * ROWS, ROWS)

    def start(self, slot, position, nodes=None):
        """Starts to load the state of a slot, the block of records that has a position, and the nodes."""
        blocks = self.keys.shape[1] // EVERY
        block = pl.ds(jax.lax.rem(jax.lax.div(position, EVERY), blocks) * EVERY, EVERY)
        loads = [
            (self.state.at[slot, self.head, self.channels], self.memory.state),
            (self.keys.at[slot, block, self.key_head], self.memory.keys),
            (self.values.at[slot, block, self.head, self.channels], self.memory.values),
        ]
        if nodes is not None:
            first = jnp.minimum(position, 0) * UNIT  # not constant: rows past the last one are read as zeros
            rows = self.sequence, pl.ds(first, nodes.tables.shape[3])
            loads += [
                (nodes.keys.at[(*rows, self.key_head)], self.memory.node_keys),
                (nodes.queries.at[(*rows, self.key_head)], self.memory.node_queries),
                (nodes.values.at[(*rows, self.head, self.channels)], self.memory.node_values),
                (nodes.tables.at[self.sequence, self.head], self.memory.tables),
            ]
        for source, target in loads:
            self.plgpu.copy_gmem_to_smem(source, target, self.memory.arrived)

    def load_behind(self):
        """Returns the factors by which each record and the state have decayed since."""
        place = self.sequence, self.head
        return self.group.per_column(self.behind.at[(*place, pl.ds(0, EVERY))]), self.behind[(*place, EVERY)]

    def records(self, behind):
        """Returns the decayed values of the records, as two parts, and the factor of the state."""
        after, total = behind
        values = self.group.read_transposed(self.memory.values).astype(jnp.float32)
        return self.group.parts(jnp.where(after > 0, values, 0.0) * after), total

    def column_blocks(self):
        """Returns the columns of the state, as many at a time as registers hold."""
        return [pl.ds(first, COLUMNS) for first in range(0, self.state.shape[3], COLUMNS)]

    def newest(self, records, columns):
        """Returns some columns of the state at the newest of the records."""
        values, total = records
        state = self.group.read(self.memory.state.at[:, columns])
        keys = self.memory.keys.at[:, columns]
        return state * total + self.group.product(*((part, keys) for part in values))

    def seen_and_read(self, records):
        """Returns the products of the newest state with the keys and with the queries of nodes, [`ROWS`, nodes]."""
        targets = self.memory.node_keys, self.memory.node_queries
        if self.group.interpret:  # the interpreter has no `wgmma` with an operand in registers
            state = [(self.group.parts(self.newest(records, columns)), columns) for columns in self.column_blocks()]
            return [
                sum(self.group.dot(part, rows[:, columns].T) for parts, columns in state for part in parts)
                for rows in targets
            ]

        def run(*sums):
            for columns in self.column_blocks():
                parts = self.group.parts(self.newest(records, columns))
                for total, rows in zip(sums, targets, strict=True):
                    self.group.multiply(total, *((part, rows.at[:, columns].T) for part in parts))
                self.plgpu.wgmma_wait(0)
            return [total[...] for total in sums]

        return pl.run_scoped(run, *[self.plgpu.ACC((ROWS, targets[0].shape[0]), jnp.float32)] * 2)

    def substituted(self, seen, read, count):
        """Returns the outputs and the corrected values of nodes, [`ROWS`, nodes], of which ``count`` may be tokens."""
        nodes, row = seen.shape[1], lambda index: self.group.per_column(self.memory.tables.at[index])
        values = self.group.read_transposed(self.memory.node_values).astype(jnp.float32)
        rest, outputs = values * row(2 * nodes) - seen * row(2 * nodes + 1), read * row(2 * nodes + 2)
        dtype = self.keys.dtype

        def take(node, carry):
            rest, outputs = carry
            value = self.group.column(rest, node).astype(dtype).astype(jnp.float32)
            return rest - value * row(node), outputs + value * row(nodes + node)

        rest, outputs = jax.lax.fori_loop(0, count, take, (rest, outputs))
        return outputs, rest.astype(dtype)

    def store(self, arrays, targets):
        """Stores outputs and corrected values of nodes."""
        tiles = self.memory.outputs, self.memory.node_values
        for array, tile in zip(arrays, tiles, strict=True):
            self.group.store_transposed(tile, array)
        self.plgpu.commit_smem()
        for tile, target in zip(tiles, targets, strict=True):
            self.plgpu.copy_smem_to_gmem(tile, target.at[self.sequence, :, self.head, self.channels])
        self.plgpu.wait_smem_to_gmem(0)
