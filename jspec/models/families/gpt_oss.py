"""The gpt-oss family (arXiv:2508.10925): attention with sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from convert.fields import Fields
from convert.huggingface import MapRow, mapped
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER, input_major

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@register("gpt_oss")
class GptOss(Llama):
    """gpt-oss: each layer is a mixture of experts, whose gates and ups have a limit."""

    published: ClassVar = "gpt-oss 20b, 120b (mxfp4, bfloat16)"
    defaults: ClassVar = {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }
    fixed: ClassVar = {"mlp_bias": False, "hidden_act": "silu"}
    theta: ClassVar = 150000.0
    names: ClassVar = {
        **LAYER,
        "router": ("mlp.router.weight",),
        "router_bias": ("mlp.router.bias",),
        "experts_gate_up": ("mlp.experts.gate_up_proj",),
        "experts_gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
        "experts_down": ("mlp.experts.down_proj",),
        "experts_down_bias": ("mlp.experts.down_proj_bias",),
    }

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        return [_read(row) for row in super().weights(config, names)]

    def layer_types(self, fields: Fields) -> list[str]:
        count = fields.integer("num_hidden_layers")
        return read_layer_types(fields, [FULL if i % 2 else SLIDING for i in range(count)])

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        is_given = any(fields.get(name) is not None for name in ("rope_parameters", "rope_scaling"))
        return super().ropes(fields if is_given else Fields({**fields, "rope_scaling": YARN}, fields.place), theta)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return super().attention(fields) | {"sinks": True}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("num_local_experts", fields.integer("num_experts", 128)),
            fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
            bias=True,
        )
        limit, alpha = fields.number("swiglu_limit"), fields.number("swiglu_alpha")
        experts = Experts(dense.width, router, bias=True, limit=limit, alpha=alpha)
        return [experts] * fields.integer("num_hidden_layers")

    def model(self, fields: Fields) -> dict[str, Any]:
        return {"norms_in_float32": True}


def _read(row: MapRow) -> MapRow:
    """Return the row of a parameter of experts, whose weights are stored as [experts, in, out].

    Of the output channels of `gate_up_proj`, the even ones are the gate's and the odd ones are up's.
    """
    match row.parameter.rpartition(".")[2]:
        case "experts_gate_up":
            return mapped(input_major(row), _gate_first)
        case "experts_gate_up_bias":
            return mapped(row, _gate_first)
        case "experts_down":
            return input_major(row)
    return row


def _gate_first(values: np.ndarray) -> np.ndarray:
    """Reorder alternating channels of gate and up along axis 1 to those of the gate, then those of up."""
    return values.reshape(len(values), -1, 2, *values.shape[2:]).swapaxes(1, 2).reshape(values.shape)
