"""Targets from the models of Tunix (google-tunix 0.1.7): the config, and weights by the names of Hugging Face.

Tunix keeps the kernel of a linear layer as [in..., out...], and a checkpoint as [out, in]. So a kernel whose first axis
is the input is reshaped to [in, out] and transposed; that of the attention's output has its input in the first axes.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from convert.fields import Fields
from jspec.core.shorten import short
from jspec.models import families
from jspec.models.config.decoder_config import ModelConfig

FIXED_THETA = 1_000_000  # rotary base that Tunix' Llama 3 and Qwen 3 use, whatever their config says
MODEL_TYPES = {"Llama3": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}  # by the name of Tunix' class
LAYER = {
    "input_layernorm.w": "input_layernorm.weight",
    "post_attention_layernorm.w": "post_attention_layernorm.weight",
    "attn.q_norm.w": "self_attn.q_norm.weight",
    "attn.k_norm.w": "self_attn.k_norm.weight",
    **{f"attn.{name}_proj.w": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"attn.{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    **{f"mlp.{name}_proj.kernel": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
OTHERS = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
}


def config_of(model: Any) -> ModelConfig:
    """Return the config of a Tunix model (`nnx.Module`) as the config of a target.

    Raises:
        ValueError: the model is of another kind, or computes something else than its config says.
    """
    kind, sizes = type(model).__name__, getattr(model, "config", None)
    if kind not in MODEL_TYPES or sizes is None:
        raise ValueError(
            f"rollout_actor: expected a Tunix model of the kinds {', '.join(MODEL_TYPES)}, got {short(model)}; other "
            "kinds need their own reader in jspec/rollouts/tunix_models.py"
        )
    if getattr(sizes, "num_experts", None):
        raise ValueError(f"rollout_actor: expected a dense model, got {sizes.num_experts} experts")
    if kind != "Qwen2" and sizes.rope_theta != FIXED_THETA:
        raise ValueError(
            f"rollout_actor: config.rope_theta: expected {FIXED_THETA}, the rotary base that Tunix' {kind} uses "
            f"whatever its config says, got {sizes.rope_theta}: Tunix would train another model than the checkpoint. A "
            f"model that begins with random weights can have {FIXED_THETA}"
        )
    tied = bool(getattr(sizes, "weight_tying", False) or getattr(sizes, "use_tied_embedding", False))
    fields = {
        "model_type": MODEL_TYPES[kind],
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.embed_dim,
        "intermediate_size": sizes.hidden_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": float(sizes.rope_theta),
        "hidden_act": "silu",
        "max_position_embeddings": 2**20,  # Tunix has no limit
        "tie_word_embeddings": tied,
    }
    return families.read_config(Fields(fields, "Tunix' config"))


def tensors_of(state: Any) -> dict[str, Array]:
    """Return the arrays of a Tunix state by the names of a Hugging Face checkpoint, in the layout of Tunix.

    Args:
        state: `nnx.State`, or a nested mapping of arrays or of variables.

    Raises:
        ValueError: there are arrays that no checkpoint has, such as those of LoRA.
    """
    arrays, unknown = {}, []
    for path, array in _flat(state):
        stored = _stored_name(path)
        if stored is None:
            unknown.append(path)
        else:
            arrays[stored] = array
    if unknown:
        lora = "; add the products of LoRA to the weights first" if any("lora" in path for path in unknown) else ""
        raise ValueError(
            f"update_params: expected the weights of a dense model, got {', '.join(unknown[:3])} too{lora}"
        )
    return arrays


def in_checkpoint(name: str, array: Array) -> Array:
    """Return an array of `tensors_of` in the layout of a checkpoint."""
    if array.ndim < 2 or name == OTHERS["embedder.input_embedding"]:
        return array
    inner = int(np.prod(array.shape[:-1])) if name.endswith("o_proj.weight") else array.shape[0]
    return array.reshape(inner, -1).T


def _flat(state: Any) -> list[tuple[str, Array]]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [(".".join(map(_key, path)).removesuffix(".value"), leaf) for path, leaf in leaves]


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))


def _stored_name(path: str) -> str | None:
    """Return the name that a checkpoint gives to an array of a state; None: it has no such array."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.*)", path)
    if layer is None:
        return OTHERS.get(path)
    return f"model.layers.{layer[1]}.{LAYER[layer[2]]}" if layer[2] in LAYER else None
