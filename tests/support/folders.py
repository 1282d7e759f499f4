"""Hugging Face folders with small random weights, and the parameters that must be loaded from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jspec.draft import auto
from jspec.draft.head_config import Overrides

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
    "num_hidden_layers": 40,  # the target's value, as in an official head
    "draft_vocab_size": 10,
}
EAGLE: dict[str, Any] = {**TARGET, "num_hidden_layers": 1}
DRAFT_IDS = np.array([3, 4, 5, 9, 11, 12, 20, 30, 38, 39])


def target_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return tensor names and shapes of an untied Llama, as the file format defines them."""
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


def eagle_tensors(config: Mapping[str, Any] = EAGLE) -> dict[str, np.ndarray]:
    """Return the tensors of an EAGLE-1 head as its authors save it, without an embedding."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if config.get("bias", True):
        shapes["fc.bias"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        shapes |= block_shapes(f"layers.{layer}", config, hidden)
        if layer > 0:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
    return random_tensors(shapes)


def medusa_tensors(heads: int = 3, layers: int = 1) -> dict[str, np.ndarray]:
    hidden, shapes = TARGET["hidden_size"], {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        shapes[f"{head}.{layers}.weight"] = (TARGET["vocab_size"], hidden)
    return random_tensors(shapes)


def head_tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return the tensors of an EAGLE-3 head as its authors save it, without an embedding."""
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


def without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the tensors or config fields without the named ones."""
    return {name: value for name, value in values.items() if name not in names}


def vocabulary(ids: np.ndarray) -> dict[str, np.ndarray]:
    member = np.isin(np.arange(HEAD["vocab_size"]), ids)
    return {"d2t": ids - np.arange(len(ids)), "t2d": member}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> Path:
    """Write config.json and safetensors, with an index if there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])  # neighbours, such as q and k, go to different shards
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


# ---- the tensors in a folder, and the parameters that reading must give

BLOCK = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def loaded(folder: Path, dtype: str | None = None, **overrides: Any) -> dict[str, np.ndarray]:
    """Return all parameters of a folder as jspec reads them."""
    plan = auto.plan(folder, Overrides(**overrides))
    arrays: dict[str, np.ndarray] = {}
    for batch in plan.batches(plan.dtype(dtype)):
        arrays |= batch
    return arrays


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder, read by the library that wrote them."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for file in (*folder.glob("*.bin"), *folder.glob("*.pt")):
        torch = pytest.importorskip("torch", reason=f"the file is {file.name}")
        tensors |= {name: tensor.numpy() for name, tensor in torch.load(file, weights_only=True).items()}
    return tensors


def block(tensors: Mapping[str, np.ndarray], to: str, source: str) -> dict[str, np.ndarray]:
    """Return a layer's attention and feed-forward parameters: rows of q, k, v in this order, gate before up rows."""
    return {
        f"{to}.{name}": np.concatenate([tensors[f"{source}.{part}.weight"] for part in parts])
        for name, parts in BLOCK.items()
    }


def expected_target(tensors: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """Return the parameters of a target without embedding and output head."""
    tree = {"norm": tensors["model.norm.weight"]}
    for i in range(layers):
        tree[f"layers.{i}.attn_norm"] = tensors[f"model.layers.{i}.input_layernorm.weight"]
        tree |= block(tensors, f"layers.{i}", f"model.layers.{i}")
    return tree


def expected_head(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of an EAGLE-3 head from tensors in its authors' names, without an embedding."""
    return {
        "fc": tensors["fc.weight"],
        "layers.0.input_norm": tensors["midlayer.input_layernorm.weight"],
        "layers.0.hidden_norm": tensors["midlayer.hidden_norm.weight"],
        **block(tensors, "layers.0", "midlayer"),
        "norm": tensors["norm.weight"],
        "head": tensors["lm_head.weight"],
        "draft_to_target": (np.arange(len(tensors["d2t"])) + tensors["d2t"]).astype(np.int32),
    }


def assert_same(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that two dictionaries have equal names with arrays of equal bits."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes(), name


def with_keys_that_no_layer_reads(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the recorded Gemma 4 E2B with tensors of keys and values in layers that share them, as published files."""
    found, rng = dict(tensors), np.random.default_rng(0)
    for index, dim in ((3, 16), (4, 16), (5, 32)):
        layer = f"model.layers.{index}.self_attn"
        found[f"{layer}.k_norm.weight"] = np.full(dim, 7, np.float32)
        found |= {f"{layer}.{part}_proj.weight": rng.normal(size=(dim, 32)).astype(np.float32) for part in "kv"}
    return found


def experts_one_by_one(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a Llama 4's tensors with the weights of each expert for itself, as exporters of quantised weights do."""
    found = {name: values for name, values in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - found.keys():
        parts = ["down_proj"] if "down" in name else ["gate_proj", "up_proj"]
        for index, expert in enumerate(tensors[name]):
            for part, values in zip(parts, np.split(expert.T, len(parts)), strict=True):
                found[f"{name.rpartition('.')[0]}.{index}.{part}.weight"] = np.ascontiguousarray(values)
    return found
