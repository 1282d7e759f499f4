"""Writes heads in their authors' formats; the inverse of the readers in `jspec.draft`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from convert.fields import read_json
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.head_config import Eagle3Config
from jspec.draft.head_layers import LAYER_TENSORS
from jspec.draft.head_weights import TENSORS
from jspec.models.config import ModelConfig
from jspec.models.layer_config import unsupported
from jspec.models.mlp_config import Dense
from jspec.models.params import Params
from jspec.models.weight_map import layer_tensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys that a head's config.json takes from the target's
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def special_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of special tokens that the config.json of a target's folder gives."""
    file = folder / CONFIG
    fields = read_json(file) if file.is_file() else {}
    return {name: fields[name] for name in TOKENS if fields.get(name) is not None}


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write config.json and the weights; a folder that has both already keeps the old weights until the new are whole.

    Args:
        folder: folder to write into.
        config: values of config.json.
        tensors: tensors by name.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".{WEIGHTS}.new"
    try:
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, work, metadata={"format": "pt"})
        (folder / f".{CONFIG}.new").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(folder / f".{CONFIG}.new", folder / CONFIG)
        os.replace(work, folder / WEIGHTS)
    except Exception as error:
        for name in (WEIGHTS, CONFIG):
            (folder / f".{name}.new").unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"{folder}: the head could not be written ({error}); is the disk full?") from error


def eagle3_files(
    head: EagleHead, target: ModelConfig, dtype: str, length: int, tokens: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json and the tensors of an EAGLE-3 head as its authors write them.

    Args:
        head: the head, with an output head of its own.
        target: config of the target.
        dtype: dtype of the tensors.
        length: length of the training rows in tokens.
        tokens: ids of special tokens, as in config.json.

    Raises:
        NotImplementedError: the format has no words for an option of the head.
    """
    config = head.config
    assert isinstance(config, Eagle3Config)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_fields(config, dtype, length),
        **tokens,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_feature_fields(config.states_of(target.num_layers), config, target.num_layers),
    }
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields |= {name: True for name in flags if getattr(config, name)}
    ids = np.asarray(head.draft_to_target) if head.draft_to_target is not None else np.arange(config.vocab_size)
    params = head_params(config)
    tensors = named_tensors(head, params, dtype)
    tensors |= {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": np.isin(np.arange(config.vocab_size), ids)}
    return fields, tensors


def _layer_fields(config: Eagle3Config, dtype: str, length: int) -> dict[str, Any]:
    """Return the part of config.json that describes the layers, which must be those of Llama."""
    layer = config.layers[0]
    attention, mlp, rope = layer.attention, layer.mlp, layer.attention.rope
    named = {"rope": rope.kind, "qk_norm": attention.qk_norm, "window": attention.window, "sinks": attention.sinks}
    plain = {"rope": "default", "qk_norm": None, "window": None, "sinks": False}
    for name, value in named.items():
        if value != plain[name]:
            raise unsupported(f"a head's {name}", value, f"{plain[name]} in the format of EAGLE-3's authors")
    if rope.fraction != 1 or not isinstance(mlp, Dense) or mlp.activation not in ACTIVATIONS:
        raise unsupported("a head's layer", f"{rope}, {mlp}", "layers of Llama in the format of EAGLE-3's authors")
    return {
        "model_type": "llama",
        "hidden_act": ACTIVATIONS[mlp.activation],
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.width,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": length,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "attention_bias": attention.bias,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _feature_fields(states: Sequence[int], config: Eagle3Config, layers: int) -> dict[str, Any]:
    """Return the keys that tell which states of the target are read.

    In `eagle_config`, ids whose lowest is 1 are those of layers, whose outputs are the next states; other ids are those
    of states. At the top level, all ids are those of states.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if list(states) != sorted(states):
        raise unsupported("feature_layers", tuple(states), "ascending states in the format of EAGLE-3's authors")
    nested: dict[str, Any] = {"use_aux_hidden_state": config.fuse}
    fields: dict[str, Any] = {}
    if config.fuse and states[0] == 2 and states[-1] <= layers:
        nested[name] = [state - 1 for state in states]
    elif config.fuse:
        fields[name] = list(states)
    if config.norm_output:
        nested["return_hidden_post_norm"] = (
            True  # says that the normed output is fed back, which norm_output leaves open
        )
    return {"eagle_config": nested, **fields}


def named_tensors(head: Any, params: Params, dtype: str) -> dict[str, np.ndarray]:
    """Return the tensors of a head by the names of its authors' format, parameters of several parts divided.

    Args:
        head: record of weights.
        params: declarations of the weights to write, by name.
        dtype: dtype of the tensors.
    """
    names = {name: [tensor] for name, tensor in TENSORS.items() if name in params}
    for index in range(head.config.num_layers):
        prefix = f"layers.{index}"
        source = "midlayer" if index == 0 and f"{prefix}.hidden_norm" in params else prefix
        names |= layer_tensors(params, prefix, source, LAYER_TENSORS)
    tensors: dict[str, np.ndarray] = {}
    for name, parts in names.items():
        value = np.asarray(jax.device_get(_get(head, name))).astype(dtype)
        ends = np.cumsum([shape[0] for shape in params[name].part_shapes()])[:-1]
        tensors |= dict(zip(parts, np.split(value, ends) if len(parts) > 1 else [value], strict=True))
    if "fc_norm" in params:
        states = np.asarray(jax.device_get(head.fc_norm)).astype(dtype)
        tensors |= {f"fc_norm.{index}.weight": state for index, state in enumerate(states)}
    return tensors


def _get(head: Any, name: str) -> Any:
    """Return a weight by its name, such as "layers.0.qkv"."""
    value = head
    for part in name.split("."):
        value = value[int(part)] if part.isdigit() else value[part] if isinstance(value, dict) else getattr(value, part)
    return value
