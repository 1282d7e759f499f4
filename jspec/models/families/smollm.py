"""The SmolLM family from SmolLM3 on: Llama's layers, some of them without a rotary embedding (arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types, read_rope_layers
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.parts.rope import NO_ROPE


@register("smollm3")
class SmolLM3(Llama):
    """SmolLM3: every fourth layer has no rotary embedding; only these layers may have a window."""

    published: ClassVar = "SmolLM3"
    defaults: ClassVar = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    fixed: ClassVar = {"mlp_bias": False}
    theta: ClassVar = 2000000.0

    def decoder(self, fields: Fields, *, rope_theta: float | None = None) -> dict[str, Any]:
        read = super().decoder(fields, rope_theta=rope_theta)
        pairs = zip(read["layers"], read_rope_layers(fields), strict=True)
        return {**read, "layers": tuple(layer if has_rope else _without_rope(layer) for layer, has_rope in pairs)}

    def layer_types(self, fields: Fields) -> list[str]:
        slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
        types = [FULL if has_rope or not slides else SLIDING for has_rope in read_rope_layers(fields)]
        return read_layer_types(fields, types)


def _without_rope(layer: LayerConfig) -> LayerConfig:
    return replace(layer, mixer=replace(layer.gqa, rope=NO_ROPE))
