"""The forward pass of EAGLE heads: one or a few decoder layers over (feature, token) pairs.

EAGLE-3 (arXiv:2503.01840): a pair's feature is the target's fused hidden states, or, for a drafted token, the head's
own output before it. Layer 0 reads the normed embedding and the normed feature side by side, embedding first.
EAGLE-1 and 2 (arXiv:2401.15077, 2406.16858): the feature is the target's state after its final norm; ``fc`` joins
embedding and feature at every step, layer 0 has no norm before its attention, and the output goes to the target's
own output head without a norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.records import KVCache, TokenBatch
from jspec.draft.head_config import HeadConfig
from jspec.models.attention import project, project_and_attend
from jspec.models.decoder import mlp, rms_norm
from pallas_kernels.layers.quantized import (
    Inputs,
    PartialSums,
    Quantized,
    Weight,
    has_dynamic_activations,
    matmul,
    matmul_unscaled,
    reduce_partials,
)
from pallas_kernels.layers.residual_norm import add_rms_norm
from pallas_kernels.layers.split_matmul import split_matmul

FIRST_ROW = 1  # row 0 of the draft's cache does not exist


@struct.dataclass
class EagleLayer:
    """Weights of one draft layer; ``inputs`` is twice the hidden size in layer 0 of EAGLE-3, else the hidden size."""

    qkv: Weight  # [(heads + 2 kv_heads) * head_dim, inputs]
    o: Weight  # [hidden, heads * head_dim]
    mlp_norm: Float[Array, "hidden"]
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    input_norm: Float[Array, "hidden"] | None = None  # layer 0: of the embedding; further layers: of their input
    hidden_norm: Float[Array, "hidden"] | None = None  # layer 0 of EAGLE-3: of the feature
    qkv_bias: Float[Array, "qkv"] | None = None
    q_norm: Float[Array, "head_dim"] | None = None
    k_norm: Float[Array, "head_dim"] | None = None


@struct.dataclass
class Drafted:
    """Layer 0's projection taken apart for tokens of the draft's vocabulary: that of their embeddings is known already.

    So a drafted token waits for a row to be looked up and added, not for a product, and half of the weight is not read.
    (Precomputing a first layer: arXiv:2402.13388.)
    """

    projected: Float[Array, "draft_vocab qkv"]  # what the projection makes of the normed embeddings
    qkv: Weight  # [(heads + 2 kv_heads) * head_dim, hidden], of the normed feature


@struct.dataclass
class EagleHead:
    """A head's weights with its config. ``embed`` and ``head`` are None until the target's are bound."""

    embed: Float[Array, "vocab hidden"] | None
    layers: list[EagleLayer]
    fc: Weight | None = None  # [hidden, features]
    fc_bias: Float[Array, "hidden"] | None = None
    fc_norm: Float[Array, "states target_hidden"] | None = None  # of each state before fc
    input_norm: Float[Array, "features"] | None = None  # of all states together before fc
    norm: Float[Array, "hidden"] | None = None  # before the output head
    head: Weight | None = None  # [draft_vocab, hidden]
    draft_to_target: Int[Array, "draft_vocab"] | None = None  # None: the same ids
    drafted: Drafted | None = None  # of an EAGLE-3 head that is bound and has a vocabulary of its own
    config: HeadConfig = struct.field(pytree_node=False, kw_only=True)

    @classmethod
    def from_weights(cls, config: HeadConfig, weights: Mapping[str, Any]) -> EagleHead:
        """Build from the tree of arrays that `jspec.models.load.load` returns."""
        own = {name: array for name, array in weights.items() if name not in ("embed", "layers")}
        layers = [EagleLayer(**layer) for layer in weights["layers"]]
        return cls(embed=weights.get("embed"), layers=layers, config=config, **own)

    @property
    def dtype(self) -> jnp.dtype:
        return self.layers[0].mlp_norm.dtype


class HeadOut(NamedTuple):
    """What the head makes of a token."""

    hidden: Float[Array, "batch tokens hidden"]  # the next token's feature
    projected: Float[Array, "batch tokens qkv"] | None  # layer 0's, of ``hidden`` (`Drafted`)


def fuse(head: EagleHead, features: Float[Array, "... features"]) -> Float[Array, "... hidden"]:
    """The target's states as one feature of a pair."""
    features, eps = features.astype(head.dtype), head.config.norm_eps
    if head.config.method == "eagle" or head.fc is None:
        return features
    with jax.named_scope("fuse"):
        if head.fc_norm is not None:
            states = features.reshape(*features.shape[:-1], *head.fc_norm.shape)
            features = rms_norm(states, head.fc_norm, eps).reshape(features.shape)
        if head.input_norm is not None:
            features = rms_norm(features, head.input_norm, eps)
        fused = matmul(features, head.fc)
        return fused if head.fc_bias is None else fused + head.fc_bias


