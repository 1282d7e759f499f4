"""What a round's kernel of the gated delta rule reads of its nodes, in one kernel for Hopper GPUs.

A CTA has a key head of one sequence, and the value heads that share it. From the projected rows of the nodes it makes
keys, queries and values node after node, and from these the tables of `delta_kernel.Nodes`, where decays between nodes
are differences of sums. It also keeps what later rounds read of the nodes, in the rows of their slots: inputs of the
convolution, keys and decays. A rule without a correction, as Mamba 2 has it, norms no keys and queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.hopper import HEIGHT, SHARED_BYTES
from pallas_kernels.recurrent.delta_cta import UNIT
from pallas_kernels.recurrent.delta_kernel import Nodes
from pallas_kernels.recurrent.record_ring import RecordRing
from pallas_kernels.recurrent.records import LEAST
from pallas_kernels.recurrent.warpgroup import WITHOUT_BARRIERS, Warpgroup, first_rows, launch, lowered_once, tiled

ROWS = 8  # rows that a warpgroup norms at a time
BLOCK = 128  # channels that a warpgroup computes at a time, one in each thread
UNIT_EPS = 1e-6  # added to the sum of squares of a key or a query before its root divides them


class NodeRows(NamedTuple):
    """The nodes of a round, as the kernel reads them; padded ones are zeros."""

    projected: Float[Array, "batch nodes channels"]  # queries, keys and values of all heads before the convolution
    gates: Float[Array, "batch heads 2 padded"]  # factors of values (rates or steps) and log decays, float32
    # Of each node the rows of its earlier inputs, the nearest first: 0 to taps - 2 is a committed input, the oldest
    # first, then come the nodes. Last the number of nodes of the sequence of which is kept what later rounds read.
    places: Int[Array, "batch nodes taps"]
    # 1 where a node (last axis) is a node (last axis but one) or comes after it in its tree, and the transposed.
    follows: Float[Array, "batch 2 height padded"]
    slots: Int[Array, "batch"]
    lengths: Int[Array, "batch"]


def has_form(nodes: int, channels: int, taps: int) -> bool:
    """Return whether a CTA's shared memory holds a round.

    Args:
        nodes: number of nodes.
        channels: value channels of a key head.
        taps: taps of the convolution; places are copied in multiples of 16 bytes.
    """
    padded = -(-nodes // UNIT) * UNIT
    rows = (2 + channels // BLOCK) * (taps - 1 + padded) * BLOCK * 2
    tables = (2 * padded + HEIGHT) * padded * 4
    more = (HEIGHT + padded) * BLOCK * 2 + 2 * ROWS * BLOCK * 4 + 8 * 1024  # each buffer begins at a multiple of 1,024
    return channels % BLOCK == 0 and taps % 4 == 0 and rows + tables + more <= SHARED_BYTES


@lowered_once("corrects")
def prepare(
    rows: NodeRows,
    weight: Float[Array, "channels taps"],
    ring: RecordRing,
    inputs: Float[Array, "slots rows channels"],
    bias: Float[Array, "channels"] | None = None,
    *,
    corrects: bool = True,
    interpret: Any = False,
) -> tuple[Nodes, RecordRing, Float[Array, "slots rows channels"]]:
    """Make what `delta_kernel.verify` reads of nodes, and keep keys, decays and inputs of the convolution.

    Args:
        rows: the nodes.
        weight: taps of the convolution.
        ring: records of all slots; keys and decays are overwritten in place if donated.
        inputs: newest inputs of the convolution of all slots, overwritten in place if donated.
        bias: what is added to the sums of the convolution; None: nothing.
        corrects: whether the rule corrects values, and norms keys and queries.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.

    Returns:
        The nodes, and the records and inputs of all slots with those of the nodes, whose values are not written yet.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (batch, count, _), padded, dtype = rows.projected.shape, rows.gates.shape[3], ring.keys.dtype
    (key_heads, key_dim), (heads, value_dim) = ring.keys.shape[2:], ring.values.shape[2:]
    shared, taps = heads // key_heads, weight.shape[1]
    blocks = 2 + shared * value_dim // BLOCK
    memory = _InputsMemory(
        rows=plgpu.SMEM((blocks, taps - 1 + padded, BLOCK), dtype),
        places=plgpu.SMEM((count, taps), jnp.int32),
        gates=plgpu.SMEM((shared, 2, padded), jnp.float32),
        mixed=plgpu.SMEM((2, ROWS, BLOCK), jnp.float32),
        keys=tiled(plgpu, (HEIGHT, key_dim), dtype),
        queries=tiled(plgpu, (padded, key_dim), dtype),
        path=plgpu.SMEM((HEIGHT,), jnp.float32),
        tables=plgpu.SMEM((2 * padded + HEIGHT, padded), jnp.float32),
        arrived=plgpu.Barrier(num_arrivals=blocks * taps + 2),
    )
    group = Warpgroup(plgpu, dtype, interpret)

    def run(refs, *scoped):
        _InputsCta(group, refs, _InputsMemory(*scoped), has_bias=bias is not None, corrects=corrects).run()

    def shape(*sizes, of=dtype):
        return jax.ShapeDtypeStruct((batch, *sizes), of)

    stored = count if count <= UNIT else padded
    out = [shape(stored, key_heads * key_dim)] * 2 + [shape(stored, heads * value_dim)]
    out += [shape(heads, 2 * padded + 3, padded, of=jnp.float32)]
    kept = [jax.new_ref(array) for array in (ring.keys, ring.decays, inputs)]
    grid = {"head": key_heads, "sequence": batch}
    read = (*rows, weight) if bias is None else (*rows, weight, bias)
    keys, queries, values, tables = launch(
        plgpu, run, "delta_inputs", grid, out, memory, (*kept, *read), interpret, **WITHOUT_BARRIERS
    )
    new_keys, decays, inputs = map(jax.freeze, kept)
    keys, queries = (of.reshape(batch, stored, key_heads, key_dim) for of in (keys, queries))
    nodes = Nodes(keys, queries, values.reshape(batch, stored, heads, value_dim), tables)
    return nodes, ring._replace(keys=new_keys, decays=decays), inputs


