"""Puts the shared expert of a mixture behind its experts, in the same arrays, so that one launch multiplies by both.

A shared expert whose width is a multiple of an expert's is as many experts, whose outputs add up to its own. Its
weights keep their order, so that dense products can read them as parts of the arrays. If its output has a factor, the
row that gives the factor's logit stands behind those of the router. `Engine.from_pretrained` joins
what it reads for one device. Models that were loaded before, that devices divide, or that are quantised, and draft
heads, have the shared expert apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.models.mlps.mlp_config import Experts, Mlp
from pallas_kernels.layers.experts.expert_matmul import MOST_ELEMENTS
from pallas_kernels.layers.weights import Quantized

MOST_SHARED = 2**25  # most values of a shared expert that is joined; one of 17 million was timed
PAIRS = {"experts_gate_up": "gate_up", "experts_down": "down"}  # fields of experts and of the shared one
GATES = {"router": "shared_gate"}  # the same of what gives the logits


def join_layers(mlps: Sequence[Mlp], layers: Sequence[dict[str, Any]]) -> None:
    """Join shared experts to experts, in place, one layer after another; the others' weights stay as they are.

    Peak memory is that of the weights and of one layer, if nothing else refers to the arrays.

    Args:
        mlps: feed-forward of each layer.
        layers: weights of each layer by field of `LayerWeights`, arrays or `jax.ShapeDtypeStruct`.
    """
    for mlp, layer in zip(mlps, layers, strict=True):
        if isinstance(mlp, Experts) and _can_join(mlp, layer):
            for experts, shared in (PAIRS | (GATES if mlp.gates_shared else {})).items():
                layer[experts] = _joined(layer[experts], layer.pop(shared))


def _can_join(config: Experts, layer: Mapping[str, Any]) -> bool:
    """Return whether a layer has a shared expert that can be some experts more, in arrays that a kernel supports."""
    weights = [layer.get(name) for name in (*PAIRS, *PAIRS.values())]
    if not config.shared_count or any(weight is None or isinstance(weight, Quantized) for weight in weights):
        return False
    count, rows, hidden = layer["experts_gate_up"].shape
    is_small = (3 if config.is_gated else 2) * config.shared * hidden <= MOST_SHARED
    is_addressable = (count + config.shared_count) * rows * hidden <= MOST_ELEMENTS
    is_alike = len({weight.dtype for weight in weights if weight is not None}) == 1
    if config.gates_shared:
        is_alike &= layer["router"].dtype == layer["shared_gate"].dtype
    return is_small and is_addressable and is_alike and count * hidden % config.shared_count == 0


def _joined(experts: Any, shared: Any) -> Any:
    """Return the weights of both in one array, or its shape if the weights are shapes."""
    if isinstance(experts, jax.ShapeDtypeStruct):
        return jax.eval_shape(_join, experts, shared)
    return jax.block_until_ready(_join(experts, shared))


@jax.jit
def _join(experts: Array, shared: Array) -> Array:
    return jnp.concatenate([experts, shared.reshape(-1, *experts.shape[1:])])


def is_joined(config: Experts, layer: Any) -> bool:
    """Return whether the experts' weights of a layer have those of its shared expert."""
    return bool(config.shared_count) and layer.gate_up is None


def check_apart(record: Any) -> None:
    """Raise ValueError if a model has shared experts that are joined to its experts."""
    both = zip(record.layers, record.config.layers, strict=True) if hasattr(record, "layers") else ()
    for layer, config in both:
        if isinstance(config.mlp, Experts) and is_joined(config.mlp, layer):
            raise ValueError(
                "model: expected shared experts apart from the experts, got a model that an engine joined them in; "
                "load it with Model.from_pretrained"
            )


def dense_weights(config: Experts, layer: Any) -> tuple[Float[Array, "both hidden"], Float[Array, "rows shared"], int]:
    """Return gate and up, or up alone, of a joined shared expert, an array whose last rows are its down projection, and
    their first.

    The second array is that of all experts in another shape: a kernel would need a copy of a part of an array.
    """
    _, hidden, _ = layer.experts_down.shape
    # The barrier keeps XLA from taking the part in the first shape. Products of more than 64 rows copy it (NOTES.md).
    rows = jax.lax.optimization_barrier(layer.experts_down.reshape(-1, config.shared))
    return layer.experts_gate_up[config.router.count :].reshape(-1, hidden), rows, len(rows) - hidden
