"""The feed-forward of a mixture of experts (arXiv:1701.06538)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.numerics import Numerics
from jspec.models.mlps.mlp_config import Experts, Router
from jspec.models.mlps.shared_expert import dense_weights, is_joined
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import mlp, product, small_product
from pallas_kernels.layers.dense.plain_product import plain_product
from pallas_kernels.layers.experts.expert_matmul import Gate
from pallas_kernels.layers.experts.expert_mlp import ExpertMlp, expert_mlp
from pallas_kernels.layers.experts.routing import route
from pallas_kernels.layers.partial_sums import reduce_partials, sum_f32, with_scales
from pallas_kernels.layers.quantize_rows import activate, gated
from pallas_kernels.layers.shard import AXIS, Shard
from pallas_kernels.layers.split_matmul import split_matmul
from pallas_kernels.layers.weights import Inputs, QuantizedActivation

# Most choices of all rows, shared experts among them, with which these are multiplied as the others are. With more
# rows dense products take less time, or nearly so (NOTES.md).
FEW_CHOICES = 64


def mix_experts(
    x: Inputs,
    layer: LayerWeights,
    config: Experts,
    used: Bool[Array, "batch tokens"] | None,
    numerics: Numerics,
) -> tuple[Array, ...]:
    """Apply a mixture of experts: each row's experts, and the shared expert if there is one.

    Each of several devices has some of the experts, and some channels of the shared one. All devices have all rows, and
    add up their results in one exchange, as after a dense feed-forward.

    Args:
        x: normed input [batch, tokens, hidden], which is not quantised.
        layer: weights of the layer.
        config: config of the mixture.
        used: whether each row's result is used; None: all are. Experts that only other rows choose are not read.
        numerics: by which kernels, and whether a row's bits may depend on the batch size.

    Returns:
        Arrays of partial sums of the output, [parts, batch, tokens, hidden] each.
    """
    assert layer.router is not None and not isinstance(x, QuantizedActivation)
    flat = x.reshape(-1, x.shape[-1])
    shared = among_experts(layer, config, len(flat), deterministic=numerics.deterministic)
    logits = small_product(flat, layer.router, numerics)
    inputs = flat
    if layer.experts_in is not None:
        inputs = reduce_partials(product(numerics)(flat, layer.experts_in), x.dtype)
    parts = chosen_sums(inputs, logits, layer, config, used, numerics, shared=shared)
    if layer.experts_out is not None:
        parts = product(numerics)(sum_f32(parts).astype(x.dtype), layer.experts_out)
    sums: tuple[Array, ...] = (parts.reshape(-1, *x.shape),)
    if config.shared and not shared:
        sums += (shared_sums(x, layer, config, numerics, logits[:, config.router.count :]),)
    return joined(sums, layer, x.dtype, numerics)


def chosen_sums(
    flat: Float[Array, "rows hidden"],
    logits: Float[Array, "rows experts"],
    layer: LayerWeights,
    config: Experts,
    used: Bool[Array, "batch tokens"] | None,
    numerics: Numerics,
    *,
    shared: int = 0,
) -> Float[Array, "parts rows hidden"]:
    """Return partial sums of the weighted outputs of each row's experts, of those that this device has.

    Args:
        flat: input of the experts.
        logits: the router's logits.
        layer, config, used, numerics: as for `mix_experts`.
        shared: as how many experts the shared expert is among them.
    """
    gate_up, down = layer.experts_gate_up, layer.experts_down
    assert gate_up is not None and down is not None
    chosen, weights = choose_experts(
        logits, layer, config.router, None if used is None else used.ravel(), numerics, shared=shared
    )
    if isinstance(down, Shard):
        chosen, down = chosen - jax.lax.axis_index(AXIS) * down.shape[0], down.weight
    gate = Gate(config.activation, config.limit, config.alpha, config.is_gated)
    factors = None if config.weighs_inputs else weights
    inputs = (flat * weights[..., None]).astype(flat.dtype) if config.weighs_inputs else flat
    assert not isinstance(gate_up, Shard), "each device has whole experts"
    experts = ExpertMlp(gate_up, down, layer.experts_gate_up_bias, layer.experts_down_bias)
    return expert_mlp(inputs, experts, chosen, gate=gate, factors=factors, shared=shared, **numerics.options)


def joined(sums: tuple[Array, ...], layer: LayerWeights, dtype: jnp.dtype, numerics: Numerics) -> tuple[Array, ...]:
    """Return partial sums of all devices from those of each device, [parts, batch, tokens, hidden] each.

    Args:
        sums: the partial sums of this device.
        layer: weights of the layer, which are those of all experts if there is one device.
        dtype: dtype of the model.
        numerics: whether a row's bits may depend on the batch size.
    """
    if not isinstance(layer.experts_down, Shard):
        return sums
    total = sum_f32(part for parts in sums for part in parts)[None]
    return (layer.experts_down.join(total, dtype, deterministic=numerics.deterministic),)


def shared_sums(
    x: Array, layer: LayerWeights, config: Experts, numerics: Numerics, gates: Float[Array, "rows gates"]
) -> Array:
    """Return partial sums of the shared expert's output, [parts, batch, tokens, hidden], by dense products.

    ``gates`` are the logits of the output's factor if the shared expert is joined and has one.
    """
    if is_joined(config, layer):
        gate_up, rows, first = dense_weights(config, layer)
        inner = plain_product(x, gate_up, x.dtype)
        inner = gated(inner, config.activation) if config.is_gated else activate(inner, config.activation)
        sums = with_scales(split_matmul(inner, rows, first=first, implementation=numerics.implementation))
    else:
        assert layer.gate_up is not None and layer.down is not None
        down = layer.down.weight if isinstance(layer.down, Shard) else layer.down
        kind: dict[str, Any] = {"activation": config.activation, "is_gated": config.is_gated}
        sums = with_scales(mlp(x, layer.gate_up, down, numerics, **kind))
        if layer.shared_gate is not None:
            gates = small_product(x, layer.shared_gate, numerics)
    return sums * jax.nn.sigmoid(gates.reshape(*x.shape[:-1], 1)) if config.gates_shared else sums


def among_experts(layer: LayerWeights, config: Experts, rows: int, *, deterministic: bool) -> int:
    """Return as how many experts, used by every row, a mixture of rows has the shared expert; 0: it has it apart.

    A deterministic mixture has it in the same way for any number of rows.
    """
    choices = rows * (config.router.chosen + config.shared_count)
    is_among = deterministic or choices <= FEW_CHOICES
    return config.shared_count if is_among and is_joined(config, layer) else 0


def choose_experts(
    logits: Float[Array, "rows experts"],
    layer: LayerWeights,
    router: Router,
    used: Bool[Array, "rows"] | None,
    numerics: Numerics,
    *,
    shared: int,
) -> tuple[Int[Array, "used rows"], Float[Array, "used rows"]]:
    """Return the experts that each row uses and their weights, as `route` does, times the factor of each expert."""
    biases = {"bias": layer.router_bias, "correction": layer.router_correction}
    chosen, weights = route(logits, router, used=used, shared=shared, **biases, **numerics.options)
    if layer.router_scale is None:
        return chosen, weights
    return chosen, weights * layer.router_scale[jnp.maximum(chosen, 0)]
