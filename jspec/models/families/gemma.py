"""The Gemma families: Gemma 2 (arXiv:2408.00118), Gemma 3 (arXiv:2503.19786) and Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from convert.huggingface import MapRow, mapped
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types, read_rope, read_ropes
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.gemma4_layers import NAMES, ONE_BY_ONE, layer_sizes, shared, with_sizes, with_unread
from jspec.models.families.llama import Llama
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.shared_kv import QueriesOnly
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER, Names

DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


@register("gemma2")
class Gemma2(Llama):
    """Gemma 2: norms before and after, limits of scores and logits, a window in every other layer."""

    published: ClassVar = "Gemma 2"
    defaults: ClassVar = {
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False, "use_bidirectional_attention": False}
    names: ClassVar = {
        **LAYER,
        "attn_post_norm": ("post_attention_layernorm.weight",),
        "mlp_norm": ("pre_feedforward_layernorm.weight",),
        "mlp_post_norm": ("post_feedforward_layernorm.weight",),
    }
    norms_less_one: ClassVar = True

    def layer_types(self, fields: Fields) -> list[str]:
        count = fields.integer("num_hidden_layers")
        return read_layer_types(fields, [FULL if i % 2 else SLIDING for i in range(count)])

    def attention(self, fields: Fields) -> dict[str, Any]:
        scale = 1 / math.sqrt(fields.number("query_pre_attn_scalar"))
        return {"scale": scale, "softcap": _cap(fields, "attn_logit_softcapping")}

    def layer(self, fields: Fields) -> dict[str, Any]:
        return {"norms": "both"}

    def model(self, fields: Fields) -> dict[str, Any]:
        return {
            "embed_scale": math.sqrt(fields.integer("hidden_size")),
            "logit_softcap": _cap(fields, "final_logit_softcapping"),
            "norms_in_float32": True,
        }


@register("gemma3_text")
class Gemma3(Gemma2):
    """Gemma 3: norms of queries and keys, most layers with a window and a rotary base of their own."""

    published: ClassVar = "Gemma 3 (text)"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    }

    def layer_types(self, fields: Fields) -> list[str]:
        count, pattern = fields.integer("num_hidden_layers"), fields.integer("sliding_window_pattern")
        return read_layer_types(fields, [SLIDING if (i + 1) % pattern else FULL for i in range(count)])

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        if theta is not None:
            raise unsupported("rope_theta", theta, "none, because layers have different rotary embeddings")
        if fields.get("rope_parameters") is not None:
            return read_ropes(fields)
        full = {"rope_theta": fields.number("rope_theta", 1e6), "rope_scaling": fields.get("rope_scaling")}
        return {
            FULL: read_rope(Fields({**fields, **full}, fields.place)),
            SLIDING: Rope(theta=fields.number("rope_local_base_freq", 1e4)),
        }

    def attention(self, fields: Fields) -> dict[str, Any]:
        return super().attention(fields) | {"softcap": None, "qk_norm": "head"}  # transformers ignores this softcap


@register("gemma4_text")
class Gemma4(Gemma2):
    """Gemma 4: full layers have heads of other sizes; values are normed; each layer's output has a weight.

    E2B and E4B have an embedding for each layer, and last layers that read the keys and values of earlier ones. 26B-A4B
    has experts beside the dense feed-forward.
    """

    published: ClassVar = "Gemma 4 E2B, E4B, 26B-A4B, 31B (text)"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    }
    fixed: ClassVar = {"attention_bias": False, "rope_scaling": None}
    names: ClassVar = {**Gemma2.names, **NAMES}
    norms_less_one: ClassVar = False

    def layer_types(self, fields: Fields) -> list[str]:
        count = fields.integer("num_hidden_layers")
        types = read_layer_types(fields, [SLIDING if (i + 1) % 6 else FULL for i in range(count)])
        return [*types[:-1], FULL]

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        if fields.get("rope_parameters") is None and theta is None:
            return {FULL: Rope(theta=1e6, kind="proportional", fraction=0.25), SLIDING: Rope(theta=1e4)}
        ropes = read_ropes(fields, theta=theta)
        for rope in ropes.values():
            if rope.kind == "default" and rope.fraction != 1.0:
                raise unsupported(
                    "partial_rotary_factor", rope.fraction, "1.0 with rotary embeddings of type 'default'"
                )
        return ropes

    def mixers(self, fields: Fields, heads: GQA, ropes: Sequence[Rope], types: Sequence[str]) -> Sequence[Mixer]:
        made, entries = super().mixers(fields, heads, ropes, types), layer_sizes(fields, len(types))
        pairs = [(entries.get(index, Fields({})), mixer) for index, mixer in enumerate(made)]
        sized = [with_sizes(fields, entry, mixer) for entry, mixer in pairs if isinstance(mixer, GQA)]
        return shared(fields, sized, types)

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Dense | Experts]:
        count, last = fields.integer("num_hidden_layers"), fields.integer("num_kv_shared_layers", 0, least=0)
        factor = 2 if fields.flag("use_double_wide_mlp") else 1
        widths = [dense.width] * (count - last) + [dense.width * factor] * last
        if not fields.flag("enable_moe_block"):
            return [replace(dense, width=width) for width in widths]
        router = Router(fields.integer("num_experts"), fields.integer("top_k_experts"), scaled=True)
        experts = Experts(fields.integer("moe_intermediate_size"), router, dense.activation, has_norms=True)
        return [replace(experts, shared=width) for width in widths]

    def attention(self, fields: Fields) -> dict[str, Any]:
        if (value := fields.get("use_bidirectional_attention")) not in (None, False, "vision"):
            raise unsupported("use_bidirectional_attention", value, "null or 'vision'")
        return {"scale": 1.0, "qk_norm": "head", "v_norm": True}

    def layer(self, fields: Fields) -> dict[str, Any]:
        size = fields.integer("hidden_size_per_layer_input", least=0)
        vocab, tokens = (fields.integer(name) for name in ("vocab_size_per_layer_input", "vocab_size"))
        if size and vocab != tokens:
            raise unsupported("vocab_size_per_layer_input", vocab, f"vocab_size {tokens}")
        return {"norms": "both", "has_scale": True, "embedded": size}

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        is_fused = any(name.endswith(".experts.gate_up_proj") for name in tensors)
        names = self.names if is_fused else {**self.names, **ONE_BY_ONE}
        return {**names, "qkv": LAYER["qkv"][:1]} if isinstance(layer.mixer, QueriesOnly) else names

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        factor = config.hidden_size**-0.5  # of the router's input

        def as_computed(row: MapRow) -> MapRow:
            if row.parameter.endswith(".router_norm"):
                return mapped(row, lambda values: values * factor)
            return with_unread(row, config, names)

        return [as_computed(row) for row in super().weights(config, names)]


@register("gemma4_unified_text")
class Gemma4Unified(Gemma4):
    """Gemma 4 12B: other defaults, and neither experts nor embeddings for each layer."""

    published: ClassVar = "Gemma 4 12B (text)"
    defaults: ClassVar = {
        **Gemma4.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }
    fixed: ClassVar = {**Gemma4.fixed, "hidden_size_per_layer_input": 0, "enable_moe_block": False}


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else fields.number(name)
