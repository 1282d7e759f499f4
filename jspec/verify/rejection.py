"""Rejection sampling with the draft's own law, for chains and for siblings drawn without replacement.

A token drawn from q is accepted with probability min(1, p/q); after a rejection the target's law becomes the residual
max(p - q, 0), normalised (arXiv:2211.17192, theorem 1; arXiv:2302.01318, theorem 1). The next sibling was drawn from
q without the token, normalised, and is tried against the residual in the same way, so the theorem carries over,
sibling by sibling: recursive rejection sampling without replacement (arXiv:2402.14160).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.records import AncestorMask, Draft
from jspec.verify.tree_walk import AcceptResult


class Trial(NamedTuple):
    """One sibling's turn."""

    accept_prob: Float[Array, "batch"]  # may exceed 1
    p_left: Float[Array, "batch vocab"]  # the laws for the next sibling, after a rejection
    q_left: Float[Array, "batch vocab"]


def without_replacement(
    law: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """The rule, with its draws given: one uniform for each node.

    One pass over the nodes in order: a node has its turn if its parent is the last accepted node by then.

    Args:
        law: the target's processed law at every node.
    """
    assert draft.probs is not None
    vocab = law.shape[-1]
    best = jnp.zeros(law.shape[0], jnp.int32)
    p, q = law[:, 0], spread(draft.probs[:, 0], draft.vocab_map, vocab)
    accept_probs = [jnp.ones_like(uniforms[:, 0])]
    for node in range(1, law.shape[1]):
        turn = draft.valid[:, node] & (draft.parents[:, node] == best)
        trial = try_token(p, q, draft.tokens[:, node])
        stands = turn & (uniforms[:, node] < trial.accept_prob)  # strictly: a uniform may be exactly 0
        behind = spread(draft.probs[:, node], draft.vocab_map, vocab)
        p = jnp.where(stands[:, None], law[:, node], jnp.where(turn[:, None], trial.p_left, p))
        q = jnp.where(stands[:, None], behind, jnp.where(turn[:, None], trial.q_left, q))
        best = jnp.where(stands, node, best)
        accept_probs.append(trial.accept_prob)
    return AcceptResult(best, p, jnp.stack(accept_probs, axis=1))


def try_token(p: Float[Array, "batch vocab"], q: Float[Array, "batch vocab"], token: Int[Array, "batch"]) -> Trial:
    """Try a token drawn from q against p.

    Where q has no mass left, the draft had no choice and the token counts as a point mass. Where no residual is left
    (p equals q up to rounding) the token is accepted.
    """
    is_token = jnp.arange(p.shape[-1]) == token[:, None]
    q = jnp.where(jnp.any(q > 0, axis=-1, keepdims=True), q, is_token.astype(q.dtype))
    own_p, own_q = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (p, q))
    residual = jnp.maximum(p - q, 0.0)
    ratio = own_p / jnp.maximum(own_q, jnp.finfo(q.dtype).tiny)
    is_left = jnp.any(residual > 0, axis=-1)
    return Trial(jnp.where(is_left, ratio, 1.0), normalised(residual), normalised(jnp.where(is_token, 0.0, q)))


def normalised(weights: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    """Weights that sum to 1; all zero if they are."""
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(mass > 0, mass, 1.0)


def spread(
    probs: Float[Array, "batch draft_vocab"], vocab_map: Int[Array, "draft_vocab"] | None, vocab: int
) -> Float[Array, "batch vocab"]:
    """A law over the draft vocabulary as one over the target's; ids outside have probability 0."""
    if vocab_map is None:
        return probs
    return jnp.zeros((probs.shape[0], vocab), probs.dtype).at[:, vocab_map].set(probs)
