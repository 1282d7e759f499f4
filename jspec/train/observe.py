"""Runs the target over packed rows, as a prefill runs it: what a head reads, and what it is taught."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.numerics import AUTO, REFERENCE, Numerics
from jspec.core.records import PromptBatch
from jspec.draft.draft_vocab import reduced_head
from jspec.models.decoder import Model, forward
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.layers import head_product, limited
from jspec.train.rows import ALIGN, Rows
from pallas_kernels.layers.partial_sums import reduce_partials

LOGITS = 2**27  # most logits that exist at a time, of a block of tokens or of the vocabulary


@struct.dataclass
class Observed:
    """The target's outputs at each token of packed rows.

    Attributes:
        features: the hidden states that the head reads, concatenated.
        normed: the hidden state after the final norm, which the output head reads.
        choices: the target's argmax for the token after each place.
    """

    features: Float[Array, "rows size features"]
    normed: Float[Array, "rows size hidden"]
    choices: Int[Array, "rows size"]


def observe(target: Model, rows: Rows, states: tuple[int, ...]) -> Observed:
    """Run the target over packed rows; a document sees itself only, with its own positions from 0 on.

    Args:
        target: the target.
        rows: packed rows.
        states: indices of the hidden states that the head reads, as in `jspec.models.decoder.forward`.
    """
    batch = blocks_of(rows)
    pages = batch.tokens.shape[0] + 1
    pool = PoolShape(1, pages, ALIGN, rows.tokens.shape[1], str(target.embed.dtype), str(target.embed.dtype))
    cache, hidden = create(target.config.layers, pool, pool.dtype), target.config.hidden_size
    wanted = (*states, target.config.num_layers + 1)
    out, _ = forward(target, cache, batch, feature_layers=wanted, with_logits=False)
    assert out.features is not None
    features = jax.lax.stop_gradient(out.features.reshape(*rows.tokens.shape, -1))
    normed = features[..., -hidden:]
    return Observed(features=features[..., :-hidden], normed=normed, choices=choose(target, normed))


def blocks_of(rows: Rows, numerics: Numerics = AUTO) -> PromptBatch:
    """Make a batch in which each document is a piece of a prompt, with a page of the cache for each block."""
    tokens, segments, positions = (of.reshape(-1, ALIGN) for of in (rows.tokens, rows.segments, rows.positions))
    blocks, first_row = jnp.arange(len(tokens), dtype=jnp.int32), positions[:, 0]
    is_used, start = segments[:, 0] > 0, blocks - first_row // ALIGN
    pages = start[:, None] + jnp.arange(rows.tokens.shape[1] // ALIGN) + 1
    ends = jnp.zeros(len(tokens), jnp.int32).at[start].max(jnp.max(jnp.where(segments > 0, positions + 1, 0), axis=1))
    return PromptBatch(
        tokens=tokens,
        positions=positions,
        valid=segments > 0,
        first_row=first_row,
        page_table=jnp.where(is_used[:, None], jnp.minimum(pages, len(tokens)), 0),
        bits=None,
        numerics=numerics,
        piece=jnp.where(is_used, start, len(tokens)),  # a piece has the number of its first block
        starts=jnp.zeros(len(tokens), jnp.int32),
        ends=ends,
        newest=jnp.zeros(len(tokens), jnp.int32),
    )


def choose(target: Model, normed: Float[Array, "rows size hidden"]) -> Int[Array, "rows size"]:
    """Return the target's argmax at each token; of equal logits, the smallest id.

    The logits of all tokens are computed for one block of the vocabulary after another.
    """
    vocab, places = target.config.vocab_size, normed.shape[0] * normed.shape[1]
    size = min(vocab, max(ALIGN, LOGITS // places))

    def better(best: tuple[Array, Array], first: Array) -> tuple[tuple[Array, Array], None]:
        ids = jnp.minimum(first, vocab - size) + jnp.arange(size)
        logits = target_logits(target, normed, ids)
        top = jnp.max(logits, axis=-1)
        chosen = ids[jnp.argmax(logits, axis=-1)]
        is_better = top > best[0]
        return (jnp.where(is_better, top, best[0]), jnp.where(is_better, chosen, best[1])), None

    none = jnp.full(normed.shape[:2], -jnp.inf), jnp.zeros(normed.shape[:2], jnp.int32)
    return jax.lax.scan(better, none, jnp.arange(0, vocab, size, dtype=jnp.int32))[0][1]


def target_logits(
    target: Model, normed: Float[Array, "*rows hidden"], ids: Int[Array, "tokens"] | None
) -> Float[Array, "*rows tokens"]:
    """Return the target's logits of some tokens in float32.

    Args:
        target: the target.
        normed: hidden states after the final norm.
        ids: the tokens; None: all.
    """
    head = target.output_head if ids is None else reduced_head(target.output_head, ids)[0]
    product = partial(head_product, numerics=REFERENCE)
    sums = limited(product(normed, head), target.config.logit_divisor, target.config.logit_softcap)
    return reduce_partials(sums, jnp.float32)
