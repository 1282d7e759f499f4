"""What a decoder is, as frozen records: the rotary embedding, the sizes; and checks with their messages."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

ROPE_KINDS = ("default", "llama3")


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
        check_layer(self)
        positive("config", self, ("max_position",))

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds the config that `to_json` wrote."""
        return cls(**{**fields, "rope": Rope(**fields["rope"])})


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
