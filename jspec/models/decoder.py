"""The decoder: plain functions on a plain pytree of weights, layers unrolled.

Layers are a list, never a stacked array under a scan: a scan copies each layer's weights and cache on a GPU.
Linear weights are stored ``[out, in]``, as in the checkpoints, with Q, K and V fused and gate and up fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.records import KVCache, TokenBatch
from jspec.models import load
from jspec.models.attention import project_and_attend
from jspec.models.config import ModelConfig
from pallas_kernels.layers.deterministic_matmul import deterministic_matmul
from pallas_kernels.layers.gated_matmul import gated_matmul, kernel_padding, tiles_for
from pallas_kernels.layers.quantized import (
    Inputs,
    PartialSums,
    Weight,
    has_dynamic_activations,
    matmul,
    matmul_unscaled,
    reduce_partials,
)
from pallas_kernels.layers.residual_norm import add_rms_norm
from pallas_kernels.layers.split_matmul import split_matmul


@struct.dataclass
class Layer:
    """Weights of one decoder layer."""

    attn_norm: Float[Array, "hidden"]
    qkv: Weight  # [(heads + 2 kv_heads) * head_dim, hidden]
    o: Weight  # [hidden, heads * head_dim]
    mlp_norm: Float[Array, "hidden"]
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]


@struct.dataclass
class Model:
    """A decoder's weights with its config. ``head`` is None where the output head is the embedding (tied)."""

    embed: Float[Array, "vocab hidden"]
    layers: list[Layer]
    norm: Float[Array, "hidden"]
    head: Weight | None  # [vocab, hidden]
    config: ModelConfig = struct.field(pytree_node=False)

    @classmethod
    def from_weights(cls, config: ModelConfig, weights: Mapping[str, Any]) -> Model:
        """Build from the tree of arrays that `jspec.models.load.load` returns."""
        layers = [Layer(**layer) for layer in weights["layers"]]
        return cls(
            embed=weights["embed"],
            layers=layers,
            norm=weights["norm"],
            head=weights.get("head"),
            config=config,
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: str | None = None, quantize: str | None = None) -> Model:
        """Load a Hugging Face folder, a folder written by ``python -m convert``, or a hub id.

        Args:
            dtype: of the weights; None: float32 on CPU, bfloat16 elsewhere.
            quantize: the products' weights, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`).
        """
        checkpoint = load.load(path, dtype=dtype, quantize=quantize)
        return cls.from_weights(checkpoint.config, checkpoint.weights)

    @property
    def output_head(self) -> Weight:
        return self.embed if self.head is None else self.head


@struct.dataclass
class TargetOut:
    """What a forward pass of the target yields."""

    product: (
        PartialSums | None
    )  # the output head's, for the rows asked for, in one part; the logits, perhaps to be scaled
    features: Float[Array, "batch tokens features"] | None  # the hidden states asked for, side by side

    @property
    def logits(self) -> Float[Array, "batch rows vocab"]:
        """Float32."""
        assert self.product is not None, "the forward pass was taken with_logits=False"
        return reduce_partials(self.product, jnp.float32)


