"""Traversal verification, the tree form of block verification (arXiv:2505.12398).

The tree is traversed from its leaves to its root: a node is tried after all its children and their descendants were
rejected, and before its next sibling. The first node that passes is accepted with all its ancestors, so a path can be
accepted although its first token alone would have been rejected. On a chain the rule is block verification
(arXiv:2403.10444).

Let a be the weight of a node: the probability that the node or a descendant is accepted, once the traversal enters the
node. Let p be the target's probabilities of the token after the node, and q the draft's. The node's first child, with
token x, has the weight min(1, a p(x) / q(x)). If it is rejected, the probabilities of tokens after the node that are
still to be emitted are max(a p - q, 0), with sum m. Then the node has the weight m / (m + 1 - a), p is replaced by the
normalised max(a p - q, 0), and q by q without x, normalised. A node whose children were all rejected passes with the
probability of its weight. The root always passes.

The rule is exact if the children of each node are drawn from its q without replacement, in the order of the nodes, and
independently of the children of other nodes, and if the shape of the tree does not depend on the drawn tokens. It stays
exact if a chain joins the tree (`jspec.draft.beside`): what hangs below a node depends on its path and the committed
text, and a child that is left out, because a drawn sibling before it has its token, would have had the weight 0.

A draft without ``probs`` was not drawn, and each of its tokens is a point mass. For such a draft, which may be a
dynamic tree, both this rule and the multi-candidate rule accept each path with the target's probability of the path.
Therefore the multi-candidate rule is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jspec.core.accept_rule import DraftSampling
from jspec.core.ancestors import longest_accepted_path
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.verify.multi_candidate import multi_candidate_accept
from jspec.verify.rejection import check_no_rank_gaps, normalised, to_target_vocab
from jspec.verify.sampled_rule import SampledRule, draw_and_accept
from jspec.verify.tree_walk import AcceptResult, at_node, candidates, child_probs, siblings

LARGEST = 1e38  # upper limit of `NodeWeights.spent`, so that its product with a probability of 0 is 0


@final
@dataclass(frozen=True)
class Traversal(SampledRule):
    """Traversal verification, from the leaves to the root. The drafter samples tokens from its own distribution."""

    name = "traversal"
    draft_sampling = DraftSampling.OWN_DISTRIBUTION

    def check(self, tree: Tree) -> None:
        check_no_rank_gaps(self.name, tree)

    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        return verify_leaf_to_root(logits, draft, ancestor_mask, view)


def verify_leaf_to_root(
    logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """Apply traversal verification; the arguments and results are those of `SampledRule.decide_sampled`."""
    accept_function = multi_candidate_accept if draft.probs is None else traversal_accept
    return draw_and_accept(accept_function, logits, draft, ancestor_mask, view)


def traversal_accept(
    target_probs: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """Apply traversal verification with given uniforms, and accept the first node that passes.

    When a node is tried, all nodes tried before it were rejected. So its weight does not depend on uniforms, and all
    weights are computed first, from the root down.

    If the target's probabilities after a node are NaN, so are the weights of its children, and these pass. Then the
    accepted path contains the node, and its row ends with an error. A leaf's weight does not depend on the
    probabilities after it.

    Args:
        target_probs: the target's processed probabilities of the token after every node.
        draft: the drafted trees; ``probs`` is not None.
        ancestor_mask: ancestors of each node.
        uniforms: a uniform number in [0, 1) for each node.
    """
    assert draft.probs is not None
    weights = _weights(_trials(target_probs, draft), draft)
    total = weights.mass + 1 - weights.alpha
    accept_probs = jnp.where(total == 0, 1.0, weights.mass / jnp.where(total == 0, 1.0, total))
    passes = candidates(draft) & ~(uniforms >= accept_probs)  # NaN passes
    leads_to_pass = jnp.any(passes[:, :, None] & ancestor_mask, axis=1)
    is_preceded = jnp.any(jnp.tril(siblings(draft)) & leads_to_pass[:, None], axis=-1)
    _, last_node = longest_accepted_path(leads_to_pass & ~is_preceded, draft, ancestor_mask)
    vocab, rows = target_probs.shape[-1], jnp.arange(len(last_node))[:, None]
    p, q, alpha, spent = (
        at_node(field, last_node) for field in (target_probs, draft.probs, weights.alpha, weights.spent)
    )
    is_child = candidates(draft) & (draft.parents == last_node[:, None])
    p = p.at[rows, jnp.where(is_child, draft.tokens, vocab)].set(0.0, mode="drop")
    residual = jnp.maximum(alpha[:, None] * p - spent[:, None] * to_target_vocab(q, draft.vocab_map, vocab), 0.0)
    return AcceptResult(last_node, normalised(residual), accept_probs)


@struct.dataclass
class NodeWeights:
    """The weights of all nodes, which change while their children are rejected one after another.

    Let a be a node's weight when it is reached. After some children were rejected, its residual is max(a p - s q, 0)
    without the tokens of these children, up to the factor 1 / (m + 1 - a), where m is the sum of the residual.
    """

    alpha: Float[Array, "batch nodes"]  # a, in the formula above
    spent: Float[Array, "batch nodes"]  # s
    mass: Float[Array, "batch nodes"]  # m


@struct.dataclass
class Trials:
    """What the trials of all nodes read: probabilities of each node's token after its parent, and of other tokens."""

    token_p: Float[Array, "batch nodes"]  # the target's probability of the node's token
    token_q: Float[Array, "batch nodes"]  # the draft's
    tail: Float[Array, "batch nodes"]  # the draft's share of all tokens except those of earlier siblings
    is_later: Bool[Array, "batch nodes nodes"]  # ``[b, n, m]``: whether m is a later sibling of n
    is_child: Bool[Array, "batch nodes draft_vocab"]  # whether a child of the node has the token
    target: Float[Array, "batch nodes draft_vocab"]  # the target's probabilities of tokens of the draft vocabulary
    outside: Float[Array, "batch nodes"]  # the target's probability of all other tokens but children of the node


