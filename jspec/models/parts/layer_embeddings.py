"""Embeddings that each token has for every layer (Gemma 4), beside that of the first layer's input.

For layer l, a token with the embedding x has the vector e_l = (norm(P_l x / sqrt(hidden)) + sqrt(D) T_l[token]) /
sqrt(2), of D channels. A layer adds norm(W (act(G r) * e_l)) to its residual stream r.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.numerics import Numerics
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import norm_rows, product
from jspec.models.parts.param_spec import ParamSpec, norm
from pallas_kernels.layers.dense.deterministic_matmul import deterministic_matmul
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.quantize_rows import Activation, gated
from pallas_kernels.layers.shard import look_up
from pallas_kernels.layers.split_matmul import split_matmul


@struct.dataclass
class LayerEmbeddings:
    """The weights from which a token's embeddings for all layers are made; layer after layer along an axis."""

    table: Float[Array, "vocab layers_embedded"]  # T, embeddings of tokens
    projection: Float[Array, "layers_embedded hidden"]  # P, projections of the first layer's input
    norm: Float[Array, "embedded"]  # norm of the projections


def embedding_params(vocab: int, hidden: int, embedded: list[int], norm_dtype: str | None) -> dict[str, ParamSpec]:
    """Declare the weights of `LayerEmbeddings`, by field name.

    Args:
        vocab: number of tokens of the vocabulary.
        hidden: number of channels of the residual stream.
        embedded: number of channels of each layer's embedding, which is the same for all.
        norm_dtype: dtype of the norm; None: that of the model.
    """
    return {
        "table": ParamSpec((vocab, sum(embedded)), ("vocab", "channels")),
        "projection": ParamSpec((sum(embedded), hidden), ("channels", "hidden")),
        "norm": norm(embedded[0], "channels", norm_dtype),
    }


def gate_params(hidden: int, embedded: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
    """Declare the weights with which a layer reads its embedding, by field name of `LayerWeights`."""
    return {
        "embed_gate": ParamSpec((embedded, hidden), ("channels", "hidden")),
        "embed_out": ParamSpec((hidden, embedded), ("hidden", "channels")),
        "embed_post_norm": norm(hidden, dtype=norm_dtype),
    }


def embeddings_of(
    weights: LayerEmbeddings,
    tokens: Int[Array, "batch tokens"],
    x: Float[Array, "batch tokens hidden"],
    *,
    eps: float,
    numerics: Numerics,
) -> Float[Array, "layers batch tokens embedded"]:
    """Return the embeddings of tokens for all layers.

    Args:
        weights: the weights.
        tokens: the tokens.
        x: input of the first layer.
        eps: epsilon of the norm.
        numerics: by which kernels, and whether a row's bits may depend on the batch size.
    """
    size, (*rows, hidden) = len(weights.norm), x.shape
    sums = reduce_partials(product(numerics)(x, weights.projection), jnp.float32)
    projected = (sums * hidden**-0.5).astype(x.dtype).reshape(*rows, -1, size)
    normed = norm_rows(projected, weights.norm, eps, numerics)
    of_tokens = look_up(weights.table, tokens).reshape(projected.shape) * jnp.asarray(math.sqrt(size), x.dtype)
    return jnp.moveaxis((normed + of_tokens) * jnp.asarray(0.5**0.5, x.dtype), -2, 0)


def gated_embedding(
    x: Float[Array, "batch tokens hidden"],
    layer: LayerWeights,
    embedded: Float[Array, "batch tokens embedded"],
    activation: Activation,
    numerics: Numerics,
) -> PartialSums:
    """Return what a layer's own embedding adds to the residual stream, before its norm.

    Args:
        x: residual stream.
        layer: weights of the layer.
        embedded: embedding of each token for this layer.
        activation: activation function of the gate.
        numerics: as for `embeddings_of`.

    Returns:
        Partial sums [parts, batch, tokens, hidden].
    """
    assert layer.embed_gate is not None and layer.embed_out is not None
    gate = reduce_partials(product(numerics)(x, layer.embed_gate), x.dtype)
    both = jnp.concatenate([gate, embedded], axis=-1)
    if numerics.deterministic:
        return deterministic_matmul(both, layer.embed_out, gate=activation, implementation=numerics.implementation)
    return split_matmul(gated(both, activation), layer.embed_out, implementation=numerics.implementation)
