"""Block verification of a drawn chain (arXiv:2403.10444, algorithm 2): the whole chain is judged at once.

By the paper's validity theorem it keeps the target's joint law, by its optimality theorem no rule that does accepts
more of a chain on average. Against a point mass it has nothing to gain: n nodes stand with probability p(x1) ... p(xn)
and the residual is p without the next token, as in the sibling rule, which then serves.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.records import AncestorMask, Draft
from jspec.verify.rejection import normalised, spread
from jspec.verify.tree_walk import AcceptResult


def block_verification(
    law: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """The rule, with its draws given: one uniform for each node; the longest chain whose end stands is accepted.

    A chain's weight is w[0] = 1, w[i] = min(1, w[i-1] p(x[i]) / q(x[i])). Node i stands with probability
    m / (m + 1 - w[i]), where m is the mass of the residual max(w[i] p - q, 0) behind it, from which the last token is
    drawn; the last valid node stands with probability w[i], and the token behind it has the law p.

    Where w[i] = 1 and no residual is left (p equals q up to rounding), node i + 1 gets weight 1 whatever its ratio.

    Args:
        law: the target's processed law at every node.
    """
    assert draft.probs is not None
    rows, nodes, vocab = law.shape
    best, last_law = jnp.zeros(rows, jnp.int32), law[:, 0]
    weight, accept_probs = jnp.ones(rows, law.dtype), []
    for node in range(nodes):
        has_next = draft.valid[:, node + 1] if node + 1 < nodes else jnp.zeros(rows, bool)
        p, q = law[:, node], spread(draft.probs[:, node], draft.vocab_map, vocab)
        residual = jnp.maximum(weight[:, None] * p - q, 0.0)
        mass = jnp.sum(residual, axis=-1)
        total = mass + 1 - weight
        stands_prob = jnp.where(has_next, mass / jnp.where(total > 0, total, 1.0), weight)
        stands = draft.valid[:, node] & ((uniforms[:, node] < stands_prob) | (node == 0))
        best = jnp.where(stands, node, best)
        last_law = jnp.where(stands[:, None], jnp.where(has_next[:, None], residual, p), last_law)
        accept_probs.append(stands_prob)
        if node + 1 < nodes:
            token = draft.tokens[:, node + 1, None]
            own_p, own_q = (jnp.take_along_axis(x, token, axis=1)[:, 0] for x in (p, q))
            ratio = own_p / jnp.maximum(own_q, jnp.finfo(q.dtype).tiny)
            weight = jnp.where((weight >= 1) & (mass == 0), 1.0, jnp.minimum(weight * ratio, 1.0))
    return AcceptResult(best, normalised(last_law), jnp.stack(accept_probs, axis=1))
