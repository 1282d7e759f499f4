"""The Llama family (Llama 2 and 3, arXiv:2307.09288), and the base class of families whose layers differ in options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from convert.fields import Fields
from convert.huggingface import MapRow
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.hf_config import (
    DEFAULT_THETA,
    FULL,
    SLIDING,
    all_layers,
    read_activation,
    read_layer_types,
    read_ropes,
    read_sizes,
    refuse,
)
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import register
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mlps.mlp_config import Dense, Mlp
from jspec.models.parts.checks import unsupported
from jspec.models.parts.rope import Rope
from jspec.models.weights.weight_map import LAYER, Names, model_rows


@register("llama")
class Llama:
    """The family of Llama 2 and 3. Other families override the methods and attributes that differ.

    Attributes:
        published: names of published models, for the list of supported targets.
        defaults: values of keys that a config.json may leave out, where they differ from Llama's.
        fixed: options that must have this value, if the config.json gives them.
        names: tensor names by parameter of a layer.
        norms_less_one: whether the file stores the weights of norms minus 1.
        rotates_parts: whether `partial_rotary_factor` may be below 1.
        theta: rotary base of a config.json that gives none.
    """

    published: ClassVar[str] = "Llama 2, 3, 3.1, 3.2 (text), 3.3"
    defaults: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {"mlp_bias": False, "use_sliding_window": False}
    names: ClassVar[Names] = LAYER
    norms_less_one: ClassVar[bool] = False
    rotates_parts: ClassVar[bool] = False
    theta: ClassVar[float] = DEFAULT_THETA

    def config(self, fields: Mapping[str, Any], *, rope_theta: float | None = None) -> ModelConfig:
        """Read the config.json of a model; `jspec.models.families.Family.config` documents arguments and errors."""
        fields = self._filled(Fields.of(fields))
        return ModelConfig(
            **self.decoder(fields, rope_theta=rope_theta),
            family=fields.text("model_type"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            max_position=fields.integer("max_position_embeddings", 2048),
            **self.model(fields),
        )

    def decoder(self, fields: Fields, *, rope_theta: float | None = None) -> dict[str, Any]:
        """Read the fields of `DecoderConfig`, for a model or for a draft head whose layers are of this family.

        The arguments and errors are those of `config`.
        """
        fields = self._filled(fields)
        refuse(fields, self.fixed)
        sizes = read_sizes(fields, "num_hidden_layers")
        all_layers(fields, FULL)  # checks the number of layers
        heads = GQA(*(sizes.pop(name) for name in ("num_heads", "num_kv_heads", "head_dim")))
        dense = Dense(sizes.pop("intermediate_size"), read_activation(fields, "hidden_activation", "hidden_act"))
        ropes, types = self.ropes(fields, rope_theta), self.layer_types(fields)
        if missing := sorted(set(types) - ropes.keys()):
            raise fields.error("rope_parameters", f"an object for each layer type, also for {', '.join(missing)}")
        layers = [
            LayerConfig(attention, mlp, **self.layer(fields))
            for attention, mlp in zip(
                self.mixers(fields, heads, [ropes[kind] for kind in types], types),
                self.mlps(fields, dense),
                strict=True,
            )
        ]
        return {**sizes, "layers": tuple(layers)}

    def _filled(self, fields: Fields) -> Fields:
        """Return a config.json with the family's values of the keys that it leaves out."""
        return Fields({**self.defaults, **fields}, fields.place)

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        """Return the rows of the weight map; `jspec.models.families.Family.weights` documents the arguments."""
        return model_rows(
            config, names, lambda layer: self.layer_names(layer, names), norms_less_one=self.norms_less_one
        )

    def layer_names(self, layer: LayerConfig, tensors: Collection[str]) -> Names:
        """Return the tensor names by parameter of a layer; ``tensors`` has the names of all tensors."""
        return self.names

    def layer_types(self, fields: Fields) -> list[str]:
        """Return whether each layer has full or sliding-window attention."""
        types = read_layer_types(fields, all_layers(fields, FULL))
        refuse(Fields({"layer_types": sorted(set(types) - {FULL}) or None}), {"layer_types": [FULL]})
        return types

    def ropes(self, fields: Fields, theta: float | None) -> Mapping[str, Rope]:
        """Return the rotary embedding of each layer type; ``theta`` replaces the base if it is not None."""
        ropes = read_ropes(fields, theta=theta, default=self.theta)
        fractions = {rope.fraction for rope in ropes.values()}
        if fractions != {1.0} and not self.rotates_parts:
            raise unsupported("partial_rotary_factor", max(fractions), "1.0")
        return ropes

    def mixers(self, fields: Fields, heads: GQA, ropes: Sequence[Rope], types: Sequence[str]) -> Sequence[Mixer]:
        """Return the attention of each layer.

        Args:
            fields: parsed config.json.
            heads: attention with the sizes in config.json.
            ropes, types: rotary embedding and type of each layer.
        """
        windows = {FULL: None, SLIDING: fields.integer("sliding_window") if SLIDING in types else None}
        attention, others = replace(heads, **self.attention(fields)), self.other_mixers(fields)
        return [
            others[kind] if kind in others else replace(attention, rope=rope, window=windows[kind])
            for rope, kind in zip(ropes, types, strict=True)
        ]

    def other_mixers(self, fields: Fields) -> Mapping[str, Mixer]:
        """Return the mixer of each layer type that has no attention."""
        return {}

    def attention(self, fields: Fields) -> dict[str, Any]:
        """Return the fields of `GQA` that differ from their defaults, except sizes, rope and window."""
        bias = fields.flag("attention_bias")
        return {"bias": bias, "output_bias": bias}

    def mlps(self, fields: Fields, dense: Dense) -> Sequence[Mlp]:
        """Return the feed-forward of each layer; ``dense`` has `intermediate_size` channels."""
        return [dense] * fields.integer("num_hidden_layers")

    def layer(self, fields: Fields) -> dict[str, Any]:
        """Return the fields of `LayerConfig` that differ from their defaults, except attention and feed-forward."""
        return {}

    def model(self, fields: Fields) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that differ from their defaults, except sizes and layers."""
        return {}
