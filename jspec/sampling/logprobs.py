"""Log-probabilities of emitted tokens and of prompt tokens, for batches with a request that asks for them.

Raw log-probabilities are the log-softmax of the model's logits. Processed log-probabilities belong to the distribution
from which a token is drawn: after penalties (`jspec.sampling.penalties`), temperature, top-k, top-p and min-p. In
greedy rows they belong to the logits after penalties. Prompt tokens are not drawn, so their log-probabilities are raw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.ancestors import ancestors
from jspec.core.config import MAX_LOGPROBS
from jspec.core.numerics import Numerics
from jspec.core.records import Draft, LogProbs, PromptBatch, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.sampling import penalties, sampler
from pallas_kernels.layers.row_by_row import row_by_row
from pallas_kernels.sampling.top_log_probs import top_log_probs

PROCESSED = "processed_logprobs"
BLOCK = 64  # number of prompt tokens whose logits are in memory at once


def score(logits: Float[Array, "*places vocab"], tokens: Int[Array, "*places"], numerics: Numerics) -> LogProbs:
    """Compute the log-probability and the rank of each token, and the most likely tokens at each position.

    Args:
        logits: logits at each position; their log-softmax is reported.
        tokens: token id at each position; the results for negative ids are undefined.
    """
    rows = (logits.reshape(-1, logits.shape[-1]), jnp.maximum(tokens, 0).reshape(-1, 1))
    scorer = partial(_score, implementation=numerics.implementation)
    scores = row_by_row(scorer, *rows) if numerics.deterministic else scorer(*rows)
    return jax.tree.map(lambda field: field.reshape(*tokens.shape, *field.shape[1:]), scores)


def _score(flat: Float[Array, "rows vocab"], ids: Int[Array, "rows 1"], *, implementation: str) -> LogProbs:
    vocab = flat.shape[-1]
    top, top_ids = top_log_probs(flat, min(MAX_LOGPROBS, vocab), implementation=implementation)
    picked = jnp.take_along_axis(flat, ids, axis=-1)
    chosen = jnp.minimum(picked - jax.nn.logsumexp(flat, axis=-1, keepdims=True), 0.0)
    is_chosen = top_ids == ids  # take this token's value from ``top``, so that both values have the same bits
    chosen = jnp.where(jnp.any(is_chosen, axis=-1), jnp.sum(jnp.where(is_chosen, top, 0.0), axis=-1), chosen[:, 0])
    return LogProbs(chosen=chosen, ranks=1 + jnp.sum(flat > picked, axis=-1, dtype=jnp.int32), top=top, top_ids=top_ids)


def of_round(
    mode: str, logits: Float[Array, "batch nodes vocab"], draft: Draft, verdict: Verdict, view: SlotView, tree: Tree
) -> LogProbs:
    """Compute the log-probabilities of a round's tokens, [batch, depth + 1].

    The log-probability of a token comes from the logits of the node before the token.

    Args:
        mode: "raw_logprobs" or "processed_logprobs".
        logits: the target's raw logits after every node.
    """
    node = jnp.maximum(verdict.path, 0)[..., None]
    rows = jnp.take_along_axis(logits, node, axis=1)
    if mode == PROCESSED:
        if view.controls is not None:
            path = penalties.node_paths(draft, ancestors(draft.parents), tree.depth)
            if view.masks is not None:
                view = replace(view, masks=jnp.take_along_axis(view.masks, node, axis=1))
            rows = penalties.apply_penalties(rows, view, jnp.take_along_axis(path, node, axis=1))
        rows = sampler.process(rows, view.sampling, view.implementation)
    return score(rows, verdict.tokens, view.numerics)


def of_first(
    mode: str,
    raw: Float[Array, "pieces 1 vocab"],
    edited: Float[Array, "pieces 1 vocab"],
    token: Int[Array, "pieces 1"],
    view: SlotView,
) -> LogProbs:
    """Compute the log-probabilities of the first tokens after prompts.

    Args:
        mode: "raw_logprobs" or "processed_logprobs".
        raw: the target's raw logits.
        edited: the raw logits after `jspec.sampling.penalties`.
    """
    rows = sampler.process(edited, view.sampling, view.implementation) if mode == PROCESSED else raw
    return score(rows, token, view.numerics)


def of_prompts(
    normed: Float[Array, "blocks rows hidden"],
    batch: PromptBatch,
    roots: Int[Array, "pieces"],
    logits_of: Callable[[Float[Array, "block hidden"]], Float[Array, "block vocab"]],
    view: SlotView,
) -> LogProbs:
    """Compute the raw log-probabilities [blocks * rows] of the tokens that follow the tokens of prompts.

    Args:
        normed: hidden states after the target's final norm.
        batch: the pieces of prompts.
        roots: token after each piece.
        logits_of: the target's output head, a function from hidden states to logits.
    """
    flat = normed.reshape(-1, normed.shape[-1])
    has_tokens = batch.ends > batch.starts
    # A row is followed by the next row's token, but a piece's last row by its root; an empty piece has no such row.
    newest = jnp.where(has_tokens, batch.newest, flat.shape[0])
    next_tokens = jnp.roll(batch.tokens.ravel(), -1).at[newest].set(roots, mode="drop")
    return of_rows(flat, next_tokens, logits_of, view.numerics)


def of_rows(
    normed: Float[Array, "rows hidden"],
    tokens: Int[Array, "rows"],
    logits_of: Callable[[Float[Array, "block hidden"]], Float[Array, "block vocab"]],
    numerics: Numerics,
) -> LogProbs:
    """Compute the raw log-probability of a token after each row, with the logits of one block of rows at a time.

    Args:
        normed: hidden states after the target's final norm.
        tokens: token after each row.
        logits_of: the target's output head, a function from hidden states to logits.
        numerics: by which kernels, and with which promise of bits.
    """
    size = len(normed)
    block = min(BLOCK, size)
    padding = -size % block
    rows = jnp.pad(normed, ((0, padding), (0, 0))).reshape(-1, block, normed.shape[-1])
    ids = jnp.pad(tokens, (0, padding)).reshape(-1, block)
    scores = jax.lax.map(lambda chunk: score(logits_of(chunk[0]), chunk[1], numerics), (rows, ids))
    return jax.tree.map(lambda field: field.reshape(-1, *field.shape[2:])[:size], scores)


def without_normed(
    features: Float[Array, "blocks rows features"], hidden: int
) -> tuple[Float[Array, "blocks rows others"] | None, Float[Array, "blocks rows hidden"]]:
    """Split features into the drafter's features and the target's hidden states after the final norm.

    The drafter's features are None if the drafter reads no features.
    """
    others = features[..., :-hidden]
    return (others if others.shape[-1] else None), features[..., -hidden:]
