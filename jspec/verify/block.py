"""Block verification, which verifies a sampled chain as a whole (arXiv:2403.10444, algorithm 2).

The paper proves that the rule keeps the target's joint distribution, and that no other lossless rule accepts more
tokens of a chain on average.

A draft without ``probs`` was not sampled, and each of its tokens is a point mass. For such a draft, block verification
equals the multi-candidate rule: both accept n tokens with probability p(x1) ... p(xn), and their residual is p without
the next token. Therefore the multi-candidate rule is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.verify.multi_candidate import multi_candidate_accept
from jspec.verify.rejection import check_no_rank_gaps, normalised, to_target_vocab
from jspec.verify.sampled_rule import SampledRule, draw_and_accept
from jspec.verify.tree_walk import AcceptResult


@final
@dataclass(frozen=True)
class Block(SampledRule):
    """Block verification, which verifies a chain as a whole. The drafter samples tokens from its own distribution."""

    name = "block"
    draft_sampling = DraftSampling.OWN_DISTRIBUTION

    def check(self, tree: Tree) -> None:
        if not tree.is_chain:
            raise ValueError(
                f'accept="block" expects a chain, got {tree}; use Tree.chain(length) or accept="rejection"'
            )
        check_no_rank_gaps(self.name, tree)

    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        accept_function = multi_candidate_accept if draft.probs is None else block_accept
        return draw_and_accept(accept_function, logits, draft, ancestor_mask, view)


def block_accept(
    target_probs: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """Apply block verification with given uniforms, and accept the chain up to the last node that passes its test.

    Node i has token x[i]; p and q are the target's and the draft's probabilities of a node's next token. The weight of
    node i is w[i] = min(1, w[i-1] p(x[i]) / q(x[i])), with w[0] = 1. The residual at node i is max(w[i] p - q, 0), with
    sum m. Node i passes with probability m / (m + 1 - w[i]). If node i is the last node that passes, the next token is
    drawn from its residual. The last valid node passes with probability w[i], and the token after it is drawn from p.

    If w[i] = 1 and m = 0 (p equals q up to rounding), the weight of node i + 1 is 1.

    Args:
        target_probs: the target's processed probabilities of the token after every node.
        draft: the drafted chains.
        ancestor_mask: ancestors of each node.
        uniforms: a uniform number in [0, 1) for each node.

    Source: arXiv:2403.10444, algorithm 2.
    """
    assert draft.probs is not None
    rows, nodes, vocab = target_probs.shape
    last_node, last_probs = jnp.zeros(rows, jnp.int32), target_probs[:, 0]
    weight, accept_probs = jnp.ones(rows, target_probs.dtype), []
    for node in range(nodes):
        has_next = draft.valid[:, node + 1] if node + 1 < nodes else jnp.zeros(rows, bool)
        p, q = target_probs[:, node], to_target_vocab(draft.probs[:, node], draft.vocab_map, vocab)
        residual = jnp.maximum(weight[:, None] * p - q, 0.0)
        mass = jnp.sum(residual, axis=-1)
        total = mass + 1 - weight
        accept_prob = jnp.where(has_next, mass / jnp.where(total > 0, total, 1.0), weight)
        accepted = draft.valid[:, node] & ((uniforms[:, node] < accept_prob) | (node == 0))
        last_node = jnp.where(accepted, node, last_node)
        last_probs = jnp.where(accepted[:, None], jnp.where(has_next[:, None], residual, p), last_probs)
        accept_probs.append(accept_prob)
        if node + 1 < nodes:
            token = draft.tokens[:, node + 1, None]
            token_p, token_q = (jnp.take_along_axis(x, token, axis=1)[:, 0] for x in (p, q))
            ratio = token_p / jnp.maximum(token_q, jnp.finfo(q.dtype).tiny)
            weight = jnp.where((weight >= 1) & (mass == 0), 1.0, jnp.minimum(weight * ratio, 1.0))
    return AcceptResult(last_node, normalised(last_probs), jnp.stack(accept_probs, axis=1))
