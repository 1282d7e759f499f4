"""The Seed-OSS family: the layers of Llama, with a bias of the attention's output that has a key of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.families import register
from jspec.models.families.llama import Llama


@register("seed_oss")
class SeedOss(Llama):
    """Seed-OSS: by default queries, keys and values have a bias, the attention's output has none."""

    published: ClassVar = "Seed-OSS 36B"
    defaults: ClassVar = {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1e-6}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"bias": fields.flag("attention_bias"), "output_bias": fields.flag("attention_out_bias")}
