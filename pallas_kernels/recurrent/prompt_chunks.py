"""The gated delta rule for pieces of prompts, in chunks of tokens (arXiv:2406.06484); `gated_delta` has the rule.

What the tokens of a chunk read of each other is known before the state is, so it is computed for all chunks at once.
With W[i, j] = rate_i e^between_ij (k_j . k_i) for j before i, the corrected values of a chunk and its outputs are

    u = inverse(1 + W) rate (v - e^path S k)       o = e^path S q + scores u

and the state advances by ``S = e^total S + sum over j of e^after_j u_j k_j^T``. The inverse comes from substitution,
row after row: powers of W lose all digits if keys repeat. A piece's first chunk begins with the records behind its
state: their values are corrected already, and they read nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.recurrent.prompt_kernel import CHUNK, ChunkedPieces, ChunkTables, advance, solve
from pallas_kernels.recurrent.records import SlotStates

LEAST = -128.0  # a log decay below it is a factor of 0 in float32
STEPS = 1024  # multiples of 1 / STEPS between CHUNK * LEAST and 0 are summed in float32 without rounding


class Chunks(NamedTuple):
    """The tokens of pieces in chunks; places without a token have zeros."""

    queries: Float[Array, "chunks tokens key_heads key_dim"]
    keys: Float[Array, "chunks tokens key_heads key_dim"]
    values: Float[Array, "chunks tokens heads value_dim"]
    decays: Float[Array, "chunks tokens heads"]  # log decays, float32
    rates: Float[Array, "chunks tokens heads"]  # float32
    is_record: Bool[Array, "chunks tokens"]  # whether a value is corrected already
    is_folded: Bool[Array, "chunks tokens"]  # whether a token advances the state; those are the first ones of a piece


def run_chunks(
    state: SlotStates, chunks: Chunks, pieces: ChunkedPieces, used: Int[Array, ""], *, interpret: Any = False
) -> tuple[Float[Array, "chunks tokens channels"], Float[Array, "pieces heads value_dim tokens"], SlotStates]:
    """Run the chunks of all pieces; arguments and results are those of `prompt_kernel.advance`.

    Args:
        state: states of all slots.
        chunks: the tokens.
        pieces: the pieces.
        used: number of chunks of all pieces.
        interpret: False, or jax's parameters for interpreting the kernels and detecting races.
    """
    count, dtype = len(chunks.keys), chunks.keys.dtype
    weights, factors, scores, decays, total = tables_of(chunks)
    inverse = solve(weights, factors, used[None], dtype, interpret=interpret)
    high = scores.astype(dtype)
    scores = jnp.stack([high, (scores - high.astype(jnp.float32)).astype(dtype)], axis=2)
    queries, keys, values = (of.reshape(count, CHUNK, -1) for of in chunks[:3])
    return advance(
        state, (queries, keys, values), ChunkTables(inverse, scores, decays, total), pieces, interpret=interpret
    )


def tables_of(chunks: Chunks) -> tuple[Array, Array, Array, Array, Array]:
    """Return W and the factors of values before it, scores, and the decays and the total of `ChunkTables`.

    W and scores are [chunks, heads, read token, token]. All results are in float32.
    """
    heads, order = chunks.decays.shape[2], jnp.arange(CHUNK)
    parts, rates = _parts(jnp.swapaxes(chunks.decays, 1, 2)), jnp.swapaxes(chunks.rates, 1, 2)
    summed = jnp.sum(jnp.where(order <= order[:, None], parts[..., None, :], 0), axis=-1)  # up to each token
    between = jnp.exp(jnp.minimum(jnp.sum(summed[..., None, :] - summed[..., None], axis=0), 0))
    weights, scores = (
        jnp.where(is_read, between * _products(chunks.keys, rows, heads), 0)
        for is_read, rows in ((order[:, None] < order, chunks.keys), (order[:, None] <= order, chunks.queries))
    )
    is_record, is_folded = chunks.is_record[:, None], chunks.is_folded[:, None]
    total = jnp.sum(jnp.where(is_folded, parts, 0), axis=-1)
    path = jnp.where(is_record, 0, jnp.exp(jnp.sum(summed, axis=0)))
    after = jnp.where(is_folded, jnp.exp(jnp.sum(total[..., None] - summed, axis=0)), 0)
    decays = jnp.stack([path, after], axis=2)
    return (
        weights * rates[..., None, :],
        jnp.where(is_record, 1, rates),
        scores,
        decays,
        jnp.exp(jnp.sum(total, axis=0)),
    )


def _parts(decays: Float[Array, "chunks heads tokens"]) -> Float[Array, "2 chunks heads tokens"]:
    """Return log decays as the sum of two parts: sums of the first are not rounded, and the second is small.

    So differences of sums, part by part, lose no digits.
    """
    decays = jnp.maximum(decays, LEAST)
    exact = jnp.round(decays * STEPS) / STEPS
    return jnp.stack([exact, decays - exact])


def _products(
    keys: Float[Array, "chunks tokens key_heads dim"], rows: Float[Array, "chunks tokens key_heads dim"], heads: int
) -> Float[Array, "chunks heads read tokens"]:
    """Return the products of each key with each row in float32, for each value head."""
    found = jnp.einsum("cjhd,cihd->chji", keys, rows, precision="highest", preferred_element_type=jnp.float32)
    return jnp.repeat(found, heads // keys.shape[2], axis=1)
