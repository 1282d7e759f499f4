"""Reads from a model's folder the layer behind its last one, which predicts further tokens (arXiv:2412.19437).

The layer `model.layers.N` of a model of N layers has the tensors of a layer, and `enorm`, `hnorm`, `eh_proj` and
`shared_head.norm`. Its copies of the model's embedding and output head are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from convert.detect import later_layers
from convert.fields import CheckpointError, Fields
from convert.huggingface import MapRow, renamed
from convert.sources import Source
from jspec.draft.eagle_head import head_params
from jspec.draft.head_config import MTPConfig
from jspec.models.families.deepseek import DeepseekV3, KimiK2
from jspec.models.families.glm import Glm4Moe
from jspec.models.families.llama import Llama
from jspec.models.load import Format, text_model, with_scheme
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params
from jspec.models.weights.params import rows
from jspec.models.weights.weight_map import in_kernel_order, layer_tensors

logger = logging.getLogger(__name__)

COUNT = "num_nextn_predict_layers"  # key of a config.json: number of these layers
FAMILIES: dict[str, Llama] = {"deepseek_v3": DeepseekV3(), "kimi_k2": KimiK2(), "glm4_moe": Glm4Moe()}
# Tensor names by parameter, after the layer's prefix.
JOINED = {"fc": "eh_proj", "embed_norm": "enorm", "feature_norm": "hnorm", "norm": "shared_head.norm"}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


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
        prefix = f"model.layers.{fields.integer('num_hidden_layers')}."
        names = {name: stored for name, stored in names.items() if _is_read(name, prefix)}
        stored = set(names.values())
        source.tensors = {name: tensor for name, tensor in source.tensors.items() if name in stored}
        params, layer = (
            head_params(config),
            {**family.layer_names(config.layers[0], names), "input_norm": ("input_layernorm.weight",)},
        )
        tensors = layer_tensors(params, "layers.0", prefix.removesuffix("."), layer)
        tensors |= {name: [f"{prefix}{tensor}.weight"] for name, tensor in JOINED.items()}
        return config, renamed([in_kernel_order(row, config) for row in rows(params, tensors)], names)

    def from_json(fields: Fields) -> MTPConfig:
        raise CheckpointError(
            fields.place, "expected the Hugging Face folder of a model, as converted folders are without MTP layers; "
            "give the folder that this one was converted from",
        )  # fmt: skip

    def params(config: MTPConfig, names: Collection[str]) -> Params:
        return head_params(config)

    return Format(with_scheme(from_hf, dequantize=dequantize, is_part=True), from_json, params)


def _is_read(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and not name.endswith(COPIES)


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
        NotImplementedError: the layers of the model's family are not supported.
    """
    kind, count = fields.text("model_type", "llama"), len(later_layers(fields, names))
    if kind not in FAMILIES:
        raise unsupported("model_type", kind, " or ".join(map(repr, FAMILIES)) + " for MTP layers")
    if not count:
        raise fields.error(COUNT, "at least 1, as MTP drafts with a layer of the model's own")
    if count > 1:
        logger.info("MTP drafts every token with the first of the %d layers that predict further tokens", count)
    layers = fields.integer("num_hidden_layers") + 1
    read = FAMILIES[kind].decoder(Fields({**fields, "num_hidden_layers": layers}, fields.place))
    sizes = {"draft_vocab_size": read["vocab_size"], "target_hidden_size": read["hidden_size"]}
    options = {**read, **sizes, "layers": read["layers"][-1:], "norm_output": norm_output}
    return MTPConfig(**options, feature_layers=None, source_format="the model's own"), FAMILIES[kind]
