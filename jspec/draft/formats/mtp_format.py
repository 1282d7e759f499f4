"""Reads from a model's folder its own layer that predicts further tokens (arXiv:2412.19437).

DeepSeek V3 and GLM have it after their last layer: `model.layers.N` of a model of N layers has the tensors of a
layer, and `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`. The hybrid Qwen models have it beside their layers:
`mtp.layers.0` is a layer with attention, whatever the model's others are, and `mtp.fc` joins the inputs. Nemotron-H,
whose layers have one part each, has attention in `mtp.layers.0` and experts in `mtp.layers.1`, and the other tensors in
either; we read both as one layer. Copies of the model's embedding and output head are not read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from convert.detect import LATER_COUNTS, later_layers
from convert.fields import CheckpointError, Fields, read_json
from convert.huggingface import MapRow, renamed
from convert.sources import Source, open_source
from jspec.draft.eagle_head import head_params
from jspec.draft.head_config import MTPConfig
from jspec.models.config.hf_config import FULL, refuse
from jspec.models.families.deepseek import DeepseekV3, KimiK2
from jspec.models.families.glm import Glm4Moe, Glm4MoeLite
from jspec.models.families.llama import Llama
from jspec.models.families.nemotron import MOE, NemotronH, types_of
from jspec.models.families.qwen_hybrid import Qwen3Next, Qwen35, Qwen35Moe
from jspec.models.load import Format, read_plan, text_model, text_names, with_scheme
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params
from jspec.models.weights.params import rows
from jspec.models.weights.weight_map import Names, as_computed, layer_tensors

logger = logging.getLogger(__name__)

AFTER: dict[str, Llama] = {
    "deepseek_v3": DeepseekV3(),
    "kimi_k2": KimiK2(),
    "glm4_moe": Glm4Moe(),
    "glm4_moe_lite": Glm4MoeLite(),
}
BESIDE: dict[str, Llama] = {"qwen3_5_text": Qwen35(), "qwen3_5_moe_text": Qwen35Moe(), "qwen3_next": Qwen3Next()}
IN_PARTS: dict[str, Llama] = {"nemotron_h": NemotronH()}
FAMILIES = AFTER | BESIDE | IN_PARTS
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
BESIDE_LAYER = re.compile(r"mtp\.layers\.([0-9]{1,6})\..*")
PARTS = [FULL, MOE]  # the only types of the layers of Nemotron-H that are supported
OF_MIXER = ("qkv", "o")  # parameters of the first of them; the others are those of the second
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": [FULL], "mlp_only_layers": [], "decoder_sparse_step": 1}


class MTPNames(NamedTuple):
    """The names of the tensors of a layer that predicts further tokens."""

    prefix: str  # of all of them
    layers: tuple[str, ...]  # prefixes of the decoder layer, one for each of its parts if they are apart
    joined: Mapping[str, str]  # names of the other tensors after the prefix, without their end, by parameter

    def reads(self, name: str) -> bool:
        """Return whether a tensor belongs to the layer."""
        prefixes = tuple(f"{layer}." for layer in self.layers)
        other = BESIDE_LAYER.fullmatch(name) is not None and not name.startswith(prefixes)
        return name.startswith(self.prefix) and not name.endswith(COPIES) and not other


def mtp_names(fields: Fields) -> MTPNames:
    """Return the names of the layer's tensors for a model's config.json."""
    kind = fields.text("model_type", "llama")
    if kind in BESIDE:
        norms = {"embed_norm": "pre_fc_norm_embedding", "feature_norm": "pre_fc_norm_hidden", "norm": "norm"}
        return MTPNames("mtp.", ("mtp.layers.0",), {"fc": "fc", **norms})
    if kind in IN_PARTS:
        norms = {"embed_norm": "layers.0.enorm", "feature_norm": "layers.0.hnorm", "norm": "layers.1.final_layernorm"}
        return MTPNames("mtp.", ("mtp.layers.0", "mtp.layers.1"), {"fc": "layers.0.eh_proj", **norms})
    layer = f"model.layers.{fields.integer('num_hidden_layers')}"
    norms = {"embed_norm": "enorm", "feature_norm": "hnorm", "norm": "shared_head.norm"}
    return MTPNames(f"{layer}.", (layer,), {"fc": "eh_proj", **norms})


def mtp_format(kind: str, *, norm_output: bool = True, dequantize: bool = False) -> Format:
    """Return the format by which a target's folder is read as an MTP layer.

    Args:
        kind: kind of the checkpoint, "target".
        norm_output: field of `MTPConfig`.
        dequantize: whether quantised weights are widened.
    """
    assert kind == "target", kind

    def from_hf(fields: Fields, source: Source) -> tuple[MTPConfig, list[MapRow]]:
        fields, names = text_model(fields, source)
        config, family = read_mtp(fields, names, norm_output=norm_output)
        naming = mtp_names(fields)
        names = {name: stored for name, stored in names.items() if naming.reads(name)}
        stored = set(names.values())
        source.tensors = {name: tensor for name, tensor in source.tensors.items() if name in stored}
        params = head_params(config)
        layer = family.layer_names(config.layers[0], names)
        layer = {**layer, "input_norm": layer["attn_norm"]}
        is_apart = len(naming.layers) > 1
        prefix, layer = ("mtp.layers", _by_part(layer)) if is_apart else (naming.layers[0], layer)
        tensors = layer_tensors(params, "layers.0", prefix, layer)
        tensors |= {name: [f"{naming.prefix}{tensor}.weight"] for name, tensor in naming.joined.items()}
        made = as_computed(rows(params, tensors), config, norms_less_one=family.norms_less_one)
        return config, renamed(made, names)

    def from_json(fields: Fields) -> MTPConfig:
        raise CheckpointError(
            fields.place, "expected the Hugging Face folder of a model, as converted folders are without MTP layers; "
            "give the folder that this one was converted from",
        )  # fmt: skip

    def params(config: MTPConfig, names: Collection[str]) -> Params:
        return head_params(config)

    return Format(with_scheme(from_hf, dequantize=dequantize, is_part=True), from_json, params)


def _by_part(layer: Names) -> Names:
    """Return the names of the tensors of a layer whose mixer and feed-forward are apart, after the index of each."""
    first = (*OF_MIXER, "input_norm")
    return {name: [f"{int(name not in first)}.{tensor}" for tensor in tensors] for name, tensors in layer.items()}


def read_mtp(fields: Fields, names: Collection[str], *, norm_output: bool = True) -> tuple[MTPConfig, Llama]:
    """Read the config of the first layer that predicts further tokens from a model's config.json.

    Args:
        fields: parsed config.json, which may leave out the number of these layers.
        names: names of the model's tensors.
        norm_output: field of `MTPConfig`.

    Returns:
        The config, and the family of the layer.

    Raises:
        CheckpointError: the model has no such layer, or a value is impossible.
        NotImplementedError: the layers of the model's family are not supported, or an option of theirs.
    """
    kind = fields.text("model_type", "llama")
    if kind not in FAMILIES:
        raise unsupported("model_type", kind, " or ".join(map(repr, FAMILIES)) + " for MTP layers")
    refuse(fields, {"mtp_use_dedicated_embeddings": False})
    _check_count(fields, names)
    read = FAMILIES[kind].decoder(Fields({**fields, **_layers_of(fields, kind)}, fields.place))
    sizes = {"draft_vocab_size": read["vocab_size"], "target_hidden_size": read["hidden_size"]}
    *others, layer = read["layers"]
    if kind in IN_PARTS:
        layer = replace(layer, mixer=others[0].mixer)
    options = {**read, **sizes, "layers": (layer,), "norm_output": norm_output}
    return MTPConfig(**options, feature_layers=None, source_format="the model's own"), FAMILIES[kind]


def _layers_of(fields: Fields, kind: str) -> dict[str, Any]:
    """Return the keys of a config.json by which a family reads the layer that predicts further tokens as its last one.

    Raises:
        CheckpointError: the list and the text of its parts differ.
        NotImplementedError: the layer has other parts than are supported.
    """
    if kind in BESIDE:
        return ONE_LAYER
    if kind not in IN_PARTS:
        return {"num_hidden_layers": fields.integer("num_hidden_layers") + 1, "mlp_layer_types": None}
    parts = types_of(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern", PARTS)
    if parts != PARTS:
        raise unsupported("mtp_layers_block_type", parts, str(PARTS))
    others = dict.fromkeys(("layer_types", "hybrid_override_pattern", "num_hidden_layers"))
    return {"layers_block_type": PARTS, **others}


def has_mtp_layer(folder: Path) -> bool:
    """Return whether a target's folder has a layer of its own that predicts further tokens, and it can be read.

    A warning says why a layer that the folder has cannot be read.

    Args:
        folder: Hugging Face folder.

    Raises:
        CheckpointError: a file of the folder is damaged.
    """
    fields = read_json(folder / "config.json")
    fields = fields.object("text_config") or fields
    if fields.text("model_type", "llama") not in FAMILIES:
        return False
    naming = mtp_names(fields)
    if not any(naming.reads(name) for name in text_names(open_source(folder).tensors)):
        return False
    try:
        read_plan(folder, mtp_format, kind="target")
    except (ValueError, NotImplementedError) as error:
        logger.warning("the model's layer that predicts further tokens cannot draft: %s", error)
        return False
    return True


def _check_count(fields: Fields, names: Collection[str]) -> None:
    """Raise CheckpointError if a model has no layer that predicts further tokens, by its config and its tensors."""
    kind = fields.text("model_type", "llama")
    is_beside = kind in BESIDE
    stored = {match[1] for name in names if (match := BESIDE_LAYER.fullmatch(name))}
    key = next((name for name in reversed(LATER_COUNTS) if fields.get(name) is not None), LATER_COUNTS[is_beside])
    parts = len(PARTS) if kind in IN_PARTS else 1
    counted = max(-(-len(stored) // parts), fields.integer(key, 0, least=0))
    count = len(later_layers(fields, names)) if kind in AFTER else counted
    if not count:
        raise fields.error(key, "at least 1, as MTP drafts with a layer of the model's own")
    if count > 1:
        logger.info("MTP drafts every token with the first of the %d layers that predict further tokens", count)
