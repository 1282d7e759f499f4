"""The gated delta rule for the tokens of rounds, whose states and records are kept by slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import HOPPER, Implementation, Kernel, dispatch
from pallas_kernels.layers.hopper import HEIGHT, multiprocessors
from pallas_kernels.recurrent import delta_kernel, gated_delta, in_order_tokens
from pallas_kernels.recurrent.delta_kernel import MOST_NODES, UNIT, Nodes, behind_of
from pallas_kernels.recurrent.record_ring import RecordRing, block_of, states_of
from pallas_kernels.recurrent.records import DeltaTokens, Records, SlotStates


def verify_and_write(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    new: DeltaTokens,
    seen: Bool[Array, "batch tokens tokens"],
    written: Bool[Array, "batch tokens"],
    *,
    implementation: Implementation = "auto",
    deterministic: bool = False,
) -> tuple[Float[Array, "batch heads tokens value_dim"], RecordRing]:
    """Compute the outputs of the tokens of a round, and write their records into the rows after the committed tokens'.

    Deterministic rounds have a kernel, which computes token after token. Others come here only if the kernels from
    projected rows to outputs have no form for them (`takes_kernels` in `jspec.models.parts.delta_nodes`). Without rates
    these still have the kernel of nodes, whose tables XLA makes.

    Args:
        state: states of all slots, each after its last multiple of `EVERY` committed tokens.
        ring: records of all slots.
        slots: distinct slots of the sequences; the results of one that does not exist are undefined.
        lengths: number of committed tokens of each sequence.
        new: inputs of the new tokens.
        seen: which tokens each token follows in its tree, itself included.
        written: tokens whose records are written.
        implementation: as in `dispatch`.
        deterministic: compute token after token, so that bits depend neither on the rounds nor on the tree.
    """

    def written_after(verify: Callable[..., tuple[Array, Records]], *arguments: Any, **options: Any) -> Any:
        *inputs, written = arguments
        outputs, records = verify(*inputs, **options)
        _, ring, slots, lengths, *_ = inputs
        return outputs, ring.written(*_rows_of(ring, slots, lengths, written), records)

    reference = partial(written_after, partial(verify_round, deterministic=deterministic))
    arguments = state, ring, slots, lengths, new, seen, written
    is_by_nodes = not deterministic and new.rates is None and has_kernel(ring) and written.shape[1] <= MOST_NODES
    is_in_order = deterministic and in_order_tokens.has_kernel(ring)
    kernels = [
        Kernel(HOPPER, partial(written_after, in_order_tokens.verify), not is_in_order),
        Kernel(HOPPER, _verify_nodes, not is_by_nodes),
    ]
    return dispatch(implementation, kernels, reference, *arguments)


def _rows_of(
    ring: RecordRing, slots: Int[Array, "batch"], lengths: Int[Array, "batch"], written: Bool[Array, "batch tokens"]
) -> tuple[Int[Array, "batch tokens"], Int[Array, "batch tokens"]]:
    """Return the slots and the positions of the tokens of a round; a token that is not written has no slot."""
    target = jnp.where(written, slots[:, None], ring.decays.shape[0])
    return target, lengths[:, None] + jnp.arange(written.shape[1])


def _verify_nodes(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    new: DeltaTokens,
    seen: Bool[Array, "batch tokens tokens"],
    written: Bool[Array, "batch tokens"],
    *,
    interpret: Any,
) -> tuple[Float[Array, "batch heads tokens value_dim"], RecordRing]:
    """Compute what `verify_and_write` does by the kernel of nodes, which writes the values of records itself."""
    behind, counts = committed_factors(ring, slots, lengths), counts_of(written, slots, len(state))
    inputs = state, ring, slots, lengths, behind, counts, nodes_of(new, seen)
    outputs, values = delta_kernel.verify(*inputs, interpret=interpret)
    # Keys and decays are written after the kernel has read the ring, so that XLA need not copy them.
    outputs, values, keys, decays = jax.lax.optimization_barrier((outputs, values, new.keys, new.decays))
    records, rows = Records(keys, new.values, decays), _rows_of(ring, slots, lengths, written)
    ring = ring._replace(values=values).written(*rows, records, has_values=True)
    return jnp.swapaxes(outputs[:, : written.shape[1]], 1, 2), ring


def nodes_of(new: DeltaTokens, seen: Bool[Array, "batch tokens tokens"]) -> Nodes:
    """Return what `delta_kernel.verify` reads of the tokens of a round.

    Args:
        new: inputs of the tokens.
        seen: which tokens each token follows in its tree, itself included.
    """
    count = new.decays.shape[2]
    more = -count % UNIT
    weights, scores = (jnp.swapaxes(of, 2, 3) for of in gated_delta.pairs_of(new, seen))
    scales = jnp.exp(gated_delta.path_decays(new.decays, seen))
    rates = (jnp.ones_like(scales), jnp.zeros_like(scales)) if new.rates is None else (new.rates, new.rates * scales)
    pairs = [jnp.pad(of, [(0, 0), (0, 0), (0, more), (0, more)]) for of in (weights, scores)]
    rows = jnp.pad(jnp.stack([*rates, scales], axis=2), [(0, 0), (0, 0), (0, 0), (0, more)])
    padding = more if count > UNIT else 0  # fewer are padded when they are loaded
    arrays = (jnp.swapaxes(of, 1, 2) for of in (new.keys, new.queries, new.values))
    keys, queries, values = (jnp.pad(of, [(0, 0), (0, padding), (0, 0), (0, 0)]) for of in arrays)
    return Nodes(keys, queries, values, jnp.concatenate([*pairs, rows], axis=2))


def verify_round(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    new: DeltaTokens,
    seen: Bool[Array, "batch tokens tokens"],
    *,
    deterministic: bool = False,
) -> tuple[Float[Array, "batch heads tokens value_dim"], Records]:
    """Compute the outputs of the tokens of a round and their records by `gated_delta.verify`, without a kernel.

    The arguments are those of `verify_and_write`.
    """
    before = states_of(state, slots), ring.window(slots, lengths)
    return gated_delta.verify(*before, new, seen, deterministic=deterministic)


def committed_factors(
    ring: RecordRing, slots: Int[Array, "batch"], lengths: Int[Array, "batch"]
) -> Float[Array, "batch heads factors"]:
    """Return `behind_of` the committed tokens after the states of some slots."""
    position = block_of(lengths)
    return behind_of(ring.decays_at(slots, position), (position < lengths[:, None])[:, None])


def counts_of(written: Bool[Array, "batch tokens"], slots: Int[Array, "batch"], all_slots: int) -> Int[Array, "batch"]:
    """Return the number of nodes of each sequence whose records are written: those up to the last one in ``written``.

    Nobody reads the records of the others among them. Padding after them is left out, as the ring may lack rows for it.
    """
    ends = jnp.max(jnp.where(written, jnp.arange(1, written.shape[1] + 1), 0), axis=1)
    return jnp.where(slots < all_slots, ends, 0).astype(jnp.int32)


def fold_round(
    state: SlotStates,
    ring: RecordRing,
    slots: Int[Array, "batch"],
    first: Int[Array, "batch"],
    *,
    implementation: Implementation = "auto",
    deterministic: bool = False,
) -> SlotStates:
    """Return the states of all slots, of which some are advanced by `EVERY` records.

    Args:
        state: states of all slots.
        ring: records of all slots.
        slots: distinct slots to advance; those that do not exist are dropped.
        first: position of the first record of each, a multiple of `EVERY`.
        implementation: as in `dispatch`.
        deterministic: advance token after token.
    """

    def reference(*arguments: Any) -> SlotStates:
        state, ring, slots, first = arguments
        block = ring.at(slots, block_of(first))
        folded = gated_delta.fold(states_of(state, slots), block, deterministic=deterministic)
        return state.at[slots].set(folded, mode="drop")

    kernels = [
        Kernel(HOPPER, in_order_tokens.fold, not (deterministic and in_order_tokens.has_kernel(ring))),
        Kernel(HOPPER, _fold, deterministic or not has_kernel(ring)),
    ]
    return dispatch(implementation, kernels, reference, state, ring, slots, first)


def has_kernel(ring: RecordRing) -> bool:
    """Return whether the kernels of folds and prompts run on the device, and have a form for such heads and dtype."""
    key_dim, value_dim, dtype = ring.keys.shape[3], ring.values.shape[3], ring.keys.dtype
    return multiprocessors() is not None and dtype == jnp.bfloat16 and key_dim in (64, 128) and value_dim % HEIGHT == 0


def _fold(state: SlotStates, ring: RecordRing, slots: Array, first: Array, *, interpret: Any) -> SlotStates:
    decays = ring.decays_at(slots, block_of(first))
    behind = behind_of(decays, jnp.ones((1, 1, 1), bool))
    return delta_kernel.fold(state, ring, slots, first, behind, interpret=interpret)