def _trials(target_probs: Float[Array, "batch nodes vocab"], draft: Draft) -> Trials:
    """Collect what all trials read.

    Args:
        target_probs: the target's processed probabilities of the token after every node.
    """
    assert draft.probs is not None
    tokens, every, target = draft.tokens, siblings(draft), target_probs
    (rows, nodes), size, outside = tokens.shape, draft.probs.shape[-1], jnp.zeros(tokens.shape)
    row, parents = jnp.arange(rows)[:, None], jnp.maximum(draft.parents, 0)
    parent_or_none = jnp.where(candidates(draft), parents, nodes)
    if draft.vocab_map is not None:
        of_target = (
            jnp.full(target.shape[-1], size, jnp.int32).at[draft.vocab_map].set(jnp.arange(size, dtype=jnp.int32))
        )
        others = target.at[row, parent_or_none, tokens].set(0.0, mode="drop")  # without all children
        outside = jnp.sum(jnp.where(of_target == size, others, 0.0), axis=-1)
        tokens, target = of_target[tokens], target[..., draft.vocab_map]
    is_child = jnp.zeros((rows, nodes, size), bool).at[row, parent_or_none, tokens].set(True, mode="drop")
    token_q = draft.probs.at[row, parents, tokens].get(mode="fill", fill_value=0.0)
    undrawn = jnp.sum(jnp.where(is_child, 0.0, draft.probs), axis=-1)  # never 1 minus a sum, which may round to 0

    def of_siblings(mask: Bool[Array, "batch nodes nodes"]) -> Float[Array, "batch nodes"]:
        total = jnp.sum(jnp.where(mask | jnp.eye(nodes, dtype=bool), token_q[:, None], 0.0), axis=-1)
        return total + undrawn[row, parents]

    is_later, whole = jnp.triu(every), of_siblings(every)
    tail = of_siblings(is_later) / jnp.where(whole > 0, whole, 1.0)  # exactly 1 for a first child
    return Trials(child_probs(target_probs, draft), token_q, tail, is_later, is_child, target, outside)


def _weights(trials: Trials, draft: Draft) -> NodeWeights:
    """Return the weights of all nodes after all their children were rejected."""
    ones = jnp.ones_like(trials.token_p)
    weights, nodes = NodeWeights(ones, jnp.zeros_like(ones), ones), draft.parents.shape[1]
    if isinstance(draft.parents, np.ndarray) and (draft.parents == draft.parents[:1]).all():
        for children in _waves(draft.parents[0]):
            weights = _try_children(children, weights, trials, draft)
        return weights

    def body(node: Array, weights: NodeWeights) -> NodeWeights:
        return _try_children(node[None], weights, trials, draft)

    return jax.lax.fori_loop(1, nodes, body, weights)


