"""Reads the files of DFlash and DSpark heads (config.json, tensor names, vocabulary maps) of their exporters.

The DFlash authors and SpecForge write a Qwen 3 config with `block_size` and the object `dflash_config`. The DSpark
authors write all keys into a Qwen 3 config. The exporter speculators puts the layers' config under
`transformer_layer_config`, and the other keys beside it.

A file without the tensors of a Markov head and of a confidence head holds a DFlash head, whatever its architecture is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.detect import bare_name
from convert.fields import CheckpointError, Fields, require
from convert.huggingface import MapRow, renamed
from convert.sources import Source
from jspec.draft.dflash2_head import selector_params
from jspec.draft.dflash_head import dflash_params
from jspec.draft.dspark_head import dspark_params
from jspec.draft.formats.eagle_formats import Parts
from jspec.draft.formats.head_layers import FAMILIES, check_tensors
from jspec.draft.formats.head_weights import weight_rows
from jspec.draft.head_config import DFlash2Config, DFlashConfig, DSparkConfig, Overrides
from jspec.models.config.hf_config import SLIDING
from jspec.models.load import Format, check_count, with_scheme
from jspec.models.mixers.gqa import GQA
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params, ParamSpec

READ = {  # keys of `dflash_config` that are read
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "sample_from_anchor", "projector_type"),
    *("causal", "use_swa", "swa_window_size"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    "confidence_head_alpha",  # weight of the confidence head in the training loss; 0: there is none
}
READ_OF_DFLASH2 = {  # those that are read of DFlash2 heads alone
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
}
PROJECTORS = ("dflash", "dspark", "dflash2")  # values of `projector_type`
# Options that change a head's forward pass, in `dflash_config` or beside it, each with its only supported value.
OPTIONS: dict[str, Any] = {
    "attention_mode": "gqa",
    "shift_label": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
}
MOST_LAYERS = 2**30  # number of a target's layers if the file does not give it
LAYERS = ("qwen3", "llama")  # values of `model_type`; a head's layers are those of Qwen 3 whichever it is


def dflash_format(kind: str, overrides: Overrides | None = None) -> Format:
    """Return the format of DFlash or DSpark heads, for files of any exporter.

    Args:
        kind: "dflash" or "dspark".
        overrides: config values that replace those of the file.
    """
    replacements = overrides or Overrides()

    def from_hf(fields: Fields, source: Source) -> tuple[DFlashConfig, list[MapRow]]:
        names = {bare_name(name): name for name in source.tensors}
        check_tensors(names)
        config = read_dflash(fields, replacements, kind)
        check_count("num_hidden_layers", config.num_layers, source.tensors)
        is_reduced = config.draft_vocab_size < config.vocab_size
        params = head_params(
            config,
            has_embed="embed_tokens.weight" in names,
            has_head=is_reduced or "lm_head.weight" in names,
            has_map=is_reduced or "d2t" in names,
        )
        return config, renamed(weight_rows(config, params, names), names)

    def from_json(fields: Fields) -> DFlashConfig:
        if fields.text("method") != kind:
            raise fields.error("method", f"{kind!r}, the kind of the checkpoint")
        return DFlashConfig.from_json(fields)

    def params(config: DFlashConfig, names: Collection[str]) -> Params:
        check_count("num_layers", config.num_layers, names)
        owned = {"has_embed": "embed", "has_head": "head", "has_map": "draft_to_target"}
        specs = head_params(config, **{option: name in names for option, name in owned.items()})
        # `bind` joins rows of all layers, in the order of the file; what it returns is divided over devices.
        return {name: replace(spec, axes=("",) * len(spec.axes)) for name, spec in specs.items()}

    return Format(with_scheme(from_hf), from_json, params, replacements.apply)


def head_params(config: DFlashConfig, **owned: bool) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter of a DFlash or DSpark head, by name; ``owned`` as in `dflash_params`."""
    params = dflash_params(config, **owned)
    if isinstance(config, DFlash2Config):
        return params | selector_params(config)
    return params | dspark_params(config) if isinstance(config, DSparkConfig) else params


