"""The decoder: a function on a pytree of weights, with its layers (`jspec.models.block`) unrolled.

Linear weights are stored ``[out, in]``, as in the checkpoints, with Q, K and V fused and gate and up fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.records import KVCache, TokenBatch
from jspec.models import load
from jspec.models.block import LayerWeights, Norm, attention_part, mlp_part, product
from jspec.models.config import ModelConfig
from jspec.models.layers import head_product, rms_norm
from pallas_kernels.layers.gated_matmul import kernel_padding
from pallas_kernels.layers.quantized import PartialSums, Weight, reduce_partials
from pallas_kernels.layers.residual_norm import add_rms_norm


@struct.dataclass
class Layer(LayerWeights):
    """Weights of one layer of a target or a draft model."""

    attn_norm: Float[Array, "hidden"] = struct.field(kw_only=True)


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
    """The result of a forward pass."""

    # The output head's product for the requested rows, in one part: the logits, before a quantised head's scales.
    product: PartialSums | None
    features: Float[Array, "batch tokens features"] | None  # the requested hidden states, concatenated

    @property
    def logits(self) -> Float[Array, "batch rows vocab"]:
        """The logits in float32."""
        assert self.product is not None, "the forward pass was taken with_logits=False"
        return reduce_partials(self.product, jnp.float32)


def forward(
    model: Model,
    cache: KVCache,
    batch: TokenBatch,
    *,
    feature_layers: tuple[int, ...] = (),
    logit_rows: Int[Array, "batch rows"] | None = None,
    with_logits: bool = True,
) -> tuple[TargetOut, KVCache]:
    """Run the model on a batch of tokens and write their rows into the cache.

    Args:
        cache: the model's pools; rows before ``batch.first_row`` are committed.
        feature_layers: requested state indices: state k enters layer k, state 0 is the embedding, state L leaves the
            last of L layers, state L + 1 is the output of the final norm.
        logit_rows: indices of the tokens whose logits are requested; None: all.
        with_logits: False skips the final norm and the head.

    Returns:
        Logits and features (concatenated in the order of ``feature_layers``), and the cache.
    """
    sequences, tokens = batch.tokens.shape
    if not batch.deterministic:
        batch = batch.pad(kernel_padding(sequences, tokens, model.layers[0].gate_up, model.embed.dtype))
    eps = model.config.norm_eps
    fixed: dict[str, Any] = {"implementation": batch.implementation, "deterministic": batch.deterministic}
    x = model.embed[batch.tokens]
    if batch.deterministic:
        x, normed = add_rms_norm(x, jnp.zeros((1, *x.shape), x.dtype), model.layers[0].attn_norm, eps=eps, **fixed)
    else:
        normed = rms_norm(x, model.layers[0].attn_norm, eps)
    states, k_pools, v_pools = [x], [], []
    next_norms: list[Norm] = [(layer.attn_norm, layer.qkv) for layer in model.layers[1:]]
    next_norms.append((model.norm, None))
    layers = zip(model.layers, model.config.layers, next_norms, cache.k, cache.v, strict=True)
    for index, (layer, config, next_norm, *pools) in enumerate(layers):
        with jax.named_scope(f"layer{index}"):
            qkv = product(batch)(normed, layer.qkv)
            attended, k_pool, v_pool = attention_part(layer, config, qkv, (pools[0], pools[1]), batch, x.dtype, eps=eps)
            x, normed = mlp_part(layer, attended, x, [next_norm], eps=eps, **fixed)
        states.append(x)
        k_pools.append(k_pool)
        v_pools.append(v_pool)
    states.append(normed)
    features = jnp.concatenate([states[i][:, :tokens] for i in feature_layers], axis=-1) if feature_layers else None
    head_sums = None
    if with_logits:
        with jax.named_scope("head"):
            normed = normed[:, :tokens]
            if logit_rows is not None:
                normed = jnp.take_along_axis(normed, logit_rows[..., None], axis=1)
            head_sums = head_product(normed, model.output_head, **fixed)
    return TargetOut(product=head_sums, features=features), KVCache(k=k_pools, v=v_pools)
