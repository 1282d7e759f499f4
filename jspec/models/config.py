"""The configs of decoders, as frozen, hashable records that check their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast, get_args

from convert.fields import CheckpointError, Fields, listed, require, short
from pallas_kernels.layers.quantize_rows import Activation

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
NORMS = ("pre", "post", "both")
QK_NORMS = (None, "head", "all")
MAX_LAYERS = 2048  # of a model; its config and its weight map have an entry for each

R = TypeVar("R")


def positive(where: str, record: Any, names: Iterable[str]) -> None:
    """Raise CheckpointError if one of the named attributes of a record is not above 0.

    Args:
        where: beginning of the error message.
        record: object with the attributes.
        names: names of the attributes to check.
    """
    _positive(where, {name: getattr(record, name) for name in names})


def _positive(where: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not value > 0:
            raise CheckpointError(where, f"expected {name} > 0, got {short(value)}; correct config.json")


def unsupported(name: str, got: Any, expected: str) -> NotImplementedError:
    """Return the error for a checkpoint option whose value jspec does not support.

    Args:
        name: name of the option.
        got: value of the option in the checkpoint.
        expected: supported values, as text.
    """
    return NotImplementedError(f"{name}: expected {expected}, got {short(got)}; this checkpoint is not supported yet")


def from_json(record: type[R], fields: Fields) -> R:
    """Make a config record from the JSON values that `to_json` returned, and check their names and types.

    Raises:
        CheckpointError: a required value is missing, a name is unknown, or a value has another type.
    """
    known = {field.name: field for field in dataclasses.fields(cast(Any, record))}
    required = [field for field in known.values() if field.default is dataclasses.MISSING]
    require(fields, [field.name for field in required if "None" not in str(field.type)])
    if unknown := sorted(fields.keys() - known.keys()):
        raise CheckpointError(fields.place, f"expected {', '.join(known)}, got {listed(unknown)}; convert again")
    return record(**{name: READERS[str(known[name].type)](fields, name) for name in fields})


def to_json(record: Any) -> dict[str, Any]:
    """Return the fields of a config record as JSON values; fields with their default value are left out."""
    found = {field: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {field.name: _json(value) for field, value in found.items() if value != field.default}


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, tuple) and value and isinstance(value[0], LayerConfig):
        kinds = list(dict.fromkeys(value))
        return {"kinds": [to_json(kind) for kind in kinds], "order": [kinds.index(layer) for layer in value]}
    return list(value) if isinstance(value, tuple) else value


def _read_layers(fields: Fields, name: str) -> tuple[LayerConfig, ...]:
    """Read the layers of a decoder: its distinct layer configs, and the index of each layer's config."""
    layers = fields.object(name)
    kinds = [from_json(LayerConfig, kind) for kind in layers.objects("kinds")]
    order = layers.integers("order")
    if len(order) > MAX_LAYERS or not all(0 <= index < len(kinds) for index in order):
        raise layers.error("order", f"at most {MAX_LAYERS} indices below {len(kinds)}, the number of kinds")
    return tuple(kinds[index] for index in order)


