"""Hugging Face folders with small random weights, written to disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
HEAD: dict[str, Any] = {
    **TARGET,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 40,  # as in an official head: the target's
    "draft_vocab_size": 10,
}
DRAFT_IDS = np.array([3, 4, 5, 9, 11, 12, 20, 30, 38, 39])


def target_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of an untied Llama, from the file format."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        shapes |= block_shapes(f"model.layers.{layer}", config, hidden)
    return shapes | {"lm_head.weight": (vocab, hidden)}


def block_shapes(prefix: str, config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, width),
        f"{prefix}.self_attn.k_proj.weight": (kv, width),
        f"{prefix}.self_attn.v_proj.weight": (kv, width),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def target_tensors(config: Mapping[str, Any] = TARGET, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return random_tensors(target_shapes(config), dtype)


def head_tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """An EAGLE-3 head as its authors save it, without an embedding."""
    hidden, drafted = HEAD["hidden_size"], HEAD["draft_vocab_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        **block_shapes("midlayer", HEAD, 2 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
    }
    return random_tensors(shapes, dtype) | vocabulary(DRAFT_IDS)


def vocabulary(ids: np.ndarray) -> dict[str, np.ndarray]:
    member = np.isin(np.arange(HEAD["vocab_size"]), ids)
    return {"d2t": ids - np.arange(len(ids)), "t2d": member}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> Path:
    """Writes config.json and safetensors, with an index if there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])  # neighbours, as q and k, fall into different shards
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
