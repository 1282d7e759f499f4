"""The LFM2 families (arXiv:2511.23404): short convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from convert.fields import Fields
from convert.huggingface import MapRow, renamed
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import FULL, read_layer_types
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.short_conv import ShortConv
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.rope import PLAIN, Rope
from jspec.models.weights.weight_map import LAYER, TENSORS, Names

CONV = "conv"  # value of `layer_types`
W1, W3, W2 = (f"w{index}.weight" for index in (1, 3, 2))  # gate, up, down


@register("lfm2")
class Lfm2(Llama):
    """LFM2: each query and key head of the layers with attention is normed before its rotation."""

    published: ClassVar = "LFM2 (350M to 2.6B), LFM2.5"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }
    fixed: ClassVar = {"conv_bias": False}
    names: ClassVar = {
        **LAYER,
        "attn_norm": ("operator_norm.weight",),
        "q_norm": ("self_attn.q_layernorm.weight",),
        "k_norm": ("self_attn.k_layernorm.weight",),
        "o": ("self_attn.out_proj.weight",),
        "mlp_norm": ("ffn_norm.weight",),
        "gate_up": (f"feed_forward.{W1}", f"feed_forward.{W3}"),
        "down": (f"feed_forward.{W2}",),
        "router": ("feed_forward.gate.weight",),
        "router_correction": ("feed_forward.expert_bias",),
        "experts_gate_up": (f"feed_forward.experts.{{}}.{W1}", f"feed_forward.experts.{{}}.{W3}"),
        "experts_down": (f"feed_forward.experts.{{}}.{W2}",),
    }
    theta: ClassVar = 1e6

    def _filled(self, fields: Fields) -> Fields:
        fields = super()._filled(fields)
        tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings"))
        read = {"rms_norm_eps": fields.number("norm_eps"), "tie_word_embeddings": tied}
        return Fields({**fields, **read, **self._width(fields)}, fields.place)

    def _width(self, fields: Fields) -> dict[str, Any]:
        """Return the width of dense feed-forwards: two thirds of what the file says, up to a multiple, if asked for."""
        width = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
        if fields.flag("block_auto_adjust_ff_dim"):
            width = 2 * width // 3
            if fields["block_ffn_dim_multiplier"] is not None:
                multiple = fields.integer("block_multiple_of")
                width = -(-int(fields.number("block_ffn_dim_multiplier") * width) // multiple) * multiple
        return {"intermediate_size": width, "block_ff_dim": width, "block_auto_adjust_ff_dim": False}

    def layer_types(self, fields: Fields) -> list[str]:
        count = fields.integer("num_hidden_layers")
        listed = fields.integers("full_attn_idxs") if fields.get("full_attn_idxs") is not None else range(count)
        return read_layer_types(fields, [FULL if i in listed else CONV for i in range(count)], limited=CONV)

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        return {**super().ropes(fields, theta), CONV: PLAIN}

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {"qk_norm": "head"}

    def other_mixers(self, fields: Fields) -> Mapping[str, Mixer]:
        return {CONV: ShortConv(fields.integer("hidden_size"), fields.integer("conv_L_cache"))}

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        if not isinstance(layer.mixer, ShortConv):
            return self.names
        return {**self.names, "qkv": ("conv.in_proj.weight",), "o": ("conv.out_proj.weight",)}

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        return renamed(super().weights(config, names), {TENSORS["norm"]: "model.embedding_norm.weight"})


@register("lfm2_moe")
class Lfm2Moe(Lfm2):
    """LFM2 with experts behind some dense layers; the scores of experts are sigmoids."""

    published: ClassVar = "LFM2-8B-A1B, LFM2-24B-A2B"
    defaults: ClassVar = {**Lfm2.defaults, "norm_topk_prob": True, "use_expert_bias": True}

    def _width(self, fields: Fields) -> dict[str, Any]:
        return {}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        router = Router(
            fields.integer("num_experts", 32),
            fields.integer("num_experts_per_tok", 4),
            scores="sigmoid",
            is_normalised=fields.flag("norm_topk_prob"),
            factor=fields.number("routed_scaling_factor", 1.0),
            correction=fields.flag("use_expert_bias"),
        )
        experts = Experts(fields.integer("moe_intermediate_size", 1792), router, dense.activation)
        first, count = fields.integer("num_dense_layers", 2, least=0), fields.integer("num_hidden_layers")
        return [dense if i < first else experts for i in range(count)]