def with_drafted(head: EagleHead) -> EagleHead:
    """A head whose embedding is bound, with the projections of the tokens it can draft; weights may be shapes."""
    config = head.config
    if config.method != "eagle3" or config.draft_vocab_size == config.vocab_size:
        return head  # a table of the whole vocabulary would be larger than the head
    is_abstract = isinstance(head.layers[0].mlp_norm, jax.ShapeDtypeStruct)
    drafted = jax.eval_shape(_drafted, head) if is_abstract else jax.jit(_drafted)(head)
    return replace(head, drafted=drafted)


def _drafted(head: EagleHead) -> Drafted:
    assert head.embed is not None
    layer, size = head.layers[0], head.config.hidden_size
    assert layer.input_norm is not None
    embedded = head.embed[head.draft_to_target].astype(head.dtype)
    of_embedding, of_feature = _columns(layer.qkv, slice(size)), _columns(layer.qkv, slice(size, None))
    return Drafted(matmul(rms_norm(embedded, layer.input_norm, head.config.norm_eps), of_embedding), of_feature)


def _columns(weight: Weight, part: slice) -> Weight:
    return replace(weight, values=weight.values[:, part]) if isinstance(weight, Quantized) else weight[:, part]


def enter(
    head: EagleHead, pairs: TokenBatch, features: Float[Array, "batch tokens hidden"]
) -> tuple[Array, PartialSums]:
    """Residual stream and projection of layer 0, of any (feature, token) pairs."""
    assert head.embed is not None
    layer, eps = head.layers[0], head.config.norm_eps
    embedded = head.embed[pairs.tokens].astype(features.dtype)
    if head.config.method == "eagle":
        assert head.fc is not None
        joined = matmul(jnp.concatenate([embedded, features], axis=-1), head.fc)
        residual = x = joined if head.fc_bias is None else joined + head.fc_bias
    else:
        assert layer.input_norm is not None
        normed = _normed(head, features)
        residual = normed if head.config.norm_before_residual else features
        x = jnp.concatenate([rms_norm(embedded, layer.input_norm, eps), normed], axis=-1)
    return residual, split_matmul(x, layer.qkv, implementation=pairs.implementation)


def enter_drafted(
    head: EagleHead, pairs: TokenBatch, ids: Int[Array, "batch tokens"], parents: HeadOut
) -> tuple[Array, PartialSums]:
    """`enter` for drafted tokens.

    Args:
        ids: of the tokens in the draft's vocabulary.
        parents: what the head made of each token's parent.
    """
    if head.drafted is None or parents.projected is None:
        return enter(head, pairs, parents.hidden)
    residual = _normed(head, parents.hidden) if head.config.norm_before_residual else parents.hidden
    return residual, (parents.projected + head.drafted.projected[ids])[None]


def _normed(head: EagleHead, features: Array) -> Array:
    """Features as layer 0 of EAGLE-3 reads them."""
    norm = head.layers[0].hidden_norm
    assert norm is not None
    return rms_norm(features, norm, head.config.norm_eps)


