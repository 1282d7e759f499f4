"""The weights and the computation of DFlash heads (arXiv:2602.06036).

A head is a decoder, mostly without an embedding and an output head of its own: it uses the target's. Its context rows
hold the keys and values of the target's hidden states. The projection ``fc`` and a norm fuse several states of one
token into a context vector, from which each layer projects a key and a value. A context vector has no query and no
residual stream.

The tokens of a block are the root and the mask token, repeated. They run through the layers together: each of them
attends to all context rows and to the whole block, also to later tokens. The output for the mask token at depth d
gives the logits of the token at depth d, or of the token at depth d + 1 if the head samples from the anchor, the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jspec.core.records import TokenBatch
from jspec.draft.draft_vocab import reduced_head
from jspec.draft.expand_tree import Vocabulary
from jspec.draft.head_config import DFlashConfig
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.decoder import Layer, Model
from jspec.models.parts.kv_pool import KVPool
from jspec.models.parts.param_spec import Params, ParamSpec, norm, prefixed
from jspec.models.parts.rope import tables
from jspec.models.weights.params import layer_params
from pallas_kernels.attention.context_append import append_layers, split_layers
from pallas_kernels.attention.rope_append import KEYS, HeadTransform
from pallas_kernels.layers.dense.grouped_matmul import widened
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.residual_norm import rms_norm
from pallas_kernels.layers.shard import Shard
from pallas_kernels.layers.weights import Quantized, Weight


@struct.dataclass
class DFlashHead:
    """The weights and the config of a DFlash head."""

    layers: list[Layer]  # weights of each layer
    fc: Weight  # projection of the concatenated target states [hidden, features]
    hidden_norm: Float[Array, "hidden"]  # norm after fc
    norm: Float[Array, "hidden"]  # norm before the output head
    embed: Float[Array, "vocab hidden"] | None = None  # embedding; None: the target's
    head: Weight | None = None  # output head [draft_vocab, hidden]; None: the target's
    draft_to_target: Int[Array, "draft_vocab"] | None = None  # target id of each draft id; None: ids are equal
    config: DFlashConfig = struct.field(pytree_node=False, kw_only=True)

    @classmethod
    def from_weights(cls, config: DFlashConfig, weights: Mapping[str, Any]) -> DFlashHead:
        """Build a head from the weights that `jspec.models.load.read_checkpoint` returns, a tree of arrays."""
        others = {name: array for name, array in weights.items() if name != "layers"}
        return cls(layers=[Layer(**layer) for layer in weights["layers"]], config=config, **others)


def dflash_params(
    config: DFlashConfig, *, has_embed: bool = False, has_head: bool = False, has_map: bool = False
) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter of a DFlash head, by name.

    Args:
        config: config of the head.
        has_embed: whether the head has an embedding of its own; if not, it uses the target's.
        has_head: whether the head has an output head of its own; if not, it uses the target's.
        has_map: whether the head has the target id of each draft id; if not, the ids are equal.
    """
    hidden = config.hidden_size
    params = {"fc": _fc(config), "hidden_norm": norm(hidden)}
    for index, layer in enumerate(config.layers):
        params |= prefixed(f"layers.{index}", {**layer_params(layer, hidden, hidden), "attn_norm": norm(hidden)})
    params["norm"] = norm(hidden)
    if has_embed:
        params["embed"] = ParamSpec((config.vocab_size, hidden), ("tokens", "hidden"))
    if has_head:
        params["head"] = ParamSpec((config.draft_vocab_size, hidden), ("draft_vocab", "hidden"))
    if has_map:
        params["draft_to_target"] = ParamSpec((config.draft_vocab_size,), ("draft_vocab",), "range", "int32")
    return params


def _fc(config: DFlashConfig) -> ParamSpec:
    shape = (config.hidden_size, config.num_features * config.target_hidden_size)
    return ParamSpec(shape, ("fused", "features"))


