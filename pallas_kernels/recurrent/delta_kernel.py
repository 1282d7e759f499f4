"""The gated delta rule of a round in one kernel for Hopper GPUs; `gated_delta` has the rule.

A CTA has `ROWS` value channels of the state of one value head of one sequence, and computes with a few columns of it at
a time, as they arrive. From the state and the records of the tokens after it (`record_ring`) it first computes the
state at the newest committed token:

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
from pallas_kernels.recurrent.delta_cta import COLUMNS, UNIT, Cta, CtaMemory, memory_of
from pallas_kernels.recurrent.record_ring import RecordRing
from pallas_kernels.recurrent.records import EVERY, SlotStates
from pallas_kernels.recurrent.warpgroup import WITHOUT_BARRIERS, Warpgroup, launch, lowered_once

MOST_NODES = 64


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
    # then the factors of its value, of what its key reads of the state, 0 without a correction, and of what its query
    # reads; float32.
    tables: Float[Array, "batch heads rows nodes"]


@lowered_once()
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
        cta = Cta(group, (state, keys, values, behind), memory)
        place = cta.place(slots, first)

        @pl.when(place.slot < state.shape[0])
        def _():
            cta.load(place)
            records = cta.records()
            for block in range(cta.blocks):
                columns = pl.ds(block * COLUMNS, COLUMNS)
                state[place.slot, place.head, place.channels, columns] = cta.newest(records, block)

    states = jax.new_ref(state)
    inputs = states, ring.keys, ring.values, slots, first, behind
    _call(plgpu, run, "fold_records", inputs, (), memory_of(plgpu, ring, 0), interpret)
    return jax.freeze(states)


@lowered_once()
def verify(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    behind: Float[Array, "batch heads factors"],
    counts: Int[Array, "batch"],
    nodes: Nodes,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "batch nodes heads value_dim"], Float[Array, "slots rows heads value_dim"]]:
    """Compute the outputs of nodes in float32, padded as `Nodes.tables`, and write corrected values into the ring's.

    Args:
        state: states of all slots [slots, ...].
        ring: records of all slots, bfloat16, whose values are overwritten in place if donated.
        slots: distinct slots of the sequences; the results of one that does not exist are undefined.
        lengths: number of committed tokens.
        behind: `behind_of` the committed tokens behind the state.
        counts: number of nodes whose values are written, to the rows after the committed tokens'; 0 without a slot.
        nodes: the new tokens.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (batch, _, heads, value_dim), count = nodes.values.shape, nodes.tables.shape[3]

    def run(group, refs, memory):
        (state, keys, values, slots, lengths, behind, counts), nodes = refs[:7], Nodes(*refs[7:11])
        cta = Cta(group, (state, keys, values, behind), memory, nodes, refs[11])
        place = cta.place(slots, lengths)
        cta.load(place)
        cta.verify(place, counts[place.sequence])

    values = jax.new_ref(ring.values)
    inputs = state, ring.keys, values, slots, lengths, behind, counts, *nodes
    results = jax.ShapeDtypeStruct((batch, count, heads, value_dim), jnp.float32)
    outputs = _call(plgpu, run, "gated_delta", inputs, results, memory_of(plgpu, ring, count), interpret)
    return outputs, jax.freeze(values)


def _call(plgpu, run, name, inputs, results, memory, interpret):
    """Runs a kernel in a CTA for each sequence, value head and `ROWS` value channels."""
    group, (_, heads, value_dim, _) = Warpgroup(plgpu, inputs[1].dtype, interpret), inputs[0].shape

    def of_cta(refs, *scoped):
        run(group, refs, CtaMemory(*scoped))

    grid = {"part": value_dim // ROWS, "head": heads, "sequence": inputs[3].shape[0]}
    return launch(plgpu, of_cta, name, grid, results, memory, inputs, interpret, **WITHOUT_BARRIERS)