def rms_norm(
    x: Float[Array, "... hidden"], weight: Float[Array, "*states hidden"], eps: float
) -> Float[Array, "... hidden"]:
    """Root-mean-square norm (arXiv:1910.07467): variance in float32, cast back, then scaled in the model's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def mlp(x: Inputs, gate_up: Weight, down: Weight, implementation: str, *, deterministic: bool = False) -> PartialSums:
    """SiLU-gated feed-forward (arXiv:2002.05202), in parts as `split_matmul` leaves them."""
    if deterministic:
        (gate_and_up,) = deterministic_matmul(x, gate_up, is_whole=True, implementation=implementation)
        return deterministic_matmul(gate_and_up, down, is_gated=True, implementation=implementation)
    if has_dynamic_activations(down) and tiles_for(x, gate_up) is None:  # silu is in the rounding's kernel
        gate_and_up = matmul(x, gate_up, implementation=implementation)
        return split_matmul(gate_and_up, down, is_gated=True, implementation=implementation)
    return split_matmul(gated_matmul(x, gate_up, implementation=implementation), down, implementation=implementation)


def logits_of(
    x: Float[Array, "... hidden"], head: Weight, implementation: str = "auto", *, deterministic: bool = False
) -> Float[Array, "... vocab"]:
    """Scores over a vocabulary, accumulated and returned in float32."""
    return reduce_partials(_head_product(x, head, implementation, deterministic=deterministic), jnp.float32)


def _head_product(x: Array, head: Weight, implementation: str, *, deterministic: bool) -> PartialSums:
    if deterministic:
        return deterministic_matmul(x, head, jnp.float32, is_whole=True, implementation=implementation)
    return matmul_unscaled(x, head, jnp.float32)


def forward(
    model: Model,
    cache: KVCache,
    batch: TokenBatch,
    *,
    feature_layers: tuple[int, ...] = (),
    logit_rows: Int[Array, "batch rows"] | None = None,
    with_logits: bool = True,
) -> tuple[TargetOut, KVCache]:
    """One pass over a batch of tokens, writing their rows into the cache.

    Args:
        cache: the model's pools; rows before ``batch.first_row`` are committed.
        feature_layers: state indices wanted: state k enters layer k, state 0 is the embedding, state L leaves the
            last layer before the final norm, state L + 1 is behind it.
        logit_rows: the tokens of each row whose logits are wanted; None: all.
        with_logits: False skips the final norm and the head.

    Returns:
        Logits and features (concatenated in the order of ``feature_layers``), and the cache.
    """
    sequences, tokens = batch.tokens.shape
    if not batch.deterministic:
        batch = batch.pad(kernel_padding(sequences, tokens, model.layers[0].gate_up, model.embed.dtype))
    eps = model.config.norm_eps
    fixed: dict[str, Any] = {"implementation": batch.implementation, "deterministic": batch.deterministic}
    split = partial(deterministic_matmul if batch.deterministic else split_matmul, implementation=batch.implementation)
    add_norm = partial(add_rms_norm, eps=eps, **fixed)
    x = model.embed[batch.tokens]
    if batch.deterministic:
        x, normed = add_norm(x, jnp.zeros((1, *x.shape), x.dtype), model.layers[0].attn_norm)
    else:
        normed = rms_norm(x, model.layers[0].attn_norm, eps)
    states, k_pools, v_pools = [x], [], []
    following = [(layer.attn_norm, has_dynamic_activations(layer.qkv)) for layer in model.layers[1:]] + [
        (model.norm, False)
    ]
    for index, (layer, (next_norm, quantize_output)) in enumerate(zip(model.layers, following, strict=True)):
        with jax.named_scope(f"layer{index}"):
            qkv = split(normed, layer.qkv)
            pools = cache.k[index], cache.v[index]
            attended, k_pool, v_pool = project_and_attend(
                qkv, *pools, batch, model.config, x.dtype, quantize_output=has_dynamic_activations(layer.o)
            )
            x, normed = add_norm(
                x, split(attended, layer.o), layer.mlp_norm, quantize_output=has_dynamic_activations(layer.gate_up)
            )
            delta = mlp(normed, layer.gate_up, layer.down, **fixed)
            x, normed = add_norm(x, delta, next_norm, quantize_output=quantize_output)
        states.append(x)
        k_pools.append(k_pool)
        v_pools.append(v_pool)
    states.append(normed)
    features = jnp.concatenate([states[i][:, :tokens] for i in feature_layers], axis=-1) if feature_layers else None
    product = None
    if with_logits:
        with jax.named_scope("head"):
            normed = normed[:, :tokens]
            if logit_rows is not None:
                normed = jnp.take_along_axis(normed, logit_rows[..., None], axis=1)
            product = _head_product(normed, model.output_head, **fixed)
    return TargetOut(product=product, features=features), KVCache(k=k_pools, v=v_pools)
