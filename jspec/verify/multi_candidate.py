"""The multi-candidate rule for deterministic drafts, which tries siblings in order, each as a point mass.

Before a child is tried, the tokens of the siblings tried earlier are removed from the target's probabilities, and the
rest is normalised. The child is accepted with its probability in the result. If no child is accepted, the last token is
drawn from the target's probabilities without the tokens of all children. Each trial is rejection sampling with a point
mass as draft distribution (arXiv:2211.17192, theorem 1). Therefore token x is emitted with the target's probability
p(x), whatever the children are.

EAGLE uses this rule for its trees (arXiv:2401.15077). For a chain the rule equals rejection sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jspec.core.accept_rule import DraftSampling
from jspec.core.ancestors import ancestors, longest_accepted_path
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.core.tree import Tree
from jspec.verify.sampled_rule import SampledRule, draw_and_accept
from jspec.verify.tree_walk import (
    AcceptResult,
    at_node,
    candidates,
    child_probs,
    ranks,
    siblings,
)


@final
@dataclass(frozen=True)
class MultiCandidate(SampledRule):
    """The rule that tries siblings in order, each as a point mass; the drafter proposes its most likely tokens."""

    name = "multi_candidate"
    draft_sampling = DraftSampling.MOST_LIKELY

    def check(self, tree: Tree) -> None:
        """Allow every tree."""

    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        return draw_and_accept(multi_candidate_accept, logits, draft, ancestor_mask, view)


def multi_candidate_accept(
    target_probs: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """Apply the multi-candidate rule with given uniforms.

    The rule is lossless for any distribution of the draft tokens, as long as the uniforms do not depend on the tokens.

    Args:
        target_probs: the target's processed probabilities of the token after every node.
        uniforms: a uniform number in [0, 1) for each node.
    """
    residual = _without_children(target_probs, draft)
    accept_probs = _accept_probs(target_probs, draft, jnp.sum(residual, axis=-1))
    passes = uniforms < accept_probs  # "<", because a uniform may be exactly 0
    is_preceded = jnp.any(jnp.tril(siblings(draft)) & passes[:, None], axis=-1)
    _, last_node = longest_accepted_path(passes & candidates(draft) & ~is_preceded, draft, ancestor_mask)
    last_residual = at_node(residual, last_node)
    return AcceptResult(last_node, last_residual / jnp.sum(last_residual, axis=-1, keepdims=True), accept_probs)


def _without_children(probs: Float[Array, "batch nodes vocab"], draft: Draft) -> Float[Array, "batch nodes vocab"]:
    """Set the probabilities of the tokens of each node's children to 0, without normalising the rest."""
    row, nodes = jnp.arange(probs.shape[0])[:, None], probs.shape[1]
    parent = jnp.where(candidates(draft), draft.parents, nodes)
    return probs.at[row, parent, draft.tokens].set(0.0, mode="drop")


def _accept_probs(
    probs: Float[Array, "batch nodes vocab"], draft: Draft, residual_mass: Float[Array, "batch nodes"]
) -> Float[Array, "batch nodes"]:
    """Return each child's acceptance probability.

    It is the child's probability, divided by the total probability of all tokens except the child's earlier siblings.
    The total is a sum over these tokens, never 1 minus a sum, so rounding cannot make it 0 while a later token has
    probability. If all tokens after a child have probability 0, the child is accepted.
    """
    node_probs = child_probs(probs, draft)
    is_later_sibling = jnp.triu(siblings(draft))
    mass_after = jnp.sum(jnp.where(is_later_sibling, node_probs[:, None], 0.0), axis=-1)
    mass_after = mass_after + jnp.take_along_axis(residual_mass, jnp.maximum(draft.parents, 0), axis=1)
    return jnp.where(mass_after > 0, node_probs / jnp.where(mass_after > 0, node_probs + mass_after, 1.0), 1.0)


