"""The Markov head and the confidence head of DSpark heads in numpy float64, from tensors as the files have them."""

from __future__ import annotations

import numpy as np

from tests.reference.head import Tensors


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def corrected(
    tensors: Tensors, base: np.ndarray, states: np.ndarray, before: np.ndarray, *, kind: str = "vanilla"
) -> np.ndarray:
    """Return the corrected logits along one path [depth, vocab].

    Args:
        tensors: tensors of the file.
        base: logits of the block at depths 1, 2, ... [depth, vocab].
        states: normed states at these depths [depth, hidden].
        before: token before each depth; the root is the first.
        kind: kind of the Markov head, "vanilla", "gated" or "rnn".
    """
    w = {name.split(".", 1)[1]: np.asarray(t, np.float64) for name, t in tensors.items() if name.startswith("markov")}
    embedded, out = w["markov_w1.weight"][before], []
    state = np.zeros(embedded.shape[1])
    for e, h, logits in zip(embedded, states, base, strict=True):
        latent = e
        if kind == "gated":
            latent = sigmoid(w["gate_proj.weight"] @ np.concatenate([h, e]) + w["gate_proj.bias"]) * e
        if kind == "rnn":
            joint = w["joint_proj.weight"] @ np.concatenate([state, e, h]) + w["joint_proj.bias"]
            gate, new, latent = sigmoid(joint[: len(e)]), np.tanh(joint[len(e) : -len(e)]), np.tanh(joint[-len(e) :])
            state = gate * state + (1 - gate) * new
        out.append(logits + w["markov_w2.weight"] @ latent)
    return np.array(out)


def confidences(
    tensors: Tensors, states: np.ndarray, before: np.ndarray, *, with_markov: bool = True, temperature: float = 1.0
) -> np.ndarray:
    """Return the confidence at each depth of a path [depth]; the arguments are those of `corrected`."""
    inputs = states
    if with_markov:
        inputs = np.concatenate([states, np.asarray(tensors["markov_head.markov_w1.weight"])[before]], axis=1)
    weight, bias = (np.asarray(tensors[f"confidence_head.proj.{name}"], np.float64) for name in ("weight", "bias"))
    return sigmoid((inputs @ weight[0] + bias[0]) / temperature)
