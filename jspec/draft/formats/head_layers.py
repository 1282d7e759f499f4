"""Reads the layers of EAGLE heads from config.json and from the names of the tensors.

The layers of a head are those of a dense model family (`jspec.models.families`), whatever the target's family is. Some
exporters write the target's `model_type` for a head of Llama layers. Therefore the tensors decide on biases and norms
that follow from `model_type` alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from convert.detect import bare_name
from convert.fields import Fields
from jspec.models.config.hf_config import read_layer_types
from jspec.models.families.llama import Llama
from jspec.models.families.phi import Phi3
from jspec.models.families.qwen import Qwen, Qwen2, Qwen3
from jspec.models.mixers.gqa import GQA
from jspec.models.parts.checks import unsupported
from jspec.models.weights.weight_map import LAYER, Names


class LlamaLayers(Qwen):
    """Llama's layers in a head, which may have windows: by `layer_types`, or else by the keys of Qwen."""

    rotates_parts = True

    def layer_types(self, fields: Fields) -> list[str]:
        return read_layer_types(fields, []) if fields.get("layer_types") is not None else super().layer_types(fields)


FAMILIES: Mapping[str, Llama] = {
    "llama": LlamaLayers(),
    "phi3": Phi3(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
}
OTHER_LAYERS = {  # patterns of tensor names that occur in unsupported layers only
    r".*\.self_attn\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj)\..*": "multi-head latent attention (MLA)",
    r".*\.(mlp|feed_forward|block_sparse_moe)\.(experts|router|gate)\..*": "a mixture of experts (MoE)",
}
FUSED = {  # names of fused tensors, by parameter
    "qkv": "self_attn.qkv_proj.weight",
    "qkv_bias": "self_attn.qkv_proj.bias",
    "gate_up": "mlp.gate_up_proj.weight",
}
LAYER_TENSORS: Names = {  # names of the tensors of a head's layer, by parameter
    **LAYER,
    "input_norm": ("input_layernorm.weight",),
    "hidden_norm": ("hidden_norm.weight",),
}
MIDLAYER = re.compile(r"midlayer\.([0-9]{1,6})\.(.*)")
LATER = re.compile(r"layers\.([0-9]{1,6})\..*")


def read_layers(fields: Fields, names: Collection[str], *, theta: float | None, is_exact: bool) -> dict[str, Any]:
    """Read the layers and sizes of a head.

    Args:
        fields: part of the config.json that describes the layers; `num_hidden_layers` is the head's.
        names: names of the tensors in the file, without the prefix `model.`.
        theta: rotary base; None: as in config.json.
        is_exact: whether `model_type` is that of the head's layers, with the biases and norms of this family. False:
            it may be the target's, and the tensors decide on biases and norms that no other key gives.

    Returns:
        The fields of `DecoderConfig`.

    Raises:
        CheckpointError: keys are missing, or a value is impossible or of another type.
        NotImplementedError: the layers are of an unsupported kind; the message names what is supported.
    """
    kind = fields.text("model_type", "llama")
    if kind not in FAMILIES:
        raise unsupported("model_type", kind, " or ".join(map(repr, FAMILIES)) + " for the layers of a head")
    read = FAMILIES[kind].decoder(fields, rope_theta=theta)
    is_given = fields.flag("attention_bias") or fields.flag("qkv_bias")
    has_bias = is_given or is_exact or _has(names, "self_attn.q_proj.bias", FUSED["qkv_bias"])
    has_norm = is_exact or _has(names, "self_attn.q_norm.weight")

    def stored(attention: GQA) -> GQA:
        bias = fields.flag("qkv_bias") or (attention.bias and has_bias)
        return replace(attention, bias=bias, qk_norm=attention.qk_norm if has_norm else None)

    layers = tuple(replace(layer, mixer=stored(layer.attention)) for layer in read["layers"])
    return {**read, "layers": layers}


def with_count(fields: Fields, names: Collection[str]) -> Fields:
    """Return a head's config with the number of layers in the file, for exporters that write the target's number.

    Args:
        fields: part of the config.json that describes the layers.
        names: names of the tensors in the file, without the prefix `model.`. After the first layer, `midlayer` or
            `layers.0`, a file may have `layers.1` and so on.
    """
    later = [int(match[1]) for match in map(LATER.fullmatch, names) if match]
    count = max([1, *(index + 1 for index in later)])
    count = min(count, fields.integer("num_hidden_layers", count))
    types = fields.texts("layer_types")[:count] or None
    return Fields({**fields, "num_hidden_layers": count, "layer_types": types}, fields.place)


def common_name(name: str) -> str:
    """Return the name that most exporters give a head's tensor.

    ModelOpt numbers the layers of a deep head `midlayer.0`, `midlayer.1`, and calls the norm before a later layer
    `hidden_norm`.
    """
    if (match := MIDLAYER.fullmatch(name := bare_name(name))) is None:
        return name
    rest = "input_layernorm.weight" if match[1] != "0" and match[2] == "hidden_norm.weight" else match[2]
    return f"layers.{match[1]}.{rest}"


def check_tensors(names: Collection[str]) -> None:
    """Raise NotImplementedError if a head's tensors belong to unsupported layers; the message names the kind."""
    for name in names:
        for pattern, kind in OTHER_LAYERS.items():
            if re.fullmatch(pattern, name):
                raise unsupported(
                    name, kind, "grouped-query attention and a dense feed-forward in the layers of a head"
                )


def tensor_names(names: Collection[str]) -> Names:
    """Return the tensor names of a head's layers, whose q, k, v and whose gate and up projections may be fused."""
    return {**LAYER_TENSORS} | {name: (tensor,) for name, tensor in FUSED.items() if _has(names, tensor)}


def _has(names: Collection[str], *tensors: str) -> bool:
    return any(name.endswith(tensors) for name in names)
