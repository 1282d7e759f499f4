"""Whether a target computes a row to the same bits in any program, which deterministic engines need."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.decoder import Model
from jspec.models.mixers.attention import Attention
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.recurrent import Recurrent
from jspec.models.mixers.short_conv import ShortConv
from jspec.models.mlps.mlp_config import Experts
from jspec.models.weights.quantize import quantized_as
from pallas_kernels.attention.paged_attention import most_query_heads
from pallas_kernels.layers.dense.deterministic_matmul import unsupported_weight
from pallas_kernels.layers.experts.expert_matmul import unsupported_experts
from pallas_kernels.layers.hopper import multiprocessors
from pallas_kernels.recurrent import in_order_kernel

logger = logging.getLogger(__name__)


def check_deterministic(target: Model, implementation: str) -> None:
    """Refuse a target for which two programs may compute different bits for the same row.

    A warning is logged if the attention of a layer has no deterministic kernel, and so runs its reference.

    Args:
        target: weights of one device, or their shapes.
        implementation: as in `EngineConfig`.

    Raises:
        ValueError: a matrix product uses a kernel that is not deterministic; the message names weights or kernel.
    """
    if kind := quantized_as(target):
        raise ValueError(f"deterministic: expected a target whose weights are not quantised, got {kind}")
    if implementation == "reference" or jax.default_backend() != "gpu":
        return
    weights: list[Any] = [w for layer in target.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    weights += [w for layer in target.layers for w in (layer.embed_gate, layer.embed_out)]
    weights += [w for layer in target.layers for w in (layer.experts_in, layer.experts_out)]
    weights += [] if target.layer_embeddings is None else [target.layer_embeddings.projection]
    reasons = [unsupported_weight(weight) for weight in (*weights, target.output_head) if weight is not None]
    reasons += [_unsupported_mixer(layer.mixer, target.dtype) for layer in target.config.layers]
    for mlp, layer in zip(target.config.mlps, target.layers, strict=True):
        if isinstance(mlp, Experts):
            of_experts: Any = (layer.experts_gate_up, mlp.is_gated), (layer.experts_down, False)
            for weight, gated in of_experts:
                reasons.append(unsupported_experts(weight, target.dtype, gated=gated))
    for reason in filter(None, reasons):
        raise ValueError(f"deterministic: on a GPU {reason}; leave it off")
    kinds = {layer.mixer for layer in target.config.layers if isinstance(layer.mixer, Attention)}
    for attention in kinds if implementation == "auto" else ():
        group = attention.heads // attention.cached_heads
        if group > (most := most_query_heads(attention.pool_dims[1])):
            logger.warning(
                "deterministic: on GPUs attention of %d query heads per KV head runs its slow reference, as its kernel "
                "has at most %d; raise tensor_parallel, which divides the heads, or leave deterministic off",
                *(group, most),
            )


def _unsupported_mixer(mixer: Mixer, dtype: jnp.dtype) -> str | None:
    """Return a text that says why a layer with a slot's state is not deterministic; None if it is.

    A program may round a product before it adds it or not. Products of two numbers of 16 bits need no rounding in
    float32, so sums of a convolution are the same in either case.
    """
    if not isinstance(mixer, (Recurrent, ShortConv)):
        return None
    if dtype.itemsize > 2:
        return f"convolutions must have weights of 16 bits, got {dtype}"
    if isinstance(mixer, ShortConv):
        return None
    name = "gated delta nets" if isinstance(mixer, GatedDelta) else "Mamba 2 mixers"
    if multiprocessors() is None:
        return f"{name} need compute capability 9.0 and jax 0.11"
    reason = in_order_kernel.unsupported(mixer.key_dim, mixer.value_dim)
    return reason and f"{name}: {reason}"
