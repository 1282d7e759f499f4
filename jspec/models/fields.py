"""What all readers of a config.json share: the rotary embedding, the sizes of a layer, checks with their messages."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

ROPE_KINDS = ("default", "llama3")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base and, for kind "llama3", the frequency scaling of Llama 3.1."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise unsupported("rope type", self.kind, " or ".join(map(repr, ROPE_KINDS)))
        positive("rope", self, ("theta", "factor"))
        if self.kind == "llama3":
            positive("rope", self, ("low_freq_factor", "original_max_position"))
            if self.high_freq_factor <= self.low_freq_factor:
                raise ValueError(
                    f"rope: expected high_freq_factor > low_freq_factor, got {self.high_freq_factor} and "
                    f"{self.low_freq_factor}; correct config.json"
                )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, theta: float | None = None) -> Self:
        """Reads `rope_theta` and `rope_scaling`, or `rope_parameters` as transformers 5 writes them.

        Args:
            config: the parsed config.json.
            theta: replaces the base that the file gives.
        Returns: the rotary embedding, base 10000 where the file gives none.
        Raises: ValueError if the two ways of writing it disagree; NotImplementedError for another rope type.
        """
        parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        if by_layer := [kind for kind, value in parameters.items() if isinstance(value, Mapping)]:
            raise unsupported("rope_parameters", by_layer, "one rotary embedding for all layers")
        named = {float(c["rope_theta"]) for c in (parameters, config) if c.get("rope_theta") is not None}
        if theta is None and len(named) > 1:
            raise ValueError(
                f"rope_theta: expected one value, got {sorted(named)} from rope_parameters and beside it; "
                "pass rope_theta= to choose"
            )
        theta = theta if theta is not None else next(iter(named), 10000.0)
        for source in (parameters, config):
            if source.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise unsupported("partial_rotary_factor", source["partial_rotary_factor"], "1.0")
        forms = {cls._scaled(theta, form) for form in (parameters, scaling) if form}
        if len(forms) > 1:
            raise ValueError(
                f"rope: expected rope_parameters and rope_scaling to agree, got {parameters} and {scaling}; "
                "delete one of the two from config.json"
            )
        return next(iter(forms), cls(theta=theta))

    @classmethod
    def _scaled(cls, theta: float, form: Mapping[str, Any]) -> Self:
        kind = form.get("rope_type", form.get("type", "default"))
        if kind != "llama3":
            return cls(theta=theta, kind=kind)
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        require("rope_scaling", form, keys)
        return cls(
            theta=theta,
            kind=kind,
            factor=float(form["factor"]),
            low_freq_factor=float(form["low_freq_factor"]),
            high_freq_factor=float(form["high_freq_factor"]),
            original_max_position=int(form["original_max_position_embeddings"]),
        )


def layer_sizes(config: Mapping[str, Any], families: Collection[str], *required: str) -> dict[str, Any]:
    """The sizes of a decoder layer as the fields of a config record.

    Args:
        config: the parsed config.json, or the part of it that describes the layers.
        families: values of `model_type` whose layers are computed.
        required: keys that must be there beside the sizes.
    Returns: the fields, with the defaults of the Llama format.
    Raises: ValueError listing missing keys; NotImplementedError naming what the layers would compute differently.
    """
    allowed = " or ".join(map(repr, families))
    if config.get("model_type") not in (None, *families):
        raise unsupported("model_type", config["model_type"], allowed)
    if config.get("hidden_act", "silu") != "silu":
        raise unsupported("hidden_act", config["hidden_act"], "'silu'")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(flag):
            raise unsupported(flag, config[flag], "False")
    if config.get("quantization_config"):
        raise unsupported("quantization_config", config["quantization_config"], "unquantised float weights")
    if other := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise unsupported("layer_types", sorted(other), "'full_attention' alone")
    require("config.json", config, ("model_type", *SIZES, *required))
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(config["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "norm_eps": float(config["rms_norm_eps"]),
    }


def check_layer(record: Any) -> None:
    """Raises ValueError for sizes of a layer that cannot be."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    positive("config", record, (*names, "norm_eps"))
    if record.num_heads % record.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of num_attention_heads {record.num_heads}, "
            f"got {record.num_kv_heads}; correct config.json"
        )
    if record.head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, got {record.head_dim}; correct config.json")


def positive(where: str, record: Any, names: Iterable[str]) -> None:
    for name in names:
        if not getattr(record, name) > 0:
            raise ValueError(f"{where}: expected {name} > 0, got {getattr(record, name)!r}; correct config.json")


def require(where: str, config: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; got {', '.join(sorted(config))}; add the keys")


def unsupported(name: str, got: Any, expected: str) -> NotImplementedError:
    return NotImplementedError(f"{name}: expected {expected}, got {got!r}; this checkpoint is not supported yet")
