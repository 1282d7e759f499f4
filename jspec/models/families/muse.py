"""The Muse family (text): a normed embedding, windows in three of four layers, and gates of the heads' outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from convert.fields import Fields
from convert.huggingface import MapRow
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types, read_rope
from jspec.models.families import register
from jspec.models.families.gemma import Gemma2
from jspec.models.families.llama import Llama
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.rope import NO_ROPE, Rope
from jspec.models.weights.weight_map import plus_one


@register("muse_glimmer_text")
class MuseGlimmer(Llama):
    """Muse Glimmer: queries and keys are normed without weights; layers that see all tokens rotate nothing."""

    published: ClassVar = "Muse Glimmer 30B (text)"
    defaults: ClassVar = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "sliding_window": 2048, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8,
    }  # fmt: skip
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False}
    names: ClassVar = {
        **Gemma2.names,
        "qkv": tuple(f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "gate")),
    }

    def layer_types(self, fields: Fields) -> list[str]:
        count = fields.integer("num_hidden_layers")
        return read_layer_types(fields, [SLIDING if (count - 1 - i) % 4 else FULL for i in range(count)])

    def attention(self, fields: Fields) -> dict[str, Any]:
        scale = fields.number("qk_scale_factor") * fields.integer("head_dim") ** -0.5
        return {"scale": scale, "qk_norm": "unit", "output_gate": True, "gates_apart": True}

    def mixers(self, fields: Fields, heads: GQA, ropes: Sequence[Rope], types: Sequence[str]) -> Sequence[Mixer]:
        pairs = zip(ropes, self._rotates(fields), strict=True)
        return super().mixers(fields, heads, [rope if rotates else NO_ROPE for rope, rotates in pairs], types)

    def _rotates(self, fields: Fields) -> list[bool]:
        """Read whether each layer has the rotary embedding; of its bases, 0 stands for none."""
        count, bases = fields.integer("num_hidden_layers"), fields.get("layer_rope_theta")
        if bases is None:
            return [bool((count - 1 - i) % 4) for i in range(count)]
        theta = read_rope(fields, default=self.theta).theta
        if not isinstance(bases, list) or len(bases) != count or any(base not in (0, theta) for base in bases):
            raise fields.error("layer_rope_theta", f"{count} numbers, one for each layer, rope_theta {theta:g} or 0")
        return [bool(base) for base in bases]

    def layer(self, fields: Fields) -> dict[str, Any]:
        return {"norms": "both", "post_norm_eps": fields.number("post_norm_eps")}

    def model(self, fields: Fields) -> dict[str, Any]:
        return {
            "norms_embedding": True,
            "norms_in_float32": True,
            "logit_divisor": 1 / fields.number("output_multiplier"),
            "logit_softcap": fields.number("final_logit_softcapping"),
        }

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        """Return the rows of the weight map; the norms of layers, not the last one, are stored minus 1."""
        made = super().weights(config, names)
        return [plus_one(row) if row.parameter.endswith("_norm") else row for row in made]
