"""Declarations of a model's parameters: their shapes, the names of their axes, and how random values are drawn.

Parameters are named as in a converted folder, for example "layers.3.qkv". Weight maps, random weights and abstract
weights take their shapes from these declarations. `jspec.models.weights.tensor_parallel` divides parameters over
devices by the names of their axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from convert.huggingface import MapRow, side_by_side, stacked
from convert.orbax import unflatten
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mlps.mlp_config import Dense, Experts, Mlp, NoMlp
from jspec.models.parts.block_conv import conv_params
from jspec.models.parts.layer_embeddings import embedding_params, gate_params
from jspec.models.parts.param_spec import Params, ParamSpec, norm, prefixed
from jspec.models.weights.quantize import quantize_parameters

EMBEDDINGS = "layer_embeddings"  # field of a model with the weights of `LayerEmbeddings`
EXPERT_NORMS = ("router_norm", "experts_norm", "experts_post_norm", "shared_post_norm")


def layer_params(layer: LayerConfig, hidden: int, inputs: int, norm_dtype: str | None = None) -> dict[str, ParamSpec]:
    """Declare the parameters of a decoder layer, by field name of `jspec.models.parts.layer_weights.LayerWeights`.

    Args:
        layer: config of the layer.
        hidden: number of channels of the residual stream.
        inputs: number of input channels of the fused QKV projection.
        norm_dtype: dtype of the norms; None: that of the model.
    """
    mixer = layer.mixer.params(hidden, inputs, norm_dtype)
    params = {name: mixer.pop(name) for name in ("qkv", "o") if name in mixer} | _mlp_params(layer.mlp, hidden)
    if layer.has_pre_norms and layer.has_mlp:
        params["mlp_norm"] = norm(hidden, dtype=norm_dtype)
    if layer.has_post_norms:
        params |= {name: norm(hidden, dtype=norm_dtype) for name in ("attn_post_norm", "mlp_post_norm")}
    if layer.has_scale:
        params["output_scale"] = ParamSpec((1,), ("one",), init="ones")
    if isinstance(layer.mlp, Experts) and layer.mlp.has_norms:
        params |= {name: norm(hidden, dtype=norm_dtype) for name in EXPERT_NORMS}
    if layer.embedded:
        params |= gate_params(hidden, layer.embedded, norm_dtype)
    if layer.block_taps:
        params |= conv_params(hidden, layer.block_taps, layer.block_group)
    return params | mixer


def _mlp_params(mlp: Mlp, hidden: int) -> dict[str, ParamSpec]:
    """Declare the parameters of a feed-forward: those that every row uses, and those of its experts."""
    if isinstance(mlp, NoMlp):
        return {}
    width = mlp.width if isinstance(mlp, Dense) else mlp.shared
    parts = (width,) * (1 + mlp.is_gated)
    params = {
        "gate_up": ParamSpec((sum(parts), hidden), ("mlp", "hidden"), parts=parts),
        "down": ParamSpec((hidden, width), ("hidden", "mlp")),
    }
    return params if isinstance(mlp, Dense) else (params if width else {}) | _expert_params(mlp, hidden)


def _expert_params(experts: Experts, hidden: int) -> dict[str, ParamSpec]:
    router, count, width = experts.router, experts.router.count, experts.width
    inner, outer = (1 + experts.is_gated) * width, experts.latent or hidden
    # Scores that are sigmoids are computed in float32, from weights in float32 (DeepSeek-V3, GLM-4.5).
    dtype = "float32" if router.scores == "sigmoid" else None
    params = {
        "router": ParamSpec((count, hidden), ("routed", "hidden"), dtype=dtype),
        "experts_gate_up": ParamSpec((count, inner, outer), ("experts", "channels", "hidden")),
        "experts_down": ParamSpec((count, outer, width), ("experts", "hidden", "channels")),
    }
    if experts.latent is not None:
        params["experts_in"] = ParamSpec((outer, hidden), ("latent", "hidden"))
        params["experts_out"] = ParamSpec((hidden, outer), ("hidden", "latent"))
    if router.bias:
        params["router_bias"] = ParamSpec((count,), ("routed",), init="zeros", dtype="float32")
    if router.scaled:
        params["router_scale"] = ParamSpec((count,), ("routed",), init="ones", dtype="float32")
    if router.correction:
        params["router_correction"] = ParamSpec((count,), ("routed",), init="zeros", dtype="float32")
    if experts.gates_shared:
        params["shared_gate"] = ParamSpec((1, hidden), ("one", "hidden"))
    if experts.bias:
        params["experts_gate_up_bias"] = ParamSpec((count, 2 * width), ("experts", "channels"), init="zeros")
        params["experts_down_bias"] = ParamSpec((count, hidden), ("experts", "hidden"), init="zeros")
    return params


def model_params(config: ModelConfig) -> dict[str, ParamSpec]:
    """Declare the parameters of a target or a draft model, by parameter name."""
    vocab = ParamSpec((config.vocab_size, config.hidden_size), ("vocab", "hidden"))
    params = {"embed": vocab if config.tie_word_embeddings else replace(vocab, axes=("tokens", "hidden"))}
    hidden, norm_dtype = config.hidden_size, "float32" if config.norms_in_float32 else None
    for index, layer in enumerate(config.layers):
        specs = layer_params(layer, hidden, hidden, norm_dtype)
        if layer.has_pre_norms and layer.has_mixer:
            specs["attn_norm"] = norm(hidden, dtype=norm_dtype)
        params |= prefixed(f"layers.{index}", specs)
    params["norm"] = norm(hidden, dtype=norm_dtype)
    if any(sizes := [layer.embedded for layer in config.layers]):
        params |= prefixed(EMBEDDINGS, embedding_params(config.vocab_size, hidden, sizes, norm_dtype))
    return params if config.tie_word_embeddings else params | {"head": vocab}


def rows(params: Params, tensors: Mapping[str, Sequence[str]]) -> list[MapRow]:
    """Return the rows of a weight map, one per parameter.

    Args:
        params: declarations of the parameters.
        tensors: names of the checkpoint's tensors that are concatenated along axis 0, by parameter name.
    """
    return [_row(name, params[name], names) for name, names in tensors.items()]


def _row(parameter: str, spec: ParamSpec, names: Sequence[str]) -> MapRow:
    """Return the row of one parameter; a parameter of several parts, or of experts, may be stored as one tensor."""
    if spec.axes[0] == "experts" and len(names) > 1:
        parts = len(names) // spec.shape[0]  # tensors of an expert
        return side_by_side(parameter, dict.fromkeys(names, (spec.shape[1] // parts, *spec.shape[2:])), parts)
    shapes = [spec.shape] if len(names) == 1 else spec.part_shapes()
    return stacked(parameter, dict(zip(names, shapes, strict=True)), spec.dtype)


def abstract_weights(params: Params, dtype: str) -> dict[str, Any]:
    """Return a tree of `jax.ShapeDtypeStruct`, with which programs are compiled before weights are loaded.

    Args:
        params: declarations of the parameters.
        dtype: dtype of the parameters that declare none.
    """
    return unflatten({name: _abstract(spec, dtype) for name, spec in params.items()})


def random_weights(
    params: Params,
    dtype: str,
    seed: int,
    quantize: str | None = None,
    put: Callable[[str, jax.Array], jax.Array] = lambda name, array: array,
) -> dict[str, Any]:
    """Draw a tree of random weights on the device.

    Args:
        params: declarations of the parameters.
        dtype: dtype of the parameters that declare none.
        seed: seed of the random numbers.
        quantize: how the weight matrices are quantised (`jspec.models.weights.quantize`); None: not at all. To save
            memory, each parameter is quantised before the next parameter is drawn.
        put: function that moves a named parameter to its devices before it is quantised.
    """
    make = jax.jit(_draw, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(seed), len(params))
    weights: dict[str, Any] = {}
    for key, (name, spec) in zip(keys, params.items(), strict=True):
        drawn = {name: put(name, make(key, spec, dtype))}
        weights |= drawn if quantize is None else quantize_parameters(drawn, quantize)
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
