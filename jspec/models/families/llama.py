"""The Llama family, which reads config.json and names the tensors of Llama checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from convert.fields import CheckpointError, Fields, require, short
from convert.huggingface import Row, same
from jspec.models.config import ModelConfig, Rope, unsupported
from jspec.models.families import register
from jspec.models.params import Params, model_params, rows

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
DEFAULT_THETA = 10000.0  # rotary base of a config.json that gives none, as in transformers
QUANTIZATION = "unquantised float weights (quantize='int8' or 'fp8' rounds them at load)"
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
        fields = Fields.of(fields)
        return ModelConfig.of_sizes(
            **read_sizes(fields, "num_hidden_layers"),
            **flags,
            family=fields.text("model_type"),
            num_layers=fields.integer("num_hidden_layers"),
            rope=read_rope(fields, theta=rope_theta),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            max_position=fields.integer("max_position_embeddings", 2048),
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
    """List the names of the checkpoint's tensors for each parameter of a layer, by parameter name.

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


def read_sizes(fields: Fields, *required: str) -> dict[str, Any]:
    """Read the sizes in a config.json, by argument name of `DecoderConfig.of_sizes`, with the Llama format's defaults.

    Args:
        fields: parsed config.json, or the part of it that describes the layers.
        required: further keys that must be present.

    Returns:
        The sizes, by argument name of `DecoderConfig.of_sizes`.

    Raises:
        CheckpointError: keys are missing, or a value has another type; the message names them.
        NotImplementedError: an option of the layers is not supported.
    """
    if fields.text("hidden_act", "silu") != "silu":
        raise unsupported("hidden_act", fields["hidden_act"], "'silu'")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.flag(flag):
            raise unsupported(flag, True, "False")
    if fields.get("quantization_config"):
        raise unsupported("quantization_config", fields["quantization_config"], QUANTIZATION)
    if other := set(fields.texts("layer_types")) - {"full_attention"}:
        raise unsupported("layer_types", sorted(other), "'full_attention' alone")
    require(fields, ("model_type", *SIZES, *required))
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", hidden // heads),
        "norm_eps": fields.number("rms_norm_eps"),
    }


def read_rope(fields: Fields, *, theta: float | None = None) -> Rope:
    """Read the rotary embedding in a config.json.

    Older files have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters` instead and reads all
    three, with a rotary base within either of the two objects. Files whose values differ are refused.

    Args:
        fields: parsed config.json.
        theta: rotary base; None: as in config.json, or 10000 if the file gives none.

    Raises:
        CheckpointError: two parts of the file differ, or a value has another type.
        NotImplementedError: the rope type is not supported.
    """
    forms = [fields.object(name) for name in ("rope_parameters", "rope_scaling")]
    if by_layer := [kind for form in forms for kind, value in form.items() if isinstance(value, Mapping)]:
        raise unsupported("rope_parameters", by_layer, "one rotary embedding for all layers")
    outer = fields.number("rope_theta", DEFAULT_THETA)
    named = {form.number("rope_theta", outer) for form in forms if form}
    if not named or fields.get("rope_theta") is not None:
        named.add(outer)
    if theta is None and len(named) > 1:
        raise CheckpointError(
            fields.place, f"rope_theta: expected one value, got {sorted(named)} from rope_parameters, rope_scaling and "
            "beside them; pass rope_theta= to choose",
        )  # fmt: skip
    theta = theta if theta is not None else named.pop()
    for part in (*forms, fields):
        if part.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise unsupported("partial_rotary_factor", part["partial_rotary_factor"], "1.0")
    ropes = {_scaled_rope(theta, form, fields) for form in forms if form}
    if len(ropes) > 1:
        raise CheckpointError(
            fields.place, f"rope: expected rope_parameters and rope_scaling to agree, got {short(dict(forms[0]))} and "
            f"{short(dict(forms[1]))}; delete one of the two",
        )  # fmt: skip
    return next(iter(ropes), Rope(theta=theta))


def _scaled_rope(theta: float, form: Fields, outer: Fields) -> Rope:
    kind = form.text("rope_type", form.text("type", "default"))
    if kind != "llama3":
        return Rope(theta=theta, kind=kind)
    length = "original_max_position_embeddings"
    require(form, ("factor", "low_freq_factor", "high_freq_factor", length))
    if outer.get(length) not in (None, form[length]):  # readers differ in which of the two they take
        raise outer.error(length, f"{short(form[length])}, as in {form.place}")
    return Rope(
        theta=theta,
        kind=kind,
        factor=form.number("factor"),
        low_freq_factor=form.number("low_freq_factor"),
        high_freq_factor=form.number("high_freq_factor"),
        original_max_position=form.integer(length),
    )
