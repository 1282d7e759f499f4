"""Reads the files of DFlash heads (config.json, tensor names, vocabulary maps) in the formats of their exporters.

The DFlash authors and SpecForge write a Qwen 3 config with `block_size` and the object `dflash_config`. The exporter
speculators puts the layers' config under `transformer_layer_config`, and the other keys beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.detect import bare_name
from convert.fields import CheckpointError, Fields, require
from convert.huggingface import Row, renamed
from convert.sources import Source
from jspec.draft.dflash_head import dflash_params
from jspec.draft.eagle_formats import Parts
from jspec.draft.head_config import DFlashConfig, Overrides
from jspec.draft.head_layers import FAMILIES, check_tensors
from jspec.draft.head_weights import weight_rows
from jspec.models.hf_config import SLIDING
from jspec.models.layer_config import GQA, unsupported
from jspec.models.load import Format, check_count, with_scheme
from jspec.models.params import Params

READ = {  # keys of `dflash_config` that are read
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"),
    *("causal", "use_swa", "swa_window_size"),
}
# Options that change a head's forward pass, in `dflash_config` or beside it, each with its only supported value.
OPTIONS: dict[str, Any] = {
    "projector_type": "dflash",
    "attention_mode": "gqa",
    "sample_from_anchor": False,
    "shift_label": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
}
LAYERS = ("qwen3", "llama")  # values of `model_type`; a head's layers are those of Qwen 3 whichever it is


def dflash_format(kind: str = "dflash", overrides: Overrides | None = None) -> Format:
    """Return the format of DFlash heads, for files of any exporter.

    Args:
        kind: "dflash".
        overrides: config values that replace those of the file.
    """
    assert kind == "dflash", kind
    given = overrides or Overrides()

    def from_hf(fields: Fields, source: Source) -> tuple[DFlashConfig, list[Row]]:
        names = {bare_name(name): name for name in source.tensors}
        check_tensors(names)
        config = read_dflash(fields, given)
        check_count("num_hidden_layers", config.num_layers, source.tensors)
        is_reduced = config.draft_vocab_size < config.vocab_size
        params = dflash_params(
            config,
            has_embed="embed_tokens.weight" in names,
            has_head=is_reduced or "lm_head.weight" in names,
            has_map=is_reduced or "d2t" in names,
        )
        return config, renamed(weight_rows(config, params, names), names)

    def params(config: DFlashConfig, names: Collection[str]) -> Params:
        check_count("num_layers", config.num_layers, names)
        owned = {"has_embed": "embed" in names, "has_head": "head" in names}
        return dflash_params(config, **owned, has_map="draft_to_target" in names)

    return Format(with_scheme(from_hf), DFlashConfig.from_json, params, given.apply)


def read_dflash(config: Mapping[str, Any], overrides: Overrides | None = None) -> DFlashConfig:
    """Read the config.json of a DFlash head.

    Args:
        config: parsed config.json.
        overrides: config values that replace those of the file.

    Raises:
        CheckpointError: keys are missing, a value has another type, or values contradict each other.
        NotImplementedError: an option is not supported.
    """
    overrides, fields = overrides or Overrides(), Fields.of(config)
    parts = _parts(fields)
    _check_options(parts)
    kind = parts.layer.text("model_type", "qwen3")
    if kind not in LAYERS:
        raise unsupported("model_type", kind, " or ".join(map(repr, LAYERS)) + " for the layers of a DFlash head")
    read = FAMILIES[kind].decoder(_with_windows(parts), rope_theta=overrides.rope_theta)
    layers = tuple(replace(layer, attention=_in_block(layer.attention, parts)) for layer in read["layers"])
    mask = parts.one("mask_token_id")
    return DFlashConfig(
        **{**read, "layers": layers},
        draft_vocab_size=parts.integer("draft_vocab_size", default=read["vocab_size"]),
        target_hidden_size=parts.integer("target_hidden_size", default=read["hidden_size"]),
        feature_layers=overrides.feature_layers or _feature_layers(parts, len(layers)),
        source_format=parts.source_format,
        block_size=Fields({"block_size": parts.one("block_size")}, fields.place).integer("block_size"),
        mask_token_id=Fields({"mask_token_id": mask}, fields.place).integer("mask_token_id", least=0),
    )


def _parts(fields: Fields) -> Parts:
    nested = fields.object("dflash_config")
    if "speculators_model_type" not in fields:
        return Parts("official", fields, fields, nested)
    require(fields, ("transformer_layer_config",))
    return Parts("speculators", fields.object("transformer_layer_config"), fields, nested)


def _check_options(parts: Parts) -> None:
    """Raise NotImplementedError if an option has an unsupported value, or if `dflash_config` has an unknown one."""
    for name, value in OPTIONS.items():
        for got in parts.values(name):
            if got != value or isinstance(got, bool) != isinstance(value, bool):
                raise unsupported(name, got, str(value))
    for name in parts.nested:
        if name not in READ | OPTIONS.keys() and parts.nested[name] is not None:
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
    own = {"layer_types": types, "use_sliding_window": True, "sliding_window": window.integer("sliding_window")}
    return Fields({**layer, **own}, layer.place)


def _in_block(attention: GQA, parts: Parts) -> GQA:
    """Return a layer's attention with the options that all layers of DFlash heads have.

    A token attends to no later token of its block in layers with a window, unless the file says otherwise.
    """
    slides = attention.window is not None and not parts.flag("use_swa")
    causal = parts.flag("causal", "is_causal", default=slides and not parts.flag("sliding_window_non_causal"))
    return replace(attention, qk_norm="head", causal=causal)


def _feature_layers(parts: Parts, num_layers: int) -> tuple[int, ...]:
    """Read the indices of the target states that the head reads, in the order in which they are concatenated.

    The ids of speculators (`aux_hidden_state_layer_ids`) are indices of states, the others are indices of layers. The
    output of layer j is state j + 1; for the target's last layer it is the state after the final norm, as transformers
    returns it.
    """
    count = parts.integer("num_target_layers", default=MOST_LAYERS)

    def after(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(count + 1 if layer == count - 1 else layer + 1 for layer in layers)

    found = {after(part.integers("target_layer_ids")) for part in (parts.nested, parts.outer)}
    found |= {tuple(part.integers("aux_hidden_state_layer_ids")) for part in (parts.nested, parts.outer)}
    states = sorted(found - {()})
    if len(states) > 1:
        raise CheckpointError(
            "target_layer_ids", f"expected one list in config.json, got the states {states}; pass feature_layers= with "
            "the target's state indices",
        )  # fmt: skip
    return states[0] if states else after(_default_layers(parts, num_layers))


MOST_LAYERS = 2**30  # number of a target's layers if the file does not give it


def _default_layers(parts: Parts, num_layers: int) -> tuple[int, ...]:
    """Return the layers that the authors' code takes for a file without a list: evenly spaced from 1 to N - 3."""
    if parts.one("num_target_layers") is None:
        raise CheckpointError(
            "target_layer_ids", "expected the indices of the target's layers whose outputs the head reads, or "
            "num_target_layers, got neither; pass feature_layers= with the target's state indices",
        )  # fmt: skip
    count = parts.integer("num_target_layers", default=1)
    if num_layers == 1:
        return (count // 2,)
    return tuple(round(1 + index * (count - 4) / (num_layers - 1)) for index in range(num_layers))
