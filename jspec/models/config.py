"""What a checkpoint's config.json says, as frozen records: models (target or draft), EAGLE-3 heads."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from jspec.models.fields import Rope, positive, require, unsupported

__all__ = ["Eagle3Config", "ModelConfig", "Rope"]

FAMILIES = ("llama",)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")

# Options that change an EAGLE-3 head's forward pass, each with the only value that is supported.
HEAD_FLAGS: dict[str, bool] = {
    "norm_output": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "return_hidden_post_norm": False,
    "eh_proj_before_attn": False,
    "use_mtp_layernorm": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: sizes in elements, `norm_eps` of the RMS norms, `max_position` in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    max_position: int

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise unsupported("model_type", self.family, " or ".join(map(repr, FAMILIES)))
        positive("config", self, ("vocab_size", "intermediate_size", "num_layers", "norm_eps", "max_position"))
        _check_heads(self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, rope_theta: float | None = None) -> Self:
        """Reads a Hugging Face config.json.

        Args:
            config: the parsed file.
            rope_theta: replaces the rotary base that the file gives.
        Returns: the config.
        Raises: ValueError listing missing keys; NotImplementedError naming an option that is not supported.
        """
        _check_supported(config, "num_hidden_layers")
        return cls(
            **_shared_fields(config),
            family=config["model_type"],
            num_layers=int(config["num_hidden_layers"]),
            rope=Rope.from_hf(config, theta=rope_theta),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position=int(config.get("max_position_embeddings", 2048)),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds the config that `to_json` wrote."""
        return cls(**{**fields, "rope": Rope(**fields["rope"])})


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head: `vocab_size` and `target_hidden_size` are the target's, sizes in elements.

    `feature_layers` are target state indices: state k enters layer k, state N leaves the last layer (before
    the final norm). None stands for states 2, N//2 and N-3 of a target with N layers.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    feature_layers: tuple[int, ...] | None
    source_format: str

    def __post_init__(self) -> None:
        positive("head config", self, ("vocab_size", "draft_vocab_size", "target_hidden_size", "intermediate_size"))
        positive("head config", self, ("norm_eps",))
        _check_heads(self)
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size: expected at most vocab_size ({self.vocab_size}, the target's), "
                f"got {self.draft_vocab_size}; correct config.json"
            )
        layers = self.feature_layers
        if layers is not None and (not layers or len(set(layers)) < len(layers) or min(layers) < 0):
            raise ValueError(
                f"feature_layers: expected distinct target state indices from 0, got {layers}; pass others"
            )

    @property
    def num_features(self) -> int:
        """Number of target states that are joined into one feature."""
        return 3 if self.feature_layers is None else len(self.feature_layers)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        rope_theta: float | None = None,
        feature_layers: Iterable[int] | None = None,
    ) -> Self:
        """Reads the config.json of an EAGLE-3 head, except `num_hidden_layers`, which is often the target's.

        Args:
            config: the parsed file.
            rope_theta: replaces the rotary base; without both, it is 10000, never the target's.
            feature_layers: target state indices, which replace those of the file.
        Returns: the config.
        Raises: ValueError listing missing keys; NotImplementedError naming an option that is not supported.
        """
        if "speculators_model_type" in config:
            raise unsupported("speculators_model_type", config["speculators_model_type"], "the EAGLE-3 authors' format")
        nested = config.get("eagle_config") or {}
        _check_flags(config, nested)
        _check_supported(config)
        fields = _shared_fields(config)
        layers = tuple(feature_layers) if feature_layers is not None else _feature_layers(config, nested)
        return cls(
            **fields,
            draft_vocab_size=int(config.get("draft_vocab_size") or fields["vocab_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or fields["hidden_size"]),
            rope=Rope.from_hf(config, theta=rope_theta),
            feature_layers=layers,
            source_format="specforge" if nested else "official",
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds the config that `to_json` wrote."""
        layers = fields["feature_layers"]
        return cls(
            **{
                **fields,
                "rope": Rope(**fields["rope"]),
                "feature_layers": None if layers is None else tuple(layers),
            }
        )


def _shared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(config["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "norm_eps": float(config["rms_norm_eps"]),
    }


def _check_supported(config: Mapping[str, Any], *sizes: str) -> None:
    """Refuses what the decoder does not compute, before a weight is read, and lists every missing key."""
    if config.get("model_type") not in (None, *FAMILIES):
        raise unsupported("model_type", config["model_type"], " or ".join(map(repr, FAMILIES)))
    if config.get("hidden_act", "silu") != "silu":
        raise unsupported("hidden_act", config["hidden_act"], "'silu'")
    for flag in ("attention_bias", "mlp_bias"):
        if config.get(flag):
            raise unsupported(flag, config[flag], "False")
    if config.get("quantization_config"):
        raise unsupported("quantization_config", config["quantization_config"], "unquantised float weights")
    require("config.json", config, ("model_type", *SIZES, *sizes))


def _check_flags(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for where in (config, nested):
        for flag, supported in HEAD_FLAGS.items():
            if where.get(flag) is not None and bool(where[flag]) != supported:
                raise unsupported(flag, where[flag], str(supported))


def _feature_layers(config: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Target state indices from the ids of the file.

    Ids inside `eagle_config` that start with 1 count layer outputs (that of layer j is state j+1); all others
    are state indices already.
    """
    found = set()
    for where in (nested, config):
        ids = where.get("eagle_aux_hidden_state_layer_ids")
        if ids:
            shift = 1 if where is nested and ids[0] == 1 else 0
            found.add(tuple(int(i) + shift for i in ids))
    if len(found) > 1 or any(list(layers) != sorted(layers) for layers in found):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: expected one ascending list, got the states {sorted(found)}; "
            "pass feature_layers= with the target state indices"
        )
    return next(iter(found), None)


def _check_heads(config: "ModelConfig | Eagle3Config") -> None:
    positive("config", config, ("hidden_size", "num_heads", "num_kv_heads", "head_dim"))
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of num_attention_heads {config.num_heads}, "
            f"got {config.num_kv_heads}; correct config.json"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, got {config.head_dim}; correct config.json")
