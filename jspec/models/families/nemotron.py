"""The Nemotron-H family (arXiv:2504.03624): each layer is a Mamba 2 mixer, attention or a feed-forward alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields, short
from convert.huggingface import MapRow, renamed
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import FULL
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.families.deepseek import corrected_router
from jspec.models.families.llama import Llama
from jspec.models.families.qwen_hybrid import LINEAR
from jspec.models.mixers.mamba2 import Mamba2
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.no_mixer import NoMixer
from jspec.models.mlps.mlp_config import Dense, Experts, Mlp, NoMlp
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import NO_ROPE, Rope
from jspec.models.weights.weight_map import LAYER, TENSORS, Names

MOE, MLP = "moe", "mlp"  # values of `layers_block_type`
KINDS = (LINEAR, MOE, FULL, MLP)
PATTERN = dict(zip("ME*-", KINDS, strict=True))  # letters of `hybrid_override_pattern`
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}  # of layers in earlier files
# Other spellings of keys, and the key of `transformers.NemotronHConfig` (5.24) for each. That class reads all of them
# but `attention_head_dim`.
OLD_KEYS = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit", "num_local_experts": "n_routed_experts", "layer_types": "layers_block_type",
    "attention_head_dim": "head_dim",
}  # fmt: skip
UNREAD = dict.fromkeys(("hidden_activation", "hidden_act"))  # `mlp_hidden_act` is read instead
ACTIVATION: Any = "relu2"


@register("nemotron_h")
class NemotronH(Llama):
    """Nemotron-H: no layer rotates queries and keys, and feed-forwards have no gate.

    The steps of Mamba 2 have no limits: a file with others in `time_step_limit` is refused. `NemotronHMamba2Mixer` of
    transformers 5.24 limits them to at least `time_step_min` in prompts, but not in the tokens that it generates.
    """

    published: ClassVar = "Nemotron 3 Nano 30B-A3B, Super; Nemotron Nano 9B v2; Nemotron-H"
    defaults: ClassVar = {
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 4096, "ssm_state_size": 128, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    }  # fmt: skip
    fixed: ClassVar = {
        "attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False,
        "mlp_hidden_act": ACTIVATION, "mamba_hidden_act": "silu", "mamba_ssm_cache_dtype": "float32",
        "n_shared_experts": 1, "residual_in_fp32": False, "sliding_window": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    names: ClassVar = {
        **LAYER,
        "attn_norm": ("norm.weight",),
        "qkv": tuple(f"mixer.{part}_proj.weight" for part in "qkv"),
        "o": ("mixer.o_proj.weight",),
        "mlp_norm": ("norm.weight",),
        "gate_up": ("mixer.up_proj.weight",),
        "down": ("mixer.down_proj.weight",),
        "router": ("mixer.gate.weight",),
        "router_correction": ("mixer.gate.e_score_correction_bias",),
        "experts_gate_up": ("mixer.experts.{}.up_proj.weight",),
        "experts_down": ("mixer.experts.{}.down_proj.weight",),
        "experts_in": ("mixer.fc1_latent_proj.weight",),
        "experts_out": ("mixer.fc2_latent_proj.weight",),
        "shared_gate_up": ("mixer.shared_experts.up_proj.weight",),
        "shared_down": ("mixer.shared_experts.down_proj.weight",),
    }
    mamba_names: ClassVar[Names] = {
        "qkv": ("mixer.in_proj.weight",),
        "gates": ("mixer.in_proj.weight",),
        "conv": ("mixer.conv1d.weight",),
        "conv_bias": ("mixer.conv1d.bias",),
        "a_log": ("mixer.A_log",),
        "dt_bias": ("mixer.dt_bias",),
        "skip": ("mixer.D",),
        "delta_norm": ("mixer.norm.weight",),
        "o": ("mixer.out_proj.weight",),
    }

    def _filled(self, fields: Fields) -> Fields:
        fields = super()._filled(_renamed(fields))
        types = types_of(fields, "layers_block_type", "hybrid_override_pattern")
        if fields.get("num_hidden_layers") not in (None, len(types)):
            raise fields.error("num_hidden_layers", f"{len(types)}, the number of layer types")
        read = {"num_hidden_layers": len(types), "rms_norm_eps": fields.number("layer_norm_epsilon")}
        return Fields({**fields, **read, "layers_block_type": types, **UNREAD}, fields.place)

    def layer_types(self, fields: Fields) -> list[str]:
        return fields.texts("layers_block_type")

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        if theta is not None:
            raise unsupported("rope_theta", theta, "none, because no layer has a rotary embedding")
        return dict.fromkeys(KINDS, NO_ROPE)

    def attention(self, fields: Fields) -> dict[str, Any]:
        return {}

    def other_mixers(self, fields: Fields) -> Mapping[str, Mixer]:
        _check_steps(fields)
        mamba = Mamba2(
            key_heads=fields.integer("n_groups"),
            value_heads=fields.integer("mamba_num_heads"),
            key_dim=fields.integer("ssm_state_size"),
            value_dim=fields.integer("mamba_head_dim"),
            taps=fields.integer("conv_kernel"),
            conv_bias=bool(fields.flag("use_conv_bias")),
        )
        return {LINEAR: mamba, MOE: NoMixer(), MLP: NoMixer()}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Mlp]:
        experts = Experts(
            fields.integer("moe_intermediate_size"),
            corrected_router(fields),
            ACTIVATION,
            is_gated=False,
            shared=fields.integer("moe_shared_expert_intermediate_size"),
            latent=None if fields.get("moe_latent_size") is None else fields.integer("moe_latent_size"),
        )
        mlps: dict[str, Mlp] = {MOE: experts, MLP: replace(dense, activation=ACTIVATION, is_gated=False)}
        return [mlps.get(kind, NoMlp()) for kind in self.layer_types(fields)]

    def model(self, fields: Fields) -> dict[str, Any]:
        return {"norms_in_float32": True}

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        return {**self.names, **self.mamba_names} if isinstance(layer.mixer, Mamba2) else self.names

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        rows = super().weights(config, names)
        new = {TENSORS["embed"]: "backbone.embeddings.weight", TENSORS["norm"]: "backbone.norm_f.weight"}
        sources = [name for row in rows for name in row.sources if name not in new]
        return renamed(rows, {name: name.replace("model.", "backbone.", 1) for name in sources} | new)


def types_of(fields: Fields, name: str, letters: str, default: list[str] | None = None) -> list[str]:
    """Read types of layers, which files give as a list or as a text with a letter for each.

    Args:
        fields: parsed config.json.
        name: key of the list.
        letters: key of the text.
        default: types of a file without both; None: it is refused. A text replaces this list, as in transformers.

    Raises:
        CheckpointError: the file gives none, or two that differ, or a value has another type.
        NotImplementedError: a type is unknown.
    """
    by_key: dict[str, list[str]] = {}
    if fields.get(name) is not None:
        types = [OLD_NAMES.get(kind, kind) for kind in fields.texts(name)]
        by_key[name] = _known(name, types, dict(zip(KINDS, KINDS, strict=True)))
    if fields.get(letters) is not None:
        by_key[letters] = _known(letters, list(fields.text(letters)), PATTERN)
    if len(by_key) == 2 and by_key[name] not in (default, by_key[letters]):
        raise fields.error(letters, f"the types of {name}, or one of the two keys alone")
    if not by_key and default is None:
        raise fields.error(name, "a list with the type of each layer")
    return by_key.get(letters, by_key.get(name, default or []))


def _known(name: str, types: list[str], known: Mapping[str, str]) -> list[str]:
    """Return the types of layers by their names in a file, of which all must be known."""
    if unknown := sorted(set(types) - known.keys()):
        raise unsupported(name, unknown, " or ".join(map(repr, known)))
    return [known[kind] for kind in types]


def _renamed(fields: Fields) -> Fields:
    """Return a config.json without `OLD_KEYS`, whose values have the new names.

    Raises:
        CheckpointError: the file gives both names with different values.
    """
    new = {name: value for name, value in fields.items() if name not in OLD_KEYS}
    for old, name in OLD_KEYS.items():
        if fields.get(old) is None:
            continue
        if new.get(name) not in (None, fields[old]):
            raise fields.error(old, f"the value of {name}, {short(new[name])}, or one of the two keys alone")
        new[name] = fields[old]
    return Fields(new, fields.place)


def _check_steps(fields: Fields) -> None:
    """Refuse limits of the steps; transformers writes infinity as an object."""
    limits = fields.get("time_step_limit")
    if limits not in (None, [0, float("inf")], (0, float("inf")), [0, {"__float__": "Infinity"}]):
        raise unsupported("time_step_limit", limits, "[0, infinity]")