def through(
    head: EagleHead, cache: KVCache, pairs: TokenBatch, residual: Array, qkv: PartialSums, *, attends: bool
) -> tuple[Any, Array, KVCache]:
    """Take pairs that were entered as far as the last layer's attention, and write all their keys and values.

    Args:
        attends: False: in the last layer nobody does yet.

    Returns:
        What was attended to, or the last layer's queries, the residual stream and the cache.
    """
    k_pools, v_pools = [], []
    for index, layer in enumerate(head.layers):
        is_last = index + 1 == len(head.layers)
        run: Any = partial(project_and_attend, start=FIRST_ROW, quantize_output=has_dynamic_activations(layer.o))
        if is_last and not attends:
            run = project
        pools = cache.k[index], cache.v[index]
        out, k_pool, v_pool = run(_norm_heads(qkv, layer, head), *pools, pairs, head.config, head.dtype)
        k_pools.append(k_pool)
        v_pools.append(v_pool)
        if not is_last:
            following = head.layers[index + 1]
            norms = [] if following.input_norm is None else [(following.input_norm, following.qkv)]
            residual, x = _after_attention(head, index, out, residual, norms, pairs.implementation)
            qkv = split_matmul(x, following.qkv, implementation=pairs.implementation)
    return out, residual, KVCache(k=k_pools, v=v_pools)


def finish(head: EagleHead, attended: Inputs, residual: Array, implementation: str) -> tuple[HeadOut, PartialSums]:
    """Run what is left of the last layer, the output norm and the output head, whose logits may be still to be scaled.

    Where a graph's launches run side by side, the next token's projection does so beside the choice of that token, not
    beside the head: two products at once take as long as one after the other.
    """
    assert head.head is not None
    is_fed_back, of_feature = head.config.norm_output, head.layers[0].hidden_norm
    norms = [] if head.norm is None else [(head.norm, None if is_fed_back else head.head)]
    if norms and head.drafted is not None and of_feature is not None and not is_fed_back:
        norms += [(of_feature, head.drafted.qkv)]  # of the same sum
    hidden, *normed = _after_attention(head, len(head.layers) - 1, attended, residual, norms, implementation)
    hidden, projected = normed[0] if is_fed_back else hidden, None
    with jax.named_scope("head"):
        product = matmul_unscaled(normed[0], head.head, jnp.float32)
    if head.drafted is not None:
        feature = normed[1] if len(norms) == 2 else _normed(head, hidden)
        parts = split_matmul(feature, head.drafted.qkv, after=product, implementation=implementation)
        projected = reduce_partials(parts, jnp.float32)
    return HeadOut(hidden, projected), product


def _norm_heads(parts: PartialSums, layer: EagleLayer, head: EagleHead) -> PartialSums:
    """Add the bias of the fused projection and norm every query and key head, where the layer does that (Qwen)."""
    if layer.qkv_bias is None and layer.q_norm is None:
        return parts
    config, qkv = head.config, reduce_partials(parts, head.dtype)
    qkv = qkv if layer.qkv_bias is None else qkv + layer.qkv_bias
    if layer.q_norm is not None and layer.k_norm is not None:
        heads = qkv.reshape(*qkv.shape[:-1], -1, config.head_dim)
        q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=-2)
        q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
        qkv = jnp.concatenate([q, k, v], axis=-2).reshape(qkv.shape)
    return qkv[None]


def _after_attention(
    head: EagleHead,
    index: int,
    attended: Inputs,
    residual: Array,
    norms: Sequence[tuple[Array, Weight | None]],
    implementation: str,
) -> tuple[Any, ...]:
    """What a layer does with what it attended to: its output, and that output normed for whatever comes next.

    Args:
        norms: each with the weight that alone is multiplied by what is normed, if there is one.
    """
    layer = head.layers[index]
    add_norm = partial(add_rms_norm, eps=head.config.norm_eps, implementation=implementation)
    delta = split_matmul(attended, layer.o, implementation=implementation)
    hidden, normed = add_norm(residual, delta, layer.mlp_norm, quantize_output=has_dynamic_activations(layer.gate_up))
    delta = mlp(normed, layer.gate_up, layer.down, implementation)
    if not norms:
        hidden = hidden + reduce_partials(delta, hidden.dtype)
        return hidden, hidden
    quantize_output = all(weight is not None and has_dynamic_activations(weight) for _, weight in norms)
    return add_norm(hidden, delta, *(norm for norm, _ in norms), quantize_output=quantize_output)
