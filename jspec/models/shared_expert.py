"""Puts the shared expert of a mixture behind its experts, in the same arrays, so that one launch multiplies by both.

A shared expert whose width is a multiple of an expert's is as many experts, whose outputs add up to its own. Its
weights keep their order, so that a dense product reads them as a part of the arrays. Devices that divide a model, and
quantised weights, have it apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.models.layer_config import LayerConfig
from jspec.models.mlp_config import Experts
from pallas_kernels.layers.expert_matmul import MOST_ELEMENTS
from pallas_kernels.layers.quantized import Quantized

PAIRS = {"experts_gate_up": "gate_up", "experts_down": "down"}  # fields of experts and of the shared one

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
            for experts, shared in PAIRS.items():
                layer[experts] = jax.block_until_ready(_evaluated(_join, layer[experts], layer.pop(shared)))


def _can_join(config: Experts, layer: Mapping[str, Any]) -> bool:
    weights = [layer.get(name) for name in (*PAIRS, *PAIRS.values())]
    if not config.shared_count or any(weight is None or isinstance(weight, Quantized) for weight in weights):
        return False
    count, *size = layer["experts_gate_up"].shape
    is_small = (count + config.shared_count) * size[0] * size[1] < MOST_ELEMENTS
    hidden, is_alike = size[1], len({weight.dtype for weight in weights if weight is not None}) == 1
    return is_small and is_alike and count * hidden % config.shared_count == 0


def _join(experts: Array, shared: Array) -> Array:
    return jnp.concatenate([experts, shared.reshape(-1, *experts.shape[1:])])


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
        shared = {"gate_up": gate_up[count:].reshape(-1, hidden), "down": down[count:].reshape(hidden, -1)}
        return {"experts_gate_up": gate_up[:count], "experts_down": down[:count], **shared}

    return layer.replace(**_evaluated(divide, gate_up, down))


def _evaluated(function: Any, *arrays: Any) -> Any:
    """Compute a function of weights, or only the shapes of its values if the weights are shapes."""
    is_abstract = isinstance(arrays[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(function, *arrays) if is_abstract else jax.jit(function)(*arrays)


def dense_weights(config: Experts, layer: Any) -> tuple[Float[Array, "both hidden"], Float[Array, "rows shared"], int]:
    """Return gate and up of a joined shared expert, an array whose last rows are its down projection, and their first.

    The second array is that of all experts in another shape: a kernel would need a copy of a part of an array.
    """
    _, hidden, _ = layer.experts_down.shape
    # The barrier keeps XLA from taking the part in the first shape. Products of more than 64 rows copy it (NOTES.md).
    rows = jax.lax.optimization_barrier(layer.experts_down.reshape(-1, config.shared))
    return layer.experts_gate_up[config.router.count :].reshape(-1, hidden), rows, len(rows) - hidden
