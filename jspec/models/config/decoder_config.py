"""The configs of decoders, as frozen, hashable records that check their values, and their form as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast

from convert.fields import CheckpointError, Fields, listed, require
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mixers.attention import Attention
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.mla import MLA
from jspec.models.mixers.shared_kv import SharedKV, TargetKV
from jspec.models.mixers.short_conv import ShortConv
from jspec.models.mlps.mlp_config import Dense, Experts, Router
from jspec.models.parts.checks import positive, unsupported
from jspec.models.parts.rope import Rope

MAX_LAYERS = 2048  # of a model; its config and its weight map have an entry for each

R = TypeVar("R")


def from_json(record: type[R], fields: Fields) -> R:
    """Make a config record from the JSON values that `to_json` returned, and check their names and types.

    Raises:
        CheckpointError: a required value is missing, a name is unknown, or a value has another type.
    """
    known = {field.name: field for field in dataclasses.fields(cast(Any, record))}
    if unknown := sorted(fields.keys() - known.keys()):
        raise CheckpointError(fields.place, f"expected {', '.join(known)}, got {listed(unknown)}; convert again")
    required = [field for field in known.values() if field.default is dataclasses.MISSING]
    require(fields, [field.name for field in required if "None" not in str(field.type)])
    return record(**{name: READERS[str(known[name].type)](fields, name) for name in fields})


def to_json(record: Any) -> dict[str, Any]:
    """Return the fields of a config record as JSON values; fields with their default value are left out."""
    values = {field: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {field.name: _json(value) for field, value in values.items() if value != field.default}


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
    kinds = [from_json(LayerConfig, _with_mixer(kind)) for kind in layers.objects("kinds")]
    order = layers.integers("order")
    if len(order) > MAX_LAYERS or not all(0 <= index < len(kinds) for index in order):
        raise layers.error("order", f"at most {MAX_LAYERS} indices below {len(kinds)}, the number of kinds")
    return tuple(kinds[index] for index in order)


def _with_mixer(layer: Fields) -> Fields:
    """Return the JSON values of a layer, whose mixer has the name "attention" in folders of earlier versions."""
    return Fields({"mixer" if name == "attention" else name: value for name, value in layer.items()}, layer.place)


# A field that only this kind of mixer has, by which its JSON values are told; others are grouped-query attention.
MIXERS: dict[str, type[Mixer]] = {
    "latent": MLA,
    "channels": ShortConv,
    "key_heads": GatedDelta,
    "source": SharedKV,
    "of_window": TargetKV,
}


def _read_mixer(fields: Fields) -> Mixer:
    return from_json(next((kind for field, kind in MIXERS.items() if field in fields), GQA), fields)


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
    "Mixer": lambda fields, name: _read_mixer(fields.object(name)),
    "Dense | Experts": lambda fields, name: from_json(
        Experts if "router" in fields.object(name) else Dense, fields.object(name)
    ),
    "Router": lambda fields, name: from_json(Router, fields.object(name)),
    "tuple[LayerConfig, ...]": _read_layers,
    "tuple[int, ...] | None": lambda fields, name: tuple(fields.integers(name)) or None,
    "tuple[float, ...]": lambda fields, name: tuple(fields.numbers(name)),
}


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
        for index, layer in enumerate(self.layers):
            layer.check()
            layer.mixer.check_after([earlier.mixer for earlier in self.layers[:index]])
        if not any(isinstance(layer.mixer, Attention) for layer in self.layers):
            raise unsupported("layer_types", "none with attention", "at least one layer with attention")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mlps(self) -> list[Dense | Experts]:
        """The feed-forward of each layer."""
        return [layer.mlp for layer in self.layers]

    @property
    def attention(self) -> Attention:
        """The mixer of the first layer that has attention."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def num_heads(self) -> int:
        return self.attention.heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.cached_heads

    @property
    def head_dim(self) -> int:
        return self.attention.key_dim

    @property
    def qk_norm(self) -> str | None:
        return self.attention.qk_norm if isinstance(self.attention, GQA) else None

    @property
    def qkv_bias(self) -> bool:
        return isinstance(self.attention, GQA) and self.attention.bias

    @property
    def rope(self) -> Rope:
        return self.attention.rope

    @property
    def has_slot_states(self) -> bool:
        """Whether a layer keeps a state in each slot, beside the pages of those with attention."""
        return not all(layer.mixer.has_pages for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        return self.layers[0].mlp.width

    @property
    def windows(self) -> list[int]:
        """The sizes of the sliding windows, in tokens; empty if every layer attends to all tokens."""
        attentions = [layer.mixer for layer in self.layers if isinstance(layer.mixer, GQA)]
        return [attention.window for attention in attentions if attention.window is not None]

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
        """Return a copy of the config with the given arguments of `of_sizes` replaced in every layer that has them.

        Raises:
            NotImplementedError: another number of layers is asked for, and the layers differ.
        """
        count = changes.pop("num_layers", self.num_layers)
        if count != self.num_layers and len(set(self.layers)) > 1:
            raise unsupported("num_layers", count, f"{self.num_layers}, because the layers differ")
        attention = {field: changes.pop(name) for name, field in ATTENTION.items() if name in changes}
        mlp = {"width": changes.pop("intermediate_size")} if "intermediate_size" in changes else {}
        layers = [
            replace(
                layer,
                mixer=layer.mixer.replaced(**attention) if isinstance(layer.mixer, Attention) else layer.mixer,
                mlp=replace(layer.mlp, **mlp),
            )
            for layer in (self.layers if count == self.num_layers else self.layers[:1] * count)
        ]
        return replace(self, layers=tuple(layers), **changes)

    def with_theta(self, theta: float) -> Self:
        """Return a copy of the config with another rotary base.

        Raises:
            NotImplementedError: layers have different rotary embeddings.
        """
        if len({layer.mixer.rope for layer in self.layers if isinstance(layer.mixer, Attention)}) > 1:
            raise unsupported("rope_theta", theta, "none, because layers have different rotary embeddings")
        return self.resized(rope=replace(self.rope, theta=theta))

    def for_length(self, max_len: int) -> Self:
        """Return the config for texts of up to ``max_len`` tokens, which decides how "longrope" rotates.

        Raises:
            NotImplementedError: the rotary embedding of kind "dynamic" would depend on the length of each text.
        """
        layers = [replace(layer, mixer=layer.mixer.for_length(max_len)) for layer in self.layers]
        return replace(self, layers=tuple(layers))

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
        norms_embedding: whether the embedding of a token is divided by its root mean square (Muse). Heads that read the
            target's embedding do not divide it.
        logit_divisor: divisor of the logits.
        logit_softcap: limit c of the logits x, which become c * tanh(x / c); None: no limit.
        norms_in_float32: whether norms multiply by their weight in float32 and round afterwards (Gemma).
    """

    family: str
    tie_word_embeddings: bool
    max_position: int
    embed_scale: float = 1.0
    norms_embedding: bool = False
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    norms_in_float32: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("config", self, ("max_position", "embed_scale", "logit_divisor"))
        if len(sizes := {layer.embedded for layer in self.layers}) > 1:
            raise unsupported("hidden_size_per_layer_input", sorted(sizes), "one size for all layers")
        if self.logit_softcap is not None:
            positive("config", self, ("logit_softcap",))
