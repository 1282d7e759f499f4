"""The GLM family from GLM-4.5 on (arXiv:2508.06471): mixtures of experts behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import or_fraction, read_dense_layers
from jspec.models.families import register
from jspec.models.families.deepseek import ALWAYS, Deepseek, behind_dense, corrected_router, mixture
from jspec.models.families.llama import Llama
from jspec.models.mlps.mlp_config import Dense, Experts
from jspec.models.parts.rope import Rope


@register("glm4_moe")
class Glm4Moe(Llama):
    """GLM-4.5: the scores of experts are sigmoids, and one more expert is used by every row."""

    published: ClassVar = "GLM-4.5, 4.5-Air, 4.6, 4.7"
    defaults: ClassVar = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    fixed: ClassVar = {"mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    rotates_parts: ClassVar = True

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        return super().ropes(or_fraction(fields, 0.5), theta)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"bias": fields.flag("attention_bias"), "qk_norm": "head" if fields.flag("use_qk_norm") else None}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        return behind_dense(fields, dense, corrected_router(fields))


@register("glm4_moe_lite")
class Glm4MoeLite(Deepseek):
    """GLM-4.7-Flash: latent attention, and the experts of GLM-4.5."""

    published: ClassVar = "GLM-4.7-Flash"
    defaults: ClassVar = {
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
    }  # fmt: skip
    fixed: ClassVar = {
        **ALWAYS, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1,
    }  # fmt: skip

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        experts = mixture(fields, dense, corrected_router(fields))
        return [dense if is_dense else experts for is_dense in read_dense_layers(fields)]
