"""The gated delta rule token after token, whose bits depend neither on rounds nor on the shape of a draft tree.

`pallas_kernels.recurrent.gated_delta` has the rule. Here a state is advanced by one record after another, and a token
takes the state of its parent. Committed records, nodes of a tree and tokens of prompts take the same steps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.layers.row_by_row import row_by_row
from pallas_kernels.recurrent.records import DeltaTokens, Records, States, each_head


def fold_in_order(state: States, records: Records) -> States:
    """Return the states after the tokens of the records, as `fold` does."""
    return row_by_row(_replayed, state, records)


def verify_in_order(
    state: States, window: Records | None, new: DeltaTokens, seen: Bool[Array, "batch tokens tokens"]
) -> tuple[Float[Array, "batch heads tokens value_dim"], Records]:
    """Compute the outputs of new tokens that form trees, and their records, as `verify` does."""
    begin = state if window is None else fold_in_order(state, window)
    outputs, values = row_by_row(_nodes, begin, new, jnp.broadcast_to(seen, (len(state), *seen.shape[1:])))
    return outputs, Records(new.keys, values, new.decays)


def _replayed(state: States, records: Records) -> States:
    keys = each_head(records.keys, state.shape[1])

    def step(index: Array, state: Array) -> Array:
        key, value, decay = (_row(rows, index) for rows in (keys, records.values, records.decays))
        return _added(_decayed(state, decay), key, value)

    return jax.lax.fori_loop(0, keys.shape[2], step, state)


def _nodes(state: States, new: DeltaTokens, seen: Array) -> tuple[Array, Array]:
    """Run the nodes of one tree, [1, heads, tokens, value_dim] each; a node has the state of its parent."""
    heads, count = state.shape[1], new.keys.shape[2]
    keys, queries = (each_head(rows, heads) for rows in (new.keys, new.queries))
    before = seen[0] & ~jnp.eye(count, dtype=bool)
    parents = jnp.max(jnp.where(before, jnp.arange(count), -1), axis=1)  # a path's last node before its own
    states = jnp.broadcast_to(state[None], (count + 1, *state.shape))

    def step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        states, outputs, values = carry
        key, query, value = (_row(rows, index) for rows in (keys, queries, new.values))
        decay, rate = _row(new.decays, index), _row(new.rates, index)
        state = _decayed(states[parents[index]], decay)  # the last one, -1, is that before the tree
        wanted = value.astype(jnp.float32) - _read(state, key)
        corrected = jax.lax.optimization_barrier(rate[..., None] * wanted).astype(values.dtype)
        state = _added(state, key, corrected)
        outputs = outputs.at[:, :, index].set(_read(state, query))
        return states.at[index].set(state), outputs, values.at[:, :, index].set(corrected)

    shape = *keys.shape[:3], state.shape[3]
    carry = states, jnp.zeros(shape, jnp.float32), jnp.zeros(shape, new.values.dtype)
    return jax.lax.fori_loop(0, count, step, carry)[1:]


def _row(rows: Float[Array, "one heads tokens *dim"], index: Array) -> Float[Array, "one heads *dim"]:
    return jax.lax.dynamic_index_in_dim(rows, index, axis=2, keepdims=False)


def _decayed(state: States, decay: Float[Array, "one heads"]) -> States:
    return jax.lax.optimization_barrier(jnp.exp(decay)[..., None, None] * state)


def _added(state: States, key: Array, value: Array) -> States:
    """Return S + k u^T; the barrier keeps a compiler from rounding product and sum at once in some programs."""
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    return state + jax.lax.optimization_barrier(key[..., :, None] * value[..., None, :])


def _read(state: States, row: Array) -> Float[Array, "one heads value_dim"]:
    """Return S^T k; its products are rounded before they are added up."""
    return jnp.sum(jax.lax.optimization_barrier(state * row.astype(jnp.float32)[..., None]), axis=-2)
