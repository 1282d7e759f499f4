"""The Laguna family: windows, a number of heads for each layer, gates of heads, and experts behind a dense layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, read_dense_layers, read_layer_types
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.families.qwen_hybrid import Qwen35
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import Rope

GATINGS = (True, "per-head", "per-element")
ROPES = {  # of a config.json that gives none, as in transformers
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}


@register("laguna")
class Laguna(Llama):
    """Laguna: a head's output is multiplied by the softplus of a further product of the layer's input."""

    published: ClassVar = "Laguna XS.2"
    defaults: ClassVar = {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072,
        "sliding_window": 512, "gating": True, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 1.0,
    }  # fmt: skip
    fixed: ClassVar = {
        "mlp_bias": False, "rope_scaling": None, "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0, "norm_topk_prob": True, "swa_attention_sink_enabled": False,
    }  # fmt: skip
    names: ClassVar = {
        **Qwen35.names,
        "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkvg"),
        "router_correction": ("mlp.experts.e_score_correction_bias",),
    }
    rotates_parts: ClassVar = True

    def layer_types(self, fields: Fields) -> list[str]:
        return read_layer_types(fields, [FULL] * fields.integer("num_hidden_layers"))

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        by_type = fields.object("rope_parameters") or ROPES
        if not all(isinstance(value, Mapping) for value in by_type.values()):
            raise fields.error("rope_parameters", "an object for each layer type")
        others = {name: fields[name] for name in fields if name != "partial_rotary_factor"}  # each type has its own
        return super().ropes(Fields({**others, "rope_parameters": by_type}, fields.place), theta)

    def attention(self, fields: Fields) -> dict[str, Any]:
        if (gating := fields["gating"]) not in GATINGS:
            raise fields.error("gating", " or ".join(map(repr, GATINGS)))
        gates = {"output_gate": True, "gates_apart": True, "head_gates": gating != "per-element"}
        return {**super().attention(fields), "qk_norm": "head", "gate_function": "softplus", **gates}

    def mixers(self, fields: Fields, heads: GQA, ropes: Sequence[Rope], types: Sequence[str]) -> Sequence[Mixer]:
        name, count = "num_attention_heads_per_layer", fields.integer("num_hidden_layers")
        counts = fields.integers(name) or [heads.heads] * count
        if len(counts) != count or 0 in counts:
            raise fields.error(name, f"{count} integers from 1, one for each layer")
        each = zip(counts, ropes, types, strict=True)
        return [
            super(Laguna, self).mixers(fields, replace(heads, heads=n), [rope], [kind])[0] for n, rope, kind in each
        ]

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("num_experts"),
            fields.integer("num_experts_per_tok"),
            scores="sigmoid",
            factor=fields.number("moe_routed_scaling_factor"),
            correction=True,
        )
        shared = fields.integer("shared_expert_intermediate_size")
        experts = Experts(fields.integer("moe_intermediate_size"), router, dense.activation, shared=shared)
        return [dense if is_dense else experts for is_dense in read_dense_layers(fields)]
