"""The dense OLMo families from OLMo 2 on (arXiv:2501.00656): norms after attention and feed-forward, none before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER


@register("olmo2")
class Olmo2(Llama):
    """OLMo 2: queries of all heads are normed together before the rotation, and so are the keys."""

    published: ClassVar = "OLMo 2"
    names: ClassVar = {
        **LAYER,
        "attn_post_norm": ("post_attention_layernorm.weight",),
        "mlp_post_norm": ("post_feedforward_layernorm.weight",),
    }

    def attention(self, fields: Fields) -> dict[str, Any]:
        return super().attention(fields) | {"qk_norm": "all"}

    def layer(self, fields: Fields) -> dict[str, Any]:
        return {"norms": "post"}

    def model(self, fields: Fields) -> dict[str, Any]:
        return {"norms_in_float32": True}


@register("olmo3")
class Olmo3(Olmo2):
    """OLMo 3: three of four layers have a window; only the others scale their rotary frequencies."""

    published: ClassVar = "OLMo 3"
    defaults: ClassVar = {"sliding_window": 4096}
    theta: ClassVar = 500000.0

    def layer_types(self, fields: Fields) -> list[str]:
        count = fields.integer("num_hidden_layers")
        return read_layer_types(fields, [SLIDING if (i + 1) % 4 else FULL for i in range(count)])

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        ropes = super().ropes(fields, theta)
        if fields.get("rope_parameters") is None:
            ropes = {**ropes, SLIDING: Rope(theta=ropes[FULL].theta)}
        return ropes
