"""The configs of decoders, as frozen, hashable records that check their values."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from convert.fields import CheckpointError, Fields, listed, require, short

ROPE_KINDS = ("default", "llama3")
ACTIVATIONS = ("silu",)
NORMS = ("pre",)
MAX_LAYERS = 2048  # of a model; its config and its weight map have an entry for each


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


def stored_arguments(record: type, fields: Fields) -> dict[str, Any]:
    """Read the arguments of a config record from the JSON values of a manifest, and check their names and types.

    Args:
        record: dataclass; its class method `of_sizes` takes the arguments if it has one.
        fields: JSON values by argument name.

    Raises:
        CheckpointError: a required value is missing, a name is unknown, or a value has another type.
    """
    kinds: dict[str, tuple[Any, Any]] = {
        field.name: (field.type, field.default) for field in dataclasses.fields(record)
    }
    if issubclass(record, DecoderConfig):
        parameters = inspect.signature(record.of_sizes).parameters.values()
        kinds |= {p.name: (p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
        del kinds["layers"]
    missing = (dataclasses.MISSING, inspect.Parameter.empty)
    require(fields, [name for name, (kind, default) in kinds.items() if default in missing and "None" not in kind])
    if unknown := sorted(fields.keys() - kinds.keys()):
        raise CheckpointError(fields.place, f"expected {', '.join(kinds)}, got {listed(unknown)}; convert again")
    return {name: READERS[kinds[name][0]](fields, name) for name in fields}


READERS: dict[str, Callable[[Fields, str], Any]] = {  # annotation of an argument: reader of its JSON value
    "int": lambda fields, name: fields.integer(name, least=0),
    "float": Fields.number,
    "bool": Fields.flag,
    "str": Fields.text,
    "Rope": lambda fields, name: Rope(**stored_arguments(Rope, fields.object(name))),
    "tuple[int, ...] | None": lambda fields, name: tuple(fields.integers(name)) or None,
}


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding; kind "llama3" scales its frequencies as Llama 3.1 does.

    Attributes:
        theta: rotary base.
        kind: "default" or "llama3"; only "llama3" uses the fields below.
        factor: divisor of low frequencies.
        low_freq_factor, high_freq_factor: limits of the interpolated frequencies, in rotations per
            ``original_max_position``.
        original_max_position: context length before the scaling, in tokens.
    """

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
                raise CheckpointError(
                    "rope", f"expected high_freq_factor > low_freq_factor, got {self.high_freq_factor} and "
                    f"{self.low_freq_factor}; correct config.json",
                )  # fmt: skip


@dataclass(frozen=True)
class GQA:
    """The config of grouped-query attention (arXiv:2305.13245).

    Attributes:
        heads: number of query heads.
        kv_heads: number of key heads, which is also the number of value heads.
        head_dim: number of channels of a head.
        bias: whether the query, key and value projections have a bias.
        qk_norm: whether every query and key head is normed before its rotation.
        window: number of newest tokens that a query attends to; None: all.
        rope: rotary position embedding.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    rope: Rope = Rope()

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
        _positive("config", named)
        if self.heads % self.kv_heads:
            raise CheckpointError(
                "num_key_value_heads",
                f"expected a divisor of num_attention_heads {self.heads}, got {self.kv_heads}; correct config.json",
            )
        if self.head_dim % 2:
            raise CheckpointError("head_dim", f"expected an even number, got {self.head_dim}; correct config.json")
        if self.window is not None:
            raise unsupported("sliding_window", self.window, "none")


@dataclass(frozen=True)
class Dense:
    """The config of a gated feed-forward (arXiv:2002.05202).

    Attributes:
        width: number of intermediate channels.
        activation: name of the gate's activation function.
    """

    width: int
    activation: str = "silu"

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
        norms: placement of the norms; "pre": before the attention and before the feed-forward.
    """

    attention: GQA
    mlp: Dense
    norms: str = "pre"

    def check(self) -> None:
        """Check the sizes and options of the layer.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        self.attention.check()
        self.mlp.check()
        if self.norms not in NORMS:
            raise unsupported("norms", self.norms, " or ".join(map(repr, NORMS)))


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
    def qk_norm(self) -> bool:
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
        qk_norm: bool = False,
        **others: Any,
    ) -> Self:
        """Make the config of a decoder whose layers are all alike.

        Args:
            num_layers: number of layers.
            num_heads, num_kv_heads, head_dim, rope, qkv_bias, qk_norm: fields of each layer's `GQA`.
            intermediate_size: width of each layer's `Dense`.
            others: all fields of the record except ``layers``.
        """
        if num_layers > MAX_LAYERS:
            raise CheckpointError(
                "config", f"expected num_layers <= {MAX_LAYERS}, got {num_layers}; correct config.json"
            )
        attention = GQA(num_heads, num_kv_heads, head_dim, bias=qkv_bias, qk_norm=qk_norm, rope=rope)
        return cls(layers=(LayerConfig(attention, Dense(intermediate_size)),) * num_layers, **others)

    def sizes(self) -> dict[str, Any]:
        """Return the arguments of `of_sizes` that make this config.

        Raises:
            NotImplementedError: the layers of the config differ.
        """
        if len(set(self.layers)) > 1:
            raise unsupported("layers", "layers that differ", "layers that are all alike")
        layer = self.layers[0]
        attention, flags = layer.attention, {"qkv_bias": layer.attention.bias, "qk_norm": layer.attention.qk_norm}
        names = [field.name for field in dataclasses.fields(self) if field.name != "layers"]
        sizes = {
            **{name: getattr(self, name) for name in names},
            "num_layers": self.num_layers,
            "num_heads": attention.heads,
            "num_kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "intermediate_size": layer.mlp.width,
            "rope": attention.rope,
            **{name: value for name, value in flags.items() if value},
        }
        assert type(self).of_sizes(**sizes) == self, "a field of `LayerConfig` is missing in `of_sizes` or `sizes`"
        return sizes

    def resized(self, **changes: Any) -> Self:
        """Return a copy of the config with the given arguments of `of_sizes` replaced."""
        return type(self).of_sizes(**{**self.sizes(), **changes})

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of `of_sizes` as JSON values, which `from_json` reads."""
        return self.sizes() | {"rope": dataclasses.asdict(self.rope)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Make a config from the JSON values that `to_json` returned."""
        return cls.of_sizes(**stored_arguments(cls, Fields.of(fields)))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """The config of a target or a draft model.

    Attributes:
        family: name of the model family in `jspec.models.families`, the `model_type` of config.json.
        tie_word_embeddings: whether the embedding is also the output head.
        max_position: longest sequence that the model was trained for, in tokens.
    """

    family: str
    tie_word_embeddings: bool
    max_position: int

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("config", self, ("max_position",))
