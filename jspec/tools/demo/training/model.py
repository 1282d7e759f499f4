"""The embedded target as a function to differentiate: a Llama (arXiv:2302.13971) with tied embedding, in plain JAX."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from safetensors.flax import load_file, save_file

EPS = 1e-5
THETA = 10000.0
WEIGHTS, FINAL_NORM = "model.safetensors", "model.norm.weight"
Weights = dict[str, Array]
Attention = Literal["xla", "cudnn"]  # implementations of `jax.nn.dot_product_attention`

# The linear weights of a layer by name, as in files of transformers; here all layers are one array [layers, out, in].
LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")

FIELDS = {  # name in config.json of each size
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of the target."""

    vocab: int = 2048
    layers: int = 7
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384
    context: int = 1024

    def linear(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each linear weight of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, ffn = self.hidden, self.ffn
        sizes = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (ffn, hidden), (hidden, ffn))
        return dict(zip(LINEAR, sizes, strict=True))

    def config(self) -> dict[str, object]:
        """Return the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{name: getattr(self, field) for field, name in FIELDS.items()},
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
        }


def initial(shape: Shape, key: Array) -> Weights:
    """Return random weights in float32: normal 0.02, smaller where a layer adds to the residual stream; norms 1."""
    keys = jax.random.split(key, len(LINEAR) + 1)
    weights = {"embed_tokens": 0.02 * jax.random.normal(keys[0], (shape.vocab, shape.hidden))}
    for own, (name, size) in zip(keys[1:], shape.linear().items(), strict=True):
        scale = 0.02 / math.sqrt(2 * shape.layers) if name.endswith(("o_proj", "down_proj")) else 0.02
        weights[name] = scale * jax.random.normal(own, (shape.layers, *size))
    weights |= {name: jnp.ones((shape.layers, shape.hidden)) for name in NORMS}
    return weights | {"norm": jnp.ones(shape.hidden)}


def logits(
    weights: Weights, tokens: Int[Array, "rows size"], shape: Shape, attention: Attention = "xla"
) -> Float[Array, "rows size vocab"]:
    """Return the logits behind each token in float32; the dtype of the weights is that of the products.

    Args:
        weights: the weights, as `initial` returns them.
        tokens: token ids.
        shape: sizes of the model.
        attention: implementation of the attention.
    """
    positions = jnp.arange(tokens.shape[1])
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=attention)

    def step(x: Array, own: Weights) -> tuple[Array, None]:
        return layer(x, own, positions, attend, shape), None

    layers = {name: weights[name] for name in (*LINEAR, *NORMS)}
    x, _ = jax.lax.scan(step, weights["embed_tokens"][tokens], layers)
    return output(x, weights)


def layer(
    x: Float[Array, "rows size hidden"],
    own: Weights,
    positions: Int[Array, "size"],
    attend: Callable[[Array, Array, Array], Array],
    shape: Shape,
) -> Float[Array, "rows size hidden"]:
    """Return the output of a layer.

    Args:
        x: the layer's input.
        own: weights of the layer.
        positions: positions of the tokens of each row.
        attend: function of queries, keys and values [rows, size, heads, head_dim] of these tokens that returns the
            attention of all heads, of the queries' shape.
        shape: sizes of the model.
    """
    angles = positions[:, None] * THETA ** (-jnp.arange(0, shape.head_dim, 2) / shape.head_dim)
    normed = norm(x, own[NORMS[0]])
    q, k, v = ((normed @ own[f"self_attn.{name}_proj"].T).reshape(*x.shape[:2], -1, shape.head_dim) for name in "qkv")
    mixed = attend(rotated(q, angles), rotated(k, angles), v)
    x += mixed.reshape(*x.shape[:2], -1) @ own["self_attn.o_proj"].T
    normed = norm(x, own[NORMS[1]])
    gated = jax.nn.silu(normed @ own["mlp.gate_proj"].T) * (normed @ own["mlp.up_proj"].T)
    return x + gated @ own["mlp.down_proj"].T


def output(x: Float[Array, "*rows hidden"], weights: Weights) -> Float[Array, "*rows vocab"]:
    """Return the logits of the last layer's outputs, in float32."""
    normed = norm(x, weights["norm"])
    return jnp.matmul(normed, weights["embed_tokens"].T, preferred_element_type=jnp.float32)


def losses(
    weights: Weights, tokens: Int[Array, "rows longer"], shape: Shape, attention: Attention = "xla"
) -> Float[Array, "rows size"]:
    """Return minus the log-probability of each token but the first, in nats."""
    scores = logits(weights, tokens[:, :-1], shape, attention)
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - chosen


def write(weights: Weights, shape: Shape, folder: Path) -> None:
    """Write weights in bfloat16, config.json and generation_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: Weights = {}
    for name, value in weights.items():
        rounded = jnp.asarray(value, jnp.bfloat16)
        if name in (*LINEAR, *NORMS):
            stored |= {f"model.layers.{layer}.{name}.weight": rounded[layer] for layer in range(shape.layers)}
        else:
            stored[f"model.{name}.weight"] = rounded
    save_file(stored, str(folder / WEIGHTS), metadata={"format": "pt"})
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    for name, fields in (("config.json", shape.config() | ends), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n")


def read(folder: Path, shape: Shape) -> Weights:
    """Return the weights that `write` wrote, in float32."""
    stored = {name: value.astype(jnp.float32) for name, value in load_file(str(folder / WEIGHTS)).items()}
    weights = {name: stored[f"model.{name}.weight"] for name in ("embed_tokens", "norm")}
    for name in (*LINEAR, *NORMS):
        weights[name] = jnp.stack([stored[f"model.layers.{layer}.{name}.weight"] for layer in range(shape.layers)])
    return weights


def shape_of(folder: Path) -> Shape:
    """Return the sizes of a target that `write` wrote."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(**{field: config[name] for field, name in FIELDS.items()})


def sharpen(folder: Path, out: Path, factor: float) -> None:
    """Write a target whose logits are ``factor`` times as large: at temperature 1 it writes as the other at 1 / factor.

    The factor is one of the weight of the final norm. The most probable tokens are the same.

    Args:
        folder: folder of a target.
        out: folder to write.
        factor: the factor.
    """
    shutil.copytree(folder, out, dirs_exist_ok=True)
    stored = load_file(str(folder / WEIGHTS))
    norm = stored[FINAL_NORM]
    stored[FINAL_NORM] = (factor * norm.astype(jnp.float32)).astype(norm.dtype)
    save_file(stored, str(out / WEIGHTS), metadata={"format": "pt"})


def norm(x: Float[Array, "*rows hidden"], weight: Float[Array, "hidden"]) -> Float[Array, "*rows hidden"]:
    """Return the RMS norm (arXiv:1910.07467) of the rows."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return scaled.astype(x.dtype) * weight


def rotated(
    x: Float[Array, "rows size heads channels"], angles: Float[Array, "size half"]
) -> Float[Array, "rows size heads channels"]:
    """Return rotary position embeddings (arXiv:2104.09864) of the pairs of channels (i, i + half)."""
    cos, sin = (of(angles)[:, None] for of in (jnp.cos, jnp.sin))
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