def read_dflash(
    config: Mapping[str, Any], overrides: Overrides | None = None, kind: str = "dflash"
) -> DFlashConfig | DSparkConfig:
    """Read the config.json of a DFlash or DSpark head.

    Args:
        config: parsed config.json.
        overrides: config values that replace those of the file.
        kind: "dflash" or "dspark", the kind of head by its tensors.

    Raises:
        CheckpointError: keys are missing, a value has another type, or values contradict each other.
        NotImplementedError: an option is not supported.
    """
    overrides, fields = overrides or Overrides(), Fields.of(config)
    parts = _parts(fields)
    _check_options(parts, READ | READ_OF_DFLASH2 if kind == "dflash2" else READ)
    family = parts.layer.text("model_type", "qwen3")
    if family not in LAYERS:
        raise unsupported("model_type", family, " or ".join(map(repr, LAYERS)) + " for the layers of a DFlash head")
    read = FAMILIES[family].decoder(_with_windows(parts), rope_theta=overrides.rope_theta)
    convolutions = _convolutions(parts) if kind == "dflash2" else {}
    sees_block = kind == "dflash2"  # in layers with a window too, if the file does not say
    layers = tuple(
        replace(layer, mixer=_in_block(layer.attention, parts, sees_block=sees_block), **convolutions)
        for layer in read["layers"]
    )
    record, read_heads = HEADS[kind]
    heads = read_heads(parts)
    return record(
        **{**read, "layers": layers},
        draft_vocab_size=parts.integer("draft_vocab_size", default=read["vocab_size"]),
        target_hidden_size=parts.integer("target_hidden_size", default=read["hidden_size"]),
        feature_layers=overrides.feature_layers or _feature_layers(parts),
        source_format=parts.source_format,
        block_size=_integer(parts, "block_size", least=1),
        mask_token_id=_integer(parts, "mask_token_id"),
        sample_from_anchor=_sample_from_anchor(parts),
        **heads,
    )


def _parts(fields: Fields) -> Parts:
    nested = fields.object("dflash_config")
    if "speculators_model_type" not in fields:
        return Parts("official", fields, fields, nested)
    require(fields, ("transformer_layer_config",))
    return Parts("speculators", fields.object("transformer_layer_config"), fields, nested)


def _check_options(parts: Parts, read: Collection[str]) -> None:
    """Raise NotImplementedError if an option has an unsupported value, or if one of `dflash_config` is not read."""
    for name, value in OPTIONS.items():
        for got in parts.values(name):
            if got != value or isinstance(got, bool) != isinstance(value, bool):
                raise unsupported(name, got, str(value))
    for got in parts.values("projector_type"):
        if got not in PROJECTORS:
            raise unsupported("projector_type", got, " or ".join(PROJECTORS))
    for name in parts.nested:
        if name not in read and name not in OPTIONS and parts.nested[name] is not None:
            raise unsupported(f"dflash_config: {name}", parts.nested[name], "none")


def _with_windows(parts: Parts) -> Fields:
    """Return the part of a config.json that describes the layers, with windows under the keys of Qwen.

    ModelOpt writes `use_swa` and `swa_window_size` for windows of all layers.
    """
    layer, types = parts.layer, parts.layer.texts("layer_types")
    if parts.flag("use_swa") and SLIDING not in types:
        types = [SLIDING] * layer.integer("num_hidden_layers")
    elif SLIDING not in types:
        return layer
    elif layer.get("use_sliding_window") is False:
        raise layer.error("use_sliding_window", f"true, because layer_types has {SLIDING!r}")
    window = Fields({"sliding_window": parts.one("swa_window_size", "sliding_window")}, layer.place)
    windows = {"layer_types": types, "use_sliding_window": True, "sliding_window": window.integer("sliding_window")}
    return Fields({**layer, **windows}, layer.place)


def _in_block(attention: GQA, parts: Parts, *, sees_block: bool) -> GQA:
    """Return a layer's attention with the options that all layers of DFlash heads have.

    A token attends to no later token of its block in layers with a window, unless the file says otherwise.

    Args:
        attention: the attention by the layer's config.
        parts: parts of config.json.
        sees_block: whether tokens of layers with a window see their whole block if the file does not say.
    """
    slides = attention.window is not None and not parts.flag("use_swa")
    sees_all = parts.flag("sliding_window_non_causal", default=sees_block)
    causal = parts.flag("causal", "is_causal", default=slides and not sees_all)
    return replace(attention, qk_norm="head", causal=causal)


def _integer(parts: Parts, name: str, default: int | None = None, *, least: int = 0) -> int:
    return Fields({name: parts.one(name)}, parts.outer.place).integer(name, default, least=least)