@struct.dataclass
class Context:
    """The weights that give the keys and values of committed tokens."""

    fc: Weight  # as in `DFlashHead`, like the next field
    hidden_norm: Float[Array, "hidden"]
    kv: Weight  # rows of the layers' QKV projections that give keys and values, all layers in order [kv, hidden]
    config: DFlashConfig = struct.field(pytree_node=False, kw_only=True)
    # Mesh over whose devices the weights are divided (`jspec.models.weights.tensor_parallel`); None: they are not.
    mesh: Mesh | None = struct.field(pytree_node=False, default=None, kw_only=True)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the activations."""
        return self.hidden_norm.dtype

    def declared(self) -> Params:
        """Return the declarations of the weights, by name."""
        config = self.config
        sizes = tuple(layer.gqa.kv_size for layer in config.layers for _ in ("keys", "values"))
        shape, unit = (sum(sizes), config.hidden_size), config.layers[0].gqa.head_dim
        kv = ParamSpec(shape, ("heads", "hidden"), parts=sizes, unit=unit)
        return {"fc": _fc(config), "hidden_norm": norm(config.hidden_size), "kv": kv}


@struct.dataclass
class BoundDFlash:
    """The weights of a DFlash head that is bound to a target."""

    model: Model  # the head's layers and norm, with the embedding and the output head that it uses
    context: Context
    draft_to_target: Int[Array, "draft_vocab"] | None  # as in `DFlashHead`
    target_size: int = struct.field(pytree_node=False)  # number of tokens of the target's vocabulary

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.draft_to_target, self.target_size)


def bind_head(head: DFlashHead, target: Model, ids: Int[np.ndarray, "draft_vocab"] | None = None) -> BoundDFlash:
    """Join a head with the embedding and the output head of a target, unless the head has its own.

    Args:
        head: the head; its weights are arrays or `jax.ShapeDtypeStruct`.
        target: a target with the head's sizes.
        ids: target ids of a reduced vocabulary for a head with the target's output head; None: it is not reduced.
    """
    config, head_config = target.config, head.config
    shares_head = head.head is None
    rows = head_config.draft_vocab_size if ids is None else len(ids)
    decoder = ModelConfig(
        vocab_size=rows,
        hidden_size=head_config.hidden_size,
        layers=head_config.layers,
        norm_eps=head_config.norm_eps,
        family=config.family,
        tie_word_embeddings=False,
        max_position=config.max_position,
        embed_scale=config.embed_scale if head.embed is None else 1.0,
        logit_divisor=config.logit_divisor if shares_head else 1.0,
        logit_softcap=config.logit_softcap if shares_head else None,
    )
    output, to_target = target.output_head if shares_head else head.head, head.draft_to_target
    if ids is not None:
        output, to_target = reduced_head(target.output_head, ids)
    embed = target.embed if head.embed is None else head.embed
    model = Model(embed=embed, layers=head.layers, norm=head.norm, head=output, config=decoder)
    is_abstract = isinstance(head.hidden_norm, jax.ShapeDtypeStruct)
    kv = jax.eval_shape(_context_weight, head) if is_abstract else jax.jit(_context_weight)(head)
    context = Context(head.fc, head.hidden_norm, kv, config=head_config)
    return BoundDFlash(model, context, to_target, config.vocab_size)


def _context_weight(head: DFlashHead) -> Float[Array, "kv hidden"]:
    """Return the rows of all layers' QKV projections that give keys and values, as one weight that is not quantised."""
    parts = []
    for layer, config in zip(head.layers, head.config.layers, strict=True):
        qkv, first = layer.qkv, config.gqa.q_size
        assert qkv is not None and not isinstance(qkv, Shard), "weights are divided after `bind`"
        if not isinstance(qkv, Quantized):
            parts.append(qkv[first:])
            continue
        parts.append(widened(qkv)[first:].astype(head.hidden_norm.dtype))
    return jnp.concatenate(parts)


def write_context(
    head: BoundDFlash, cache: list[KVPool], batch: TokenBatch, features: Float[Array, "batch tokens features"]
) -> list[KVPool]:
    """Write the keys and values of committed tokens to the draft cache, and return the cache.

    Args:
        head: weights of the head.
        cache: draft cache.
        batch: positions and cache rows of the tokens; its ids are not read.
        features: the target's hidden states at the tokens, concatenated.
    """
    with jax.named_scope("context"):
        projected, transforms = _project(head, features), _transforms(head, batch.positions)
        rows = (batch.page_table, batch.first_row, batch.valid)
        pools = [pool.k for pool in cache], [pool.v for pool in cache]
        k, v = append_layers(*pools, projected, transforms, *rows, implementation=batch.implementation)
    return list(map(KVPool, k, v))


def context_keys(
    head: BoundDFlash, positions: Int[Array, "batch tokens"], features: Float[Array, "batch tokens features"]
) -> list[tuple[Float[Array, "batch tokens kv_heads head_dim"], Float[Array, "batch tokens kv_heads head_dim"]]]:
    """Return each layer's rotated keys and values of committed tokens.

    Args:
        head: weights of the head.
        positions: position of each token.
        features: the target's hidden states at the tokens, concatenated.
    """
    kv_heads = head.model.config.layers[0].gqa.kv_heads
    return split_layers(_project(head, features), _transforms(head, positions), kv_heads)


def _project(head: BoundDFlash, features: Float[Array, "batch tokens features"]) -> Float[Array, "batch tokens kv"]:
    """Return the projections of committed tokens to the keys and values of all layers."""
    context = head.context
    fused = matmul(features.astype(context.hidden_norm.dtype), context.fc)
    return matmul(rms_norm(fused, context.hidden_norm, head.model.config.norm_eps), context.kv)


def _transforms(head: BoundDFlash, positions: Int[Array, "batch tokens"]) -> list[HeadTransform]:
    """Return how the projection of each layer becomes keys and values."""
    eps, transforms = head.model.config.norm_eps, []
    for layer, config in zip(head.model.layers, head.model.config.layers, strict=True):
        bias = None if layer.qkv_bias is None else layer.qkv_bias[config.gqa.q_size :]
        cos_sin = tables(config.gqa.rope, config.gqa.head_dim, positions)[KEYS]
        transforms.append(HeadTransform(cos_sin, bias=bias, k_norm=layer.k_norm, eps=eps))
    return transforms
