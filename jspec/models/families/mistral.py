"""The dense Mistral families (arXiv:2310.06825): Mistral, Ministral and Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.hf_config import FULL, SLIDING, all_layers, read_layer_types
from jspec.models.layer_config import Rope


@register("mistral")
class Mistral(Llama):
    """Mistral: every layer has a sliding window, unless `sliding_window` is null."""

    published: ClassVar = "Mistral 7B, Nemo, Small 3 (text)"
    defaults: ClassVar = {"sliding_window": 4096}
    fixed: ClassVar = {"mlp_bias": False, "attention_bias": False}

    def layer_types(self, fields: Fields) -> list[str]:
        return all_layers(fields, FULL if fields.get("sliding_window") is None else SLIDING)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {}


@register("ministral")
class Ministral(Mistral):
    """Ministral: the config may give the type of each layer."""

    published: ClassVar = "Ministral 8B"

    def layer_types(self, fields: Fields) -> list[str]:
        return read_layer_types(fields, super().layer_types(fields))


@register("ministral3")
class Ministral3(Mistral):
    """Ministral 3: rotated queries are multiplied by a factor that grows with their position."""

    published: ClassVar = "Ministral 3 (text)"
    defaults: ClassVar = {"sliding_window": None, "head_dim": 128}

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        forms = [fields.object(name) for name in ("rope_parameters", "rope_scaling")]
        beta = next((form.number("llama_4_scaling_beta") for form in forms if form.get("llama_4_scaling_beta")), 0.0)
        ropes = super().ropes(fields, theta)
        return {kind: replace(rope, temperature=beta) for kind, rope in ropes.items()}
