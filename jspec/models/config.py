"""What a checkpoint is, as frozen records: models (target or draft), EAGLE heads, Medusa heads."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jspec.models.fields import Rope, check_layer, layer_sizes, positive, unsupported

__all__ = ["ModelConfig", "Rope"]

FAMILIES = ("llama",)


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
        check_layer(self)
        positive("config", self, ("max_position",))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, rope_theta: float | None = None) -> Self:
        """Reads a Hugging Face config.json.

        Args:
            config: the parsed file.
            rope_theta: replaces the rotary base that the file gives.
        Returns: the config.
        Raises: ValueError listing missing keys; NotImplementedError naming an option that is not supported.
        """
        return cls(
            **layer_sizes(config, FAMILIES, "num_hidden_layers"),
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
