"""The hybrid Qwen families, Qwen3-Next and Qwen 3.5 to 3.8: gated delta nets in most layers, attention in others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from convert.fields import Fields
from convert.huggingface import MapRow, selected
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import FULL, read_layer_types
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.families.qwen import sparse_layers
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.mixer import Mixer
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import PLAIN, Rope
from jspec.models.weights.weight_map import LAYER, Names, of_experts

LINEAR = "linear_attention"  # value of `layer_types`
DELTA, SHARED = "linear_attn", "mlp.shared_expert"
DEFAULTS = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip


@register("qwen3_5_text")
class Qwen35(Llama):
    """Qwen 3.5, 3.6 and 3.8 without experts: heads of attention have gates, and norms of them before a part rotates."""

    published: ClassVar = "Qwen 3.5, 3.6, 3.8 (text)"
    defaults: ClassVar = {**DEFAULTS, "num_key_value_heads": 4}
    fixed: ClassVar = {
        "attention_bias": False, "attn_output_gate": True, "output_gate_type": "swish", "hidden_act": "silu",
        "mamba_ssm_dtype": "float32", "mlp_bias": False, "use_sliding_window": False,
    }  # fmt: skip
    names: ClassVar = {
        **LAYER,
        "shared_gate_up": (f"{SHARED}.gate_proj.weight", f"{SHARED}.up_proj.weight"),
        "shared_down": (f"{SHARED}.down_proj.weight",),
    }
    delta_names: ClassVar[Names] = {
        "qkv": (f"{DELTA}.in_proj_qkv.weight", f"{DELTA}.in_proj_z.weight"),
        "gates": (f"{DELTA}.in_proj_b.weight", f"{DELTA}.in_proj_a.weight"),
        "conv": (f"{DELTA}.conv1d.weight",),
        "o": (f"{DELTA}.out_proj.weight",),
    }
    norms_less_one: ClassVar = True
    rotates_parts: ClassVar = True

    def layer_types(self, fields: Fields) -> list[str]:
        every, count = fields.integer("full_attention_interval"), fields.integer("num_hidden_layers")
        return read_layer_types(fields, [LINEAR if (i + 1) % every else FULL for i in range(count)], limited=LINEAR)

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        given = [fields.object(name) for name in ("rope_parameters", "rope_scaling")]
        if any("partial_rotary_factor" in form for form in given):  # else the default, which stands beside them
            fields = Fields({name: fields[name] for name in fields if name != "partial_rotary_factor"}, fields.place)
        return {**super().ropes(fields, theta), LINEAR: PLAIN}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"qk_norm": "head", "output_gate": True}

    def other_mixers(self, fields: Fields) -> Mapping[str, Mixer]:
        delta = GatedDelta(
            key_heads=fields.integer("linear_num_key_heads"),
            value_heads=fields.integer("linear_num_value_heads"),
            key_dim=fields.integer("linear_key_head_dim"),
            value_dim=fields.integer("linear_value_head_dim"),
            taps=fields.integer("linear_conv_kernel_dim"),
        )
        return {LINEAR: delta}

    def model(self, fields: Fields) -> dict[str, Any]:
        return {"norms_in_float32": True}

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        return {**self.names, **self.delta_names} if isinstance(layer.mixer, GatedDelta) else self.names


@register("qwen3_5_moe_text")
class Qwen35Moe(Qwen35):
    """Qwen 3.5, 3.6 and 3.8 with experts, and one more that every row uses, whose output has a factor."""

    published: ClassVar = "Qwen 3.5, 3.6, 3.8 MoE (text)"
    defaults: ClassVar = {
        **DEFAULTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5632,
    }  # fmt: skip
    fixed: ClassVar = {**Qwen35.fixed, "norm_topk_prob": True}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("num_experts"),
            fields.integer("num_experts_per_tok"),
            is_normalised=fields.flag("norm_topk_prob"),
        )
        shared = fields.integer("shared_expert_intermediate_size")
        width = fields.integer("moe_intermediate_size")
        return sparse_layers(fields, dense, Experts(width, router, dense.activation, shared=shared, gates_shared=True))

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        return of_experts(super().layer_names(layer, tensors), tensors)


@register("qwen3_next")
class Qwen3Next(Qwen35Moe):
    """Qwen3-Next, whose files have the rows of a gated delta net key head by key head."""

    published: ClassVar = "Qwen3-Next 80B-A3B"
    defaults: ClassVar = {**Qwen35Moe.defaults, "num_experts": 512, "num_experts_per_tok": 10}
    fixed: ClassVar = Qwen35.fixed
    delta_names: ClassVar = {
        **Qwen35.delta_names,
        "qkv": (f"{DELTA}.in_proj_qkvz.weight",),
        "gates": (f"{DELTA}.in_proj_ba.weight",),
    }

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        return [_by_part(row, config) for row in super().weights(config, names)]


def _by_part(row: MapRow, config: ModelConfig) -> MapRow:
    """Return rows of all key heads part by part, which the file has key head by key head, each with its value heads."""
    layer, _, name = row.parameter.rpartition(".")
    if name not in ("qkv", "gates"):
        return row
    mixer = config.layers[int(layer.rpartition(".")[2])].mixer
    if not isinstance(mixer, GatedDelta):
        return row
    values = mixer.value_heads // mixer.key_heads * mixer.value_dim
    parts = [mixer.key_dim] * 2 + [values] * 2 if name == "qkv" else [mixer.value_heads // mixer.key_heads] * 2
    by_head = np.arange(row.shape[0]).reshape(mixer.key_heads, -1)
    return selected(row, np.concatenate([part.ravel() for part in np.split(by_head, np.cumsum(parts)[:-1], axis=1)]))
