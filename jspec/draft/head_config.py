"""Configs of draft heads, with one class per method, and the config values that a caller may override."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from convert.fields import CheckpointError, Fields
from jspec.models.config.decoder_config import DecoderConfig, from_json
from jspec.models.parts.checks import positive, positive_values, unsupported

# Options of the forward pass that only EAGLE-3 heads have.
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fuse")
# The fields of `Overrides` that apply to each kind of checkpoint.
OVERRIDABLE = {
    "target": {"rope_theta"},
    "eagle3": {"rope_theta", "feature_layers", "norm_before_residual", "norm_output"},
    "peagle": {"rope_theta", "feature_layers", "norm_before_residual", "mask_token_id"},
    "eagle": {"rope_theta", "feature_layers"},
    "dflash": {"rope_theta", "feature_layers"},
    "dspark": {"rope_theta", "feature_layers"},
    "dflash2": {"rope_theta", "feature_layers"},
    "medusa": set(),
    "gemma4_assistant": set(),
    "mtp": {"norm_output"},
}
MARKOV_HEADS = ("vanilla", "gated", "rnn")  # kinds of Markov heads (`jspec.draft.dspark_head`)


LEAST_LAYERS = 7  # least number of layers of a target whose default states differ


def default_states(num_layers: int) -> tuple[int, int, int]:
    """Return the indices of the three target states that an EAGLE-3 head reads by default.

    They are distinct if the target has `LEAST_LAYERS` layers or more.

    Args:
        num_layers: number of layers of the target.
    """
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DecoderConfig, ABC):
    """Base class of head configs, with the fields of all methods; `vocab_size` is the target's.

    Attributes:
        draft_vocab_size: number of tokens that the head can draft.
        target_hidden_size: number of channels of the target's hidden states.
        feature_layers: indices of the target's hidden states that the head reads, concatenated in this order. State k
            is the input of layer k. In a target of N layers, state N is the output of the last layer, and state N + 1
            the output of the final norm. None: the defaults of `states_of`.
        source_format: name of the exporter, for display.
        fc_bias: whether `fc`, the projection of the head's inputs, has a bias.
    """

    method: ClassVar[str]

    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    source_format: str
    fc_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("head config", self, ("draft_vocab_size", "target_hidden_size"))
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                "draft_vocab_size",
                f"expected at most vocab_size ({self.vocab_size}, the target's), got {self.draft_vocab_size}; "
                "correct config.json",
            )
        layers = self.feature_layers
        if layers is not None and (not layers or len(set(layers)) < len(layers) or min(layers) < 0):
            raise ValueError(
                f"feature_layers: expected distinct target state indices from 0, got {layers}; pass others"
            )
        if not self.fuses_states:
            self._check_single_state()

    @property
    @abstractmethod
    def fuses_states(self) -> bool:
        """Return whether `fc` maps several target states to one feature; if not, the feature is one target state."""

    @property
    def num_features(self) -> int:
        """The number of target states that the head reads."""
        if self.feature_layers is not None:
            return len(self.feature_layers)
        return 3 if self.fuses_states else 1

    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the target's hidden states that the head reads.

        If `feature_layers` is None, a head that fuses states reads the `default_states`. Another head reads the state
        after the target's final norm.

        Args:
            num_layers: number of layers of the target.
        """
        if self.feature_layers is not None:
            return self.feature_layers
        return default_states(num_layers) if self.fuses_states else (num_layers + 1,)

    def _check_single_state(self) -> None:
        """Raise ValueError unless the head reads a single target state of the head's own hidden size."""
        if self.num_features != 1:
            raise ValueError(
                f"feature_layers: expected one target state for a head that fuses none, got {self.feature_layers}; "
                "pass feature_layers= with one state, or leave it out for the state after the final norm"
            )
        if self.target_hidden_size != self.hidden_size:
            raise CheckpointError(
                "target_hidden_size",
                f"expected hidden_size ({self.hidden_size}) for a head that fuses no states, "
                f"got {self.target_hidden_size}; correct config.json",
            )

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "method": self.method}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build a config from the JSON values that `to_json` returned; the value "method" selects the class."""
        fields = Fields.of(fields)
        method = fields.text("method")
        if method not in METHODS:
            raise fields.error("method", f"one of {', '.join(METHODS)}")
        rest = {name: value for name, value in fields.items() if name != "method"}
        config = from_json(METHODS[method], Fields(rest, fields.place))
        assert isinstance(config, cls)
        return config

    @classmethod
    def of_method(cls, **fields: Any) -> Self:
        """Build a config from its fields and the flags of all methods.

        Raises:
            NotImplementedError: a flag that this method does not have is True.
        """
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The config of an EAGLE-3 head (arXiv:2503.01840).

    Attributes:
        norm_before_residual: whether the first residual is the normed feature instead of the feature itself.
        norm_before_fc: whether the concatenated target states are normed together before `fc`.
        fc_norm: whether each target state is normed before `fc`.
        norm_output: whether the head's normed output is the next feature (EAGLE-3.1).
        fuse: whether `fc` maps the target states to the feature; False: one target state is the feature.
    """

    method: ClassVar[str] = "eagle3"

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fuse: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise CheckpointError(
                "norm_before_fc, fc_norm",
                "expected at most one of them, got both; correct config.json, the head's file holds input_norm.weight "
                "for the former, fc_norm.0.weight for the latter",
            )

    def _check_single_state(self) -> None:
        _refuse(vars(self), "a head that fuses no states", "norm_before_fc", "fc_norm")
        super()._check_single_state()

    @property
    def fuses_states(self) -> bool:
        return self.fuse


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The config of a P-EAGLE head (arXiv:2602.01469), an EAGLE-3 head that drafts several tokens in one pass.

    Its output is never fed back, so ``norm_output`` has no effect and is False.

    Attributes:
        mask_token_id: target id whose embedding stands for each token that is not drafted yet.
    """

    method: ClassVar[str] = "peagle"

    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_mask_token(self.mask_token_id, self.vocab_size)

    @classmethod
    def of_method(cls, **fields: Any) -> Self:
        return cls(**{**fields, "norm_output": False})


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """The config of an EAGLE-1 or EAGLE-2 head (arXiv:2401.15077, 2406.16858); both methods have the same heads."""

    method: ClassVar[str] = "eagle"

    @property
    def fuses_states(self) -> bool:
        return False

    @classmethod
    def of_method(cls, **fields: Any) -> Self:
        if fields["draft_vocab_size"] != fields["vocab_size"]:
            raise unsupported("draft_vocab_size", fields["draft_vocab_size"], f"the target's {fields['vocab_size']}")
        flags = {name: fields.pop(name, False) for name in EAGLE3_FLAGS}
        _refuse(flags, "a head that fuses no states", "norm_before_fc", "fc_norm")
        _refuse(flags, "method 'eagle'", "norm_before_residual", "norm_output")
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """The config of a model's own layer that predicts further tokens (arXiv:2412.19437, section 2.2).

    Attributes:
        norm_output: whether the layer's normed output is the next feature; False: its output before the norm.
    """

    method: ClassVar[str] = "mtp"

    norm_output: bool = True

    @property
    def fuses_states(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """The config of a DFlash head (arXiv:2602.06036).

    Attributes:
        block_size: number of tokens of a block, the root included.
        mask_token_id: target id whose embedding stands for each token of a block after the root.
        sample_from_anchor: whether the output for a token of the block gives the token after it. If so, the root's
            output drafts too. False: the output for a mask token gives the token in its place.
    """

    method: ClassVar[str] = "dflash"

    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise CheckpointError("block_size", f"expected at least 2, got {self.block_size}; correct config.json")
        for attention in (layer.gqa for layer in self.layers):
            if attention.window is not None and attention.window < self.block_size and not attention.causal:
                raise CheckpointError(
                    "sliding_window", f"expected at least {self.block_size}, the block_size, in layers whose tokens "
                    f"see the whole block, got {attention.window}; correct config.json",
                )  # fmt: skip
        _check_mask_token(self.mask_token_id, self.vocab_size)

    @property
    def fuses_states(self) -> bool:
        return True

    @property
    def max_depth(self) -> int:
        """The largest number of tokens that one block drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The config of a DSpark head (arXiv:2607.05147), a DFlash head with a Markov head and a confidence head.

    Attributes:
        markov_rank: number of channels of the Markov head; 0: there is none.
        markov_head_type: one of `MARKOV_HEADS`.
        confidence_head: whether there is a confidence head.
        confidence_head_with_markov: whether the confidence head also reads the Markov embedding of the token before.
    """

    method: ClassVar[str] = "dspark"

    sample_from_anchor: bool = True
    markov_rank: int
    markov_head_type: str = "vanilla"
    confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head_type not in MARKOV_HEADS:
            raise unsupported("markov_head_type", self.markov_head_type, " or ".join(map(repr, MARKOV_HEADS)))
        if self.reads_markov and self.markov_rank == 0:
            raise CheckpointError(
                "confidence_head_with_markov",
                "expected false for a head without a Markov head (markov_rank 0), got true; correct config.json",
            )

    @property
    def reads_markov(self) -> bool:
        """Whether there is a confidence head that reads the Markov embedding."""
        return self.confidence_head and self.confidence_head_with_markov


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """The config of a DFlash2 head, a DFlash head with convolutions in its layers and a selector of candidates.

    Attributes:
        selector_rank: number of channels of the selector.
        selector_top_k: number of candidates at each depth.
        input_scale: factor of the embedding.
        output_multiplier: factor of the logits.
        output_softcap: limit c of the logits x after the factor, which become c * tanh(x / c); None: no limit.
    """

    method: ClassVar[str] = "dflash2"

    selector_rank: int
    selector_top_k: int
    input_scale: float = 1.0
    output_multiplier: float = 1.0
    output_softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("head config", self, ("selector_rank", "selector_top_k"))
        positive_values("head config", {name: getattr(self, name) for name in ("input_scale", "output_multiplier")})
        if self.output_softcap is not None:
            positive_values("head config", {"output_softcap": self.output_softcap})
        group = self.layers[0].block_group
        if self.hidden_size % group:
            raise CheckpointError(
                "conv_group_size", f"expected a divisor of hidden_size ({self.hidden_size}), got {group}; correct "
                "config.json",
            )  # fmt: skip
        if self.sample_from_anchor:
            raise unsupported("sample_from_anchor", True, "false for a DFlash2 head, whose root drafts nothing")


METHODS: dict[str, type[Eagle3Config] | type[EagleConfig] | type[MTPConfig] | type[DFlashConfig]] = {
    "eagle3": Eagle3Config,
    "peagle": PEagleConfig,
    "eagle": EagleConfig,
    "mtp": MTPConfig,
    "dflash": DFlashConfig,
    "dspark": DSparkConfig,
    "dflash2": DFlash2Config,
}


def _check_mask_token(mask_token_id: int, vocab_size: int) -> None:
    if not 0 <= mask_token_id < vocab_size:
        raise CheckpointError(
            "mask_token_id", f"expected an id below vocab_size ({vocab_size}), got {mask_token_id}; correct config.json"
        )


def _refuse(flags: Mapping[str, bool], where: str, *names: str) -> None:
    if refused := [name for name in names if flags.get(name)]:
        raise unsupported(", ".join(refused), True, f"False for {where}")


@dataclass(frozen=True)
class Overrides:
    """Config values that replace a checkpoint's; a value of None keeps the checkpoint's."""

    rope_theta: float | None = None  # rotary base
    feature_layers: tuple[int, ...] | None = None  # as in `HeadConfig`
    norm_before_residual: bool | None = None  # as in `Eagle3Config`
    norm_output: bool | None = None  # as in `Eagle3Config`
    mask_token_id: int | None = None  # as in `PEagleConfig`

    def given(self) -> dict[str, Any]:
        """Return the fields that are not None, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def check(self, kind: str) -> None:
        """Raise ValueError if a given value does not apply to checkpoints of a kind, such as "target" or "eagle3"."""
        if extra := self.given().keys() - OVERRIDABLE[kind]:
            raise ValueError(
                f"{', '.join(sorted(extra))}: expected a draft head that has this, got a checkpoint of kind {kind!r}; "
                "leave it out"
            )

    def apply(self, config: HeadConfig) -> HeadConfig:
        """Return a converted head's config with the given values in place of its own.

        Raises:
            ValueError: the number of feature layers differs from the head's, which would change the shape of `fc`.
        """
        changes, layers = self.given(), self.feature_layers
        if layers is not None and len(layers) != config.num_features:
            raise ValueError(
                f"feature_layers: expected {config.num_features} target states, got {layers}; pass that many"
            )
        theta = changes.pop("rope_theta", None)
        return (config if theta is None else config.with_theta(theta)).resized(**changes)
