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

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jspec.core.records import TokenBatch
from jspec.models.attention import attend, project, project_and_attend
from jspec.models.experts import mix_experts
from jspec.models.latent_attention import expand_values, write_latents
from jspec.models.layer_config import MLA, LayerConfig
from jspec.models.layers import mlp
from jspec.models.mlp_config import Dense, Experts
from jspec.models.rope import tables
from pallas_kernels.attention.rope_append import HeadTransform
from pallas_kernels.layers.dense.deterministic_matmul import deterministic_matmul
from pallas_kernels.layers.norm_columns import norm_columns
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.residual_norm import add_rms_norm
from pallas_kernels.layers.shard import AXIS, Shard, gather_columns, own_columns
from pallas_kernels.layers.split_matmul import split_matmul
from pallas_kernels.layers.weights import Inputs, Weight, has_dynamic_activations

# The weight of a norm, and the linear weight that multiplies the norm's output; None: the output has other uses too.
Norm = tuple[Float[Array, "hidden"], Weight | None]


optional = partial(struct.field, default=None, kw_only=True)  # declares a weight that not every layer has


@struct.dataclass
class LayerWeights:
    """The weights of one decoder layer; linear weights are [out, in].

    ``inputs`` is the number of input channels of the fused QKV projection. It equals the hidden size, except in layer 0
    of an EAGLE-3 head, where it is twice the hidden size.
    """

    qkv: Weight  # fused QKV projection [(heads + 2 kv_heads) * head_dim, inputs]
    o: Weight  # output projection of the attention [hidden, heads * head_dim]
    # Further weights; None: the layer has no such weight. The norms' size is head_dim, or that of all heads.
    gate_up: Weight | None = optional()  # fused gate and up projections [2 * intermediate, hidden]
    down: Weight | None = optional()  # down projection [hidden, intermediate]
    mlp_norm: Float[Array, "hidden"] | None = optional()  # norm before the feed-forward
    attn_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the attention's output
    mlp_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the feed-forward's output
    qkv_bias: Float[Array, "qkv"] | None = optional()  # bias of qkv
    o_bias: Float[Array, "hidden"] | None = optional()  # bias of o
    q_norm: Float[Array, "size"] | None = optional()  # norm of the query heads
    k_norm: Float[Array, "kv_size"] | None = optional()  # norm of the key heads
    output_scale: Float[Array, "one"] | None = optional()  # factor of the residual stream after the layer
    sinks: Float[Array, "heads"] | None = optional()  # score of each query head's sink
    # Weights of latent attention, whose q_norm and k_norm are those of the latent vectors (`jspec.models.params`).
    q_up: Weight | None = optional()  # queries from their latent vector [heads * (plain + rotated), query_latent]
    k_up: Float[Array, "plain latent"] | None = optional()  # keys from the latent vector [heads * plain, latent]
    v_up: Float[Array, "values latent"] | None = optional()  # values from the latent vector [heads * value_dim, latent]
    # Weights of a mixture of experts; then gate_up and down are those of the shared expert, if there is one. It may be
    # among the experts instead, behind those of the router (`jspec.models.shared_expert`).
    router: Float[Array, "experts hidden"] | None = optional()
    router_bias: Float[Array, "experts"] | None = optional()  # bias of the router's logits
    router_correction: Float[Array, "experts"] | None = optional()  # correction of the scores, for the choice only
    experts_gate_up: Weight | None = optional()  # gate and up of each expert [experts, 2 * width, hidden]
    experts_down: Weight | None = optional()  # down projection of each expert [experts, hidden, width]
    experts_gate_up_bias: Float[Array, "experts twice"] | None = optional()
    experts_down_bias: Float[Array, "experts hidden"] | None = optional()


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
        qkv: partial sums of the fused QKV projection, [parts, batch, tokens, width]; of the packed rows if the batch
            has a packing.
        pools: key and value pools of the layer.
        batch: positions, cache rows and mask of the tokens.
        dtype: dtype of the model.
        eps: epsilon of the norms.
        start: first cache row that exists; 1 for EAGLE heads, which have no row 0.
        attends: False: return the rotated queries [batch, tokens, heads, head_dim] instead of the attended values.

    Returns:
        The attended values [batch, tokens, heads * head_dim], the key pool and the value pool.
    """
    attention = config.attention
    if isinstance(attention, MLA):
        q, *new_pools = write_latents(layer, attention, qkv, *pools, batch, dtype)
        pools = new_pools[0], new_pools[1]
        return batch.pack(attend_part(layer, config, q, pools, batch, start=start)) if attends else q, *pools
    qkv = batch.unpack(qkv)
    fixed: dict[str, Any] = {"deterministic": batch.deterministic, "implementation": batch.implementation}
    cos_sin = tables(attention.rope, attention.head_dim, batch.positions, **fixed)
    if attention.qk_norm == "all":
        qkv = norm_all_heads(layer, config, qkv, eps=eps, dtype=dtype, **fixed)[None]
        transform = HeadTransform(cos_sin)
    else:
        ones = jnp.ones(attention.head_dim, dtype)
        q_norm, k_norm = (ones, ones) if attention.qk_norm == "unit" else (layer.q_norm, layer.k_norm)
        v_norm = ones if attention.v_norm else None
        transform = HeadTransform(cos_sin, layer.qkv_bias, q_norm, k_norm, v_norm, eps)
    if not attends:
        return project(qkv, *pools, batch, transform, attention, dtype)
    options: dict[str, Any] = {"start": start, "quantize_output": has_dynamic_activations(layer.o)}
    attended, *new_pools = project_and_attend(
        qkv, *pools, batch, transform, attention, dtype, sinks=layer.sinks, **options
    )
    return batch.pack(attended), *new_pools


def attend_part(
    layer: LayerWeights,
    config: LayerConfig,
    q: Float[Array, "batch tokens heads head_dim"],
    pools: tuple[Array, Array],
    batch: TokenBatch,
    *,
    start: int = 0,
) -> Inputs:
    """Attend to the visible cache rows with the queries that `attention_part` returned with ``attends=False``.

    Args:
        layer, config, pools, batch, start: as for `attention_part`; the pools have the batch's rows.
        q: the queries.

    Returns:
        The attended values [batch, tokens, heads * head_dim]; those of latent attention [.., heads * value_dim].
    """
    attention = config.attention
    if isinstance(attention, MLA):
        return expand_values(layer, attention, attend(q, *pools, batch, attention, start=start), batch)
    quantize_output = has_dynamic_activations(layer.o)
    return attend(q, *pools, batch, attention, sinks=layer.sinks, start=start, quantize_output=quantize_output)


def norm_all_heads(
    layer: LayerWeights, config: LayerConfig, qkv: PartialSums, *, eps: float, dtype: jnp.dtype, **fixed: Any
) -> Float[Array, "batch tokens width"]:
    """Norm the queries of all heads together, and so the keys; devices that share the heads gather them for this.

    Args:
        layer, qkv, eps, dtype: as for `attention_part`.
        config: config of the layer, with the heads of this device.
        fixed: other options of `norm_columns`.
    """
    assert layer.q_norm is not None and layer.k_norm is not None
    norm = partial(norm_columns, eps=eps, dtype=dtype, **fixed)
    if not isinstance(layer.o, Shard):
        return norm(qkv, layer.q_norm, layer.k_norm, bias=layer.qkv_bias)
    total = reduce_partials(qkv, jnp.float32)
    total = total if layer.qkv_bias is None else total + layer.qkv_bias
    sizes = config.gqa.q_size, config.gqa.kv_size
    q, k, v = jnp.split(total, (sizes[0], sum(sizes)), axis=-1)
    copies = jax.lax.axis_size(AXIS) * k.shape[-1] // layer.k_norm.shape[0]  # devices with the same keys
    queries, keys = gather_columns(q), gather_columns(k, copies)
    normed = norm(jnp.concatenate([queries, keys, v], axis=-1)[None], layer.q_norm, layer.k_norm)
    queries, keys, v = jnp.split(normed, (queries.shape[-1], queries.shape[-1] + keys.shape[-1]), axis=-1)
    return jnp.concatenate([own_columns(queries, sizes[0]), own_columns(keys, sizes[1], copies), v], axis=-1)


def feed_forward(
    x: Inputs, layer: LayerWeights, config: Dense | Experts, used: Array | None, **fixed: Any
) -> PartialSums | tuple[Array, ...]:
    """Apply a layer's feed-forward, dense or a mixture of experts.

    Args:
        x: normed input [batch, tokens, hidden].
        layer: weights of the layer.
        config: config of the feed-forward.
        used, fixed: as for `mlp_part`.

    Returns:
        Partial sums of the output, [parts, batch, tokens, hidden], or several arrays of these.
    """
    if isinstance(config, Experts):
        return mix_experts(x, layer, config, used, **fixed)
    assert layer.gate_up is not None and layer.down is not None
    return mlp(x, layer.gate_up, layer.down, activation=config.activation, **fixed)


def mlp_part(
    layer: LayerWeights,
    config: LayerConfig,
    attended: Inputs,
    residual: Array,
    norms: Sequence[Norm],
    *,
    eps: float,
    used: Bool[Array, "batch tokens"] | None = None,
    **fixed: Any,
) -> tuple[Any, ...]:
    """Run a layer's attention output projection, its feed-forward, and the norms that read the layer's output.

    Args:
        layer: weights of the layer.
        config: config of the layer.
        attended: attended values, as `attention_part` returns them.
        residual: residual stream before the layer's attention [batch, tokens, hidden].
        norms: one norm for each operation that reads the layer's output.
        eps: epsilon of the norms.
        used: whether each row's result is used; None: all are. Experts that only other rows choose are not read.
        fixed: `implementation`: kernel implementation (`pallas_kernels.dispatch`); `deterministic`: use products whose
            result does not depend on the batch size.

    Returns:
        The residual stream after the layer, then its normed value for each norm. If there are no norms, the residual
        stream twice.
    """
    multiply = deterministic_matmul if fixed.get("deterministic") else split_matmul
    add_norm = partial(add_rms_norm, eps=eps, factor=config.residual_scale, **fixed)
    delta = multiply(attended, layer.o, implementation=fixed["implementation"])
    own_norms = [] if layer.mlp_norm is None else [layer.mlp_norm]
    quantize_output = bool(own_norms) and has_dynamic_activations(layer.gate_up)
    options: dict[str, Any] = {"post_norm": layer.attn_post_norm, "quantize_output": quantize_output}
    residual, *normed = add_norm(residual, delta, *own_norms, bias=layer.o_bias, **options)
    x = normed[0] if normed else residual
    delta = feed_forward(x, layer, config.mlp, used, **fixed)
    quantize_output = bool(norms) and all(weight is not None and has_dynamic_activations(weight) for _, weight in norms)
    options = {"post_norm": layer.mlp_post_norm, "scale": layer.output_scale, "quantize_output": quantize_output}
    residual, *normed = add_norm(residual, delta, *(norm for norm, _ in norms), **options)
    return residual, *(normed or [residual])
