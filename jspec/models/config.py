"""Configs of decoders as frozen, hashable records with one `LayerConfig` a layer, and checks with their messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

ROPE_KINDS = ("default", "llama3")
ACTIVATIONS = ("silu",)
NORMS = ("pre",)


def positive(where: str, record: Any, names: Iterable[str]) -> None:
    """Raises ValueError naming the first of the record's attributes that is not above 0."""
    _positive(where, {name: getattr(record, name) for name in names})


def _positive(where: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{where}: expected {name} > 0, got {value!r}; correct config.json")


def require(where: str, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError listing the keys that are absent or null."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; got {', '.join(sorted(config))}; add the keys")


def unsupported(name: str, got: Any, expected: str) -> NotImplementedError:
    """The error for an option that is not computed."""
    return NotImplementedError(f"{name}: expected {expected}, got {got!r}; this checkpoint is not supported yet")


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


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention (arXiv:2305.13245).

    Attributes:
        heads, kv_heads: number of query heads, and of key and value heads.
        head_dim: channels of a head.
        bias: the query, key and value projections have a bias.
        qk_norm: every query and key head is normed before it is rotated.
        window: tokens back that a query attends to; None: all.
        rope: the rotary position embedding.
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
        """Channels of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    def check(self) -> None:
        """Raises ValueError for impossible sizes, NotImplementedError for unsupported options."""
        named = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        _positive("config", named)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads {self.heads}, "
                f"got {self.kv_heads}; correct config.json"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}; correct config.json")
        if self.window is not None:
            raise unsupported("sliding_window", self.window, "none")


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward (arXiv:2002.05202) of ``width`` channels."""

    width: int
    activation: str = "silu"

    def check(self) -> None:
        """Raises ValueError for an impossible size, NotImplementedError for another activation."""
        _positive("config", {"intermediate_size": self.width})
        if self.activation not in ACTIVATIONS:
            raise unsupported("hidden_act", self.activation, " or ".join(map(repr, ACTIVATIONS)))


@dataclass(frozen=True)
class LayerConfig:
    """A decoder layer.

    Attributes:
        norms: where the norms are; "pre": before the attention and before the feed-forward.
    """

    attention: GQA
    mlp: Dense
    norms: str = "pre"

    def check(self) -> None:
        """Raises ValueError for impossible sizes, NotImplementedError naming an unsupported option."""
        self.attention.check()
        self.mlp.check()
        if self.norms not in NORMS:
            raise unsupported("norms", self.norms, " or ".join(map(repr, NORMS)))


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes that models and EAGLE heads share.

    Attributes:
        vocab_size: tokens of the vocabulary.
        hidden_size: channels of the residual stream.
        layers: one record a layer.
        norm_eps: of all RMS norms.
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
        """A decoder whose layers are all alike.

        Args:
            others: the fields of the record beside ``layers``.
        """
        attention = GQA(num_heads, num_kv_heads, head_dim, bias=qkv_bias, qk_norm=qk_norm, rope=rope)
        return cls(layers=(LayerConfig(attention, Dense(intermediate_size)),) * num_layers, **others)

    def sizes(self) -> dict[str, Any]:
        """The arguments of `of_sizes` that give this config.

        Raises: NotImplementedError if its layers differ.
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
        """The config with other arguments of `of_sizes`."""
        return type(self).of_sizes(**{**self.sizes(), **changes})

    def to_json(self) -> dict[str, Any]:
        """The sizes as JSON values, for `from_json`."""
        return self.sizes() | {"rope": dataclasses.asdict(self.rope)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds the config that `to_json` wrote."""
        return cls.of_sizes(**{**fields, "rope": Rope(**fields["rope"])})


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """A target or a draft model.

    Attributes:
        family: the `model_type` under which `jspec.models.families` knows it.
        tie_word_embeddings: the output head is the embedding.
        max_position: longest sequence that the model was trained for, in tokens.
    """

    family: str
    tie_word_embeddings: bool
    max_position: int

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("config", self, ("max_position",))
