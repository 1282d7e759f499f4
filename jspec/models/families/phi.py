"""The Phi family from Phi-3 on (arXiv:2404.14219): fused projections in the file, and "longrope"."""

from __future__ import annotations

from typing import ClassVar

from jspec.models.families import register
from jspec.models.families.mistral import Mistral
from jspec.models.weights.weight_map import LAYER


@register("phi3")
class Phi3(Mistral):
    """Phi-3, 3.5 and 4: every layer has a sliding window, unless `sliding_window` is null or absent."""

    published: ClassVar = "Phi 3, 3.5 mini, 4, 4 mini"
    defaults: ClassVar = {}
    rotates_parts: ClassVar = True
    names: ClassVar = {**LAYER, "qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)}
