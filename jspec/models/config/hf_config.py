"""Reads the parts of a Hugging Face config.json that model families and draft heads share: sizes, layer types, rope."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.fields import CheckpointError, Fields, require, short
from jspec.models.config.decoder_config import check_num_layers
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope, yarn_magnitude
from pallas_kernels.layers.quantize_rows import Activation

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
DEFAULT_THETA = 10000.0  # rotary base of a config.json that gives none, as in transformers
QUANTIZATION = "unquantised float weights (quantize='int8' or 'fp8' rounds them at load)"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # values in `layer_types`
ORIGINAL = "original_max_position_embeddings"


def read_sizes(fields: Fields, *required: str) -> dict[str, Any]:
    """Read the sizes in a config.json, by argument name of `DecoderConfig.of_sizes`, with the Llama format's defaults.

    Args:
        fields: parsed config.json, or the part of it that describes the layers.
        required: further keys that must be present.

    Returns:
        The sizes, by argument name of `DecoderConfig.of_sizes`.

    Raises:
        CheckpointError: keys are missing, or a value has another type; the message names them.
        NotImplementedError: the weights are quantised.
    """
    if fields.get("quantization_config"):
        raise unsupported("quantization_config", fields["quantization_config"], QUANTIZATION)
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


def refuse(fields: Fields, options: Mapping[str, Any]) -> None:
    """Raise NotImplementedError if an option has another value than the only one that is supported.

    Args:
        fields: parsed config.json.
        options: the supported value of each option, which is also the value of an absent one.
    """
    for name, supported in options.items():
        if fields.get(name) not in (None, supported):
            raise unsupported(name, fields[name], str(supported))


def read_activation(fields: Fields, *names: str) -> Activation:
    """Read the activation of the feed-forward under the first of several keys that is present; "silu" if none is."""
    name = next((name for name in names if fields.get(name) is not None), names[0])
    value = fields.text(name, "silu")
    if value not in ACTIVATIONS:
        raise unsupported(name, value, " or ".join(map(repr, ACTIVATIONS)))
    return ACTIVATIONS[value]


def read_layer_types(fields: Fields, default: list[str], *, limited: str = SLIDING) -> list[str]:
    """Read whether each layer has full or limited attention.

    Args:
        fields: parsed config.json.
        default: types of the layers if the file gives none.
        limited: type of limited attention, by a window or by chunks.

    Raises:
        CheckpointError: the file gives another number of types than layers.
        NotImplementedError: a type is unknown.
    """
    types = fields.texts("layer_types") or default
    if len(types) != (count := fields.integer("num_hidden_layers")):
        raise fields.error("layer_types", f"{count} types, one for each layer")
    if other := sorted(set(types) - {FULL, limited}):
        raise unsupported("layer_types", other, f"{FULL!r} or {limited!r}")
    return types


def read_rope_layers(fields: Fields) -> list[bool]:
    """Read whether each layer has a rotary embedding; without `no_rope_layers`, every fourth layer has none."""
    count, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    flags = fields.integers("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    if len(flags) < count:
        raise fields.error("no_rope_layers", f"{count} numbers, one for each layer; 0: no rotary embedding")
    return [bool(flag) for flag in flags[:count]]


def read_dense_layers(fields: Fields) -> list[bool]:
    """Read whether the feed-forward of each layer is dense; without `mlp_layer_types`, that of the first layer is."""
    count = fields.integer("num_hidden_layers")
    types = fields.texts("mlp_layer_types") or ["dense", *["sparse"] * (count - 1)]
    if len(types) != count or not set(types) <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"{count} types, one for each layer, 'dense' or 'sparse'")
    return [kind == "dense" for kind in types]


def all_layers(fields: Fields, kind: str) -> list[str]:
    """Return one layer type for each of the `num_hidden_layers` layers."""
    count = fields.integer("num_hidden_layers")
    check_num_layers(count)
    return [kind] * count


def read_ropes(fields: Fields, *, theta: float | None = None, default: float = DEFAULT_THETA) -> dict[str, Rope]:
    """Read the rotary embedding of each layer type.

    `rope_parameters` of transformers 5 may hold one object for each layer type; otherwise all layers are alike.

    Args:
        fields: parsed config.json.
        theta: rotary base; None: as in config.json.
        default: rotary base of a file that gives none.

    Raises: the errors of `read_rope`; also NotImplementedError: a base is given, and layers have different ones.
    """
    by_type = fields.object("rope_parameters")
    if not any(isinstance(value, Mapping) for value in by_type.values()):
        return dict.fromkeys((FULL, SLIDING, CHUNKED), read_rope(fields, theta=theta, default=default))
    if theta is not None:
        raise unsupported("rope_theta", theta, "none, because layers have different rotary embeddings")
    others = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_theta")}
    return {
        kind: read_rope(Fields({**others, "rope_parameters": by_type.object(kind)}, fields.place), default=default)
        for kind in by_type
    }


def or_fraction(fields: Fields, default: float) -> Fields:
    """Return a config.json with a `partial_rotary_factor` if no part of it gives one."""
    name = "partial_rotary_factor"
    forms = (fields, fields.object("rope_parameters"), fields.object("rope_scaling"))
    return fields if any(name in form for form in forms) else Fields({**fields, name: default}, fields.place)


def read_rope(fields: Fields, *, theta: float | None = None, default: float = DEFAULT_THETA) -> Rope:
    """Read the rotary embedding in a config.json.

    Older files have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters` instead and reads all
    three, with a rotary base within either of the two objects. Files whose values differ are refused.

    Args:
        fields: parsed config.json.
        theta: rotary base; None: as in config.json.
        default: rotary base of a file that gives none.

    Raises:
        CheckpointError: two parts of the file differ, or a value has another type.
        NotImplementedError: the rope type is not supported.
    """
    forms = [fields.object(name) for name in ("rope_parameters", "rope_scaling")]
    if by_layer := [kind for form in forms for kind, value in form.items() if isinstance(value, Mapping)]:
        raise unsupported("rope_parameters", by_layer, "one rotary embedding for all layers")
    outer = fields.number("rope_theta", default)
    named = {form.number("rope_theta", outer) for form in forms if form}
    if not named or fields.get("rope_theta") is not None:
        named.add(outer)
    if theta is None and len(named) > 1:
        raise CheckpointError(
            fields.place, f"rope_theta: expected one value, got {sorted(named)} from rope_parameters, rope_scaling and "
            "beside them; pass rope_theta= to choose",
        )  # fmt: skip
    theta = theta if theta is not None else named.pop()
    ropes = {_scaled_rope(theta, form, fields) for form in forms if form} or {Rope(theta=theta)}
    if len(ropes) > 1:
        raise CheckpointError(
            fields.place, f"rope: expected rope_parameters and rope_scaling to agree, got {short(dict(forms[0]))} and "
            f"{short(dict(forms[1]))}; delete one of the two",
        )  # fmt: skip
    fractions = {
        part.number("partial_rotary_factor", 1.0) for part in (*forms, fields) if "partial_rotary_factor" in part
    }
    if len(fractions) > 1:
        raise CheckpointError(
            fields.place, f"partial_rotary_factor: expected one value, got {sorted(fractions)}; correct the file"
        )
    return replace(ropes.pop(), fraction=fractions.pop() if fractions else 1.0)


def _scaled_rope(theta: float, form: Fields, outer: Fields) -> Rope:
    """Read a rotary embedding from `rope_parameters` or `rope_scaling` (form) of a config.json (outer)."""
    kind = form.text("rope_type", form.text("type", "default"))
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)  # mrope differs for positions of images alone
    match kind:
        case "linear":
            return Rope(theta=theta, kind=kind, factor=_required(form, "factor"))
        case "proportional":
            return Rope(theta=theta, kind=kind, factor=form.number("factor", 1.0))
        case "dynamic":
            factor, most = _required(form, "factor"), outer.integer("max_position_embeddings")
            return Rope(theta=theta, kind=kind, factor=factor, original_max_position=most)
        case "llama3":
            return _llama3(theta, form, outer)
        case "yarn":
            return _yarn(theta, form, outer)
        case "longrope":
            return _longrope(theta, form, outer)
    return Rope(theta=theta, kind=kind)


def _required(form: Fields, name: str) -> float:
    require(form, (name,))
    return form.number(name)


def _llama3(theta: float, form: Fields, outer: Fields) -> Rope:
    require(form, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL))
    if outer.get(ORIGINAL) not in (None, form[ORIGINAL]):  # readers differ in which of the two they take
        raise outer.error(ORIGINAL, f"{short(form[ORIGINAL])}, as in {form.place}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=form.number("factor"),
        low_freq_factor=form.number("low_freq_factor"),
        high_freq_factor=form.number("high_freq_factor"),
        original_max_position=form.integer(ORIGINAL),
    )


def _lengths(form: Fields, outer: Fields) -> tuple[int, float]:
    """Read the context length before scaling, and the factor by which the scaling lengthens it."""
    default = form.integer(ORIGINAL, outer.integer("max_position_embeddings", 2048, least=2), least=2)
    original = outer.integer(ORIGINAL, default, least=2)  # 1 has the logarithm 0
    return original, form.number("factor", outer.integer("max_position_embeddings", original) / original)


def _yarn(theta: float, form: Fields, outer: Fields) -> Rope:
    original, factor = _lengths(form, outer)
    if form.get("mscale") and form.get("mscale_all_dim"):
        magnitudes = [yarn_magnitude(factor, form.number(name)) for name in ("mscale", "mscale_all_dim")]
        attention_factor = magnitudes[0] / magnitudes[1]
    else:
        attention_factor = yarn_magnitude(factor)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=form.number("beta_fast", 32.0),
        beta_slow=form.number("beta_slow", 1.0),
        truncate=form.flag("truncate", True),
        attention_factor=form.number("attention_factor", attention_factor),
    )


def _longrope(theta: float, form: Fields, outer: Fields) -> Rope:
    require(form, ("short_factor", "long_factor"))
    if unknown := [name for name in ("short_mscale", "long_mscale") if name in form]:
        raise unsupported(f"{form.place}: {unknown[0]}", form[unknown[0]], "none")
    original, factor = _lengths(form, outer)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        short_factors=tuple(form.numbers("short_factor")),
        long_factors=tuple(form.numbers("long_factor")),
        attention_factor=form.number("attention_factor", magnitude),
    )