class Candidate(NamedTuple):
    """The accepted path of one tree, as `multi_candidate` returns it."""

    accept_len: int  # number of accepted draft tokens
    path: np.ndarray  # ids of the root and the accepted nodes, [accept_len + 1], the root first
    bonus_probs: np.ndarray  # [vocab], probabilities of the token after the path


def multi_candidate(p: ArrayLike, tokens: ArrayLike, parents: ArrayLike, uniforms: ArrayLike) -> Candidate:
    """Apply the multi-candidate rule to one tree with recorded uniforms, on the host (not inside jit).

    Args:
        p: the target's processed probabilities after every node, [nodes, vocab].
        tokens: token ids [nodes], the root first; siblings are tried in node order.
        parents: parent of each node [nodes], ``parents[i] < i``; -1 for the root and for padding nodes.
        uniforms: a uniform number for each tried child, in the order of trials; further entries are not read, and may
            be NaN.

    Raises:
        ValueError: the arrays do not describe one tree, or there are fewer uniforms than tried children.
    """
    probs, recorded = np.asarray(p, np.float32), np.asarray(uniforms, np.float32)
    node_tokens, node_parents = np.asarray(tokens, np.int32), np.asarray(parents, np.int32)
    _check_tree(probs.shape, node_tokens, node_parents)
    nodes = len(node_parents)
    draft = Draft(
        tokens=jax.device_put(node_tokens[None]),
        parents=jax.device_put(node_parents[None]),
        scores=jax.device_put(np.zeros((1, nodes), np.float32)),
        valid=jax.device_put(np.ones((1, nodes), bool)),
        probs=None,
        vocab_map=None,
    )
    ancestor_mask = ancestors(node_parents[None])
    trial = np.asarray(jax.jit(_trial_index)(draft, ancestor_mask)[0])
    draws = np.full(nodes, np.nan, np.float32)  # the last entry is the root's
    draws[:-1][: len(recorded)] = recorded[: nodes - 1]
    result = jax.jit(multi_candidate_accept)(probs[None], draft, ancestor_mask, draws[trial][None])
    last_node = int(result.last_node[0])
    num_tried = np.append(trial[node_parents == last_node], trial[last_node]).max() + 1
    if np.isnan(draws[:num_tried]).any():
        raise ValueError(f"uniforms: expected one for each of {num_tried} tried children, got {recorded}")
    path = np.flatnonzero(ancestor_mask[0, last_node])
    return Candidate(len(path) - 1, path, np.asarray(result.residual_probs[0]))


def _trial_index(draft: Draft, ancestor_mask: AncestorMask) -> Int[Array, "batch nodes"]:
    """Return the index of each node in the order of trials if all its ancestors are accepted; -1 for the root."""
    tries = jnp.where(candidates(draft), ranks(draft) + 1, 0)
    return jnp.sum(jnp.where(ancestor_mask, tries[:, None], 0), axis=-1, dtype=jnp.int32) - 1


def _check_tree(shape: tuple[int, ...], tokens: np.ndarray, parents: np.ndarray) -> None:
    is_one_tree = tokens.ndim == 1 and tokens.size and tokens.shape == parents.shape
    if not is_one_tree or len(shape) != 2 or shape[0] != tokens.size:
        raise ValueError(
            f"multi_candidate: expected p [nodes, vocab], tokens [nodes] and parents [nodes], "
            f"got {shape}, {tokens.shape} and {parents.shape}"
        )
    if parents[0] != -1 or (parents >= np.arange(len(parents))).any() or (parents < -1).any():
        raise ValueError(f"parents: expected -1 for the root, then -1 <= parents[i] < i, got {parents}")
    children = [(int(parent), int(token)) for parent, token in zip(parents, tokens, strict=True) if parent >= 0]
    if any(not 0 <= token < shape[1] for _, token in children):
        raise ValueError(f"tokens: expected ids from 0 to {shape[1] - 1}, got {tokens}")
    if len(set(children)) < len(children):
        raise ValueError(f"tokens: expected siblings to differ, got (parent, token) pairs {children}; merge equal ones")
