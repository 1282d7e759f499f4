"""Every draft and every outcome of a round, with their probabilities: the exact joint law that a rule emits.

Laws are given by prefix: ``laws[d]`` has shape [vocab] * d + [vocab]. A rule is called as the engine calls it, with
uniforms of 0 (which accepts whatever can be accepted) and 1 (which rejects whatever can be rejected); the weight of
an outcome follows from the rule's own acceptance probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.core.ancestors import ancestors
from jspec.core.records import Draft
from jspec.core.tree import Tree

Laws = list[np.ndarray]


def random_laws(rng: np.random.Generator, vocab: int, depth: int, *, zeros: float = 0.2) -> Laws:
    """Laws for every prefix of up to ``depth`` tokens; some probabilities are exactly 0, as top-k leaves them."""
    laws = []
    for d in range(depth + 1):
        weights = rng.exponential(size=[vocab] * (d + 1)) ** 2
        weights[rng.random(weights.shape) < zeros] = 0
        weights[..., -1] += 1e-3
        laws.append(weights / weights.sum(-1, keepdims=True))
    return laws


def joint(laws: Laws) -> np.ndarray:
    """The law of len(laws) tokens in float64: the oracle."""
    out = np.ones(())
    for law in laws:
        out = out[..., None] * law
    return out


def prefix(tree: Tree, tokens: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The tokens from behind the root down to a node."""
    return () if node == 0 else (*prefix(tree, tokens, tree.parents[node]), tokens[node])


def drawn(tree: Tree, laws: Laws) -> tuple[np.ndarray, np.ndarray]:
    """Every draft whose siblings are drawn without replacement, and its probability; the root is token 0.

    Where a law has no token left, the smallest id follows, as Gumbel top-k does it.
    """
    rows: list[tuple[tuple[int, ...], float]] = [((0,), 1.0)]
    for node in range(1, tree.nodes):
        grown = []
        for tokens, weight in rows:
            before = prefix(tree, tokens, tree.parents[node])
            law = laws[len(before)][before].copy()
            taken = [tokens[m] for m in range(1, node) if tree.parents[m] == tree.parents[node]]
            law[taken] = 0
            if not law.any():
                law[min(set(range(len(law))) - set(taken))] = 1
            law /= law.sum()
            grown += [((*tokens, x), weight * law[x]) for x in range(len(law)) if x not in taken]
        rows = grown
    return np.array([tokens for tokens, _ in rows]), np.array([weight for _, weight in rows])


def likeliest(tree: Tree, laws: Laws) -> tuple[np.ndarray, np.ndarray]:
    """The one deterministic draft of the likeliest tokens, with weight 1."""
    tokens: tuple[int, ...] = (0,)
    for node in range(1, tree.nodes):
        before = prefix(tree, tokens, tree.parents[node])
        tokens = (*tokens, int(np.argsort(-laws[len(before)][before], kind="stable")[tree.ranks[node]]))
    return np.array([tokens]), np.ones(1)


def along(tree: Tree, tokens: np.ndarray, laws: Laws) -> np.ndarray:
    """The law behind each node of every draft, [drafts, nodes, vocab]; zero where ``laws`` ends."""
    out = np.zeros((*tokens.shape, laws[0].shape[-1]))
    for row, node in np.ndindex(*tokens.shape):
        before = prefix(tree, tuple(tokens[row].tolist()), node)
        if len(before) < len(laws):
            out[row, node] = laws[len(before)][before]
    return out


def record(tree: Tree, tokens: np.ndarray, probs: np.ndarray | None, valid: np.ndarray | bool = True) -> Draft:
    return Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), tokens.shape),
        scores=jnp.zeros(tokens.shape),
        valid=jnp.broadcast_to(jnp.asarray(valid), tokens.shape),
        probs=None if probs is None else jnp.asarray(probs, jnp.float32),
        vocab_map=None,
    )


def emitted(
    rule: Callable[..., Any],
    tree: Tree,
    drafts: tuple[np.ndarray, np.ndarray],
    target: Laws,
    drafted: Laws | None,
    *,
    all_at_once: bool = False,
    cap: int | None = None,
) -> np.ndarray:
    """The joint law of depth + 1 tokens: those of the round, and behind them the target's own.

    Args:
        drafts: every draft and its probability.
        drafted: the law that the rule is told the drafts came from; None: none.
        all_at_once: the rule uses every node's uniform, not only those of nodes whose turn comes.
        cap: nodes deeper than this are cut off.
    """
    tokens, weight = (np.repeat(x, 2 ** (tree.nodes - 1), axis=0) for x in drafts)
    coins = np.array(list(itertools.product([0, 1], repeat=tree.nodes - 1)) * len(drafts[0]))
    accepts = np.concatenate([np.ones((len(coins), 1), int), coins], axis=1)
    deep = np.array([len(prefix(tree, tuple(range(tree.nodes)), n)) for n in range(tree.nodes)])
    valid = deep <= (tree.depth if cap is None else cap)
    p = along(tree, tokens, target)
    q = None if drafted is None else along(tree, tokens, drafted)
    draft = record(tree, tokens, q, valid)
    ancestor_mask = ancestors(draft.parents)
    ruling = rule(jnp.asarray(p, jnp.float32), draft, ancestor_mask, jnp.asarray(1.0 - accepts, jnp.float32))
    best, last = np.asarray(ruling.best), np.asarray(ruling.last_law, np.float64)
    probs = np.minimum(np.asarray(ruling.accept_probs, np.float64), 1)
    had_turn = _had_turn(tree, np.asarray(ancestor_mask)[np.arange(len(best)), best]) | all_at_once
    each = np.where(had_turn & valid, np.where(accepts == 1, probs, 1 - probs), 0.5)
    weight = weight * np.prod(each[:, 1:], axis=1)
    out = np.zeros([target[0].shape[-1]] * (tree.depth + 1))
    for row in np.flatnonzero(weight):
        before = prefix(tree, tuple(tokens[row].tolist()), int(best[row]))
        for token in np.flatnonzero(last[row]):
            out[*before, token] += weight[row] * last[row, token] * _tail(target, (*before, token))
    return out


def _had_turn(tree: Tree, on_path: np.ndarray) -> np.ndarray:
    """Nodes that the sibling-by-sibling rules looked at, given the accepted path: [rows, nodes]."""
    turn = np.zeros_like(on_path)
    for node in range(1, tree.nodes):
        parent = tree.parents[node]
        earlier = [m for m in range(1, node) if tree.parents[m] == parent]
        turn[:, node] = on_path[:, parent] & ~on_path[:, earlier].any(axis=1)
    return turn


def _tail(target: Laws, before: tuple[int, ...]) -> np.ndarray:
    """The target's law of the tokens that are missing behind a prefix."""
    out = np.ones(())
    for law in target[len(before) :]:
        out = out[..., None] * law[before]
    return out


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(a - b).sum() / 2)
