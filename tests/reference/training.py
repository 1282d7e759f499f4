"""EAGLE-3's loss of one document, written from the equations in numpy and float64.

Source: arXiv:2503.01840, section 3.2, with the shift, the rotary positions and the mask of `loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Weights = Mapping[str, np.ndarray]  # fc, qkv, o, gate_up, down, norm, head and the norms of the layer


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    output_norm: bool = False  # EAGLE-3.1: the normed output is fed on
    state_norm: bool = False  # EAGLE-3.1: each state of the target is normed before fc


class ReferenceDocument(NamedTuple):
    tokens: np.ndarray  # [n]
    counted: np.ndarray  # [n]
    states: np.ndarray  # [n, 3, target hidden]
    logits: np.ndarray  # [n, target vocabulary], behind each token


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotate heads [heads, dim] by a position; channel i is paired with channel i + dim / 2."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
    )


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def cross_entropy(p: np.ndarray, q: np.ndarray) -> float:
    return float(-(q * np.log(p)).sum())


def loss(
    weights: Weights,
    shape: Shape,
    document: ReferenceDocument,
    embedding: np.ndarray,
    ids: np.ndarray,
    *,
    steps: int,
    decay: float,
    of: object = cross_entropy,
) -> float:
    """Return sum_j decay^j sum_i m_ij * of(p_ij, q_ij) of one document, place by place."""
    tokens, counted, states, logits = document
    size, total = len(tokens), 0.0
    if shape.state_norm:
        states = np.stack([norm(states[:, i], weights["fc_norm"][i], shape.eps) for i in range(3)], axis=1)
    features = states.reshape(size, -1) @ weights["fc"].T
    first_keys: list[np.ndarray] = []
    first_values: list[np.ndarray] = []
    own: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(size)]
    for step in range(steps):
        nexts = np.zeros_like(features)
        for i in range(size):
            token = tokens[i + 1 + step] if i + 1 + step < size else 0
            e = norm(embedding[token], weights["input_norm"], shape.eps)
            u = np.concatenate([e, norm(features[i], weights["hidden_norm"], shape.eps)])
            projected = (weights["qkv"] @ u).reshape(-1, shape.head_dim)
            q, k, v = np.split(projected, [shape.heads, shape.heads + shape.kv_heads])
            q, k = rotate(q, i + step, shape.theta), rotate(k, i + step, shape.theta)
            if step == 0:
                first_keys.append(k)
                first_values.append(v)
            else:
                own[i].append((k, v))
            keys = np.stack(first_keys[: i + 1] + [one for one, _ in own[i]])
            values = np.stack(first_values[: i + 1] + [one for _, one in own[i]])
            attended = []
            for head in range(shape.heads):
                group = head * shape.kv_heads // shape.heads
                share = softmax(keys[:, group] @ q[head] / np.sqrt(shape.head_dim))
                attended.append(share @ values[:, group])
            r = features[i] + weights["o"] @ np.concatenate(attended)
            gate, up = np.split(weights["gate_up"] @ norm(r, weights["mlp_norm"], shape.eps), 2)
            h = r + weights["down"] @ (silu(gate) * up)
            normed = norm(h, weights["norm"], shape.eps)
            nexts[i] = normed if shape.output_norm else h
            at = i + 1 + step
            if at < size and counted[at] and np.argmax(logits[at]) in ids:
                total += decay**step * of(softmax(weights["head"] @ normed), softmax(logits[at][ids]))  # type: ignore[operator]
        features = nexts
    return total
