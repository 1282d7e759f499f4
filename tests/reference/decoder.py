"""A Llama decoder and the sampling options in numpy float64, written from the formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jspec.models.decoder import Model


def logits(model: Model, tokens: np.ndarray, window: int | None = None) -> np.ndarray:
    """Compute the logits after every token of whole sequences [batch, tokens, vocab], without a cache.

    Args:
        window: number of tokens that each token attends to, itself included; None: all earlier tokens and itself.
    """
    c = model.config
    x = np.asarray(model.embed, np.float64)[tokens]
    for layer in model.layers:
        w = {name: np.asarray(getattr(layer, name), np.float64) for name in layer.__dataclass_fields__}
        x = x + attention(_norm(x, w["attn_norm"], c.norm_eps) @ w["qkv"].T, c, window) @ w["o"].T
        gate, up = np.split(_norm(x, w["mlp_norm"], c.norm_eps) @ w["gate_up"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    return _norm(x, np.asarray(model.norm, np.float64), c.norm_eps) @ np.asarray(model.output_head, np.float64).T


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def attention(qkv: np.ndarray, c, window: int | None = None) -> np.ndarray:
    """Compute causal attention over whole sequences from fused projections; c is the config of a decoder or a head."""
    batch, size, _ = qkv.shape
    seen = np.tril(np.ones((size, size), bool)) & ~np.tril(np.ones((size, size), bool), -(window or size))
    heads = qkv.reshape(batch, size, -1, c.head_dim).transpose(0, 2, 1, 3)
    q, k, v = np.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
    q, k = _rotated(q, c.rope.theta), _rotated(k, c.rope.theta)
    out = np.empty_like(q)
    for head in range(c.num_heads):
        shared = head // (c.num_heads // c.num_kv_heads)
        scores = q[:, head] @ k[:, shared].transpose(0, 2, 1) / np.sqrt(c.head_dim)
        scores = np.where(seen, scores, -np.inf)
        out[:, head] = _softmax(scores) @ v[:, shared]
    return out.transpose(0, 2, 1, 3).reshape(batch, size, -1)


def _rotated(x: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * theta ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def processed_probs(
    row: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Return the probabilities [vocab] of one row of logits after the sampling options, by sorting."""
    if temperature == 0:
        return np.eye(len(row))[row.argmax()]
    probs = _softmax(np.asarray(row, np.float64) / temperature)
    order = np.argsort(-probs, kind="stable")
    keep = np.zeros(len(row), bool)
    keep[order[: top_k if top_k > 0 else len(row)]] = True
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    if top_p < 1:
        mass = np.cumsum(probs[order])
        keep = np.zeros(len(row), bool)
        keep[order[: int(np.searchsorted(mass, top_p)) + 1]] = True
        probs = np.where(keep, probs, 0) / probs[keep].sum()
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    return probs / probs.sum()


def joint_probs(
    model: Model,
    prompt: list[int],
    length: int,
    edit: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda row, _: row,
    **controls: float,
) -> np.ndarray:
    """Return the joint probabilities of the next ``length`` tokens after a prompt: ``length`` axes of size vocab.

    Args:
        edit: function of logits [vocab] and the tokens generated before them that returns the edited logits.
    """
    vocab = model.config.vocab_size
    contexts = np.stack(np.meshgrid(*[np.arange(vocab)] * (length - 1), indexing="ij"), -1).reshape(-1, length - 1)
    tokens = np.concatenate([np.broadcast_to(prompt, (len(contexts), len(prompt))), contexts], axis=1)
    next_logits = logits(model, tokens)[:, len(prompt) - 1 :]
    out, probs = np.ones(len(contexts)), np.empty((len(contexts), length, vocab))
    for depth in range(length):
        equal = vocab ** (length - 1 - depth)  # contexts that begin with the same `depth` tokens follow one another
        for first in range(0, len(contexts), equal):
            row = edit(next_logits[first, depth], contexts[first, :depth])
            probs[first : first + equal, depth] = processed_probs(row, **controls)
    for depth in range(length - 1):
        out = out * probs[np.arange(len(contexts)), depth, contexts[:, depth]]
    return (out[:, None] * probs[:, -1]).reshape([vocab] * length)
