"""The exact joint distribution that an accept rule emits, by enumerating every draft and every outcome of a step.

Probabilities are given by prefix: ``probs[d]`` has d axes for the prefix and one for the next token, all of size vocab.
An accept function is called as the engine calls it, with uniform numbers of 0, which accept every token of positive
probability, and 1, which reject every token of probability below 1. The weight of an outcome is computed from the
function's own acceptance probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.core.ancestors import ancestors
from jspec.core.records import Draft
from jspec.core.tree import Tree
from tests.support.arrays import on_device

PrefixProbs = list[np.ndarray]


def random_probs(rng: np.random.Generator, vocab: int, depth: int, *, zeros: float = 0.2) -> PrefixProbs:
    """Draw probabilities for every prefix of up to ``depth`` tokens; some are exactly 0, as after top-k."""
    probs = []
    for d in range(depth + 1):
        weights = rng.exponential(size=[vocab] * (d + 1)) ** 2
        weights[rng.random(weights.shape) < zeros] = 0
        weights[..., -1] += 1e-3
        probs.append(weights / weights.sum(-1, keepdims=True))
    return probs


def joint(probs: PrefixProbs) -> np.ndarray:
    """Return the exact joint probabilities of len(probs) tokens in float64."""
    out = np.ones(())
    for next_probs in probs:
        out = out[..., None] * next_probs
    return out


def prefix(tree: Tree, tokens: tuple[int, ...], node: int) -> tuple[int, ...]:
    """Return the tokens on the path from the root to a node, without the root's token."""
    return () if node == 0 else (*prefix(tree, tokens, tree.parents[node]), tokens[node])


def sampled_drafts(tree: Tree, probs: PrefixProbs) -> tuple[np.ndarray, np.ndarray]:
    """Return every draft whose siblings are drawn without replacement, and its probability; the root is token 0.

    If no token has probability left, the smallest remaining id is drawn, as by Gumbel top-k.
    """
    rows: list[tuple[tuple[int, ...], float]] = [((0,), 1.0)]
    for node in range(1, tree.nodes):
        grown = []
        for tokens, weight in rows:
            before = prefix(tree, tokens, tree.parents[node])
            own = probs[len(before)][before].copy()
            taken = [tokens[m] for m in range(1, node) if tree.parents[m] == tree.parents[node]]
            own[taken] = 0
            if not own.any():
                own[min(set(range(len(own))) - set(taken))] = 1
            own /= own.sum()
            grown += [((*tokens, x), weight * own[x]) for x in range(len(own)) if x not in taken]
        rows = grown
    return np.array([tokens for tokens, _ in rows]), np.array([weight for _, weight in rows])


def most_likely_draft(tree: Tree, probs: PrefixProbs) -> tuple[np.ndarray, np.ndarray]:
    """Return the one deterministic draft of the most likely tokens, with weight 1."""
    tokens: tuple[int, ...] = (0,)
    for node in range(1, tree.nodes):
        before = prefix(tree, tokens, tree.parents[node])
        tokens = (*tokens, int(np.argsort(-probs[len(before)][before], kind="stable")[tree.ranks[node]]))
    return np.array([tokens]), np.ones(1)


def probs_at_nodes(tree: Tree, tokens: np.ndarray, probs: PrefixProbs) -> np.ndarray:
    """Return next-token probabilities [drafts, nodes, vocab]; they are 0 for prefixes longer than ``probs`` has."""
    out = np.zeros((*tokens.shape, probs[0].shape[-1]))
    for row, node in np.ndindex(*tokens.shape):
        before = prefix(tree, tuple(tokens[row].tolist()), node)
        if len(before) < len(probs):
            out[row, node] = probs[len(before)][before]
    return out


def draft_of(tree: Tree, tokens: np.ndarray, probs: np.ndarray | None, valid: np.ndarray | bool = True) -> Draft:
    """Return the `Draft` record of tokens [drafts, nodes] of one tree."""
    return Draft(
        tokens=on_device(tokens, jnp.int32),
        parents=on_device(np.broadcast_to(tree.parents, tokens.shape), jnp.int32),
        scores=on_device(np.zeros(tokens.shape)),
        valid=on_device(np.broadcast_to(valid, tokens.shape)),
        probs=None if probs is None else on_device(probs, jnp.float32),
        vocab_map=None,
    )


