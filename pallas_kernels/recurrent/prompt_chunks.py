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

from pallas_kernels.recurrent.prompt_kernel import CHUNK, ChunkedPieces, ChunkTables, advance
from pallas_kernels.recurrent.records import LEAST, SlotStates
from pallas_kernels.recurrent.solve_kernel import solve

STEPS = 1024  # multiples of 1 / STEPS between CHUNK * LEAST and 0 are summed in float32 without rounding


class Chunks(NamedTuple):
    """The tokens of pieces in chunks; places without a token have zeros."""

    queries: Float[Array, "chunks tokens key_heads key_dim"]
    keys: Float[Array, "chunks tokens key_heads key_dim"]
    values: Float[Array, "chunks tokens heads value_dim"]
    decays: Float[Array, "chunks tokens heads"]  # log decays, float32
    rates: Float[Array, "chunks tokens heads"] | None  # float32; None: values are not corrected
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
    count, key_dim = len(chunks.keys), chunks.keys.shape[3]
    queries, keys, values = (of.reshape(count, CHUNK, -1) for of in chunks[:3])
    summed, rates, decays, total = tables_of(chunks)
    inverse, scores = solve((queries, keys), summed, rates, used[None], key_dim, interpret=interpret)
    tables = ChunkTables(inverse, scores, decays, total)
    return advance(state, (queries, keys, values), tables, pieces, interpret=interpret)


def tables_of(
    chunks: Chunks,
) -> tuple[
    Float[Array, "chunks heads 2 tokens"],
    Float[Array, "chunks heads 2 tokens"] | None,
    Float[Array, "chunks heads 2 tokens"],
    Float[Array, "chunks heads"],
]:
    """Return summed decays and rates for `solve`, and the decays and the total of `ChunkTables`, all in float32."""
    order = jnp.arange(CHUNK)
    parts, rates = _parts(jnp.swapaxes(chunks.decays, 1, 2)), None
    is_up_to = jnp.where(order[:, None] <= order, 1.0, 0.0)
    summed = jnp.matmul(parts, is_up_to, precision="highest")
    is_record, is_folded = chunks.is_record[:, None], chunks.is_folded[:, None]
    total = jnp.sum(jnp.where(is_folded[:, :, None], parts, 0), axis=-1)
    path = jnp.where(is_record, 0, jnp.exp(jnp.sum(summed, axis=2)))
    after = jnp.where(is_folded, jnp.exp(jnp.sum(total[..., None] - summed, axis=2)), 0)
    if chunks.rates is not None:
        rates = jnp.swapaxes(chunks.rates, 1, 2)
        rates = jnp.stack([rates, jnp.where(is_record, 1, rates)], axis=2)
    return (
        summed,
        rates,
        jnp.stack([path, after], axis=2),
        jnp.exp(jnp.sum(total, axis=2)),
    )


def _parts(decays: Float[Array, "chunks heads tokens"]) -> Float[Array, "chunks heads 2 tokens"]:
    """Return log decays as the sum of two parts: sums of the first are not rounded, and the second is small.

    So differences of sums, part by part, lose no digits.
    """
    decays = jnp.maximum(decays, LEAST)
    exact = jnp.round(decays * STEPS) / STEPS
    return jnp.stack([exact, decays - exact], axis=2)
