"""Model shapes with random weights, made on the device: speed needs no checkpoint."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from convert.orbax import flatten, unflatten
from jspec.draft.eagle_head import EagleHead
from jspec.draft.head_config import HeadConfig
from jspec.models.config import ModelConfig, Rope
from jspec.models.decoder import Model
from jspec.models.quantize import quantize_parameters

LLAMA3 = Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192)


def _config(
    vocab_size: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: Any
) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        tie_word_embeddings=False,
        **more,
    )


TARGETS = {
    "llama3-8b": _config(128256, 4096, 14336, 32, (32, 8, 128), rope=LLAMA3, max_position=131072),
    "tiny": _config(512, 64, 192, 8, (4, 2, 16), rope=Rope(), max_position=2048),
    "least": _config(64, 16, 16, 1, (1, 1, 8), rope=Rope(), max_position=65536),  # for measurements of the host
}
DRAFT_VOCAB = {"llama3-8b": 32000, "tiny": 128, "least": 16}


def target_shapes(name: str, dtype: str) -> Any:
    """Shapes of a target's weights."""
    c, array = TARGETS[name], partial(_array, dtype)
    layer = _block(c, c.hidden_size, dtype) | dict(attn_norm=array(c.hidden_size))
    return dict(
        embed=array(c.vocab_size, c.hidden_size),
        layers=[layer] * c.num_layers,
        norm=array(c.hidden_size),
        head=array(c.vocab_size, c.hidden_size),
    )


def head_config(name: str) -> HeadConfig:
    """Config of an EAGLE-3 head as published, for a target shape."""
    c = TARGETS[name]
    return HeadConfig(
        method="eagle3",
        vocab_size=c.vocab_size,
        draft_vocab_size=DRAFT_VOCAB[name],
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        norm_eps=c.norm_eps,
        rope=Rope(),
        feature_layers=None,
        source_format="random",
    )


def head_shapes(name: str, dtype: str) -> Any:
    """Shapes of the weights of its EAGLE-3 head."""
    c, array = head_config(name), partial(_array, dtype)
    norms = dict(input_norm=array(c.hidden_size), hidden_norm=array(c.hidden_size))
    return dict(
        fc=array(c.hidden_size, 3 * c.target_hidden_size),
        layers=[_block(c, 2 * c.hidden_size, dtype) | norms],
        norm=array(c.hidden_size),
        head=array(c.draft_vocab_size, c.hidden_size),
        draft_to_target=jax.ShapeDtypeStruct((c.draft_vocab_size,), jnp.int32),
    )


def _array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _block(c: ModelConfig | HeadConfig, inputs: int, dtype: str) -> dict[str, Any]:
    """Attention whose QKV projection has a number of inputs, and feed-forward."""
    array = partial(_array, dtype)
    return dict(
        qkv=array((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, inputs),
        o=array(c.hidden_size, c.num_heads * c.head_dim),
        mlp_norm=array(c.hidden_size),
        gate_up=array(2 * c.intermediate_size, c.hidden_size),
        down=array(c.hidden_size, c.intermediate_size),
    )


def random_weights(shapes: Any, seed: int, quantize: str | None = None) -> Any:
    """Weights of unit gain for a tree of shapes, made on the device; integer leaves count up from 0.

    Args:
        quantize: kind for `jspec.models.quantize`, applied weight by weight to save memory; None: none.
    """

    def fill(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jnp.arange(shape.size, dtype=shape.dtype)
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        # Drawn in float32: the 128 values of a bfloat16 draw have a mean of -0.012, which adds up over layers.
        return (jax.random.normal(key, shape.shape, jnp.float32) / math.sqrt(shape.shape[-1])).astype(shape.dtype)

    make = jax.jit(fill, static_argnums=1)
    flat = flatten(shapes)
    weights: dict[str, Any] = {}
    for key, (name, shape) in zip(jax.random.split(jax.random.key(seed), len(flat)), flat.items(), strict=True):
        own = {name: make(key, shape)}
        weights |= own if quantize is None else quantize_parameters(own, quantize)
    return unflatten(weights)


def random_target(name: str, dtype: str, quantize: str | None = None, *, seed: int = 0) -> Model:
    """A target with random weights."""
    return Model.from_weights(TARGETS[name], random_weights(target_shapes(name, dtype), seed, quantize))


def random_head(name: str, dtype: str, quantize: str | None = None, *, seed: int = 1) -> EagleHead:
    """Its EAGLE-3 head with random weights, whose drafts are practically never accepted."""
    return EagleHead.from_weights(head_config(name), random_weights(head_shapes(name, dtype), seed, quantize))
