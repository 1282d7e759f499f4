"""Puts the shared expert of a mixture behind its experts, in the same arrays, so that one launch multiplies by both.

A shared expert whose width is a multiple of an expert's is as many experts, whose outputs add up to its own. Its gate
and up keep their order, and its down projection is in pieces of columns, so that dense products read both as parts of
the arrays without a copy. Devices that divide a model, and quantised weights, have it apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.models.layer_config import LayerConfig
from jspec.models.mlp_config import Experts
from pallas_kernels.layers.expert_matmul import MOST_ELEMENTS
from pallas_kernels.layers.quantized import Quantized

Record = TypeVar("Record")


def join_layers(configs: Sequence[LayerConfig], layers: Sequence[dict[str, Any]]) -> None:
    """Join shared experts to experts, in place, one layer after another; the others' weights stay as they are.

    Peak memory is that of the weights and of one layer, if nothing else refers to the arrays.

    Args:
        configs: config of each layer.
        layers: weights of each layer by field of `LayerWeights`, arrays or `jax.ShapeDtypeStruct`.
    """
    for config, layer in zip(configs, layers, strict=True):
        if isinstance(config.mlp, Experts) and _can_join(config.mlp, layer):
            for name, join in (("gate_up", _join_gate_up), ("down", _join_down)):
                both = layer[f"experts_{name}"], layer.pop(name)
                layer[f"experts_{name}"] = jax.block_until_ready(_evaluated(join, *both))


def _can_join(config: Experts, layer: Mapping[str, Any]) -> bool:
    weights = [layer.get(name) for name in ("gate_up", "down", "experts_gate_up", "experts_down")]
    if not config.shared_count or any(weight is None or isinstance(weight, Quantized) for weight in weights):
        return False
    count, *size = layer["experts_gate_up"].shape
    is_small = (count + config.shared_count) * size[0] * size[1] < MOST_ELEMENTS
    return is_small and len({weight.dtype for weight in weights if weight is not None}) == 1


def _join_gate_up(experts: Array, shared: Array) -> Array:
    return jnp.concatenate([experts, shared.reshape(-1, *experts.shape[1:])])


def _join_down(experts: Array, shared: Array) -> Array:
    hidden, width = experts.shape[1:]
    return jnp.concatenate([experts, shared.reshape(hidden, -1, width).swapaxes(0, 1)])


def is_joined(config: Experts, layer: Any) -> bool:
    """Return whether the experts' weights of a layer have those of its shared expert."""
    return bool(config.shared_count) and layer.gate_up is None


def apart(record: Record) -> Record:
    """Return a model or a head whose shared experts are apart from its experts."""
    own: Any = record
    if not hasattr(own, "layers"):
        return record
    both = list(zip(own.layers, own.config.layers, strict=True))
    if not any(isinstance(config.mlp, Experts) and is_joined(config.mlp, layer) for layer, config in both):
        return record
    return own.replace(layers=[_apart(config.mlp, layer) for layer, config in both])


def _apart(config: Any, layer: Any) -> Any:
    if not isinstance(config, Experts) or not is_joined(config, layer):
        return layer
    gate_up, down = layer.experts_gate_up, layer.experts_down
    count, (_, hidden, _) = config.router.count, down.shape

    def divide(gate_up: Array, down: Array) -> dict[str, Array]:
        pieces = down[count:].swapaxes(0, 1).reshape(hidden, -1)
        shared = {"gate_up": gate_up[count:].reshape(-1, hidden), "down": pieces}
        return {"experts_gate_up": gate_up[:count], "experts_down": down[:count], **shared}

    return layer.replace(**_evaluated(divide, gate_up, down))


def _evaluated(function: Any, *arrays: Any) -> Any:
    """Compute a function of weights, or only the shapes of its values if the weights are shapes."""
    is_abstract = isinstance(arrays[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(function, *arrays) if is_abstract else jax.jit(function)(*arrays)