class _InputsMemory(NamedTuple):
    """The shared memory of a CTA, and the barrier on which all that is loaded arrives."""

    rows: Any  # [blocks, committed inputs, then nodes, BLOCK]: inputs of the convolution, `BLOCK` channels at a time
    places: Any  # [nodes, taps]
    gates: Any  # [value heads, 2, padded]
    mixed: Any  # [2, ROWS, BLOCK]: queries before they are normed, and keys
    keys: Any  # [HEIGHT, key_dim]
    queries: Any  # [padded, key_dim]
    path: Any  # [HEIGHT]: log decay of the path from the root to each node
    tables: Any  # [2 padded + HEIGHT, padded]
    arrived: Any


class _InputsCta:
    """The place of a CTA, and what it computes."""

    def __init__(self, group, refs, memory, has_bias, corrects):
        self.group, self.plgpu, self.memory, self.corrects = group, group.plgpu, memory, corrects
        self.ring_keys, self.ring_decays, self.inputs = refs[:3]
        self.nodes, self.weight, self.bias = NodeRows(*refs[3:9]), refs[9], refs[10] if has_bias else None
        self.keys, self.queries, self.values, self.tables = refs[-4:]
        self.head, self.sequence = (jax.lax.axis_index(name) for name in ("head", "sequence"))
        slots, _, key_heads, self.key_dim = self.ring_keys.shape
        self.shared, self.taps = self.ring_decays.shape[2] // key_heads, self.weight.shape[1]
        self.slot = jnp.minimum(self.nodes.slots[self.sequence], slots - 1)
        self.length, self.padded = self.nodes.lengths[self.sequence], memory.gates.shape[2]
        values = self.values.shape[2] // key_heads
        starts = [self.head * BLOCK, key_heads * BLOCK + self.head * BLOCK]
        self.value_starts = [self.head * values + first for first in range(0, values, BLOCK)]
        starts += [2 * key_heads * BLOCK + start for start in self.value_starts]
        self.columns = [pl.ds(start, BLOCK) for start in starts]
        # A warp has a row, a thread successive channels of it.
        tiling = self.plgpu.Tiling(((ROWS // 2, BLOCK), (BLOCK // 32,)))
        self.row_layout = self.plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def run(self):
        self.load()
        weight = [
            [self.vector(self.weight.at[of, tap]).astype(jnp.float32) for tap in range(self.taps)]
            for of in self.columns
        ]
        bias = [0.0 if self.bias is None else self.vector(self.bias.at[of]).astype(jnp.float32) for of in self.columns]
        self.plgpu.barrier_wait(self.memory.arrived)
        self.clear_inputs_before_text()
        count = self.nodes.projected.shape[1]

        def prepare(part, carry):
            first = part * ROWS
            end = jnp.minimum(first + ROWS, count)
            jax.lax.fori_loop(first, end, convolve, 0)
            self.plgpu.commit_smem()
            self.norm(first)
            self.plgpu.commit_smem()
            jax.lax.fori_loop(first, jnp.minimum(end, self.memory.places[0, self.taps - 1]), keep, 0)
            return carry

        def convolve(index, carry):
            self.convolve(index, weight, bias)
            return carry

        def keep(index, carry):
            self.keep(index)
            return carry

        jax.lax.fori_loop(0, self.padded // ROWS, prepare, 0)
        for index in range(count, self.values.shape[1]):
            for start in self.value_starts:
                self.values[self.sequence, index, pl.ds(start, BLOCK)] = jnp.zeros(BLOCK, self.values.dtype)
        self.store_rows()
        self.store_tables()
        self.plgpu.wait_smem_to_gmem(0)

    def vector(self, ref):
        """Loads `BLOCK` channels, one in each thread."""
        if self.group.interpret:
            return ref[...]
        return self.plgpu.load(ref, layout=self.plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=1), optimized=False)

    def load(self):
        """Starts to load the rows of the nodes and of the committed inputs before them."""
        memory, before, padded = self.memory, self.taps - 1, self.padded
        heads = pl.ds(self.head * self.shared, self.shared)
        loads = [(self.nodes.places.at[self.sequence], memory.places)]
        loads += [(self.nodes.gates.at[self.sequence, heads], memory.gates)]
        for block, columns in enumerate(self.columns):
            source = self.nodes.projected.at[self.sequence, first_rows(self.length, padded), columns]
            loads.append((source, memory.rows.at[block, pl.ds(before, padded)]))
            for index in range(before):
                row = jax.lax.rem(self.length + (self.inputs.shape[1] - before + index), self.inputs.shape[1])
                source = self.inputs.at[self.slot, pl.ds(row, 1), columns]
                loads.append((source, memory.rows.at[block, pl.ds(index, 1)]))
        for source, target in loads:
            self.plgpu.copy_gmem_to_smem(source, target, memory.arrived)

    def clear_inputs_before_text(self):
        """Writes zeros in place of inputs before the first token."""
        before = self.taps - 1
        for index in range(before):

            @pl.when(self.length + index < before)
            def _(index=index):
                for block in range(len(self.columns)):
                    self.memory.rows[block, index] = jnp.zeros(BLOCK, self.memory.rows.dtype)
                self.plgpu.commit_smem()

    def convolve(self, index, weight, bias):
        """Computes a node's query and key before they are normed, and its values."""
        memory = self.memory
        sources = [memory.places[index, age] for age in reversed(range(self.taps - 1))] + [self.taps - 1 + index]
        for block, taps in enumerate(weight):
            inputs = [self.vector(memory.rows.at[block, row]).astype(jnp.float32) for row in sources]
            mixed = sum((x * tap for x, tap in zip(inputs, taps, strict=True)), bias[block])
            mixed = mixed / (1 + jnp.exp(-mixed))
            if block < 2:
                memory.mixed[block, jax.lax.rem(index, ROWS)] = mixed
            else:
                channels = pl.ds(self.value_starts[block - 2], BLOCK)
                self.values[self.sequence, index, channels] = mixed.astype(memory.rows.dtype)

    def norm(self, first):
        """Norms some queries and keys if values are corrected.

        A key that is not finite becomes 0, and its query NaN, which ends the request.
        """
        memory, dtype, rows = self.memory, self.memory.rows.dtype, pl.ds(first, ROWS)
        query, key = (self.group.load(memory.mixed.at[index], self.row_layout) for index in (0, 1))
        if self.corrects:
            query, key = (x * self.over_rows(jax.lax.rsqrt(jnp.sum(x * x, axis=1) + UNIT_EPS)) for x in (query, key))
            query = query * self.key_dim**-0.5
        query = query + self.over_rows(jnp.sum(key * 0, axis=1))
        is_node = self.group.index(0, BLOCK, ROWS, self.row_layout) < self.nodes.projected.shape[1] - first
        key = jnp.where(is_node & (jnp.abs(key) < jnp.inf), key, 0.0)
        memory.queries[rows] = jnp.where(is_node, query, 0.0).astype(dtype)
        memory.keys[rows] = key.astype(dtype)
        memory.mixed[1] = key

    def over_rows(self, values):
        """Returns a value of each row in all channels of the row."""
        return jax.lax.broadcast_in_dim(values, (*values.shape, BLOCK), [0])

    def store_rows(self):
        """Begins to store keys and queries."""
        rows, columns = first_rows(self.length, self.padded), pl.ds(self.head * BLOCK, BLOCK)
        tiles = self.memory.keys.at[pl.ds(0, self.padded)], self.memory.queries
        for source, target in zip(tiles, (self.keys, self.queries), strict=True):
            self.plgpu.copy_smem_to_gmem(source, target.at[self.sequence, rows, columns])

    def keep(self, index):
        """Writes key, decays and inputs of the convolution of a node into the rows of its slot."""
        row = jax.lax.rem(self.length + index, self.inputs.shape[1])
        for block, columns in enumerate(self.columns):
            self.inputs[self.slot, row, columns] = self.vector(self.memory.rows.at[block, self.taps - 1 + index])
        row = jax.lax.rem(self.length + index, self.ring_keys.shape[1])
        key = self.vector(self.memory.mixed.at[1, jax.lax.rem(index, ROWS)])
        self.ring_keys[self.slot, row, self.head] = key.astype(self.ring_keys.dtype)
        for shared in range(self.shared):
            self.ring_decays[self.slot, row, self.head * self.shared + shared] = self.memory.gates[shared, 1, index]

    def store_tables(self):
        """Stores what the corrected values of nodes count for other nodes."""
        group, memory = self.group, self.memory
        keys = group.read(memory.keys)
        tiles = memory.keys.at[pl.ds(0, self.padded)], memory.queries
        of_keys, of_queries = (group.product((keys, tile.T)) for tile in tiles)
        follows, after = (group.load(self.nodes.follows.at[self.sequence, index]) > 0 for index in (0, 1))
        padded = of_keys.shape[1]
        is_after = follows & (group.index(0, padded) != group.index(1, padded))
        for shared in range(self.shared):
            factors, decays = (group.per_column(memory.gates.at[shared, index]) for index in (0, 1))
            path = jnp.sum(jnp.where(after, jnp.maximum(decays, LEAST), 0.0), axis=1)
            memory.path[...] = path
            self.plgpu.commit_smem()
            of_column = group.per_column(memory.path.at[pl.ds(0, padded)])
            between = jnp.exp(of_column - jax.lax.broadcast_in_dim(path, (HEIGHT, padded), [0]))
            row, scale = group.index(0, padded), jnp.exp(of_column)
            of_state = factors * scale if self.corrects else 0.0
            parts = (
                jnp.where(is_after & self.corrects, between * of_keys, 0.0) * factors,
                jnp.where(follows, between * of_queries, 0.0),
                jnp.where(row == 0, factors, jnp.where(row == 1, of_state, scale)),
            )
            self.plgpu.wait_smem_to_gmem(0)
            for index, part in enumerate(parts):
                memory.tables[pl.ds(index * padded, HEIGHT), :] = part
                self.plgpu.commit_smem()
            head = self.head * self.shared + shared
            source = memory.tables.at[pl.ds(0, 2 * padded + 3)]
            self.plgpu.copy_smem_to_gmem(source, self.tables.at[self.sequence, head])
