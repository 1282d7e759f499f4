"""The forward pass of DFlash and DSpark heads in numpy float64, from a config.json and tensors as in the files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.reference.head import ACTIVATIONS, Tensors, norm, rotated


def block_logits(
    config: Mapping[str, Any],
    tensors: Tensors,
    embed: np.ndarray,
    features: np.ndarray,
    root: int,
    depth: int,
    *,
    output: np.ndarray,
    causal: bool | None = None,
) -> np.ndarray:
    """Compute the logits of the tokens at depths 1 to ``depth`` after a root [depth, vocab].

    Args:
        config: config.json of the head.
        tensors: tensors of the file.
        embed: the target's embedding [vocab, hidden].
        features: target states at each token before the root, concatenated [tokens, states * hidden].
        output: output head [vocab, hidden].
        causal: whether a token of the block attends to no later token; None: only in layers with a window.
    """
    states = block_states(config, tensors, embed, features, root, depth + 1, causal=causal)
    return norm(states, np.asarray(tensors["norm.weight"], np.float64), config["rms_norm_eps"])[1:] @ output.T


def block_states(
    config: Mapping[str, Any],
    tensors: Tensors,
    embed: np.ndarray,
    features: np.ndarray,
    root: int,
    size: int,
    *,
    causal: bool | None = None,
) -> np.ndarray:
    """Compute the states of a block of ``size`` tokens before the final norm [size, hidden]; other arguments above."""
    t, eps = {name: np.asarray(value, np.float64) for name, value in tensors.items()}, config["rms_norm_eps"]
    mask = {**config, **config.get("dflash_config", {})}["mask_token_id"]
    context = norm(features @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    x = embed[[root] + [mask] * (size - 1)].astype(np.float64)
    for index in range(config["num_hidden_layers"]):
        w = {name.split(".", 2)[2]: value for name, value in t.items() if name.startswith(f"layers.{index}.")}
        is_sliding = (config.get("layer_types") or {index: ""})[index] == "sliding_attention"
        window = config["sliding_window"] if is_sliding else len(context) + size
        hidden, finish = convolved(w, "attention_conv", norm(x, w["input_layernorm.weight"], eps))
        x = x + finish(attention(config, w, context, hidden, window, is_sliding if causal is None else causal))
        y, finish = convolved(w, "mlp_conv", norm(x, w["post_attention_layernorm.weight"], eps))
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + finish((ACTIVATIONS["silu"](gate) * up) @ w["mlp.down_proj.weight"].T)
    return x


def convolved(w: Tensors, name: str, x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return the convolved input of a sublayer of DFlash2, and the convolution of its output; without: unchanged."""
    if f"{name}.base_kernel" not in w:
        return x, lambda y: y
    base = w[f"{name}.base_kernel"]  # [2, taps, hidden]
    added = (x @ w[f"{name}.kernel_projection.weight"].T).reshape(len(x), *base.shape[:2], -1)
    width = x.shape[1] // added.shape[-1]

    def run(y: np.ndarray, side: int) -> np.ndarray:
        out = np.zeros_like(y)
        for place in range(len(y)):
            for tap in range(min(place + 1, base.shape[1])):
                kernel = base[side, tap] + np.repeat(added[place, side, tap], width)
                out[place] += kernel * y[place - tap]
        return out

    return run(x, 0), lambda y: run(y, 1)


def attention(
    config: Mapping[str, Any], w: Tensors, context: np.ndarray, block: np.ndarray, window: int, causal: bool
) -> np.ndarray:
    """Let each token of a block [size, hidden] attend to the context [tokens, hidden] and to the whole block.

    A token at position p attends to no token before position p - window + 1.
    """
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps, both = config["rms_norm_eps"], np.concatenate([context, block])
    # Queries of the context are not used; they give the block's queries their positions.
    projected = (both @ w[f"self_attn.{n}_proj.weight"].T + w.get(f"self_attn.{n}_proj.bias", 0.0) for n in "qkv")
    q, k, v = (part.reshape(len(both), -1, dim).transpose(1, 0, 2) for part in projected)
    q, k = (norm(part, w[f"self_attn.{n}_norm.weight"], eps) for part, n in ((q, "q"), (k, "k")))
    q, k = rotated(q, config)[:, len(context) :], rotated(k, config)
    seen = np.triu(np.ones((len(block), len(both)), bool), len(context) - window + 1)
    if causal:
        seen = np.tril(seen, len(context))
    out = np.empty_like(q)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = np.where(seen, q[head] @ k[shared].T / math.sqrt(dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[head] = weights / weights.sum(-1, keepdims=True) @ v[shared]
    return out.transpose(1, 0, 2).reshape(len(block), -1) @ w["self_attn.o_proj.weight"].T + w.get(
        "self_attn.o_proj.bias", 0.0
    )
