"""The DeepSeek families (V2: arXiv:2405.04434, V3: arXiv:2412.19437): latent attention, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from convert.fields import Fields
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.mla import MLA
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope, yarn_magnitude
from jspec.models.weights.weight_map import LAYER, Names

CACHED, QUERY = "self_attn.kv_a_proj_with_mqa.weight", "self_attn.{}.weight"
GROUPED = "group_limited_greedy"  # value of `topk_method`
ALWAYS = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}  # options of both families


class Deepseek(Llama):
    """What the DeepSeek families share: latent attention."""

    names: ClassVar[Names] = {
        **LAYER,
        "q_norm": ("self_attn.q_a_layernorm.weight",),
        "k_norm": ("self_attn.kv_a_layernorm.weight",),
        "q_up": ("self_attn.q_b_proj.weight",),
        "k_up": ("self_attn.kv_b_proj.weight",),
        "v_up": ("self_attn.kv_b_proj.weight",),
    }

    def mixers(self, fields: Fields, heads: GQA, ropes: Sequence[Rope], types: Sequence[str]) -> Sequence[Mixer]:
        plain, rotated = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
        attention = MLA(
            heads.heads,
            latent=fields.integer("kv_lora_rank", 512),
            rotated=rotated,
            plain=plain,
            value_dim=fields.integer("v_head_dim", 128),
            scale=(plain + rotated) ** -0.5 * score_factor(fields, ropes[0]),
            query_latent=None if fields["q_lora_rank"] is None else fields.integer("q_lora_rank"),
            is_interleaved=bool(fields.flag("rope_interleave", True)),
        )
        return [replace(attention, rope=rope) for rope in ropes]

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        attention = layer.attention
        assert isinstance(attention, MLA)
        has_latent = attention.query_latent is not None  # the order is that of `jspec.models.weights.params`
        qkv = (QUERY.format("q_a_proj"), CACHED) if has_latent else (CACHED, QUERY.format("q_proj"))
        return {**self.names, "qkv": qkv}


def score_factor(fields: Fields, rope: Rope) -> float:
    """Return the factor of the scores that belongs to a scaled rotary embedding, the square of YaRN's magnitude."""
    forms = (fields.object("rope_parameters"), fields.object("rope_scaling"))
    scale = next((form.number("mscale_all_dim") for form in forms if form.get("mscale_all_dim")), None)
    return 1.0 if scale is None or rope.kind == "default" else yarn_magnitude(rope.factor, scale) ** 2


def corrected_router(fields: Fields) -> Router:
    """Read a router whose scores are sigmoids, with a correction for the choice."""
    return Router(
        fields.integer("n_routed_experts", fields.integer("num_local_experts", 128)),
        fields.integer("num_experts_per_tok", 8),
        scores="sigmoid",
        is_normalised=bool(fields.flag("norm_topk_prob", True)),
        factor=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.integer("n_group", 1),
        chosen_groups=fields.integer("topk_group", 1),
    )


def mixture(fields: Fields, dense: Dense, router: Router) -> Experts:
    """Read a mixture of experts with a shared expert, whose activation is that of the dense feed-forward."""
    width = fields.integer("moe_intermediate_size", 1408)
    return Experts(width, router, dense.activation, shared=width * fields.integer("n_shared_experts", 1, least=0))


def behind_dense(fields: Fields, dense: Dense, router: Router) -> list[Dense | Experts]:
    """Return the feed-forward of each layer: some dense ones, then mixtures of experts with a shared expert."""
    first, count = fields.integer("first_k_dense_replace", 1, least=0), fields.integer("num_hidden_layers")
    experts = mixture(fields, dense, router)
    return [dense if i < first else experts for i in range(count)]


@register("deepseek_v2")
class DeepseekV2(Deepseek):
    """DeepSeek V2: scores of experts are a softmax, whose largest ones are weights as they are."""

    published: ClassVar = "DeepSeek V2, V2-Lite, V2.5"
    defaults: ClassVar = {
        "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "n_routed_experts": 64, "n_shared_experts": 2,
        "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
    }  # fmt: skip
    fixed: ClassVar = {**ALWAYS, "scoring_func": "softmax", "norm_topk_prob": False, "rope_interleave": True}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", GROUPED):
            raise unsupported("topk_method", method, f"'greedy' or {GROUPED!r}")
        router = Router(
            fields.integer("n_routed_experts"),
            fields.integer("num_experts_per_tok"),
            is_normalised=False,
            factor=fields.number("routed_scaling_factor", 1.0),
            summed=1,
        )
        if method == GROUPED:
            router = replace(router, groups=fields.integer("n_group"), chosen_groups=fields.integer("topk_group"))
        return behind_dense(fields, dense, router)


@register("deepseek_v3")
class DeepseekV3(Deepseek):
    """DeepSeek V3 and R1: scores of experts are sigmoids, with a correction for the choice."""

    published: ClassVar = "DeepSeek V3, V3.1, R1"
    defaults: ClassVar = {
        "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    }  # fmt: skip
    fixed: ClassVar = {**ALWAYS, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        return behind_dense(fields, dense, corrected_router(fields))


@register("kimi_k2")
class KimiK2(DeepseekV3):
    """Kimi K2 (arXiv:2507.20534), which computes what DeepSeek V3 does."""

    published: ClassVar = "Kimi K2"
