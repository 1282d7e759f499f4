"""The sibling rule for drafts that were not drawn: every node is a point mass, its siblings are tried in order.

Child x of a node is accepted with the probability of x under what the target's law there leaves when the children
tried before are taken out; if none is accepted, the last token is drawn from what they all leave. Each step is
rejection sampling with a point mass for q (arXiv:2211.17192, theorem 1), so token x comes out with probability p(x)
whatever the children are. It is the rule of EAGLE's trees (arXiv:2401.15077); for a chain it is the classic rule.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jspec.core.ancestors import ancestors
from jspec.core.records import AncestorMask, Draft
from jspec.verify.tree_walk import (
    AcceptResult,
    at_node,
    candidates,
    child_probs,
    longest_accepted_path,
    ranks,
    siblings,
)


def multi_candidate_accept(
    law: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    uniforms: Float[Array, "batch nodes"],
) -> AcceptResult:
    """The rule, with its draws given: one uniform for each node.

    Lossless whatever law the tokens came from, as long as the uniforms do not depend on them.

    Args:
        law: the target's processed law at every node.
    """
    untried = _without_children(law, draft)
    accept_probs = _accept_probs(law, draft, jnp.sum(untried, axis=-1))
    stands = uniforms < accept_probs  # strictly: a uniform may be exactly 0
    is_beaten = jnp.any(jnp.tril(siblings(draft)) & stands[:, None], axis=-1)
    _, best = longest_accepted_path(stands & candidates(draft) & ~is_beaten, draft, ancestor_mask)
    left = at_node(untried, best)
    return AcceptResult(best, left / jnp.sum(left, axis=-1, keepdims=True), accept_probs)


def _without_children(law: Float[Array, "batch nodes vocab"], draft: Draft) -> Float[Array, "batch nodes vocab"]:
    """The law at every node, not normalised, with the tokens of its children taken out."""
    row, nodes = jnp.arange(law.shape[0])[:, None], law.shape[1]
    parent = jnp.where(candidates(draft), draft.parents, nodes)
    return law.at[row, parent, draft.tokens].set(0.0, mode="drop")


def _accept_probs(
    law: Float[Array, "batch nodes vocab"], draft: Draft, untried: Float[Array, "batch nodes"]
) -> Float[Array, "batch nodes"]:
    """Each child's share of the mass that its earlier siblings leave.

    That mass is added up from what is left, never subtracted from 1: no rounding can make it empty while a later
    token still has mass. A child behind which nothing is left is accepted.
    """
    own = child_probs(law, draft)
    later = jnp.triu(siblings(draft))
    behind = jnp.sum(jnp.where(later, own[:, None], 0.0), axis=-1)
    behind = behind + jnp.take_along_axis(untried, jnp.maximum(draft.parents, 0), axis=1)
    return jnp.where(behind > 0, own / jnp.where(behind > 0, own + behind, 1.0), 1.0)


class Candidate(NamedTuple):
    """The path that `multi_candidate` accepts in one tree."""

    accept_len: int
    path: np.ndarray  # accept_len + 1 node ids, the root first
    bonus_probs: np.ndarray  # [vocab], the law of the token behind the path


def multi_candidate(p: ArrayLike, tokens: ArrayLike, parents: ArrayLike, uniforms: ArrayLike) -> Candidate:
    """The rule on one tree with recorded draws; for the host, not to be called inside a jitted function.

    Args:
        p: the target's processed law at every node, [nodes, vocab].
        tokens: [nodes], the root first; siblings are tried in node order.
        parents: [nodes], ``parents[i] < i``; -1 for the root and for padding nodes.
        uniforms: one for each child that is tried, in order; further ones are not read and may be NaN.

    Raises:
        ValueError: arrays that do not describe one tree, or fewer draws than tried children.
    """
    law, given = np.asarray(p, np.float32), np.asarray(uniforms, np.float32)
    node_tokens, node_parents = np.asarray(tokens, np.int32), np.asarray(parents, np.int32)
    _check_tree(law.shape, node_tokens, node_parents)
    nodes = len(node_parents)
    draft = Draft(
        tokens=jnp.asarray(node_tokens)[None],
        parents=jnp.asarray(node_parents)[None],
        scores=jnp.zeros((1, nodes)),
        valid=jnp.ones((1, nodes), bool),
        probs=None,
        vocab_map=None,
    )
    ancestor_mask = ancestors(draft.parents)
    turn = np.asarray(_turns(draft, ancestor_mask)[0])
    draws = np.full(nodes, np.nan, np.float32)  # the last one is the root's
    draws[:-1][: len(given)] = given[: nodes - 1]
    ruling = jax.jit(multi_candidate_accept)(
        jnp.asarray(law)[None], draft, ancestor_mask, jnp.asarray(draws[turn])[None]
    )
    best = int(ruling.best[0])
    tried = np.append(turn[node_parents == best], turn[best]).max() + 1
    if np.isnan(draws[:tried]).any():
        raise ValueError(f"uniforms: expected one for each of {tried} tried children, got {given}")
    path = np.flatnonzero(np.asarray(ancestor_mask[0, best]))
    return Candidate(len(path) - 1, path, np.asarray(ruling.last_law[0]))


def _turns(draft: Draft, ancestor_mask: AncestorMask) -> Int[Array, "batch nodes"]:
    """How many children are tried before a node, if all its ancestors are accepted; -1 for the root."""
    tries = jnp.where(candidates(draft), ranks(draft) + 1, 0)
    return jnp.sum(jnp.where(ancestor_mask, tries[:, None], 0), axis=-1, dtype=jnp.int32) - 1


def _check_tree(law: tuple[int, ...], tokens: np.ndarray, parents: np.ndarray) -> None:
    if tokens.ndim != 1 or not tokens.size or tokens.shape != parents.shape or len(law) != 2 or law[0] != tokens.size:
        raise ValueError(
            f"multi_candidate: expected p [nodes, vocab], tokens [nodes] and parents [nodes], "
            f"got {law}, {tokens.shape} and {parents.shape}"
        )
    if parents[0] != -1 or (parents >= np.arange(len(parents))).any() or (parents < -1).any():
        raise ValueError(f"parents: expected -1 for the root, then -1 <= parents[i] < i, got {parents}")
    children = [(int(parent), int(token)) for parent, token in zip(parents, tokens, strict=True) if parent >= 0]
    if any(not 0 <= token < law[1] for _, token in children):
        raise ValueError(f"tokens: expected ids from 0 to {law[1] - 1}, got {tokens}")
    if len(set(children)) < len(children):
        raise ValueError(f"tokens: expected siblings to differ, got (parent, token) pairs {children}; merge equal ones")
