"""Declarations of a model's parameters: their shapes, the names of their axes, and how random values are drawn.

Parameters are named as in a converted folder, for example "layers.3.qkv". Weight maps, random weights and abstract
weights take their shapes from these declarations. To shard a model, a mesh axis is assigned to the name of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from convert.huggingface import Row, stacked
from convert.orbax import unflatten
from convert.sources import Shape
from jspec.models.config import LayerConfig, ModelConfig
from jspec.models.quantize import quantize_parameters


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of one parameter.

    Attributes:
        shape: shape of the parameter; linear weights are [out, in].
        axes: name of each axis.
        init: values of random weights: "normal" (standard deviation 1 / sqrt(in)), "ones", "zeros" or "range"
            (0, 1, 2, ...).
        dtype: dtype of the parameter; None: the dtype of the model.
        parts: for a parameter that is fused from several checkpoint tensors along axis 0, the sizes of these tensors
            along axis 0, in order; (): the parameter is one tensor.
    """

    shape: Shape
    axes: tuple[str, ...]
    init: str = "normal"
    dtype: str | None = None
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.shape), self
        assert not self.parts or sum(self.parts) == self.shape[0], self

    def part_shapes(self) -> list[Shape]:
        """Shapes of the checkpoint's tensors that are concatenated to this parameter."""
        return [(rows, *self.shape[1:]) for rows in self.parts or self.shape[:1]]


Params = Mapping[str, ParamSpec]  # parameter name -> declaration


def norm(size: int, axis: str = "hidden") -> ParamSpec:
    """Declare the weight of a norm over ``size`` channels."""
    return ParamSpec((size,), (axis,), init="ones")


def layer_params(layer: LayerConfig, hidden: int, inputs: int) -> dict[str, ParamSpec]:
    """Declare the parameters of a decoder layer, by field name of `jspec.models.block.LayerWeights`.

    Args:
        layer: config of the layer.
        hidden: number of channels of the residual stream.
        inputs: number of input channels of the fused QKV projection.
    """
    q, kv, width = layer.attention.q_size, layer.attention.kv_size, layer.mlp.width
    params = {
        "qkv": ParamSpec((q + 2 * kv, inputs), ("heads", "hidden"), parts=(q, kv, kv)),
        "o": ParamSpec((hidden, q), ("hidden", "heads")),
        "mlp_norm": norm(hidden),
        "gate_up": ParamSpec((2 * width, hidden), ("mlp", "hidden"), parts=(width, width)),
        "down": ParamSpec((hidden, width), ("hidden", "mlp")),
    }
    if layer.attention.bias:
        params["qkv_bias"] = ParamSpec((q + 2 * kv,), ("heads",), init="zeros", parts=(q, kv, kv))
    if layer.attention.qk_norm:
        params |= {name: norm(layer.attention.head_dim, "head_dim") for name in ("q_norm", "k_norm")}
    return params


def model_params(config: ModelConfig) -> dict[str, ParamSpec]:
    """Declare the parameters of a target or a draft model, by parameter name."""
    vocab = ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "hidden"))
    params = {"embed": vocab}
    for index, layer in enumerate(config.layers):
        own = layer_params(layer, config.hidden_size, config.hidden_size) | {"attn_norm": norm(config.hidden_size)}
        params |= prefixed(f"layers.{index}", own)
    params["norm"] = norm(config.hidden_size)
    return params if config.tie_word_embeddings else params | {"head": vocab}


def prefixed(prefix: str, params: Params) -> dict[str, ParamSpec]:
    """Return the declarations with ``prefix.`` before each parameter name."""
    return {f"{prefix}.{name}": spec for name, spec in params.items()}


def rows(params: Params, tensors: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return the rows of a weight map, one per parameter.

    Args:
        params: declarations of the parameters.
        tensors: names of the checkpoint's tensors that are concatenated along axis 0, by parameter name.
    """
    return [stacked(name, dict(zip(names, params[name].part_shapes(), strict=True))) for name, names in tensors.items()]


def abstract_weights(params: Params, dtype: str) -> dict[str, Any]:
    """Return a tree of `jax.ShapeDtypeStruct`, with which programs are compiled before weights are loaded.

    Args:
        params: declarations of the parameters.
        dtype: dtype of the parameters that declare none.
    """
    return unflatten({name: _abstract(spec, dtype) for name, spec in params.items()})


def random_weights(params: Params, dtype: str, seed: int, quantize: str | None = None) -> dict[str, Any]:
    """Draw a tree of random weights on the device.

    Args:
        params: declarations of the parameters.
        dtype: dtype of the parameters that declare none.
        seed: seed of the random numbers.
        quantize: how the weight matrices are quantised (`jspec.models.quantize`); None: not at all. To save memory,
            each parameter is quantised before the next parameter is drawn.
    """
    make = jax.jit(_draw, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(seed), len(params))
    weights: dict[str, Any] = {}
    for key, (name, spec) in zip(keys, params.items(), strict=True):
        own = {name: make(key, spec, dtype)}
        weights |= own if quantize is None else quantize_parameters(own, quantize)
    return unflatten(weights)


def _abstract(spec: ParamSpec, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype)


def _draw(key: jax.Array, spec: ParamSpec, dtype: str) -> jax.Array:
    dtype = spec.dtype or dtype
    match spec.init:
        case "range":
            return jnp.arange(spec.shape[0], dtype=dtype)
        case "ones":
            return jnp.ones(spec.shape, dtype)
        case "zeros":
            return jnp.zeros(spec.shape, dtype)
        case _:
            # Drawn in float32: the 128 values of a bfloat16 draw have a mean of -0.012, which adds up over layers.
            values = jax.random.normal(key, spec.shape, jnp.float32) / math.sqrt(spec.shape[-1])
            return values.astype(dtype)
