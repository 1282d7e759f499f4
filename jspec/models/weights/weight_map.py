"""Weight maps of decoders in the format of Hugging Face: from which tensors each parameter is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from convert.huggingface import MapRow, mapped, same
from jspec.models.config.decoder_config import DecoderConfig, ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.parts.param_spec import Params
from jspec.models.weights.params import model_params, rows

Names = Mapping[str, Sequence[str]]  # for each parameter, the tensors that are concatenated along axis 0
TENSORS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layer_embeddings.table": "model.embed_tokens_per_layer.weight",
    "layer_embeddings.projection": "model.per_layer_model_projection.weight",
    "layer_embeddings.norm": "model.per_layer_projection_norm.weight",
}
LAYER: Names = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "sinks": ("self_attn.sinks",),
    "conv": ("conv.conv.weight",),
    "conv_bias": ("conv.conv.bias",),
    "a_log": ("linear_attn.A_log",),
    "dt_bias": ("linear_attn.dt_bias",),
    "delta_norm": ("linear_attn.norm.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
    "attn_taps": ("attention_conv.base_kernel",),
    "attn_taps_project": ("attention_conv.kernel_projection.weight",),
    "mlp_taps": ("mlp_conv.base_kernel",),
    "mlp_taps_project": ("mlp_conv.kernel_projection.weight",),
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
# The weights of all experts together, as some files have them; others have them expert by expert.
TOGETHER: Names = {
    "experts_gate_up": ("mlp.experts.gate_up_proj",),
    "experts_down": ("mlp.experts.down_proj",),
}
NORMS = (
    *("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_norm", "k_norm", "norm"),
    *("input_norm", "embed_norm", "feature_norm"),  # of a layer that predicts further tokens
)


def model_rows(
    config: ModelConfig,
    names: Collection[str],
    names_of: Callable[[LayerConfig], Names] = lambda layer: LAYER,
    *,
    norms_less_one: bool = False,
) -> list[MapRow]:
    """Return the rows of the weight map of a target or a draft model, one per parameter.

    Args:
        config: config of the model.
        names: names of all tensors in the checkpoint.
        names_of: function of a layer's config that returns tensor names by parameter name, without prefix.
        norms_less_one: whether the file stores the weights of norms minus 1.
    """
    params = model_params(config)
    tensors = {name: [tensor] for name, tensor in TENSORS.items() if name in params}
    for index, layer in enumerate(config.layers):
        tensors |= layer_tensors(params, f"layers.{index}", f"model.layers.{index}", names_of(layer))
    tied: list[MapRow] = []
    if config.tie_word_embeddings:
        del tensors["embed"]
        both = [TENSORS[name] for name in ("embed", "head")]
        stored = [name for name in both if name in names] or both[:1]
        tied = [same("embed", dict.fromkeys(stored, params["embed"].shape))]
    return as_computed([*tied, *rows(params, tensors)], config, norms_less_one=norms_less_one)


def as_computed(made: Iterable[MapRow], config: DecoderConfig, *, norms_less_one: bool) -> list[MapRow]:
    """Return rows as they are computed with: norms with their 1, and the weights of mixers in the order of kernels.

    Args:
        made: the rows, which read what the file stores.
        config: config of the model, or of a layer that predicts further tokens.
        norms_less_one: as for `model_rows`.
    """
    if norms_less_one:
        made = [plus_one(row) if row.parameter.rpartition(".")[2] in NORMS else row for row in made]
    return [in_kernel_order(row, config) for row in made]


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


def of_experts(names: Names, tensors: Collection[str]) -> Names:
    """Return the tensor names by parameter of a layer, with those of experts as the file of ``tensors`` has them."""
    is_together = any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors)
    return {**names, **TOGETHER} if is_together else names


def input_major(row: MapRow) -> MapRow:
    """Return the row of a parameter of experts [experts, out, in] that the file stores as [experts, in, out]."""
    count, out, inner = row.shape
    return mapped(row, lambda values: values.swapaxes(1, 2).copy(), (count, inner, out))


def plus_one(row: MapRow) -> MapRow:
    """Return the row of a norm whose weight the file stores minus 1."""
    return mapped(row, lambda values: values + np.ones((), values.dtype))


def in_kernel_order(row: MapRow, config: DecoderConfig) -> MapRow:
    """Return the row of a layer's weight in the form that its mixer computes with; other rows as they are."""
    layer = row.parameter.rpartition(".")[0].rpartition(".")[2]
    return config.layers[int(layer)].mixer.file_row(row) if layer.isdecimal() else row
