"""The nodes of a round from their projected rows to the outputs of the rule, in kernels for Hopper GPUs.

The rule is that of gated delta nets or of Mamba 2 (`pallas_kernels.recurrent.gated_delta`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.records import PromptBatch, TokenBatch
from jspec.models.parts.conv_state import input_places
from jspec.models.parts.delta_state import DeltaState
from jspec.models.parts.slot_rows import ancestor_mask
from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.recurrent import delta_kernel, inputs_kernel
from pallas_kernels.recurrent.delta_cta import UNIT
from pallas_kernels.recurrent.delta_kernel import MOST_NODES
from pallas_kernels.recurrent.delta_rounds import committed_factors, counts_of
from pallas_kernels.recurrent.inputs_kernel import NodeRows

OfNodes = Float[Array, "batch nodes heads value_dim"]


def takes_kernels(
    state: DeltaState, projected: Float[Array, "batch tokens channels"], taps: int, batch: TokenBatch
) -> bool:
    """Return whether the kernels run on the device, and have a form for this batch, these heads and so many taps."""
    if isinstance(batch, PromptBatch) or batch.deterministic or projected.shape[1] > MOST_NODES:
        return False
    key_heads, (heads, value_dim) = state.records.keys.shape[2], state.records.values.shape[2:]
    has_form = inputs_kernel.has_form(projected.shape[1], heads // key_heads * value_dim, taps)
    return state.has_kernel and has_form and projected.dtype == jnp.bfloat16


def run_nodes(
    state: DeltaState,
    projected: Float[Array, "batch tokens channels"],
    factors: Float[Array, "batch tokens heads"],
    decays: Float[Array, "batch tokens heads"],
    weight: Float[Array, "conv_channels taps"],
    batch: TokenBatch,
    *,
    bias: Float[Array, "conv_channels"] | None = None,
    corrects: bool = True,
    interpret: Any = False,
) -> tuple[tuple[OfNodes, OfNodes], DeltaState]:
    """Convolve the projected rows of a round's nodes, and apply the gated delta rule or that of Mamba 2.

    Args:
        state: state of the layer.
        projected: queries, keys and values of all heads before the convolution, then channels that are not read.
        factors: factors of values, float32: rates of the gated delta rule, or steps of Mamba 2.
        decays: log decays, float32.
        weight: taps of the convolution.
        batch: the nodes.
        bias: bias of the convolution; None: it has none.
        corrects: whether the rule corrects values, and norms keys and queries.
        interpret: False, or jax's parameters for interpreting the kernels and detecting races.

    Returns:
        The outputs in float32 and the values before their factors, and the state with records and inputs of the nodes.
    """
    assert batch.slots is not None, "rounds have slots"
    slots, lengths, ring = batch.slots, batch.first_row, state.records
    behind = committed_factors(ring, slots, lengths)
    # The new decays are written after the committed ones have been read: else they are copied.
    behind, projected = jax.lax.optimization_barrier((behind, projected))
    counts = counts_of(batch.valid, slots, state.slots)
    rows = _node_rows(projected, factors, decays, weight.shape[1], counts, batch)
    options: Any = dict(corrects=corrects, interpret=interpret)
    nodes, ring, inputs = inputs_kernel.prepare(rows, weight, ring, state.inputs.inputs, bias, **options)
    outputs, values = delta_kernel.verify(state.state, ring, slots, lengths, behind, counts, nodes, interpret=interpret)
    state = state._replace(records=ring._replace(values=values), inputs=state.inputs._replace(inputs=inputs))
    return (outputs[:, : projected.shape[1]], nodes.values[:, : projected.shape[1]]), state


def _node_rows(
    projected: Array, factors: Array, decays: Array, taps: int, counts: Array, batch: TokenBatch
) -> NodeRows:
    """Return the rows of nodes as the kernel reads them."""
    assert batch.slots is not None
    count, is_seen = projected.shape[1], ancestor_mask(batch)
    more = -count % UNIT
    gates = jnp.stack([jnp.swapaxes(of, 1, 2) for of in (factors, decays)], axis=2)
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, 0), (0, more)))
    follows = jnp.stack([jnp.swapaxes(is_seen, 1, 2), is_seen], axis=1).astype(jnp.float32)
    follows = jnp.pad(follows, ((0, 0), (0, 0), (0, HEIGHT - count), (0, more)))
    kept = jnp.broadcast_to(counts[:, None, None], (*projected.shape[:2], 1))
    places = jnp.concatenate([input_places(batch, taps), kept], axis=-1).astype(jnp.int32)
    return NodeRows(projected, gates, places, follows, batch.slots, batch.first_row)
