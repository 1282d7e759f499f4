"""The gated delta rule of a round in one kernel for Hopper GPUs; `gated_delta` has the rule.

A CTA has `ROWS` value channels of the state of one value head of one sequence, in registers. With the records behind
the state (`record_ring`) it first makes the state at the newest committed token:

    newest = e^total state + sum over records j of (e^after_j u_j) k_j^T

`fold` stores this. `verify` multiplies it by the keys and queries of all nodes, and substitutes node after node, since
a node comes after its ancestors. The tensor cores get float32 operands as two bfloat16 numbers, high and low.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.hopper import HEIGHT as ROWS
from pallas_kernels.recurrent.record_ring import RecordRing
from pallas_kernels.recurrent.records import EVERY, States

MOST_NODES = 64
UNIT = 8  # nodes are padded to a multiple


class Behind(NamedTuple):
    """The decays behind the records of one block of `EVERY` positions, as factors."""

    after: Float[Array, "batch heads every"]  # of the tokens behind each record; 0: the record is not read
    total: Float[Array, "batch heads"]  # of all records

    @classmethod
    def of(cls, decays: Float[Array, "batch heads every"], exists: Array) -> Behind:
        """Return the factors of log decays, of which some do not exist."""
        decays = jnp.where(exists, decays, 0)
        is_behind = ~jnp.tri(EVERY, dtype=bool)
        after = jnp.sum(jnp.where(is_behind, decays[..., None, :], 0), axis=-1)
        return cls(jnp.where(exists, jnp.exp(after), 0), jnp.exp(jnp.sum(decays, axis=-1)))


class Nodes(NamedTuple):
    """The new tokens of a round; their number is a multiple of `UNIT`, and padding is zeros."""

    keys: Float[Array, "batch key_heads nodes key_dim"]
    queries: Float[Array, "batch key_heads nodes key_dim"]
    wanted: Float[Array, "batch heads value_dim nodes"]  # values times rates, float32
    key_scales: Float[Array, "batch heads nodes"]  # of what a node's key reads of the state, float32
    query_scales: Float[Array, "batch heads nodes"]
    weights: Float[Array, "batch heads nodes nodes"]  # of a node's corrected value in those of later nodes (last axis)
    scores: Float[Array, "batch heads nodes nodes"]  # and in their outputs


def fold(
    state: States,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    first: Int[Array, "batch"],
    behind: Behind,
    *,
    interpret: Any = False,
) -> States:
    """Return the states of all slots, of which some are advanced by a block of records.

    Args:
        state: states of all slots [slots, ...], overwritten in place if donated.
        ring: records of all slots, bfloat16.
        slots: distinct slots to advance; those that do not exist are dropped.
        first: position of the first record of each block, a multiple of `EVERY`.
        behind: decays behind the records.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def run(refs, key_rows, arrived):
        state, keys, values, slots, first, after, total = refs
        cta = _Cta(plgpu, state, keys, values, after, total, interpret)
        slot = slots[cta.batch]

        @pl.when(slot < state.shape[0])
        def _():
            cta.start(slot, first[cta.batch], key_rows, arrived)
            plgpu.barrier_wait(arrived)
            state[slot, cta.head, cta.channels, :] = cta.newest(slot, key_rows)

    states = jax.new_ref(state)
    inputs = states, ring.keys, ring.values, slots, first, *behind
    _call(plgpu, run, "fold_records", state, ring, inputs, (), 0, interpret)
    return jax.freeze(states)


