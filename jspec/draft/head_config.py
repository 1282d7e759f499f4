"""The configs of EAGLE heads as frozen records, and the values that a caller may override."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jspec.models.config import Rope, check_layer, positive, unsupported

METHODS = ("eagle3", "eagle")
# The fields of `Overrides` that a checkpoint of each kind has.
OVERRIDABLE = {
    "target": {"rope_theta"},
    "eagle3": {"rope_theta", "feature_layers", "norm_before_residual", "norm_output"},
    "eagle": {"rope_theta", "feature_layers"},
    "medusa": set(),
}


def default_states(num_layers: int) -> tuple[int, int, int]:
    """The target states that an EAGLE-3 head reads if its file names none; they differ from 7 layers on."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class HeadConfig:
    """An EAGLE head: sizes in elements, `vocab_size` and `target_hidden_size` are the target's.

    Attributes:
        feature_layers: target state indices, joined in this order. State k enters layer k, state N leaves the last
            of N layers, state N+1 is that after the final norm. None: as `states_of` says.
        source_format: the exporter's, for people to read.
        method: "eagle3", or "eagle" for EAGLE-1 and 2, which share their checkpoints.
        norm_before_residual: the first residual is the normed feature, not the feature itself.
        norm_before_fc: one norm over all joined states before fc.
        fc_norm: a norm of each state before fc.
        norm_output: the normed output is fed back as the next feature (EAGLE-3.1).
        qk_norm: every query and key head is normed before the rotary embedding.
        fuse: False: the one feature enters the layer without fc.
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
    method: str = "eagle3"
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    fc_bias: bool = False
    fuse: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}; pass one of them")
        check_layer(self)
        positive("head config", self, ("draft_vocab_size", "target_hidden_size"))
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
        self._check_features()
        if self.method == "eagle":
            self._refuse("method 'eagle'", "norm_before_residual", "norm_output")
            if self.draft_vocab_size != self.vocab_size:
                raise unsupported("draft_vocab_size", self.draft_vocab_size, f"the target's {self.vocab_size}")

    def _check_features(self) -> None:
        """One feature of the head's own width where nothing fuses several."""
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc, fc_norm: expected at most one of them, got both; correct config.json, "
                "the head's file holds input_norm.weight for the former, fc_norm.0.weight for the latter"
            )
        if self.method == "eagle3" and self.fuse:
            return
        self._refuse("a head that fuses no states", "norm_before_fc", "fc_norm")
        if self.num_features != 1:
            raise ValueError(
                f"feature_layers: expected one target state for a head that fuses none, got {self.feature_layers}; "
                "pass feature_layers= with one state, or leave it out for the state after the final norm"
            )
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"target_hidden_size: expected hidden_size ({self.hidden_size}) for a head that fuses no states, "
                f"got {self.target_hidden_size}; correct config.json"
            )

    def _refuse(self, what: str, *flags: str) -> None:
        if given := [flag for flag in flags if getattr(self, flag)]:
            raise unsupported(", ".join(given), True, f"False for {what}")

    @property
    def num_features(self) -> int:
        """Number of target states that are joined into one feature."""
        if self.feature_layers is not None:
            return len(self.feature_layers)
        return 3 if self.method == "eagle3" and self.fuse else 1

    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """The states that are joined, of a target of so many layers.

        Where `feature_layers` is None: the `default_states`, or, for method "eagle" and without `fuse`, state N+1.
        """
        if self.feature_layers is not None:
            return self.feature_layers
        return default_states(num_layers) if self.method == "eagle3" and self.fuse else (num_layers + 1,)

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


@dataclass(frozen=True)
class Overrides:
    """What a caller knows better than a checkpoint's file; None: as the file says."""

    rope_theta: float | None = None
    feature_layers: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None

    def given(self) -> dict[str, Any]:
        """The values that are not None, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def check(self, kind: str) -> None:
        """Raises ValueError for what a checkpoint of this kind does not have."""
        if extra := self.given().keys() - OVERRIDABLE[kind]:
            raise ValueError(
                f"{', '.join(sorted(extra))}: expected a draft head that has this, got a checkpoint of kind {kind!r}; "
                "leave it out"
            )

    def apply(self, config: HeadConfig) -> HeadConfig:
        """Replaces the values of a converted head by those given.

        Raises: ValueError if a weight would need another shape.
        """
        changes, layers = self.given(), self.feature_layers
        if layers is not None and len(layers) != config.num_features:
            raise ValueError(
                f"feature_layers: expected {config.num_features} target states, got {layers}; pass that many"
            )
        if "rope_theta" in changes:
            changes["rope"] = dataclasses.replace(config.rope, theta=changes.pop("rope_theta"))
        return dataclasses.replace(config, **changes)
