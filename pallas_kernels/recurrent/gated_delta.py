"""The gated delta rule (arXiv:2412.06464) for trees of tokens, whose rejected ones leave no trace.

A token with key k, value v, log decay g <= 0 and rate beta advances the state S [value_dim, key_dim] of a head:

    S = e^g S;  u = beta (v - S k);  S = S + u k^T;  output S q

A state stands at a position that is a multiple of `EVERY`. The tokens behind it have *records*: key, corrected value u
and log decay. A token's output needs the state, the records of the committed tokens behind it, and its ancestors:

    seen_i = e^(after + path_i) S k_i + sum over records j of e^(after_j + path_i) (k_j . k_i) u_j
    u_i    = beta_i (v_i - seen_i - sum over ancestors j of e^(between_ij) (k_j . k_i) u_j)

where path_i sums g from the root to i, after_j over the records behind j, after over all, and between_ij over the path
behind j to i. Every exponent is a sum of numbers <= 0, none is a difference of sums, so decays near 0 lose no digits.
So a tree is verified without writing a state, and what a commit keeps are records. `fold` moves the oldest `EVERY`
records into the state when there are as many.

Tokens without rates have u = v, and nothing is solved. This is the rule of Mamba 2 (arXiv:2405.21060).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.recurrent.gated_delta_in_order import fold_in_order, verify_in_order
from pallas_kernels.recurrent.records import DeltaTokens, Records, States, each_head


def fold(state: States, records: Records, *, deterministic: bool = False) -> States:
    """Return the states after the tokens of the records; records of zeros change nothing.

    Args:
        state: state of each sequence before the tokens.
        records: the tokens.
        deterministic: advance token after token.
    """
    if deterministic:
        return fold_in_order(state, records)
    after, total = _behind(records.decays)
    decayed = jnp.exp(total)[..., None, None] * state
    keys = each_head(records.keys, state.shape[1]) * jnp.exp(after)[..., None]
    return decayed + _product("bhtv,bhtk->bhvk", records.values, keys)


def verify(
    state: States,
    window: Records | None,
    new: DeltaTokens,
    seen: Bool[Array, "batch tokens tokens"],
    *,
    deterministic: bool = False,
) -> tuple[Float[Array, "batch heads tokens value_dim"], Records]:
    """Compute the outputs of new tokens that form trees, and their records.

    Args:
        state: state of each sequence before its window.
        window: records of the committed tokens behind the state, zeros for those that do not exist; None: none exist.
        new: inputs of the new tokens; an ancestor has a smaller index.
        seen: which tokens each token follows in its tree, itself included.
        deterministic: compute token after token, so that bits depend neither on the window nor on the tree.

    Returns:
        The outputs in float32, and the records of the new tokens.
    """
    if deterministic:
        return verify_in_order(state, window, new, seen)
    keys, queries = (each_head(rows, state.shape[1]) for rows in (new.keys, new.queries))
    weights, scores = pairs_of(new, seen)
    scale, values = jnp.exp(path_decays(new.decays, seen)), new.values
    if new.rates is None:
        read = _read(state, window, queries, scale)
    else:
        both, scales = jnp.concatenate([keys, queries], axis=2), jnp.concatenate([scale, scale], axis=2)
        by_keys, read = jnp.split(_read(state, window, both, scales), 2, axis=2)
        values = _solve(weights, new.rates[..., None] * (new.values - by_keys), new.keys.dtype)
    return read + _product("bhij,bhjv->bhiv", scores, values), Records(new.keys, values, new.decays)


def _read(
    state: States,
    window: Records | None,
    rows: Float[Array, "batch heads rows key_dim"],
    scale: Float[Array, "batch heads rows"],
) -> Float[Array, "batch heads rows value_dim"]:
    """Return what keys or queries read of states and of the records after them, times a factor of each row."""
    of_state = scale[..., None] * _product("bhvk,bhtk->bhtv", state, rows)
    if window is None:
        return of_state
    after, total = _behind(window.decays)
    keys = each_head(window.keys, state.shape[1])
    products = _product("bhwk,bhtk->bhtw", keys, rows) * jnp.exp(after)[:, :, None]
    of_window = _product("bhtw,bhwv->bhtv", products * scale[..., None], window.values)
    return jnp.exp(total)[..., None, None] * of_state + of_window


class DeltaChunk(NamedTuple):
    """What some successive tokens have that does not depend on the state before them (arXiv:2406.06484).

    Their corrected values are ``values - keys S^T``, and their outputs ``queries S^T`` and ``scores`` times these.
    Without ``values`` and ``keys`` no value is corrected.
    """

    values: Float[Array, "batch heads tokens value_dim"] | None
    keys: Float[Array, "batch heads tokens key_dim"] | None
    queries: Float[Array, "batch heads tokens key_dim"]
    scores: Float[Array, "batch heads tokens tokens"]
    records: Records  # whose values are not corrected yet


def chunk_of(new: DeltaTokens) -> DeltaChunk:
    """Compute what some successive tokens have before their state is known, of many sequences at once."""
    weights, scores = pairs_of(new, jnp.tri(new.decays.shape[2], dtype=bool)[None])
    keys, queries = (each_head(rows, new.decays.shape[1]) for rows in (new.keys, new.queries))
    path = jnp.exp(jnp.cumsum(new.decays, axis=-1))[..., None]
    values = corrections = None
    if new.rates is not None:
        both = jnp.concatenate([new.values.astype(jnp.float32), path * keys], axis=-1) * new.rates[..., None]
        values, corrections = jnp.split(_solve(weights, both, jnp.float32), [new.values.shape[-1]], axis=-1)
    return DeltaChunk(values, corrections, path * queries, scores, Records(new.keys, new.values, new.decays))


def run_chunk(state: States, chunk: DeltaChunk) -> tuple[Float[Array, "batch heads tokens value_dim"], Records]:
    """Compute the outputs of successive tokens behind a state, and their records, as `verify` does."""
    values = chunk.records.values
    if chunk.values is not None and chunk.keys is not None:
        values = (chunk.values - _product("bhtk,bhvk->bhtv", chunk.keys, state)).astype(values.dtype)
    outputs = _product("bhtk,bhvk->bhtv", chunk.queries, state) + _product("bhij,bhjv->bhiv", chunk.scores, values)
    return outputs, chunk.records._replace(values=values)


def path_decays(
    decays: Float[Array, "batch heads tokens"], seen: Bool[Array, "batch tokens tokens"]
) -> Float[Array, "batch heads tokens"]:
    """Return the sum of the log decays of each token and its ancestors."""
    if seen.shape[1] == 1:
        return decays
    return jnp.sum(jnp.where(seen[:, None], decays[:, :, None], 0), axis=-1)


def _products_of(
    keys: Float[Array, "batch heads tokens dim"], rows: Float[Array, "batch heads tokens dim"]
) -> Float[Array, "batch heads tokens tokens"]:
    """Return the products of each row (third axis) with each key (last axis), in float32."""
    return _product("bhjk,bhik->bhij", keys, rows)


def pairs_of(new: DeltaTokens, seen: Bool[Array, "batch tokens tokens"]) -> tuple[Array, Array]:
    """Return what the corrected values of a token's ancestors count for it, [batch, heads, tokens, ancestors].

    The first array weights them in the token's own value, the second in its output, where its own value counts too.
    Without rates the first one is 0.
    """
    heads, count = new.decays.shape[1:]
    between, is_before = jnp.exp(_between(new.decays, seen)), seen & ~jnp.eye(count, dtype=bool)

    def counted(counts: Array, rows: Array) -> Array:
        return jnp.where(counts[:, None], between * each_head(_products_of(new.keys, rows), heads), 0)

    scores = counted(seen, new.queries)
    if new.rates is None:
        return jnp.zeros_like(scores), scores
    return counted(is_before, new.keys) * new.rates[..., None], scores


def _solve(
    weights: Float[Array, "batch heads tokens tokens"], wanted: Float[Array, "batch heads tokens value_dim"], dtype: Any
) -> Array:
    """Solve (I + weights) u = wanted for strictly lower triangular weights, from the first row to the last.

    Each u is rounded before a later row reads it, so that it is the same whichever round its readers are in.
    """

    def row(index: Array, values: Array) -> Array:
        of_row = jax.lax.dynamic_index_in_dim(weights, index, axis=2)
        before = _product("bhij,bhjv->bhiv", of_row, values)
        solved = (jax.lax.dynamic_index_in_dim(wanted, index, axis=2) - before).astype(dtype)
        return jax.lax.dynamic_update_index_in_dim(values, solved, index, axis=2)

    if wanted.shape[2] == 1:
        return wanted.astype(dtype)
    return jax.lax.fori_loop(0, wanted.shape[2], row, jnp.zeros(wanted.shape, dtype))


def _between(decays: Array, seen: Array) -> Float[Array, "batch heads tokens tokens"]:
    """Return for each token i and its ancestor j the sum of decays on the path behind j to i; 0 for other pairs."""
    behind = seen & ~jnp.eye(seen.shape[1], dtype=bool)  # [m, j]: m is behind j
    counted = seen[:, :, None] & jnp.swapaxes(behind, 1, 2)[:, None]  # [i, j, m]
    return jnp.sum(jnp.where(counted[:, None], decays[:, :, None, None], 0), axis=-1)


def _behind(decays: Float[Array, "batch heads tokens"]) -> tuple[Array, Array]:
    """Return the sum of decays behind each token, and that of all."""
    summed = jnp.cumsum(decays[..., ::-1], axis=-1)[..., ::-1]
    return jnp.pad(summed[..., 1:], ((0, 0), (0, 0), (0, 1))), summed[..., 0]


def _product(equation: str, a: Array, b: Array) -> Array:
    """Return an einsum in float32 without rounding its operands further."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
