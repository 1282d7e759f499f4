"""The MiniMax M2 family: norms of the queries of all heads together, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from convert.fields import Fields, short
from jspec.models.config.hf_config import or_fraction
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.families.mistral import Mixtral
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope


@register("minimax_m2")
class MiniMaxM2(Llama):
    """MiniMax M2: scores of experts are sigmoids, and a part of each head is rotated."""

    published: ClassVar = "MiniMax M2, M2.1, M2.5"
    defaults: ClassVar = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "num_experts_per_tok": 8}
    fixed: ClassVar = {
        "mlp_bias": False, "use_sliding_window": False, "attention_bias": False, "use_qk_norm": True,
        "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0,
    }  # fmt: skip
    names: ClassVar = {**Mixtral.names, "router_correction": ("block_sparse_moe.e_score_correction_bias",)}
    rotates_parts: ClassVar = True
    theta: ClassVar = 5e6

    def layer_types(self, fields: Fields) -> list[str]:
        kinds = fields.integers("attn_type_list")
        if set(kinds) - {1}:  # 0: linear attention of MiniMax-01
            raise unsupported("attn_type_list", short(kinds), "1 for each layer")
        return super().layer_types(fields)

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        if fields.get("rotary_dim") is not None:  # as released files spell the part that is rotated
            fields = or_fraction(fields, fields.integer("rotary_dim") / fields.integer("head_dim"))
        return super().ropes(fields, theta)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"qk_norm": "all"}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        count = fields.integer("num_local_experts", fields.integer("num_experts", 256))
        router = Router(count, fields.integer("num_experts_per_tok"), scores="sigmoid", correction=True)
        return [Experts(dense.width, router, dense.activation)] * fields.integer("num_hidden_layers")
