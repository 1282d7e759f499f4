"""The Mistral families (arXiv:2310.06825): Mistral, Ministral, Ministral 3, Mistral 4, Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, all_layers, or_fraction, read_layer_types
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.deepseek import ALWAYS, Deepseek, behind_dense
from jspec.models.families.llama import Llama
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER, Names, of_experts

YARN = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


class Tempered(Llama):
    """What Ministral 3 and Mistral 4 share: queries are multiplied by a factor that grows with their position.

    Attributes:
        yarn: rotary embedding of a config.json that gives none.
    """

    yarn: ClassVar[Mapping[str, Any]]

    def _filled(self, fields: Fields) -> Fields:
        fields = super()._filled(fields)
        if any(fields.get(name) is not None for name in ("rope_parameters", "rope_scaling")):
            return fields
        return Fields({**fields, "rope_theta": None, "rope_parameters": self.yarn}, fields.place)

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        forms = [fields.object(name) for name in ("rope_parameters", "rope_scaling")]
        beta = next((form.number("llama_4_scaling_beta") for form in forms if form.get("llama_4_scaling_beta")), 0.0)
        ropes = super().ropes(fields, theta)
        return {kind: replace(rope, temperature=beta) for kind, rope in ropes.items()}


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
class Ministral3(Tempered, Mistral):
    """Ministral 3, whose rotary embedding is scaled, and whose queries have a temperature."""

    published: ClassVar = "Ministral 3 (text)"
    defaults: ClassVar = {"sliding_window": None, "head_dim": 128}
    yarn: ClassVar = {**YARN, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}


@register("mistral4")
class Mistral4(Tempered, Deepseek):
    """Mistral Small 4: latent attention whose queries have a temperature, and experts by a softmax."""

    published: ClassVar = "Mistral Small 4 (text)"
    defaults: ClassVar = {
        "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "rms_norm_eps": 1e-6, "n_routed_experts": 128,
        "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0,
    }  # fmt: skip
    fixed: ClassVar = {**ALWAYS, "scoring_func": "softmax", "n_group": 1, "topk_group": 1}
    rotates_parts: ClassVar = True
    yarn: ClassVar = {**YARN, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        """Read the rotary embedding, whose `partial_rotary_factor` counts the channels that are not rotated, too."""
        rotated = fields.integer("qk_rope_head_dim", 64)
        part = rotated / (rotated + fields.integer("qk_nope_head_dim"))
        rope = super().ropes(or_fraction(fields, part), theta)[FULL]
        if rope.kind != "yarn":
            raise unsupported("rope type", rope.kind, "'yarn'")
        if rope.fraction != part:
            raise unsupported("partial_rotary_factor", rope.fraction, f"{part}, the part of a head that is rotated")
        return {FULL: replace(rope, fraction=1.0)}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("n_routed_experts"),
            fields.integer("num_experts_per_tok"),
            is_normalised=bool(fields.flag("norm_topk_prob", True)),
            factor=fields.number("routed_scaling_factor", 1.0),
        )
        return behind_dense(fields, dense, router)

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        return of_experts(super().layer_names(layer, tensors), tensors)


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
