"""The Llama family, which reads config.json and names the tensors of Llama checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from convert.huggingface import Row, same
from jspec.models.config import ModelConfig, Rope, require, unsupported
from jspec.models.families import register
from jspec.models.params import Params, model_params, rows

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
TENSORS = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER = {  # for each parameter of a layer, the tensors that are concatenated along axis 0
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


@register("llama")
class Llama:
    """The family of Llama 2 and 3, and base class of families whose layers differ from Llama only in flags."""

    def config(self, fields: Mapping[str, Any], *, rope_theta: float | None = None, **flags: bool) -> ModelConfig:
        """Read the config.json of a model; `jspec.models.families.Family.config` documents the errors.

        Args:
            fields: parsed config.json.
            rope_theta: rotary base; None: as in config.json.
            flags: values of `qkv_bias` and `qk_norm` for all layers, which derived families pass.
        """
        return ModelConfig.of_sizes(
            **read_sizes(fields, "num_hidden_layers"),
            **flags,
            family=fields["model_type"],
            num_layers=int(fields["num_hidden_layers"]),
            rope=read_rope(fields, theta=rope_theta),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            max_position=int(fields.get("max_position_embeddings", 2048)),
        )

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[Row]:
        params = model_params(config)
        tensors = {name: [tensor] for name, tensor in TENSORS.items() if name in params}
        for index in range(config.num_layers):
            tensors |= layer_tensors(params, f"layers.{index}", f"model.layers.{index}")
        if not config.tie_word_embeddings:
            return rows(params, tensors)
        del tensors["embed"]
        tied = [TENSORS[name] for name in ("embed", "head")]
        found = [name for name in tied if name in names] or tied[:1]
        return [same("embed", dict.fromkeys(found, params["embed"].shape)), *rows(params, tensors)]


def layer_tensors(
    params: Params, to: str, source: str, layer: Mapping[str, Sequence[str]] = LAYER
) -> dict[str, list[str]]:
    """Return the names of the checkpoint's tensors for each parameter of a layer, by parameter name.

    Args:
        params: declarations of the model's parameters; parameters without a declaration are left out of the result.
        to: prefix of the layer's parameter names.
        source: prefix of the layer's tensor names.
        layer: tensor names by parameter name, all without prefix.
    """
    return {
        f"{to}.{name}": [f"{source}.{tensor}" for tensor in tensors]
        for name, tensors in layer.items()
        if f"{to}.{name}" in params
    }


def read_sizes(fields: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """Read the sizes in a config.json, with the defaults of the Llama format.

    Args:
        fields: parsed config.json, or the part of it that describes the layers.
        required: further keys that must be present.

    Returns:
        The sizes, by argument name of `DecoderConfig.of_sizes`.

    Raises:
        ValueError: keys are missing; the message names them.
        NotImplementedError: an option of the layers is not supported.
    """
    if fields.get("hidden_act", "silu") != "silu":
        raise unsupported("hidden_act", fields["hidden_act"], "'silu'")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.get(flag):
            raise unsupported(flag, fields[flag], "False")
    if fields.get("quantization_config"):
        raise unsupported("quantization_config", fields["quantization_config"], "unquantised float weights")
    if other := set(fields.get("layer_types") or ()) - {"full_attention"}:
        raise unsupported("layer_types", sorted(other), "'full_attention' alone")
    require("config.json", fields, ("model_type", *SIZES, *required))
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    return {
        "vocab_size": int(fields["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(fields.get("num_key_value_heads") or heads),
        "head_dim": int(fields.get("head_dim") or hidden // heads),
        "norm_eps": float(fields["rms_norm_eps"]),
    }


def read_rope(fields: Mapping[str, Any], *, theta: float | None = None) -> Rope:
    """Read the rotary embedding in a config.json.

    Older config.json files have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters` instead.

    Args:
        fields: parsed config.json.
        theta: rotary base; None: as in config.json, or 10000 if the file gives none.

    Raises:
        ValueError: `rope_parameters` and the older keys are both present and their values differ.
        NotImplementedError: the rope type is not supported.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if by_layer := [kind for kind, value in parameters.items() if isinstance(value, Mapping)]:
        raise unsupported("rope_parameters", by_layer, "one rotary embedding for all layers")
    named = {float(c["rope_theta"]) for c in (parameters, fields) if c.get("rope_theta") is not None}
    if theta is None and len(named) > 1:
        raise ValueError(
            f"rope_theta: expected one value, got {sorted(named)} from rope_parameters and beside it; "
            "pass rope_theta= to choose"
        )
    theta = theta if theta is not None else next(iter(named), 10000.0)
    for source in (parameters, fields):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise unsupported("partial_rotary_factor", source["partial_rotary_factor"], "1.0")
    forms = {_scaled_rope(theta, form) for form in (parameters, scaling) if form}
    if len(forms) > 1:
        raise ValueError(
            f"rope: expected rope_parameters and rope_scaling to agree, got {parameters} and {scaling}; "
            "delete one of the two from config.json"
        )
    return next(iter(forms), Rope(theta=theta))


def _scaled_rope(theta: float, form: Mapping[str, Any]) -> Rope:
    kind = form.get("rope_type", form.get("type", "default"))
    if kind != "llama3":
        return Rope(theta=theta, kind=kind)
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    require("rope_scaling", form, keys)
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(form["factor"]),
        low_freq_factor=float(form["low_freq_factor"]),
        high_freq_factor=float(form["high_freq_factor"]),
        original_max_position=int(form["original_max_position_embeddings"]),
    )
