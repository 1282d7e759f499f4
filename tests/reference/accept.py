"""The accept rules for one tree in numpy float64, written from the papers as loops.

Each function takes the tree's tokens and parents, and a flag ``valid`` and a uniform number per node. It returns the
accepted path from the root and the probabilities of the token after this path.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

AcceptResult = tuple[list[int], np.ndarray]


def children(parents: np.ndarray, valid: np.ndarray, node: int) -> list[int]:
    return [n for n in range(1, len(parents)) if parents[n] == node and valid[n]]


def multi_candidate_accept(
    p: np.ndarray, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray, u: np.ndarray
) -> AcceptResult:
    """Apply EAGLE's rule: a rejected child's token gets probability 0, and the others are renormalised."""
    path, probs = [0], p[0].astype(np.float64)
    while True:
        for child in children(parents, valid, path[-1]):
            if u[child] < probs[tokens[child]]:
                path, probs = [*path, child], p[child].astype(np.float64)
                break
            probs = probs.copy()
            probs[tokens[child]] = 0
            probs /= probs.sum()
        else:
            return path, probs


def rejection_accept(
    p: np.ndarray, q: np.ndarray, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray, u: np.ndarray
) -> AcceptResult:
    """Apply recursive rejection sampling without replacement (arXiv:2402.14160)."""
    path = [0]
    while True:
        target_probs, draft_probs = p[path[-1]].astype(np.float64), q[path[-1]].astype(np.float64)
        for child in children(parents, valid, path[-1]):
            x = tokens[child]
            if u[child] < min(1, target_probs[x] / draft_probs[x]):
                path = [*path, child]
                break
            target_probs = np.maximum(target_probs - draft_probs, 0)
            target_probs /= target_probs.sum()
            draft_probs = draft_probs.copy()
            draft_probs[x] = 0
            draft_probs /= draft_probs.sum()
        else:
            return path, target_probs


def block_accept(p: np.ndarray, q: np.ndarray, tokens: np.ndarray, length: int, u: np.ndarray) -> AcceptResult:
    """Apply algorithm 2 of arXiv:2403.10444 to a chain of ``length`` tokens."""
    accepted, weights = 0, [1.0]
    for i in range(1, length + 1):
        weights.append(min(weights[-1] * p[i - 1, tokens[i]] / q[i - 1, tokens[i]], 1.0))
        if i < length:
            mass = np.maximum(weights[i] * p[i] - q[i], 0).sum()
            h = mass / (mass + 1 - weights[i])
        else:
            h = weights[i]
        if u[i] < h:
            accepted = i
    last = p[length] if accepted == length else np.maximum(weights[accepted] * p[accepted] - q[accepted], 0)
    return list(range(accepted + 1)), last / last.sum()


def traversal_trials(
    p: np.ndarray,
    q: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    valid: np.ndarray,
    *,
    new_weight: Callable[[float, float], float] = lambda mass, weight: mass / (mass + 1 - weight),
    is_removed: bool = True,
    from_root: bool = False,
) -> list[tuple[int, float, np.ndarray]]:
    """Return the trials of traversal verification (arXiv:2505.12398) in their order, if all are rejected.

    Each trial is a node, its acceptance probability, and the probabilities of the token after it. The root's is last.

    Args:
        new_weight: weight of a node after a child's rejection, from the sum of its residual and its old weight.
        is_removed: whether a rejected child's token loses its draft probability.
        from_root: whether a node is tried before its children instead of after them.
    """
    trials = []

    def visit(node: int, weight: float) -> None:
        target_probs, draft_probs, own = p[node].astype(np.float64), q[node].astype(np.float64), len(trials)
        if from_root:
            trials.append((node, weight, target_probs))
        for child in children(parents, valid, node):
            x = tokens[child]
            if draft_probs[x] == 0:  # the draft had no token left
                draft_probs = (np.arange(len(draft_probs)) == x).astype(np.float64)
            visit(child, min(1, weight * target_probs[x] / draft_probs[x]))
            residual = np.maximum(weight * target_probs - draft_probs, 0)
            weight = new_weight(residual.sum(), weight)
            target_probs = residual / max(residual.sum(), 1e-30)
            if is_removed:
                draft_probs = draft_probs * (np.arange(len(draft_probs)) != x)
                draft_probs /= max(draft_probs.sum(), 1e-30)
        if from_root:
            trials[own] = (node, trials[own][1], target_probs)
        else:
            trials.append((node, weight, target_probs))

    visit(0, 1.0)
    return trials


def typical_accept(
    logits: np.ndarray,
    temperature: float,
    tokens: np.ndarray,
    parents: np.ndarray,
    valid: np.ndarray,
    options: tuple[float, float],
) -> tuple[list[int], int]:
    """Apply Medusa's typical acceptance (arXiv:2401.10774): the longest, then likeliest path, and its argmax."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    found = []

    def extend(path: list[int], log_prob: float) -> None:
        probs = p[path[-1]]
        entropy = -(probs * np.log(probs + 1e-5)).sum()
        threshold, alpha = options
        found.append((len(path), log_prob, path))
        for child in children(parents, valid, path[-1]):
            prob = probs[tokens[child]]
            if prob > min(threshold, alpha * np.exp(-entropy)):
                extend([*path, child], log_prob + np.log(prob))

    extend([0], 0.0)
    path = max(found)[2]
    return path, int(logits[path[-1]].argmax())
