"""The forward pass of EAGLE heads in numpy float64, from a config.json and tensors as the files have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def eagle3(config: Mapping[str, Any], tensors: Tensors, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Compute an EAGLE-3 head's logits after each token of a text [tokens, draft_vocab].

    Args:
        config: the part of config.json that describes the layers.
        tensors: tensors of the file, with the first layer as "layers.0".
        embedded: embedding of each token [tokens, hidden].
        features: target states before each token, concatenated [tokens, states * target_hidden].
    """
    t, eps = {name: np.asarray(value, np.float64) for name, value in tensors.items()}, config["rms_norm_eps"]
    first = "layers.0."
    if "fc_norm.0.weight" in t:
        states = np.split(features, sum(name.startswith("fc_norm.") for name in t), axis=-1)
        features = np.concatenate([norm(s, t[f"fc_norm.{i}.weight"], eps) for i, s in enumerate(states)], axis=-1)
    x = features @ t["fc.weight"].T
    names = ("input_layernorm", "hidden_norm")
    embed_norm, hidden_norm = (t[f"{first}{name}.weight"] for name in names)
    inputs = np.concatenate([norm(embedded, embed_norm, eps), norm(x, hidden_norm, eps)], axis=-1)
    x = layers(config, t, norm(x, hidden_norm, eps) if config.get("norm_before_residual") else x, inputs)
    return norm(x, t["norm.weight"], eps) @ t["lm_head.weight"].T


def peagle(
    config: Mapping[str, Any], tensors: Tensors, tokens: Sequence[int], features: np.ndarray, depth: int, mask: int
) -> np.ndarray:
    """Compute a P-EAGLE head's logits of the tokens at depths 1 to ``depth`` after a root [depth, draft_vocab].

    Args:
        config, tensors: as for `eagle3`; the file has an embedding.
        tokens: tokens of the text after the first, the last of which is the root.
        features: target states before each of them, concatenated [tokens, states * target_hidden].
        mask: id of the mask token.
    """
    embedded = np.asarray(tensors["embed_tokens.weight"], np.float64)[[*tokens, *[mask] * (depth - 1)]]
    unknown = np.tile(np.asarray(tensors["mask_hidden"], np.float64).reshape(1, -1), (depth - 1, 1))
    return eagle3(config, tensors, embedded, np.concatenate([features, unknown]))[-depth:]


def eagle1(config: Mapping[str, Any], tensors: Tensors, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Compute an EAGLE-1 head's output after each token of a text [tokens, hidden]; arguments as those of `eagle3`."""
    t = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = np.concatenate([embedded, features], axis=-1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
    return layers(config, t, x, x)


def layers(config: Mapping[str, Any], t: Tensors, x: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Run all layers on the residual stream [tokens, hidden]; layer 0 reads ``inputs``, which are normed already."""
    count, eps = 1 + max(int(name.split(".")[1]) for name in t if name.startswith("layers.")), config["rms_norm_eps"]
    for index in range(count):
        w = {name.split(".", 2)[2]: value for name, value in t.items() if name.startswith(f"layers.{index}.")}
        if index > 0:
            inputs = norm(x, w["input_layernorm.weight"], eps)
        x = x + attention(config, w, inputs, index)
        y = norm(x, w["post_attention_layernorm.weight"], eps)
        if "mlp.gate_up_proj.weight" in w:
            gate, up = np.split(y @ w["mlp.gate_up_proj.weight"].T, 2, axis=-1)
        else:
            gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (ACTIVATIONS[config.get("hidden_act", "silu")](gate) * up) @ w["mlp.down_proj.weight"].T
    return x


def attention(config: Mapping[str, Any], w: Tensors, x: np.ndarray, index: int) -> np.ndarray:
    """Compute a layer's causal attention, with its output projection, over a text [tokens, hidden]."""
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    if "self_attn.qkv_proj.weight" in w:
        bounds = [heads * dim, (heads + kv_heads) * dim]
        q, k, v = np.split(x @ w["self_attn.qkv_proj.weight"].T, bounds, axis=-1)
    else:
        q, k, v = (x @ w[f"self_attn.{n}_proj.weight"].T + w.get(f"self_attn.{n}_proj.bias", 0.0) for n in "qkv")
    q, k, v = (part.reshape(len(x), -1, dim).transpose(1, 0, 2) for part in (q, k, v))
    if "self_attn.q_norm.weight" in w:
        q, k = (norm(part, w[f"self_attn.{n}_norm.weight"], eps) for part, n in ((q, "q"), (k, "k")))
    q, k = rotated(q, config), rotated(k, config)
    seen = np.tril(np.ones((len(x), len(x)), bool))
    if (config.get("layer_types") or [""] * (index + 1))[index] == "sliding_attention":
        seen &= ~np.tril(np.ones_like(seen), -config["sliding_window"])
    out = np.empty_like(q)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = np.where(seen, q[head] @ k[shared].T / math.sqrt(dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[head] = weights / weights.sum(-1, keepdims=True) @ v[shared]
    joined = out.transpose(1, 0, 2).reshape(len(x), -1)
    return joined @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0.0)


def rotated(x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rotate heads [heads, tokens, head_dim]: channel i of the first r with channel i + r / 2."""
    size = int(x.shape[-1] * config.get("partial_rotary_factor", 1.0))
    speeds, factor = rope(config, size)
    angle = np.arange(x.shape[-2])[:, None] * speeds
    pairs = (x[..., : size // 2] + 1j * x[..., size // 2 : size]) * np.exp(1j * angle) * factor
    return np.concatenate([pairs.real, pairs.imag, x[..., size:]], axis=-1)


def rope(config: Mapping[str, Any], size: int) -> tuple[np.ndarray, float]:
    """Return the angle per position of each pair of ``size`` channels, and the factor of cosines and sines."""
    theta, scaling = config.get("rope_theta", 1e4), config.get("rope_scaling") or {}
    speeds = theta ** (-np.arange(size // 2) / (size // 2))
    match scaling.get("rope_type"):
        case "linear":
            return speeds / scaling["factor"], 1.0
        case "longrope":
            original = config["original_max_position_embeddings"]
            return speeds / np.array(scaling["long_factor"]), math.sqrt(
                1 + math.log(scaling["factor"]) / math.log(original)
            )
        case "yarn":
            # Frequencies of `beta` rotations in the original context bound the interpolated pairs, whole pairs out.
            turns = scaling["original_max_position_embeddings"] / (2 * math.pi)
            low, high = ((size / 2) * math.log(turns / beta) / math.log(theta) for beta in (32, 1))
            low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
            slow = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
            return speeds * (1 - slow) + speeds / scaling["factor"] * slow, 0.1 * math.log(scaling["factor"]) + 1
    return speeds, 1.0


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
