"""Layers of Gemma 4 in a checkpoint: names of tensors, sizes of heads, layers that share keys and values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from convert.fields import Fields
from convert.huggingface import MapRow, selected, unselected
from jspec.models.config.decoder_config import DecoderConfig
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.shared_kv import QueriesOnly, SharedKV
from jspec.models.parts.checks import unsupported
from jspec.models.weights.weight_map import LAYER, Names

Q = TypeVar("Q", bound=QueriesOnly)

NAMES: Names = {
    "output_scale": ("layer_scalar",),
    "embed_gate": ("per_layer_input_gate.weight",),
    "embed_out": ("per_layer_projection.weight",),
    "embed_post_norm": ("post_per_layer_input_norm.weight",),
    "router": ("router.proj.weight",),
    "router_norm": ("router.scale",),
    "router_scale": ("router.per_expert_scale",),
    "experts_norm": ("pre_feedforward_layernorm_2.weight",),
    "experts_post_norm": ("post_feedforward_layernorm_2.weight",),
    "shared_post_norm": ("post_feedforward_layernorm_1.weight",),
    "experts_gate_up": ("experts.gate_up_proj",),
    "experts_down": ("experts.down_proj",),
    "shared_gate_up": LAYER["gate_up"],
    "shared_down": LAYER["down"],
}
# Names of the experts' tensors if each expert has its own, as exporters of quantised weights store them.
ONE_BY_ONE: Names = {
    "experts_gate_up": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
    "experts_down": ("experts.{}.down_proj.weight",),
}
# Tensors of keys and values that files have of layers that share them: by the parameter whose row names them too.
UNREAD = {
    "qkv": ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "q_norm": ("self_attn.k_norm.weight",),
}


def layer_sizes(fields: Fields, count: int) -> dict[int, Fields]:
    """Return the entries of `per_layer_config` (transformers 5) by the index of their layer.

    Names are indices, with zeros before them in files of more than ten layers.

    Args:
        fields: parsed config.json.
        count: number of layers.
    """
    entries = fields.object("per_layer_config")
    sizes = {int(name): entries.object(name) for name in entries if name.isdecimal()}
    if len(sizes) != len(entries) or max(sizes, default=0) >= count:
        raise fields.error("per_layer_config", f"one entry a layer, named by an index below {count}")
    return sizes


def with_sizes(fields: Fields, sizes: Fields, heads: GQA) -> GQA:
    """Return the attention of a layer with the sizes of its heads.

    Args:
        fields: parsed config.json. Full layers have the sizes of `global_head_dim` and `num_global_key_value_heads`;
            in files with `per_layer_config` (transformers 5) a layer has the sizes of its entry there instead.
        sizes: entry of the layer; empty: it has none.
        heads: attention with the sizes of sliding layers.
    """
    if unknown := sorted(sizes.keys() - {"head_dim", "num_key_value_heads"}):
        raise unsupported(sizes.place, unknown, "head_dim and num_key_value_heads")
    is_full, dim, count = heads.window is None, heads.head_dim, heads.kv_heads
    values_are_keys = is_full and fields.flag("attention_k_eq_v")
    if is_full and fields.get("per_layer_config") is None:
        dim = fields.integer("global_head_dim")
        count = fields.integer("num_global_key_value_heads", count) if values_are_keys else count
    dim, count = sizes.integer("head_dim", dim), sizes.integer("num_key_value_heads", count)
    return replace(heads, head_dim=dim, kv_heads=count, values_are_keys=values_are_keys)


def shared(fields: Fields, mixers: Sequence[GQA], types: Sequence[str]) -> list[Mixer]:
    """Return the attention of all layers, of which the last `num_kv_shared_layers` read keys and values of others.

    Each of these reads those of the last layer of its type before them.

    Args:
        fields: parsed config.json.
        mixers, types: attention and type of each layer.
    """
    first = len(mixers) - fields.integer("num_kv_shared_layers", 0, least=0)
    sources = {kind: index for index, kind in enumerate(types[: max(first, 0)])}
    if missing := sorted(set(types) - sources.keys()):
        raise fields.error(
            "num_kv_shared_layers", f"fewer, so that an earlier layer is of type {' and '.join(missing)}"
        )

    later = zip(mixers[first:], types[first:], strict=True)
    others = [queries_only(SharedKV, mixer, source=sources[kind]) for mixer, kind in later]
    return [*mixers[:first], *others]


def queries_only(record: type[Q], mixer: GQA, **source: Any) -> Q:
    """Return the attention of a layer that reads keys and values of another layer, with the sizes of its own.

    Args:
        record: the kind of attention.
        mixer: attention of the layer, as if it had keys and values.
        source: the field of the record that says which layer has them.
    """
    options = {field.name: getattr(mixer, field.name) for field in fields_of(mixer)}
    return record(**{**options, "values_are_keys": False, "v_norm": False}, **source)


def with_unread(row: MapRow, config: DecoderConfig, names: Collection[str]) -> MapRow:
    """Return a row that also names the keys' tensors of a layer that shares keys, if the file has them.

    Published files have such tensors, which no model computes with. The parameter does not change.

    Args:
        row: row of a weight map.
        config: config of the model, or of a head.
        names: names of all tensors in the checkpoint.
    """
    layer, _, name = row.parameter.rpartition(".")
    tensors = [f"model.{layer}.{tensor}" for tensor in UNREAD.get(name, ())]
    unread = [tensor for tensor in tensors if tensor in names]
    mixer = config.layers[int(layer.rpartition(".")[2])].mixer if unread else None
    if not isinstance(mixer, QueriesOnly):
        return row
    stored, index = unselected(row)
    rows, inner = mixer.kv_size if name == "qkv" else mixer.head_dim, stored.shape[1:]
    sources = {**stored.sources, **dict.fromkeys(unread, (rows, *inner))}
    both = replace(stored, sources=sources, shape=(stored.shape[0] + rows * len(unread), *inner))
    return selected(both, np.arange(stored.shape[0]) if index is None else index)
