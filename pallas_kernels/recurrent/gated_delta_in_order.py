"""The gated delta rule token after token, whose bits depend neither on rounds nor on the shape of a draft tree.

`pallas_kernels.recurrent.gated_delta` has the rule. Here a token advances the state of its parent. Committed records,
nodes of a tree and tokens of prompts take the same compiled step, one head at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layers.row_by_row import row_by_row
from pallas_kernels.recurrent.records import DeltaTokens, Records, States, each_head


def fold_in_order(state: States, records: Records) -> States:
    """Return the states after the tokens of the records, as `fold` does."""
    batch, heads, count = records.decays.shape
    chain = jnp.broadcast_to(jnp.arange(count) - 1, (batch, count))
    keys = each_head(records.keys, heads)
    tokens = DeltaTokens(keys, keys, records.values, records.decays, jnp.zeros_like(records.decays))
    return row_by_row(_tokens, state, tokens, chain, jnp.ones((batch, count), bool))[0]


def verify_in_order(
    state: States, window: Records | None, new: DeltaTokens, seen: Bool[Array, "batch tokens tokens"]
) -> tuple[Float[Array, "batch heads tokens value_dim"], Records]:
    """Compute the outputs of new tokens that form trees, and their records, as `verify` does."""
    begin = state if window is None else fold_in_order(state, window)
    batch, heads, count = new.decays.shape
    before = seen & ~jnp.eye(count, dtype=bool)
    parents = jnp.max(jnp.where(before, jnp.arange(count), -1), axis=2)  # a path's last token before its own
    rates = jnp.zeros_like(new.decays) if new.rates is None else new.rates
    tokens = new._replace(queries=each_head(new.queries, heads), keys=each_head(new.keys, heads), rates=rates)
    # The value of a token without a rate is that of its record.
    parents, are_records = jnp.broadcast_to(parents, (batch, count)), jnp.full((batch, count), new.rates is None)
    _, outputs, values = row_by_row(_tokens, begin, tokens, parents, are_records)
    return outputs, Records(new.keys, values, new.decays)


def _tokens(
    state: States, new: DeltaTokens, parents: Int[Array, "one tokens"], are_records: Bool[Array, "one tokens"]
) -> tuple[States, Array, Array]:
    """Run the tokens of one row, and return the state after the last one, the outputs and the corrected values.

    A token has the state of its parent; that of parent -1 is the state before all.
    """
    # The barrier keeps the compiler from making another step for records, whose bits would differ.
    new, parents, are_records = jax.lax.optimization_barrier(
        jax.tree.map(lambda rows: rows[0], (new, parents, are_records))
    )
    count, heads = len(parents), state.shape[1]

    def run(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        states, outputs, values = carry
        of_token = [jax.lax.dynamic_index_in_dim(rows, index, axis=1, keepdims=False) for rows in new]
        is_record = jnp.broadcast_to(are_records[index], heads)
        state, output, value = row_by_row(_step, states[parents[index]], *of_token, is_record)
        return states.at[index].set(state), outputs.at[:, index].set(output), values.at[:, index].set(value)

    empty = jnp.zeros(new.values.shape, jnp.float32), jnp.zeros_like(new.values)
    before = jnp.broadcast_to(state, (count + 1, *state.shape[1:]))
    states, *rows = jax.lax.fori_loop(0, count, run, (before, *empty))
    return states[count - 1][None], *(of_tokens[None] for of_tokens in rows)


def _step(
    state: Float[Array, "one value_dim key_dim"],
    query: Float[Array, "one key_dim"],
    key: Float[Array, "one key_dim"],
    value: Float[Array, "one value_dim"],
    decay: Float[Array, "one"],
    rate: Float[Array, "one"],
    is_record: Bool[Array, "one"],
) -> tuple[Array, Array, Array]:
    """Advance the state of one head by a token, or by the record of a token, whose value is corrected already."""
    state, wide = jnp.exp(decay)[:, None, None] * state, key.astype(jnp.float32)[:, None]
    wanted = rate[:, None] * (value.astype(jnp.float32) - jnp.sum(state * wide, axis=2))
    corrected = jnp.where(is_record[:, None], value, wanted.astype(value.dtype))
    state = state + corrected.astype(jnp.float32)[..., None] * wide
    return state, jnp.sum(state * query.astype(jnp.float32)[:, None], axis=2), corrected
