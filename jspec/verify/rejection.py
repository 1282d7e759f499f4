"""Rejection sampling with the draft's own probabilities, for chains and for siblings drawn without replacement.

Let p be the target's probabilities and q the draft's. A token x drawn from q is accepted with probability
min(1, p(x) / q(x)). After a rejection, p is replaced by the normalised residual max(p - q, 0) (arXiv:2211.17192,
theorem 1; arXiv:2302.01318, theorem 1). The next sibling was drawn from q without the rejected token, normalised. It is
tried against the residual with the same formula, so the theorem applies to one sibling after another (recursive
rejection sampling without replacement, arXiv:2402.14160).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.verify.multi_candidate import multi_candidate_accept
from jspec.verify.sampled_rule import SampledRule, draw_and_accept
from jspec.verify.tree_walk import AcceptResult


@final
@dataclass(frozen=True)
class Rejection(SampledRule):
    """Rejection sampling of one sibling after another. The drafter samples tokens from its own distribution.

    The multi-candidate rule is used if the draft has no ``probs``, because such a draft was not sampled.
    """

    name = "rejection"
    draft_sampling = DraftSampling.OWN_DISTRIBUTION

    def check(self, tree: Tree) -> None:
        check_no_rank_gaps(self.name, tree)

    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        accept_function = multi_candidate_accept if draft.probs is None else rejection_accept
        return draw_and_accept(accept_function, logits, draft, ancestor_mask, view)


def check_no_rank_gaps(rule: str, tree: Tree) -> None:
    """Raise an error if the sibling ranks of a static tree have a gap.

    Siblings after a gap are not a sample without replacement.

    Args:
        rule: name of the accept rule, for the error message.

    Raises:
        ValueError: a sibling rank is missing.
    """
    paths = (tree.base or tree).paths or ()  # a joined chain is not drawn
    for path in paths:
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in paths:
            raise ValueError(
                f'accept="{rule}" expects sibling ranks without gaps, got {path} without '
                f'{(*path[:-1], path[-1] - 1)}; add that path or use accept="coupled"'
            )


class Trial(NamedTuple):
    """The result of testing one sibling's token against the target's probabilities."""

    accept_prob: Float[Array, "batch"]  # acceptance probability of the sibling, may exceed 1
    residual_p: Float[Array, "batch vocab"]  # the target's probabilities for the next sibling, after a rejection
    residual_q: Float[Array, "batch vocab"]  # the draft's probabilities for the next sibling, after a rejection


def rejection_accept(
    target_probs: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """Apply rejection sampling with given uniforms.

    The nodes are visited in order. A node is tried if its parent is the last node accepted so far.

    Args:
        target_probs: the target's processed probabilities of the token after every node.
        uniforms: a uniform number in [0, 1) for each node.
    """
    assert draft.probs is not None
    vocab = target_probs.shape[-1]
    last_node = jnp.zeros(target_probs.shape[0], jnp.int32)
    p, q = target_probs[:, 0], to_target_vocab(draft.probs[:, 0], draft.vocab_map, vocab)
    accept_probs = [jnp.ones_like(uniforms[:, 0])]
    for node in range(1, target_probs.shape[1]):
        is_tried = draft.valid[:, node] & (draft.parents[:, node] == last_node)
        trial = try_token(p, q if draft.drawn is None else q * draft.drawn[:, node, None], draft.tokens[:, node])
        accepted = is_tried & (uniforms[:, node] < trial.accept_prob)  # "<", because a uniform may be exactly 0
        next_q = to_target_vocab(draft.probs[:, node], draft.vocab_map, vocab)
        p = jnp.where(accepted[:, None], target_probs[:, node], jnp.where(is_tried[:, None], trial.residual_p, p))
        q = jnp.where(accepted[:, None], next_q, jnp.where(is_tried[:, None], trial.residual_q, q))
        last_node = jnp.where(accepted, node, last_node)
        accept_probs.append(trial.accept_prob)
    return AcceptResult(last_node, p, jnp.stack(accept_probs, axis=1))


def try_token(p: Float[Array, "batch vocab"], q: Float[Array, "batch vocab"], token: Int[Array, "batch"]) -> Trial:
    """Test a token drawn from the draft's probabilities q against the target's probabilities p.

    If q is all zeros, the draft had only this token left, and q counts as a point mass on this token. If the residual
    max(p - q, 0) is all zeros (p equals q up to rounding), the token is accepted.
    """
    is_token = jnp.arange(p.shape[-1]) == token[:, None]
    q = jnp.where(jnp.any(q > 0, axis=-1, keepdims=True), q, is_token.astype(q.dtype))
    token_p, token_q = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (p, q))
    residual = jnp.maximum(p - q, 0.0)
    ratio = token_p / jnp.maximum(token_q, jnp.finfo(q.dtype).tiny)
    has_residual = jnp.any(residual > 0, axis=-1)
    return Trial(jnp.where(has_residual, ratio, 1.0), normalised(residual), normalised(jnp.where(is_token, 0.0, q)))


def normalised(weights: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    """Divide the weights of each row by their sum; rows of zeros stay zeros."""
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(mass > 0, mass, 1.0)


def to_target_vocab(
    probs: Float[Array, "batch draft_vocab"], vocab_map: Int[Array, "draft_vocab"] | None, vocab: int
) -> Float[Array, "batch vocab"]:
    """Expand draft-vocabulary probabilities to the target's vocabulary; tokens that the draft lacks get probability 0.

    Args:
        vocab_map: target id of each draft id; None: the two vocabularies are the same.
        vocab: size of the target's vocabulary.
    """
    if vocab_map is None:
        return probs
    return jnp.zeros((probs.shape[0], vocab), probs.dtype).at[:, vocab_map].set(probs)
