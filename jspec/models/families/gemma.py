"""The dense Gemma families: Gemma 2 (arXiv:2408.00118), Gemma 3 (arXiv:2503.19786) and Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from jspec.models.config.hf_config import FULL, SLIDING, read_layer_types, read_rope, read_ropes
from jspec.models.families import register
from jspec.models.families.llama import Llama
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER

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
    """Gemma 4, dense: full layers have heads of other sizes; values are normed; each layer's output has a weight."""

    published: ClassVar = "Gemma 4 31B (text)"
    defaults: ClassVar = {
        **DEFAULTS,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
    }
    fixed: ClassVar = {
        "attention_bias": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_scaling": None,
        "enable_moe_block": False,
    }
    names: ClassVar = {**Gemma2.names, "output_scale": ("layer_scalar",)}
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
        made = super().mixers(fields, heads, ropes, types)
        return [_with_sizes(fields, index, mixer) for index, mixer in enumerate(made) if isinstance(mixer, GQA)]

    def attention(self, fields: Fields) -> dict[str, Any]:
        if fields.get("use_bidirectional_attention") == "all":
            raise unsupported("use_bidirectional_attention", "all", "null or 'vision'")
        return {"scale": 1.0, "qk_norm": "head", "v_norm": True}

    def layer(self, fields: Fields) -> dict[str, Any]:
        return {"norms": "both", "has_scale": True}


def _with_sizes(fields: Fields, index: int, heads: GQA) -> GQA:
    """Return the attention of a layer of Gemma 4 with the sizes of its heads.

    Args:
        fields: parsed config.json. Full layers have the sizes of `global_head_dim` and `num_global_key_value_heads`;
            in files with `per_layer_config` (transformers 5) a layer has the sizes of its entry there instead.
        index: index of the layer.
        heads: attention with the sizes of sliding layers.
    """
    sizes = fields.object("per_layer_config").object(str(index))
    if unknown := sorted(sizes.keys() - {"head_dim", "num_key_value_heads"}):
        raise unsupported(sizes.place, unknown, "head_dim and num_key_value_heads")
    is_full, dim, count = heads.window is None, heads.head_dim, heads.kv_heads
    values_are_keys = is_full and fields.flag("attention_k_eq_v")
    if is_full and fields.get("per_layer_config") is None:
        dim = fields.integer("global_head_dim")
        count = fields.integer("num_global_key_value_heads", count) if values_are_keys else count
    dim, count = sizes.integer("head_dim", dim), sizes.integer("num_key_value_heads", count)
    return replace(heads, head_dim=dim, kv_heads=count, values_are_keys=values_are_keys)


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else fields.number(name)
