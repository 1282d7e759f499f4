"""Writes heads in their authors' formats; the inverse of the readers in `jspec.draft`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from convert.fields import read_json
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.formats.dflash_format import head_params as block_params
from jspec.draft.formats.head_layers import LAYER_TENSORS
from jspec.draft.formats.head_weights import TENSORS
from jspec.draft.head_config import DSparkConfig, Eagle3Config, HeadConfig
from jspec.draft.medusa import MedusaHeads
from jspec.draft.medusa import head_weights as medusa_weights
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.mlps.mlp_config import Dense
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params
from jspec.models.weights.weight_map import layer_tensors
from jspec.train.files import write_text

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys that a head's config.json takes from the target's
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def special_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of special tokens that the config.json of a target's folder gives."""
    file = folder / CONFIG
    fields = read_json(file) if file.is_file() else {}
    return {name: fields[name] for name in TOKENS if fields.get(name) is not None}


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], weights: str = WEIGHTS
) -> None:
    """Write config.json and the weights; a folder that has both already keeps the old weights until the new are whole.

    Args:
        folder: folder to write into.
        config: values of config.json.
        tensors: tensors by name.
        weights: name of the file of the weights.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".{weights}.new"
    try:
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, work, metadata={"format": "pt"})
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        os.replace(work, folder / weights)
    except SafetensorError as error:
        raise OSError(f"{folder}: the head could not be written ({error}); is the disk full?") from error
    finally:
        work.unlink(missing_ok=True)


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
    return fields, tensors | vocabulary(ids, config.vocab_size)


def _layer_fields(config: HeadConfig, dtype: str, length: int, family: str = "llama") -> dict[str, Any]:
    """Return the part of config.json that describes the layers, which must be plain ones of a family."""
    layer = config.layers[0]
    attention, mlp, rope = layer.gqa, layer.mlp, layer.gqa.rope
    named = {"rope": rope.kind, "qk_norm": attention.qk_norm, "window": attention.window, "sinks": attention.sinks}
    plain = {"rope": "default", "qk_norm": "head" if family == "qwen3" else None, "window": None, "sinks": False}
    for name, value in named.items():
        if value != plain[name]:
            raise unsupported(f"a head's {name}", value, f"{plain[name]} in the format of the method's authors")
    if rope.fraction != 1 or not isinstance(mlp, Dense) or mlp.activation not in ACTIVATIONS:
        raise unsupported(
            "a head's layer", f"{rope}, {mlp}", f"layers of {family} in the format of the method's authors"
        )
    return {
        "model_type": family,
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


def block_files(
    head: DFlashHead, target: ModelConfig, dtype: str, length: int, tokens: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json and the tensors of a DFlash or DSpark head as their authors write them.

    Args:
        head: the head.
        target, dtype, length, tokens: as for `eagle3_files`.

    Raises:
        NotImplementedError: the format has no words for an option of the head.
    """
    config = head.config
    fields = {
        "architectures": ["DSparkDraftModel" if isinstance(config, DSparkConfig) else "DFlashDraftModel"],
        **_layer_fields(config, dtype, length, family="qwen3"),
        **tokens,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": target.num_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [_layer_of(state, target.num_layers) for state in config.feature_layers or ()],
            "sample_from_anchor": config.sample_from_anchor,
        },
    }
    if isinstance(config, DSparkConfig):
        names = ("markov_rank", "markov_head_type", "confidence_head_with_markov")
        fields |= {name: getattr(config, name) for name in names}
        fields["enable_confidence_head"] = config.confidence_head
    owned = {"has_embed": head.embed, "has_head": head.head, "has_map": head.draft_to_target}
    params = block_params(config, **{name: value is not None for name, value in owned.items()})
    tensors = named_tensors(head, params, dtype)
    if head.draft_to_target is not None:
        tensors |= vocabulary(np.asarray(head.draft_to_target), config.vocab_size)
    return fields, tensors


def _layer_of(state: int, layers: int) -> int:
    """Return the layer of the target whose output is a state; the last layer's is taken after the final norm."""
    if not 1 <= state < layers and state != layers + 1:
        raise unsupported(
            "feature_layers", state, f"1 to {layers - 1} or {layers + 1} in the format of DFlash's authors"
        )
    return min(state, layers) - 1


def medusa_files(heads: MedusaHeads, dtype: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json and the tensors of Medusa heads as their authors write them."""
    config = heads.config
    fields = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "version": "2"}
    tensors = {
        tensor: np.asarray(jax.device_get(_get(heads, row.parameter))).astype(dtype)
        for row in medusa_weights(config)
        for tensor in row.sources
    }
    return {**fields, "torch_dtype": dtype}, tensors


def vocabulary(ids: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """Return the tensors of a draft vocabulary: offsets of the target ids, and which target ids it has."""
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}


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
