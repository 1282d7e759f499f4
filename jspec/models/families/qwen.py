"""The Qwen families: Qwen 2 and 2.5 (arXiv:2412.15115), which have biases, and Qwen 3 (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mlps.mlp_config import Dense, Experts, Router


class Qwen(Llama):
    """What the Qwen families share: windows of the last layers."""

    fixed: ClassVar = {"mlp_bias": False}

    def layer_types(self, fields: Fields) -> list[str]:
        slides = fields.flag("use_sliding_window") and fields.get("sliding_window", 4096) is not None
        first = fields.integer("max_window_layers", 28, least=0)
        count = fields.integer("num_hidden_layers")
        types = read_layer_types(fields, [SLIDING if slides and i >= first else FULL for i in range(count)])
        return types if slides else [FULL] * count


@register("qwen2")
class Qwen2(Qwen):
    """Qwen 2 and 2.5: queries, keys and values have a bias, the attention's output has none."""

    published: ClassVar = "Qwen 2, 2.5, QwQ"
    defaults: ClassVar = {"sliding_window": 4096}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"bias": True}


@register("qwen3")
class Qwen3(Qwen):
    """Qwen 3 without experts: each query and key head is normed before its rotation."""

    published: ClassVar = "Qwen 3 (0.6B to 32B)"
    defaults: ClassVar = {"sliding_window": 4096, "head_dim": 128}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return super().attention(fields) | {"qk_norm": "head"}


@register("qwen3_moe")
class Qwen3Moe(Qwen3):
    """Qwen 3 with experts, except in layers that the config names; windows are in all layers or in none."""

    published: ClassVar = "Qwen 3 MoE (30B-A3B, 235B-A22B, Coder)"
    defaults: ClassVar = {"sliding_window": 4096, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}

    def layer_types(self, fields: Fields) -> list[str]:
        return super().layer_types(Fields({**fields, "max_window_layers": 0, "layer_types": None}, fields.place))

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("num_experts", fields.integer("num_local_experts", 128)),
            fields.integer("num_experts_per_tok", 8),
            is_normalised=bool(fields.flag("norm_topk_prob")),
        )
        return sparse_layers(
            fields, dense, Experts(fields.integer("moe_intermediate_size", 768), router, dense.activation)
        )


def sparse_layers(fields: Fields, dense: Dense, experts: Experts) -> list[Dense | Experts]:
    """Return the feed-forward of each layer: experts in every few layers, except those that the config names."""
    step, listed = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    count = fields.integer("num_hidden_layers")
    return [dense if i in listed or (i + 1) % step else experts for i in range(count)]
