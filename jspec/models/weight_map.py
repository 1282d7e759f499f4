"""Weight maps of decoders in the format of Hugging Face: from which tensors each parameter is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from convert.huggingface import MapRow, mapped, same, selected, stacked
from jspec.models.config import DecoderConfig, ModelConfig
from jspec.models.layer_config import GQA, MLA
from jspec.models.param_spec import Params
from jspec.models.params import model_params, rows

Names = Mapping[str, Sequence[str]]  # for each parameter, the tensors that are concatenated along axis 0
TENSORS = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER: Names = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "sinks": ("self_attn.sinks",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "router": ("mlp.gate.weight",),
    "router_correction": ("mlp.gate.e_score_correction_bias",),
    "experts_gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),  # {}: index of the expert
    "experts_down": ("mlp.experts.{}.down_proj.weight",),
    # The tensors of gate_up and down in a layer that is a mixture of experts.
    "shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
}
ROTATED = ("qkv", "qkv_bias", "q_norm", "k_norm", "q_up", "k_up", "v_up")  # what queries and keys are made from
NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_norm", "k_norm", "norm")


def model_rows(
    config: ModelConfig, names: Collection[str], layer: Names = LAYER, *, norms_less_one: bool = False
) -> list[MapRow]:
    """Return the rows of the weight map of a target or a draft model, one per parameter.

    Args:
        config: config of the model.
        names: names of all tensors in the checkpoint.
        layer: tensor names by parameter name of a layer, without prefix.
        norms_less_one: whether the file stores the weights of norms minus 1.
    """
    params = model_params(config)
    tensors = {name: [tensor] for name, tensor in TENSORS.items() if name in params}
    for index in range(config.num_layers):
        tensors |= layer_tensors(params, f"layers.{index}", f"model.layers.{index}", layer)
    tied: list[MapRow] = []
    if config.tie_word_embeddings:
        del tensors["embed"]
        both = [TENSORS[name] for name in ("embed", "head")]
        found = [name for name in both if name in names] or both[:1]
        tied = [same("embed", dict.fromkeys(found, params["embed"].shape))]
    made = [*tied, *rows(params, tensors)]
    if norms_less_one:
        made = [mapped(row, _plus_one) if row.parameter.rpartition(".")[2] in NORMS else row for row in made]
    return [rotated_first(without_values(row, config), config) for row in made]


def layer_tensors(params: Params, to: str, source: str, layer: Names = LAYER) -> dict[str, list[str]]:
    """List the names of the checkpoint's tensors for each parameter of a layer, by parameter name.

    Args:
        params: declarations of the model's parameters; parameters without a declaration are left out of the result.
        to: prefix of the layer's parameter names.
        source: prefix of the layer's tensor names.
        layer: tensor names by parameter name, all without prefix.
    """
    if f"{to}.router" in params:
        layer = {**layer, "gate_up": layer["shared_gate_up"], "down": layer["shared_down"]}
    return {
        f"{to}.{name}": [f"{source}.{tensor}" for tensor in _each_expert(tensors, params[f"{to}.{name}"].shape[0])]
        for name, tensors in layer.items()
        if f"{to}.{name}" in params
    }


def _each_expert(tensors: Sequence[str], count: int) -> list[str]:
    """Return the names of the tensors of all experts, expert after expert; other tensors' names are unchanged."""
    experts = range(count) if "{}" in tensors[0] else range(1)
    return [tensor.format(expert) for expert in experts for tensor in tensors]


def input_major(row: MapRow) -> MapRow:
    """Return the row of a parameter of experts [experts, out, in] that the file stores as [experts, in, out]."""
    count, out, inner = row.shape
    return mapped(row, lambda values: np.ascontiguousarray(values.swapaxes(1, 2)), (count, inner, out))


def _plus_one(values: np.ndarray) -> np.ndarray:
    return values + np.ones((), values.dtype)


def without_values(row: MapRow, config: DecoderConfig) -> MapRow:
    """Make the qkv of a layer whose values are keys from the tensors of queries and keys."""
    prefix, _, name = row.parameter.rpartition(".")
    attention = config.layers[int(prefix.rpartition(".")[2])].attention if name == "qkv" else None
    if not isinstance(attention, GQA) or not attention.values_are_keys:
        return row
    q, kv = attention.q_size, attention.kv_size
    own = stacked(row.parameter, dict(list(row.sources.items())[:2]), row.dtype)
    return selected(own, np.concatenate([np.arange(q + kv), np.arange(q, q + kv)]))


def rotated_first(row: MapRow, config: DecoderConfig) -> MapRow:
    """Reorder the channels of queries and keys of a layer whose kernels rotate other pairs of channels than the file.

    The file rotates channel i of the first r channels with channel i + r / 2, or channel 2i with channel 2i + 1.
    Kernels rotate channel i of a head of d channels with channel i + d / 2. Scores do not depend on the order of the
    channels, if queries and keys have the same order.
    """
    prefix, _, name = row.parameter.rpartition(".")
    if name not in ROTATED:
        return row
    layer = config.layers[int(prefix.rpartition(".")[2])]
    if isinstance(layer.attention, MLA):
        return latent_row(row, layer.attention)
    rotated, dim = layer.attention.rope.rotated(layer.attention.head_dim), layer.attention.head_dim
    is_kept = rotated == dim and not layer.attention.is_interleaved
    if is_kept or name not in ("qkv", "qkv_bias", "q_norm", "k_norm"):
        return row
    pairs = np.arange(rotated).reshape(-1, 2).T if layer.attention.is_interleaved else np.arange(rotated).reshape(2, -1)
    order = np.concatenate([pairs, np.arange(rotated, dim).reshape(2, -1)], axis=1).ravel()
    index, heads = np.arange(row.shape[0]), _reordered_heads(name, layer.attention)
    index[: heads * dim] = (np.arange(heads)[:, None] * dim + order).ravel()
    return selected(row, index)


def _reordered_heads(name: str, attention: GQA) -> int:
    if name in ("qkv", "qkv_bias"):
        return attention.heads + attention.kv_heads
    of_all = attention.heads if name == "q_norm" else attention.kv_heads
    return of_all if attention.qk_norm == "all" else 1


def latent_row(row: MapRow, attention: MLA) -> MapRow:
    """Take of a tensor of latent attention the rows of a parameter, with rotated channels in the order of kernels.

    A head's keys and values are products of successive rows of one tensor. The file may rotate channels 2i and 2i + 1
    together; kernels rotate channel i with channel i + half.
    """
    name, heads, rotated = row.parameter.rpartition(".")[2], attention.heads, attention.rotated
    if name in ("k_up", "v_up"):
        whole = heads * (attention.plain + attention.value_dim), attention.latent
        by_head = np.split(np.arange(whole[0]).reshape(heads, -1), [attention.plain], axis=1)
        tensor = stacked(row.parameter, dict.fromkeys(row.sources, whole), row.dtype)
        return selected(tensor, by_head[name == "v_up"].ravel())
    if name not in ("qkv", "q_up") or not attention.is_interleaved:
        return row
    index = np.arange(row.shape[0])
    of_heads = attention.plain + attention.query_dim * np.arange(heads)
    if name == "q_up":
        starts = of_heads
    elif attention.query_latent is None:
        starts = np.concatenate([[attention.latent], attention.head_dim + of_heads])
    else:
        starts = np.array([attention.query_latent + attention.latent])
    order = np.arange(rotated).reshape(-1, 2).T.ravel()
    index[(starts[:, None] + np.arange(rotated)).ravel()] = (starts[:, None] + order).ravel()
    return selected(row, index)
