"""The parameters of a model, each declared once: shape, logical axes, and how random weights are drawn.

Parameters are named as in a converted folder, "layers.3.qkv". The shapes of the weight maps, of random weights and of
abstract ones all come from here; `axes` name dimensions so that a mesh can be assigned to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from convert.huggingface import Row, Shape, stacked
from convert.orbax import unflatten
from jspec.models.config import LayerConfig, ModelConfig
from jspec.models.quantize import quantize_parameters


@dataclass(frozen=True)
class ParamSpec:
    """A parameter.

    Attributes:
        shape: linear weights are [out, in].
        axes: the logical name of each dimension.
        init: random values: "normal" (of unit gain), "ones", "zeros" or "range" (0, 1, 2, ...).
        dtype: None: the dtype of the model.
        parts: rows of each tensor in a file, of which a fused parameter is made along axis 0; (): one tensor.
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
        """The shapes of the tensors that the parameter is made of."""
        return [(rows, *self.shape[1:]) for rows in self.parts or self.shape[:1]]


Params = Mapping[str, ParamSpec]


def norm(size: int, axis: str = "hidden") -> ParamSpec:
    """The weight of a norm over ``size`` channels."""
    return ParamSpec((size,), (axis,), init="ones")


def layer_params(layer: LayerConfig, hidden: int, inputs: int) -> dict[str, ParamSpec]:
    """The parameters of a decoder layer, by the field names of `jspec.models.block.LayerWeights`.

    Args:
        hidden: channels of the residual stream.
        inputs: channels that the attention's projection reads.
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
    """The parameters of a target or a draft model, by name."""
    vocab = ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "hidden"))
    params = {"embed": vocab}
    for index, layer in enumerate(config.layers):
        own = layer_params(layer, config.hidden_size, config.hidden_size) | {"attn_norm": norm(config.hidden_size)}
        params |= prefixed(f"layers.{index}", own)
    params["norm"] = norm(config.hidden_size)
    return params if config.tie_word_embeddings else params | {"head": vocab}


def prefixed(prefix: str, params: Params) -> dict[str, ParamSpec]:
    """The parameters under names that begin with ``prefix.``."""
    return {f"{prefix}.{name}": spec for name, spec in params.items()}


def rows(params: Params, tensors: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows of a weight map.

    Args:
        tensors: by parameter the names of the tensors that it is made of, one after the other along axis 0.
    """
    return [stacked(name, dict(zip(names, params[name].part_shapes(), strict=True))) for name, names in tensors.items()]


def abstract_weights(params: Params, dtype: str) -> dict[str, Any]:
    """The tree of weights as shapes, for compiling without weights."""
    return unflatten({name: _abstract(spec, dtype) for name, spec in params.items()})


def random_weights(params: Params, dtype: str, seed: int, quantize: str | None = None) -> dict[str, Any]:
    """The tree of weights, drawn on the device.

    Args:
        quantize: as `jspec.models.quantize`, parameter by parameter: the whole unquantised model never exists.
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
