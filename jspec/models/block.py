"""One decoder layer, for targets, draft models and EAGLE heads: the only code that computes a `LayerConfig`.

A layer is split where its residual sums are: `attention_part` goes from the fused QKV projection to the attended
values, `mlp_part` from these to the residual stream and the norm that the next layer reads, which one kernel computes
with the residual sum. So the norm before a layer's attention is computed by the layer before it.

Layers are a list, never a stacked array under a scan: a scan copies each layer's weights and cache on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jspec.core.records import TokenBatch
from jspec.models.attention import project, project_and_attend
from jspec.models.config import LayerConfig
from jspec.models.layers import mlp, rms_norm
from pallas_kernels.layers.deterministic_matmul import deterministic_matmul
from pallas_kernels.layers.quantized import Inputs, PartialSums, Weight, has_dynamic_activations, reduce_partials
from pallas_kernels.layers.residual_norm import add_rms_norm
from pallas_kernels.layers.split_matmul import split_matmul

# The weight of a norm, and the only weight that its output is multiplied by; None: the output is used otherwise too.
Norm = tuple[Float[Array, "hidden"], Weight | None]


@struct.dataclass
class LayerWeights:
    """Weights of one decoder layer, linear ones as [out, in]; ``inputs`` is the hidden size except in EAGLE-3."""

    qkv: Weight  # [(heads + 2 kv_heads) * head_dim, inputs]
    o: Weight  # [hidden, heads * head_dim]
    mlp_norm: Float[Array, "hidden"]
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    qkv_bias: Float[Array, "qkv"] | None = struct.field(default=None, kw_only=True)
    q_norm: Float[Array, "head_dim"] | None = struct.field(default=None, kw_only=True)
    k_norm: Float[Array, "head_dim"] | None = struct.field(default=None, kw_only=True)


def product(batch: TokenBatch) -> Any:
    """The function that multiplies activations with a weight into partial sums."""
    multiply = deterministic_matmul if batch.deterministic else split_matmul
    return partial(multiply, implementation=batch.implementation)


def attention_part(
    layer: LayerWeights,
    config: LayerConfig,
    qkv: PartialSums,
    pools: tuple[Array, Array],
    batch: TokenBatch,
    dtype: jnp.dtype,
    *,
    eps: float,
    start: int = 0,
    attends: bool = True,
) -> tuple[Any, Array, Array]:
    """Write the batch's keys and values, and attend.

    Args:
        qkv: partial sums of the fused projection.
        pools: the layer's pools of keys and values.
        dtype: of the model.
        eps: of the norms.
        start: first cache row that exists.
        attends: False: return the rotated queries instead of the attended values.

    Returns:
        The attended values [batch, tokens, heads * head_dim] and both pools.
    """
    qkv = _bias_and_norm_heads(qkv, layer, config, dtype, eps)
    if not attends:
        return project(qkv, *pools, batch, config.attention, dtype)
    quantize_output = has_dynamic_activations(layer.o)
    options: dict[str, Any] = {"start": start, "quantize_output": quantize_output}
    return project_and_attend(qkv, *pools, batch, config.attention, dtype, **options)


def mlp_part(
    layer: LayerWeights,
    attended: Inputs,
    residual: Array,
    norms: Sequence[Norm],
    *,
    eps: float,
    implementation: str,
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """Run a layer from the attended values to its output.

    Args:
        attended: as `attention_part` returns it.
        residual: the residual stream before the layer's attention.
        norms: of the layer's output, for what reads it next.
        eps: of the norms.

    Returns:
        The residual stream after the layer, and its output under each of ``norms``; without norms the output itself.
    """
    fixed: dict[str, Any] = {"implementation": implementation, "deterministic": deterministic}
    multiply = deterministic_matmul if deterministic else split_matmul
    add_norm = partial(add_rms_norm, eps=eps, **fixed)
    delta = multiply(attended, layer.o, implementation=implementation)
    residual, normed = add_norm(residual, delta, layer.mlp_norm, quantize_output=has_dynamic_activations(layer.gate_up))
    delta = mlp(normed, layer.gate_up, layer.down, **fixed)
    if not norms:
        residual = residual + reduce_partials(delta, residual.dtype)
        return residual, residual
    quantize_output = all(weight is not None and has_dynamic_activations(weight) for _, weight in norms)
    return add_norm(residual, delta, *(norm for norm, _ in norms), quantize_output=quantize_output)


def _bias_and_norm_heads(
    parts: PartialSums, layer: LayerWeights, config: LayerConfig, dtype: jnp.dtype, eps: float
) -> PartialSums:
    """Add the bias of the fused projection, and norm every query and key head, where the layer does (Qwen)."""
    attention = config.attention
    if not attention.bias and not attention.qk_norm:
        return parts
    qkv = reduce_partials(parts, dtype)
    if attention.bias:
        assert layer.qkv_bias is not None
        qkv = qkv + layer.qkv_bias
    if attention.qk_norm:
        assert layer.q_norm is not None and layer.k_norm is not None
        heads = qkv.reshape(*qkv.shape[:-1], -1, attention.head_dim)
        q, k, v = jnp.split(heads, [attention.heads, attention.heads + attention.kv_heads], axis=-2)
        q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
        qkv = jnp.concatenate([q, k, v], axis=-2).reshape(qkv.shape)
    return qkv[None]
