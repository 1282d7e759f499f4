"""The Mistral families (arXiv:2310.06825): Mistral, Ministral, Ministral 3, and Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, all_layers, read_layer_types
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER

# The rotary embedding of a Ministral 3 config.json that gives none, as in transformers.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


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
        if all(fields.get(name) is None for name in ("rope_parameters", "rope_scaling")):
            fields = Fields({**fields, "rope_theta": None, "rope_parameters": YARN}, fields.place)
        forms = [fields.object(name) for name in ("rope_parameters", "rope_scaling")]
        beta = next((form.number("llama_4_scaling_beta") for form in forms if form.get("llama_4_scaling_beta")), 0.0)
        ropes = super().ropes(fields, theta)
        return {kind: replace(rope, temperature=beta) for kind, rope in ropes.items()}


@register("mixtral")
class Mixtral(Mistral):
    """Mixtral: every layer is a mixture of experts, whose width is `intermediate_size`."""

    published: ClassVar = "Mixtral 8x7B, 8x22B"
    defaults: ClassVar = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    theta: ClassVar = 1e6
    names: ClassVar = {
        **LAYER,
        "router": ("block_sparse_moe.gate.weight",),
        "experts_gate_up": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        "experts_down": ("block_sparse_moe.experts.{}.w2.weight",),
    }

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        count = fields.integer("num_local_experts", fields.integer("num_experts", 8))
        router = Router(count, fields.integer("num_experts_per_tok", 2))
        return [Experts(dense.width, router, dense.activation)] * fields.integer("num_hidden_layers")