def verify(
    state: States,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    behind: Behind,
    nodes: Nodes,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "batch heads value_dim nodes"], Float[Array, "batch heads value_dim nodes"]]:
    """Compute the outputs and the corrected values of nodes, in float32; the latter are rounded to bfloat16.

    Args:
        state: states of all slots [slots, ...].
        ring: records of all slots, bfloat16.
        slots: slot of each sequence; the results of one that does not exist are undefined.
        lengths: number of committed tokens.
        behind: decays behind the records of the committed tokens behind the state.
        nodes: the new tokens.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def run(refs, key_rows, arrived, node_keys, node_queries):
        (state, keys, values, slots, lengths, after, total), nodes = refs[:7], Nodes(*refs[7:14])
        corrected, outputs = refs[14:]
        cta = _Cta(plgpu, state, keys, values, after, total, interpret)
        slot = jnp.minimum(slots[cta.batch], state.shape[0] - 1)
        cta.start(slot, lengths[cta.batch], key_rows, arrived)
        for source, target in ((nodes.keys, node_keys), (nodes.queries, node_queries)):
            plgpu.copy_gmem_to_smem(source.at[cta.batch, cta.key_head], target, arrived)
        plgpu.barrier_wait(arrived)
        found = cta.substituted(cta.newest(slot, key_rows), node_keys, node_queries, nodes)
        corrected[cta.place], outputs[cta.place] = found

    inputs = state, ring.keys, ring.values, slots, lengths, *behind, *nodes
    result = jax.ShapeDtypeStruct(nodes.wanted.shape, jnp.float32)
    corrected, outputs = _call(
        plgpu, run, "gated_delta", state, ring, inputs, (result, result), nodes.keys.shape[2], interpret
    )
    return outputs, corrected


def _call(plgpu, run, name, state, ring, inputs, results, nodes, interpret):
    """Runs a kernel in a CTA for each sequence, value head and `ROWS` value channels."""
    (_, heads, value_dim, key_dim), dtype = state.shape, ring.keys.dtype

    def memory(rows, inner):
        transforms = plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(inner * dtype.itemsize)
        return plgpu.SMEM((rows, key_dim), dtype, transforms=transforms)

    def entry(*refs):
        of_nodes = [memory(nodes, 64)] * 2 if nodes else []
        arrived = plgpu.Barrier(num_arrivals=1 + len(of_nodes))
        pl.run_scoped(functools.partial(run, refs), memory(EVERY, 32), arrived, *of_nodes, collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=results,
        grid=(value_dim // ROWS, heads, inputs[3].shape[0]),
        grid_names=("part", "head", "sequence"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=False),
        interpret=interpret,
    )(*inputs)


class _Cta:
    """The place of a CTA, and its operations on arrays [`ROWS`, n] in registers."""

    def __init__(self, plgpu, state, keys, values, after, total, interpret):
        self.plgpu, self.layout, self.interpret = plgpu, plgpu.Layout.WGMMA, interpret
        self.state, self.keys, self.values, self.after, self.total = state, keys, values, after, total
        part, self.head, self.batch = (jax.lax.axis_index(name) for name in ("part", "head", "sequence"))
        self.key_head = jax.lax.div(self.head, state.shape[1] // keys.shape[1])
        self.channels = pl.ds(part * ROWS, ROWS)
        self.place = self.batch, self.head, self.channels, slice(None)

    def start(self, slot, position, key_rows, arrived):
        """Starts to load the keys of the records of the block that has a position."""
        blocks = self.keys.shape[2] // EVERY
        first = jax.lax.rem(jax.lax.div(position, EVERY), blocks) * EVERY
        self.rows = pl.ds(first, EVERY)
        self.plgpu.copy_gmem_to_smem(self.keys.at[slot, self.key_head, self.rows], key_rows, arrived)

    def newest(self, slot, key_rows):
        """Returns the state at the newest of the records."""
        state = self.load(self.state.at[slot, self.head, self.channels])
        after = self.per_column(self.after.at[self.batch, self.head])
        values = self.load(self.values.at[slot, self.head, self.channels, self.rows]).astype(jnp.float32)
        values = jnp.where(after > 0, values, 0.0) * after
        return state * self.total[self.batch, self.head] + self.product(values, key_rows, is_transposed=False)

    def substituted(self, state, node_keys, node_queries, nodes):
        """Returns the corrected values and the outputs of nodes behind a state, [`ROWS`, nodes]."""
        place = self.batch, self.head
        seen = self.product(state, node_keys, is_transposed=True)
        read = self.product(state, node_queries, is_transposed=True)
        rest = self.load(nodes.wanted.at[self.place[:3]]) - seen * self.per_column(nodes.key_scales.at[place])
        outputs = read * self.per_column(nodes.query_scales.at[place])
        index, dtype = self.column_index(rest.shape), node_keys.dtype

        def take(node, carry):
            rest, outputs = carry
            value = jnp.sum(jnp.where(index == node, rest, 0.0), axis=1).astype(dtype).astype(jnp.float32)
            value = jax.lax.broadcast_in_dim(value, rest.shape, [0])
            weights, scores = (self.per_column(of.at[(*place, node)]) for of in (nodes.weights, nodes.scores))
            return rest - value * weights, outputs + value * scores

        rest, outputs = jax.lax.fori_loop(0, rest.shape[1], take, (rest, outputs))
        return rest.astype(dtype).astype(jnp.float32), outputs

    def load(self, ref, layout=None):
        """Loads an array from global memory into registers."""
        if self.interpret:
            return ref[...]
        return self.plgpu.load(ref, layout=layout or self.layout, optimized=False)

    def per_column(self, ref):
        """Loads a value for each column, [`ROWS`, n]."""
        values = self.load(ref, self.layout.reduce(0))
        return jax.lax.broadcast_in_dim(values, (ROWS, *values.shape), [1])

    def column_index(self, shape):
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return self.plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.layout)

    def product(self, a, b_ref, *, is_transposed):
        """Returns a @ b, or a @ b^T, of a in registers as high and low parts, and b in shared memory."""
        dtype, b_ref = b_ref.dtype, b_ref.T if is_transposed and not self.interpret else b_ref
        high = a.astype(dtype)
        low = (a - high.astype(jnp.float32)).astype(dtype)
        if self.interpret:  # the interpreter has no `wgmma` with an operand in registers
            b = b_ref[...].astype(jnp.float32)
            b = b.T if is_transposed else b
            return sum(jnp.dot(part.astype(jnp.float32), b, precision="highest") for part in (high, low))

        def run(sums):
            self.plgpu.wgmma(sums, high, b_ref)
            self.plgpu.wgmma(sums, low, b_ref)
            self.plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(run, self.plgpu.ACC((ROWS, b_ref.shape[1]), jnp.float32))
