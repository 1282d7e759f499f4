"""The dense Qwen families: Qwen 2 and 2.5 (arXiv:2412.15115), which have biases, and Qwen 3 (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.hf_config import FULL, SLIDING, read_layer_types


class Qwen(Llama):
    """What the dense Qwen families share: windows of the last layers."""

    fixed: ClassVar = {"mlp_bias": False}

    def layer_types(self, fields: Fields) -> list[str]:
        slides = fields.flag("use_sliding_window") and fields.get("sliding_window", 4096) is not None
        first = fields.integer("max_window_layers", 28, least=0)
        count = fields.integer("num_hidden_layers")
        types = read_layer_types(fields, [SLIDING if slides and i >= first else FULL for i in range(count)])
        return types if slides else [FULL] * count


@register("qwen2")
class Qwen2(Qwen):
    """Qwen 2 and 2.5: queries, keys and values have a bias, the attention's output has none."""

    published: ClassVar = "Qwen 2, 2.5, QwQ"
    defaults: ClassVar = {"sliding_window": 4096}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"bias": True}


@register("qwen3")
class Qwen3(Qwen):
    """Qwen 3 without experts: each query and key head is normed before its rotation."""

    published: ClassVar = "Qwen 3 (0.6B to 32B)"
    defaults: ClassVar = {"sliding_window": 4096, "head_dim": 128}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return super().attention(fields) | {"qk_norm": "head"}