def _heads(parts: Parts) -> dict[str, Any]:
    """Read which Markov head and which confidence head there are, as fields of `DSparkConfig`."""
    is_trained = parts.one("confidence_head_alpha", default=0) not in (0, None)
    return dict(
        markov_rank=_integer(parts, "markov_rank", 0),
        markov_head_type=Fields({"type": parts.one("markov_head_type")}, parts.outer.place).text("type", "vanilla"),
        confidence_head=parts.flag("enable_confidence_head", default=is_trained),
        confidence_head_with_markov=parts.flag("confidence_head_with_markov"),
    )


def _no_heads(parts: Parts) -> dict[str, Any]:
    """Check that the config names neither a Markov head nor a confidence head, because the file has none."""
    heads = _heads(parts)
    for key, name, tensors in (
        ("markov_rank", "markov_rank", "markov_head.*"),
        ("confidence_head", "enable_confidence_head", "confidence_head.*"),
    ):
        if heads[key]:
            raise CheckpointError(
                name, f"expected the tensors {tensors}, because config.json has {name} {heads[key]}, got none; "
                "download the file again, or correct config.json",
            )  # fmt: skip
    return {}


def _convolutions(parts: Parts) -> dict[str, int]:
    """Read the convolutions of the layers of a DFlash2 head, as fields of `LayerConfig`."""
    return dict(
        block_taps=_integer(parts, "conv_kernel_size", 2, least=1),
        block_group=_integer(parts, "conv_group_size", 16, least=1),
    )


def _selector(parts: Parts) -> dict[str, Any]:
    """Read the selector of a DFlash2 head and the factors of its embedding and logits, as fields of `DFlash2Config`."""

    def number(name: str) -> Any:
        return Fields({name: parts.one(name)}, parts.outer.place).number(name, 1.0)

    limit = parts.one("final_logit_softcapping")
    return _no_heads(parts) | dict(
        selector_rank=_integer(parts, "selector_rank", 256, least=1),
        selector_top_k=_integer(parts, "selector_top_k", 16, least=1),
        input_scale=number("input_embedding_scale"),
        output_multiplier=number("output_multiplier"),
        output_softcap=number("final_logit_softcapping") if limit else None,
    )


HEADS: dict[str, tuple[Any, Callable[[Parts], dict[str, Any]]]] = {  # record of each kind, and what reads its fields
    "dflash": (DFlashConfig, _no_heads),
    "dspark": (DSparkConfig, _heads),
    "dflash2": (DFlash2Config, _selector),
}


def _sample_from_anchor(parts: Parts) -> bool:
    """Read whether the root's output drafts a token.

    It does in the code of the DSpark authors and SpecForge, whose configs do not say so. Older versions of speculators
    trained DSpark heads whose root drafts nothing, and their configs do not say so either.
    """
    if parts.values("sample_from_anchor"):
        return parts.flag("sample_from_anchor")
    if parts.outer.text("speculators_model_type", "") == "dspark":
        raise CheckpointError(
            "sample_from_anchor", "expected true or false in a speculators config.json of a DSpark head, got none; add "
            "true if the root's output drafts the first token, else false",
        )  # fmt: skip
    return "DSpark" in " ".join(parts.outer.texts("architectures")) or parts.one("projector_type") == "dspark"


def _feature_layers(parts: Parts) -> tuple[int, ...]:
    """Read the indices of the target states that the head reads, in the order in which they are concatenated.

    The ids of speculators (`aux_hidden_state_layer_ids`) are indices of states, the others are indices of layers. The
    output of layer j is state j + 1; for the target's last layer it is the state after the final norm, as transformers
    returns it.
    """
    count = parts.integer("num_target_layers", default=MOST_LAYERS)

    def after(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(count + 1 if layer == count - 1 else layer + 1 for layer in layers)

    lists = {after(part.integers("target_layer_ids")) for part in (parts.nested, parts.outer)}
    lists |= {tuple(part.integers("aux_hidden_state_layer_ids")) for part in (parts.nested, parts.outer)}
    states = sorted(lists - {()})
    if len(states) != 1:
        raise CheckpointError(
            "target_layer_ids", "expected one list in config.json of the target's layers whose outputs the head reads, "
            f"got {f'the states {states}' if states else 'none'}; pass feature_layers= with the target's state indices",
        )  # fmt: skip
    return states[0]