READERS: dict[str, Callable[[Fields, str], Any]] = {  # annotation of a field: reader of its JSON value
    "int": lambda fields, name: fields.integer(name, least=0),
    "int | None": lambda fields, name: None if fields[name] is None else fields.integer(name, least=0),
    "float": Fields.number,
    "float | None": lambda fields, name: None if fields[name] is None else fields.number(name),
    "bool": Fields.flag,
    "str": Fields.text,
    "Activation": Fields.text,
    "str | None": lambda fields, name: None if fields[name] is None else fields.text(name),
    "Rope": lambda fields, name: from_json(Rope, fields.object(name)),
    "GQA": lambda fields, name: from_json(GQA, fields.object(name)),
    "Dense": lambda fields, name: from_json(Dense, fields.object(name)),
    "tuple[LayerConfig, ...]": _read_layers,
    "tuple[int, ...] | None": lambda fields, name: tuple(fields.integers(name)) or None,
    "tuple[float, ...]": lambda fields, name: tuple(fields.numbers(name)),
}


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding (arXiv:2104.09864); `jspec.models.rope` computes its tables.

    Attributes:
        theta: rotary base.
        kind: "default"; "linear" and "dynamic" (position interpolation, arXiv:2306.15595, and its form that depends on
            the length); "llama3", the scaling of Llama 3.1; "yarn" (arXiv:2309.00071); "longrope" (arXiv:2402.13753).
        fraction: part of a head's channels that is rotated; the others keep their values at every position.
        factor: divisor of low frequencies ("llama3", "yarn") or of all frequencies ("linear", "dynamic").
        original_max_position: context length before the scaling, in tokens ("dynamic": the longest without it).
        low_freq_factor, high_freq_factor: "llama3": limits of the interpolated frequencies, in rotations per
            ``original_max_position``.
        beta_fast, beta_slow: "yarn": limits of the interpolated frequencies, in the same unit.
        truncate: "yarn": round these limits to whole channels.
        attention_factor: factor of cosines and sines.
        short_factors, long_factors: "longrope": divisor of each frequency, for texts of up to
            ``original_max_position`` tokens and for longer texts [rotated channels / 2].
        is_long: "longrope": use ``long_factors``.
        temperature: factor b of 1 + b * ln(1 + position // original_max_position), which multiplies rotated queries
            (Llama 4, Ministral 3); 0: none.
    """

    theta: float = 10000.0
    kind: str = "default"
    fraction: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise unsupported("rope type", self.kind, " or ".join(map(repr, ROPE_KINDS)))
        positive("rope", self, ("theta", "factor", "fraction", "attention_factor"))
        if self.fraction > 1:
            raise CheckpointError("partial_rotary_factor", f"expected at most 1, got {self.fraction}")
        if self.kind not in ("default", "linear") or self.temperature:
            positive("rope", self, ("original_max_position",))
        if self.kind == "llama3":
            positive("rope", self, ("low_freq_factor",))
            if self.high_freq_factor <= self.low_freq_factor:
                raise CheckpointError(
                    "rope", f"expected high_freq_factor > low_freq_factor, got {self.high_freq_factor} and "
                    f"{self.low_freq_factor}; correct config.json",
                )  # fmt: skip
        if self.kind == "yarn":
            positive("rope", self, ("beta_fast", "beta_slow"))

    def rotated(self, head_dim: int) -> int:
        """Return the number of a head's channels that are rotated."""
        return int(head_dim * self.fraction)

    def check(self, head_dim: int) -> None:
        """Check the values that depend on the head's number of channels.

        Raises:
            ValueError: the number of rotated channels is odd, or "longrope" has another number of factors.
        """
        rotated = self.rotated(head_dim)
        if rotated % 2 or not rotated:
            raise CheckpointError(
                "partial_rotary_factor",
                f"expected to rotate an even number of channels, got {rotated} of {head_dim}; correct config.json",
            )
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if self.kind == "longrope" and (len(factors) != rotated // 2 or not min(factors) > 0):
                raise CheckpointError(
                    name, f"expected {rotated // 2} numbers above 0, got {short(list(factors))}; correct config.json"
                )


@dataclass(frozen=True)
class GQA:
    """The config of grouped-query attention (arXiv:2305.13245).

    Attributes:
        heads: number of query heads.
        kv_heads: number of key heads, which is also the number of value heads.
        head_dim: number of channels of a head.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output projection has a bias.
        qk_norm: norm of queries and keys before the rotation: "head": of each head; "all": of all heads together; None:
            none.
        window: number of newest tokens that a query attends to, its own included; None: all.
        rope: rotary position embedding.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: limit c of the scores x, which become c * tanh(x / c) (Gemma 2, arXiv:2408.00118); None: no limit.
        sinks: whether each query head has a sink, a score without a value (gpt-oss, arXiv:2508.10925).
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: str | None = None
    window: int | None = None
    rope: Rope = Rope()
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def q_size(self) -> int:
        """Number of channels of all query heads in total."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of channels of all key heads in total; all value heads have as many."""
        return self.kv_heads * self.head_dim

    def check(self) -> None:
        """Check the sizes and options of the attention.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        named = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        limits = {"sliding_window": self.window, "attention scale": self.scale, "attn_logit_softcapping": self.softcap}
        _positive("config", named | {name: limit for name, limit in limits.items() if limit is not None})
        if self.heads % self.kv_heads:
            raise CheckpointError(
                "num_key_value_heads",
                f"expected a divisor of num_attention_heads {self.heads}, got {self.kv_heads}; correct config.json",
            )
        if self.head_dim % 2:
            raise CheckpointError("head_dim", f"expected an even number, got {self.head_dim}; correct config.json")
        if self.qk_norm not in QK_NORMS:
            raise unsupported("qk_norm", self.qk_norm, " or ".join(map(repr, QK_NORMS)))
        self.rope.check(self.head_dim)


@dataclass(frozen=True)
class Dense:
    """The config of a gated feed-forward (arXiv:2002.05202).

    Attributes:
        width: number of intermediate channels.
        activation: the gate's activation function: "silu", "gelu_tanh" (the approximation of GELU by tanh) or "gelu".
    """

    width: int
    activation: Activation = "silu"

    def check(self) -> None:
        """Check the width and the activation.

        Raises:
            ValueError: the width is not positive.
            NotImplementedError: the activation is not supported.
        """
        _positive("config", {"intermediate_size": self.width})
        if self.activation not in ACTIVATIONS:
            raise unsupported("hidden_act", self.activation, " or ".join(map(repr, ACTIVATIONS)))


@dataclass(frozen=True)
class LayerConfig:
    """The config of a decoder layer.

    Attributes:
        attention: config of the attention.
        mlp: config of the feed-forward.
        norms: placement of the norms: "pre": before the attention and before the feed-forward; "post": after both;
            "both": before and after both.
        residual_scale: factor of the outputs of attention and feed-forward before they are added to the residual
            stream.
    """

    attention: GQA
    mlp: Dense
    norms: str = "pre"
    residual_scale: float = 1.0

    def check(self) -> None:
        """Check the sizes and options of the layer.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        self.attention.check()
        self.mlp.check()
        _positive("config", {"residual_multiplier": self.residual_scale})
        if self.norms not in NORMS:
            raise unsupported("norms", self.norms, " or ".join(map(repr, NORMS)))

    @property
    def has_pre_norms(self) -> bool:
        """Whether attention and feed-forward have norms before them."""
        return self.norms != "post"

    @property
    def has_post_norms(self) -> bool:
        """Whether attention and feed-forward have norms after them."""
        return self.norms != "pre"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config fields that models and EAGLE heads have in common.

    Attributes:
        vocab_size: number of tokens of the vocabulary.
        hidden_size: number of channels of the residual stream.
        layers: config of each layer.
        norm_eps: epsilon of all RMS norms.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float

    def __post_init__(self) -> None:
        positive("config", self, ("vocab_size", "hidden_size", "num_layers", "norm_eps"))
        for layer in self.layers:
            layer.check()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def qk_norm(self) -> str | None:
        return self.layers[0].attention.qk_norm

    @property
    def qkv_bias(self) -> bool:
        return self.layers[0].attention.bias

    @property
    def rope(self) -> Rope:
        return self.layers[0].attention.rope

    @property
    def intermediate_size(self) -> int:
        return self.layers[0].mlp.width

    @property
    def windows(self) -> list[int]:
        """The sizes of the sliding windows, in tokens; empty if every layer attends to all tokens."""
        return [layer.attention.window for layer in self.layers if layer.attention.window is not None]

    @classmethod
    def of_sizes(
        cls,
        *,
        num_layers: int = 1,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        rope: Rope,
        qkv_bias: bool = False,
        qk_norm: str | None = None,
        **others: Any,
    ) -> Self:
        """Make the config of a decoder whose layers are all alike, as those of Llama.

        Args:
            num_layers: number of layers.
            num_heads, num_kv_heads, head_dim, rope, qkv_bias, qk_norm: fields of each layer's `GQA`.
            intermediate_size: width of each layer's `Dense`.
            others: all fields of the record except ``layers``.
        """
        check_num_layers(num_layers)
        attention = GQA(num_heads, num_kv_heads, head_dim, bias=qkv_bias, qk_norm=qk_norm, rope=rope)
        return cls(layers=(LayerConfig(attention, Dense(intermediate_size)),) * num_layers, **others)

    def resized(self, **changes: Any) -> Self:
        """Return a copy of the config with the given arguments of `of_sizes` replaced in every layer.

        Raises:
            NotImplementedError: another number of layers is asked for, and the layers differ.
        """
        count = changes.pop("num_layers", self.num_layers)
        if count != self.num_layers and len(set(self.layers)) > 1:
            raise unsupported("num_layers", count, f"{self.num_layers}, because the layers differ")
        attention = {own: changes.pop(name) for name, own in ATTENTION.items() if name in changes}
        mlp = {"width": changes.pop("intermediate_size")} if "intermediate_size" in changes else {}
        layers = [
            replace(layer, attention=replace(layer.attention, **attention), mlp=replace(layer.mlp, **mlp))
            for layer in (self.layers if count == self.num_layers else self.layers[:1] * count)
        ]
        return replace(self, layers=tuple(layers), **changes)

    def with_theta(self, theta: float) -> Self:
        """Return a copy of the config with another rotary base.

        Raises:
            NotImplementedError: layers have different rotary embeddings.
        """
        if len({layer.attention.rope for layer in self.layers}) > 1:
            raise unsupported("rope_theta", theta, "none, because layers have different rotary embeddings")
        return self.resized(rope=replace(self.rope, theta=theta))

    def for_length(self, max_len: int) -> Self:
        """Return the config for texts of up to ``max_len`` tokens, which decides how "longrope" rotates.

        Raises:
            NotImplementedError: the rotary embedding of kind "dynamic" would depend on the length of each text.
        """
        rope = self.rope
        if rope.kind == "dynamic" and max_len > rope.original_max_position:
            raise unsupported(
                "max_len", max_len, f"at most {rope.original_max_position} with rotary embeddings of type 'dynamic'"
            )
        is_long = rope.kind == "longrope" and max_len > rope.original_max_position
        return self.resized(rope=replace(rope, is_long=True)) if is_long else self

    def to_json(self) -> dict[str, Any]:
        """Return the config as JSON values, which `from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Make a config from the JSON values that `to_json` returned."""
        return from_json(cls, Fields.of(fields))


ATTENTION = {  # arguments of `of_sizes` that are fields of `GQA`, under the fields' names
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "rope": "rope",
    "qkv_bias": "bias",
    "qk_norm": "qk_norm",
}


def check_num_layers(count: int) -> None:
    """Raise CheckpointError if a model has more than `MAX_LAYERS` layers."""
    if count > MAX_LAYERS:
        raise CheckpointError("config", f"expected num_layers <= {MAX_LAYERS}, got {count}; correct config.json")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """The config of a target or a draft model.

    Attributes:
        family: name of the model family in `jspec.models.families`, the `model_type` of config.json.
        tie_word_embeddings: whether the embedding is also the output head.
        max_position: longest sequence that the model was trained for, in tokens.
        embed_scale: factor of the embedding, rounded to the model's dtype.
        logit_divisor: divisor of the logits.
        logit_softcap: limit c of the logits x, which become c * tanh(x / c); None: no limit.
        norms_in_float32: whether norms multiply by their weight in float32 and round afterwards (Gemma).
    """

    family: str
    tie_word_embeddings: bool
    max_position: int
    embed_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    norms_in_float32: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("config", self, ("max_position", "embed_scale", "logit_divisor"))
        if self.logit_softcap is not None:
            positive("config", self, ("logit_softcap",))
