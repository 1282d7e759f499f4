"""The Phi family from Phi-3 on (arXiv:2404.14219): fused projections in the file, and "longrope"."""

from __future__ import annotations

from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.hf_config import FULL, SLIDING, all_layers
from jspec.models.weight_map import LAYER


@register("phi3")
class Phi3(Llama):
    """Phi-3, 3.5 and 4: every layer has a sliding window, unless `sliding_window` is null or absent."""

    published: ClassVar = "Phi 3, 3.5 mini, 4, 4 mini"
    fixed: ClassVar = {"mlp_bias": False, "attention_bias": False}
    rotates_parts: ClassVar = True
    names: ClassVar = {**LAYER, "qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)}

    def layer_types(self, fields: Fields) -> list[str]:
        return all_layers(fields, FULL if fields.get("sliding_window") is None else SLIDING)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {}