class Outcomes(NamedTuple):
    """Every outcome of a step: the draft's tokens, what the rule decides, and the outcome's probability."""

    tokens: np.ndarray  # [outcomes, nodes]
    last_node: np.ndarray  # [outcomes]
    residual: np.ndarray  # probabilities of the token after the last node [outcomes, vocab]
    weight: np.ndarray  # [outcomes]


def outcomes(
    accept_function: Callable[..., Any],
    tree: Tree,
    drafts: tuple[np.ndarray, np.ndarray],
    target: PrefixProbs,
    draft_probs: PrefixProbs | None,
    *,
    all_at_once: bool = False,
    cap: int | None = None,
) -> Outcomes:
    """Return every outcome of a step, for each draft and each set of accepted nodes.

    Args:
        drafts: every draft and its probability.
        draft_probs: the draft probabilities given to the rule, or None.
        all_at_once: whether the rule uses every node's uniform, not only those of the nodes that it tries.
        cap: deepest level of valid nodes.
    """
    tokens, weight = (np.repeat(x, 2 ** (tree.nodes - 1), axis=0) for x in drafts)
    coins = np.array(list(itertools.product([0, 1], repeat=tree.nodes - 1)) * len(drafts[0]))
    accepts = np.concatenate([np.ones((len(coins), 1), int), coins], axis=1)
    valid = depths(tree) <= (tree.depth if cap is None else cap)
    p = probs_at_nodes(tree, tokens, target)
    q = None if draft_probs is None else probs_at_nodes(tree, tokens, draft_probs)
    draft = draft_of(tree, tokens, q, valid)
    ancestor_mask = ancestors(np.asarray(draft.parents))
    uniforms = on_device(1.0 - accepts, jnp.float32)
    result = accept_function(on_device(p, jnp.float32), draft, ancestor_mask, uniforms)
    last_node, residual = np.asarray(result.last_node), np.asarray(result.residual_probs, np.float64)
    probs = np.minimum(np.asarray(result.accept_probs, np.float64), 1)
    is_tried = _is_tried(tree, ancestor_mask[np.arange(len(last_node)), last_node]) | all_at_once
    each = np.where(is_tried & valid, np.where(accepts == 1, probs, 1 - probs), 0.5)
    return Outcomes(tokens, last_node, residual, weight * np.prod(each[:, 1:], axis=1))


def emitted(
    accept_function: Callable[..., Any],
    tree: Tree,
    drafts: tuple[np.ndarray, np.ndarray],
    target: PrefixProbs,
    draft_probs: PrefixProbs | None,
    **options: Any,
) -> np.ndarray:
    """Return the joint probabilities of depth + 1 tokens: those that a step emits, followed by tokens of the target.

    The arguments are those of `outcomes`.
    """
    return law(tree, target, outcomes(accept_function, tree, drafts, target, draft_probs, **options))


def law(tree: Tree, target: PrefixProbs, found: Outcomes) -> np.ndarray:
    """Return the joint probabilities of depth + 1 tokens: those of the outcomes, followed by tokens of the target."""
    out = np.zeros([target[0].shape[-1]] * (tree.depth + 1))
    for tokens, last_node, residual, weight in zip(*found, strict=True):
        if weight == 0:
            continue
        before = prefix(tree, tuple(tokens.tolist()), int(last_node))
        for token in np.flatnonzero(residual):
            out[*before, token] += weight * residual[token] * tail(target, (*before, token))
    return out


def accepted_length(tree: Tree, found: Outcomes) -> float:
    """Return the mean number of accepted draft tokens."""
    return float(found.weight @ depths(tree)[found.last_node])


def depths(tree: Tree) -> np.ndarray:
    """Return the depth of each node."""
    return np.array([len(prefix(tree, tuple(range(tree.nodes)), node)) for node in range(tree.nodes)])


def _is_tried(tree: Tree, on_path: np.ndarray) -> np.ndarray:
    """Return the nodes that sibling-by-sibling rules try, given the accepted path [rows, nodes]."""
    is_tried = np.zeros_like(on_path)
    for node in range(1, tree.nodes):
        parent = tree.parents[node]
        earlier = [m for m in range(1, node) if tree.parents[m] == parent]
        is_tried[:, node] = on_path[:, parent] & ~on_path[:, earlier].any(axis=1)
    return is_tried


def tail(target: PrefixProbs, before: tuple[int, ...]) -> np.ndarray:
    """Return the target's joint probabilities of the tokens that follow a prefix."""
    out = np.ones(())
    for probs in target[len(before) :]:
        out = out[..., None] * probs[before]
    return out


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the total variation distance of two distributions."""
    return float(np.abs(a - b).sum() / 2)
