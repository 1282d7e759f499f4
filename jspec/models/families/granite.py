"""The dense Granite family (Granite 3): constant factors of embedding, scores, residual sums and logits."""

from __future__ import annotations

from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.families import register
from jspec.models.families.llama import Llama


@register("granite")
class Granite(Llama):
    """Granite 3 without experts."""

    published: ClassVar = "Granite 3 (dense)"
    defaults: ClassVar = {"rms_norm_eps": 1e-6}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return super().attention(fields) | {"scale": fields.number("attention_multiplier", 1.0)}

    def layer(self, fields: Fields) -> dict[str, Any]:
        return {"residual_scale": fields.number("residual_multiplier", 1.0)}

    def model(self, fields: Fields) -> dict[str, Any]:
        return {
            "embed_scale": fields.number("embedding_multiplier", 1.0),
            "logit_divisor": fields.number("logits_scaling", 1.0),
        }
