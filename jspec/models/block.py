"""The computation of one decoder layer, for targets, draft models and EAGLE heads.

Two functions compute a layer. `attention_part` takes the fused QKV projection and returns the attended values.
`mlp_part` takes the attended values, and returns the residual stream and the normed input of the next layer. One kernel
computes the last residual sum together with this norm. Therefore each layer computes the norm before the next layer's
attention.

Layers are kept in a list. A scan over stacked layers would copy each layer's weights and cache on a GPU.
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

# The weight of a norm, and the linear weight that multiplies the norm's output; None: the output has other uses too.
Norm = tuple[Float[Array, "hidden"], Weight | None]


@struct.dataclass
class LayerWeights:
    """The weights of one decoder layer; linear weights are [out, in].

    ``inputs`` is the number of input channels of the fused QKV projection. It equals the hidden size, except in layer 0
    of an EAGLE-3 head, where it is twice the hidden size.
    """

    qkv: Weight  # fused QKV projection [(heads + 2 kv_heads) * head_dim, inputs]
    o: Weight  # output projection of the attention [hidden, heads * head_dim]
    mlp_norm: Float[Array, "hidden"]  # norm before the feed-forward
    gate_up: Weight  # fused gate and up projections [2 * intermediate, hidden]
    down: Weight  # down projection [hidden, intermediate]
    qkv_bias: Float[Array, "qkv"] | None = struct.field(default=None, kw_only=True)  # bias of qkv; None: no bias
    q_norm: Float[Array, "head_dim"] | None = struct.field(default=None, kw_only=True)  # norm of a query head, or None
    k_norm: Float[Array, "head_dim"] | None = struct.field(default=None, kw_only=True)  # norm of a key head, or None


def product(batch: TokenBatch) -> Any:
    """Return the function (activations, weight) -> partial sums of their product.

    If ``batch.deterministic`` is True, the bits of a row's product do not depend on the number of rows.
    """
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
    """Write the batch's keys and values into the pools, and attend to the visible cache rows.

    Args:
        layer: weights of the layer.
        config: config of the layer.
        qkv: partial sums of the fused QKV projection, [parts, batch, tokens, width].
        pools: key and value pools of the layer.
        batch: positions, cache rows and mask of the tokens.
        dtype: dtype of the model.
        eps: epsilon of the norms.
        start: first cache row that exists; 1 for EAGLE heads, which have no row 0.
        attends: False: return the rotated queries [batch, tokens, heads, head_dim] instead of the attended values.

    Returns:
        The attended values [batch, tokens, heads * head_dim], the key pool and the value pool.
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
    """Run a layer's attention output projection, its feed-forward, and the norms that read the layer's output.

    Args:
        layer: weights of the layer.
        attended: attended values, as `attention_part` returns them.
        residual: residual stream before the layer's attention [batch, tokens, hidden].
        norms: one norm for each operation that reads the layer's output.
        eps: epsilon of the norms.
        implementation: kernel implementation (`pallas_kernels.dispatch`).
        deterministic: use products whose result does not depend on the batch size.

    Returns:
        The residual stream after the layer, then its normed value for each norm. If there are no norms, the residual
        stream twice.
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
    """Add the bias to the fused QKV projection, and norm every query and key head, if the layer's config says so."""
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
