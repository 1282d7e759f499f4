"""The GLM family from GLM-4.5 on (arXiv:2508.06471): mixtures of experts behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import Rope

PARTIAL = "partial_rotary_factor"


@register("glm4_moe")
class Glm4Moe(Llama):
    """GLM-4.5: the scores of experts are sigmoids, and one more expert is used by every row."""

    published: ClassVar = "GLM-4.5, 4.5-Air, 4.6, 4.7"
    defaults: ClassVar = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    fixed: ClassVar = {"mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    rotates_parts: ClassVar = True

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        forms = (fields, fields.object("rope_parameters"), fields.object("rope_scaling"))
        is_given = any(PARTIAL in form for form in forms)
        return super().ropes(fields if is_given else Fields({**fields, PARTIAL: 0.5}, fields.place), theta)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"bias": fields.flag("attention_bias"), "qk_norm": "head" if fields.flag("use_qk_norm") else None}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        return behind_dense(fields, dense, corrected_router(fields))


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


def behind_dense(fields: Fields, dense: Dense, router: Router) -> list[Dense | Experts]:
    """Return the feed-forward of each layer: some dense ones, then mixtures of experts with a shared expert."""
    width = fields.integer("moe_intermediate_size", 1408)
    shared = width * fields.integer("n_shared_experts", 1, least=0)
    experts = Experts(width, router, dense.activation, shared=shared)
    first, count = fields.integer("first_k_dense_replace", 1, least=0), fields.integer("num_hidden_layers")
    return [dense if i < first else experts for i in range(count)]