def _waves(parents: Int[np.ndarray, "nodes"]) -> list[Int[np.ndarray, "wave"]]:
    """Divide the nodes of a static tree, except the root, into waves whose weights can be computed together.

    A node's wave comes after those of its parent and of its earlier siblings.
    """
    wave, newest = np.zeros(len(parents), int), np.zeros(len(parents), int)
    for node, parent in enumerate(parents[1:], 1):
        wave[node] = newest[node] = newest[parent] = 1 + newest[parent]
    return [np.flatnonzero(wave == index) for index in range(1, wave.max() + 1)]


def _try_children(
    children: Int[Array | np.ndarray, "wave"], weights: NodeWeights, trials: Trials, draft: Draft
) -> NodeWeights:
    """Set the weights of nodes, and change those of their parents to the ones after the nodes are rejected.

    A token with the draft probability 0 was not drawn (the draft had no other token left), and is a point mass.

    Args:
        children: nodes with different parents, whose parents and earlier siblings have been handled.
    """
    parents = jnp.maximum(draft.parents[:, children], 0)
    rows = np.arange(len(parents))[:, None]
    alpha, spent, mass = weights.alpha[rows, parents], weights.spent[rows, parents], weights.mass[rows, parents]
    p, q, tail = trials.token_p[:, children], trials.token_q[:, children], trials.tail[:, children]
    total, is_point = mass + 1 - alpha, q == 0
    if draft.drawn is not None:
        is_point |= ~draft.drawn[:, children]
    ratio = jnp.maximum(alpha * p - spent * q, 0.0) / jnp.where(total == 0, 1.0, total)
    ratio = ratio / jnp.where(is_point, 1.0, q / tail)
    spent = jnp.minimum(spent + jnp.where(is_point, 0.0, total / tail), LARGEST)
    mass = _residual_mass(children, parents, alpha, spent, trials, draft)
    weight = jnp.where(ratio > 0, jnp.minimum(ratio, 1.0), 0.0)
    weight = jnp.where((alpha >= 1) & (mass == 0), 1.0, weight)  # p equals q up to rounding
    is_tried = candidates(draft)[:, children]
    weight = jnp.where(is_tried, weight, 0.0)
    return NodeWeights(
        alpha=_put(weights.alpha, children, weight),
        spent=_put(weights.spent, jnp.where(is_tried, parents, -1), spent),
        mass=_put(_put(weights.mass, jnp.where(is_tried, parents, -1), mass), children, weight),
    )


def _put(
    field: Float[Array, "batch nodes"],
    nodes: Int[Array | np.ndarray, "*batch wave"],
    values: Float[Array, "batch wave"],
) -> Float[Array, "batch nodes"]:
    """Return a copy of ``field`` with values at some nodes; -1: nowhere. A scatter would be a launch of its own."""
    is_here = jnp.arange(field.shape[1])[:, None] == jnp.atleast_2d(nodes)[:, None]
    return jnp.where(is_here.any(axis=-1), jnp.sum(jnp.where(is_here, values[:, None], 0.0), axis=-1), field)


def _residual_mass(
    children: Int[Array | np.ndarray, "wave"],
    parents: Int[Array, "batch wave"],
    alpha: Float[Array, "batch wave"],
    spent: Float[Array, "batch wave"],
    trials: Trials,
    draft: Draft,
) -> Float[Array, "batch wave"]:
    """Return the sum of the residual of each parent after a child was rejected; 0 for a weight of 0."""
    assert draft.probs is not None
    rows = np.arange(len(parents))[:, None]

    def total(p: Array, q: Array) -> Array:
        return jnp.sum(jnp.maximum(alpha[..., None] * p - spent[..., None] * q, 0.0), axis=-1)

    later = trials.is_later[:, children]
    of_siblings = total(*(jnp.where(later, field[:, None], 0.0) for field in (trials.token_p, trials.token_q)))
    others = jnp.where(trials.is_child[rows, parents], 0.0, trials.target[rows, parents])
    of_others = total(others, draft.probs[rows, parents])
    mass = of_siblings + of_others + alpha * trials.outside[rows, parents]
    return jnp.where(alpha > 0, mass, 0.0)
