"""The Llama 4 family (text): chunks of attention, layers without rotary embeddings, experts with weighted inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from convert.fields import Fields, is_int
from convert.huggingface import MapRow
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import CHUNKED, FULL, read_layer_types, read_rope_layers
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import NO_ROPE, Rope
from jspec.models.weights.weight_map import LAYER, Names, input_major, model_rows

MLP, SHARED, EXPERTS = "feed_forward", "feed_forward.shared_expert", "feed_forward.experts"
SEPARATE: Names = {  # as files have them whose experts are quantised one by one
    "experts_gate_up": (f"{EXPERTS}.{{}}.gate_proj.weight", f"{EXPERTS}.{{}}.up_proj.weight"),
    "experts_down": (f"{EXPERTS}.{{}}.down_proj.weight",),
}


@register("llama4_text")
class Llama4(Llama):
    """Llama 4: layers with a rotary embedding have chunks; the others see all, and queries have a temperature."""

    published: ClassVar = "Llama 4 Scout, Maverick (text)"
    defaults: ClassVar = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
    }
    theta: ClassVar = 500000.0
    names: ClassVar = {
        **LAYER,
        "gate_up": (f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"),
        "down": (f"{MLP}.down_proj.weight",),
        "shared_gate_up": (f"{SHARED}.gate_proj.weight", f"{SHARED}.up_proj.weight"),
        "shared_down": (f"{SHARED}.down_proj.weight",),
        "router": (f"{MLP}.router.weight",),
        "experts_gate_up": (f"{EXPERTS}.gate_up_proj",),
        "experts_down": (f"{EXPERTS}.down_proj",),
    }

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        if any(f".{EXPERTS}.0." in name for name in names):
            return model_rows(config, names, lambda layer: {**self.names, **SEPARATE})
        made = super().weights(config, names)
        return [input_major(row) if row.parameter.rpartition(".")[2] in SEPARATE else row for row in made]

    def layer_types(self, fields: Fields) -> list[str]:
        has_chunks = fields.get("attention_chunk_size") is not None
        default = [CHUNKED if has_rope and has_chunks else FULL for has_rope in read_rope_layers(fields)]
        return read_layer_types(fields, default, limited=CHUNKED)

    def mixers(self, fields: Fields, heads: GQA, ropes: Sequence[Rope], types: Sequence[str]) -> Sequence[Mixer]:
        chunks = {FULL: None, CHUNKED: fields.integer("attention_chunk_size") if CHUNKED in types else None}
        attention = replace(heads, **self.attention(fields), is_interleaved=True)
        norm, still = "unit" if fields.flag("use_qk_norm") else None, _without_rotation(fields)
        each = zip(read_rope_layers(fields), ropes, types, strict=True)
        return [
            replace(attention, chunk=chunks[kind], rope=rope if has_rope else still, qk_norm=norm if has_rope else None)
            for has_rope, rope, kind in each
        ]

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("num_local_experts", 16),
            fields.integer("num_experts_per_tok", 1),
            scores="sigmoid",
            is_normalised=False,
        )
        count, step = fields.integer("num_hidden_layers"), fields.integer("interleave_moe_layer_step", 1)
        has_list = fields.get("moe_layers") is not None
        mixed = fields.integers("moe_layers") if has_list else range(step - 1, count, step)
        experts = Experts(dense.width, router, dense.activation, shared=dense.width, weighs_inputs=True)
        others = replace(dense, width=fields.integer("intermediate_size_mlp", 16384))
        return [experts if index in mixed else others for index in range(count)]


def _without_rotation(fields: Fields) -> Rope:
    """Return the rotary embedding of layers that rotate nothing; their queries may have a temperature."""
    tuned = fields["attn_temperature_tuning"]
    if not (isinstance(tuned, bool) or is_int(tuned)):  # older files have 4 for true
        raise fields.error("attn_temperature_tuning", "true, false or an integer")
    if not tuned:
        return NO_ROPE
    scale, length = fields.number("attn_scale"), fields.integer("floor_scale")
    return Rope(kind="none", temperature=scale, temperature_offset=1, original_max_position=length)
