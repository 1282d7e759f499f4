"""The forward pass of EAGLE heads: one or a few decoder layers over (feature, token) pairs.

The feature of a committed token comes from the target's hidden states. The feature of a draft token is the head's own
output for the token's parent in the tree.

EAGLE-3 (arXiv:2503.01840): The projection ``fc`` fuses several hidden states of the target into one feature. Layer 0
reads the normed embedding and the normed feature, concatenated in this order.
EAGLE-1 and 2 (arXiv:2401.15077, 2406.16858): The feature is the target's hidden state after its final norm. ``fc`` maps
the concatenated embedding and feature to the input of layer 0, which has no norm before its attention. The output of
the last layer goes to the target's output head without a norm.
MTP (arXiv:2412.19437, section 2.2): The feature is the target's state after its final norm, too, but embedding and
feature are normed before ``fc``, and the layer is one of the target's kind. Its normed output goes to the target's
output head, and is the next feature.
P-EAGLE (arXiv:2602.01469): A head as in EAGLE-3 that is never fed its own output. The draft tokens of a block are mask
pairs: the mask token beside a trained feature, which stands for the feature that is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jspec.core.numerics import Numerics
from jspec.core.records import TokenBatch
from jspec.draft.draft_vocab import reduced_head
from jspec.draft.head_config import Eagle3Config, EagleConfig, HeadConfig, MTPConfig, PEagleConfig
from jspec.models.block import Norm, mlp_part
from jspec.models.parts.kv_pool import KVPool
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import limited
from jspec.models.parts.param_spec import Params, ParamSpec, norm, prefixed
from jspec.models.weights.params import layer_params
from jspec.models.weights.tensor_parallel import place, put
from pallas_kernels.layers.formats import columns_of
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.products import matmul, matmul_unscaled
from pallas_kernels.layers.residual_norm import rms_norm
from pallas_kernels.layers.shard import Shard, look_up
from pallas_kernels.layers.split_matmul import split_matmul
from pallas_kernels.layers.weights import Inputs, Quantized, Weight

# Function of a layer's index and the partial sums of its QKV projection that returns the layer's attended values.
Attend = Callable[[int, PartialSums], Any]
FIRST_ROW = 1  # first row of the draft cache; row 0 is never written


@struct.dataclass
class EagleLayer(LayerWeights):
    """The weights of one layer of a head; in layer 0 of EAGLE-3, ``qkv`` has 2 * hidden input channels."""

    # Norm of the embedding in layer 0 of EAGLE-3, or of the input of other layers; None in layer 0 of EAGLE-1.
    input_norm: Float[Array, "hidden"] | None = None
    hidden_norm: Float[Array, "hidden"] | None = None  # norm of the feature in layer 0 of EAGLE-3; None elsewhere


@struct.dataclass
class PrecomputedFirstLayer:
    """The embedding half of layer 0's QKV projection, precomputed for every token of the draft vocabulary.

    A lookup of one row then replaces the embedding's half of the matrix product, and half of the weight is not read.
    Source: precomputing the first layer, arXiv:2402.13388.
    """

    projected: Float[Array, "draft_vocab qkv"]  # projection of each draft token's normed embedding
    qkv: Weight  # the half that multiplies the normed feature [(heads + 2 kv_heads) * head_dim, hidden]


@struct.dataclass
class EagleHead:
    """The weights and the config of an EAGLE head."""

    embed: Float[Array, "vocab hidden"] | None  # embedding; None: the target's, until `EagleDrafter.bind` sets it
    layers: list[EagleLayer]  # weights of each layer
    fc: Weight | None = None  # projection of the joined inputs [hidden, features]; None: one state is the feature
    fc_bias: Float[Array, "hidden"] | None = None  # bias of fc; None: no bias
    fc_norm: Float[Array, "states target_hidden"] | None = None  # norm of each target state before fc
    input_norm: Float[Array, "features"] | None = None  # norm of the concatenated target states before fc
    embed_norm: Float[Array, "hidden"] | None = None  # norm of the embedding before fc; MTP only
    feature_norm: Float[Array, "hidden"] | None = None  # norm of the feature before fc; MTP only
    norm: Float[Array, "hidden"] | None = None  # norm before the output head; None in EAGLE-1
    head: Weight | None = None  # output head [draft_vocab, hidden]; None: the target's, until `EagleDrafter.bind`
    draft_to_target: Int[Array, "draft_vocab"] | None = None  # target id of each draft id; None: ids are equal
    precomputed: PrecomputedFirstLayer | None = None  # set by `bind` for EAGLE-3 heads with a reduced vocabulary
    mask_hidden: Float[Array, "features"] | None = None  # target states of a mask pair, concatenated; P-EAGLE only
    mask_feature: Float[Array, "hidden"] | None = None  # feature of a mask pair, set by `bind`; P-EAGLE only
    # Divisor and limit of the logits (`jspec.models.parts.layers.limited`): the target's, if the output head is the
    # target's.
    logit_limits: tuple[float, float | None] = struct.field(pytree_node=False, default=(1.0, None))
    config: HeadConfig = struct.field(pytree_node=False, kw_only=True)
    # Mesh over whose devices the weights are divided (`jspec.models.weights.tensor_parallel`); None: they are not.
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    def declared(self) -> Params:
        """Return the declarations of the weights, by name; those of `PrecomputedFirstLayer` too."""
        params, hidden = head_params(self.config, has_embed=True), self.config.hidden_size
        params["draft_to_target"] = draft_ids(self.config)
        head = ParamSpec((self.config.draft_vocab_size, hidden), ("draft_vocab", "hidden"))
        qkv = params["layers.0.qkv"]
        projected = ParamSpec((self.config.draft_vocab_size, qkv.shape[0]), ("draft_ids", "projection"))
        half = ParamSpec((qkv.shape[0], hidden), ("heads", "hidden"))
        tables = {"precomputed.projected": projected, "precomputed.qkv": half, "mask_feature": norm(hidden)}
        return {**params, "head": head, **tables}

    @classmethod
    def from_weights(cls, config: HeadConfig, weights: Mapping[str, Any]) -> EagleHead:
        """Build a head from the tree of weights that `jspec.models.load.read_checkpoint` returns."""
        others = {name: array for name, array in weights.items() if name not in ("embed", "layers")}
        layers = [EagleLayer(**layer) for layer in weights["layers"]]
        return cls(embed=weights.get("embed"), layers=layers, config=config, **others)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the activations."""
        norm = self.layers[0].mlp_norm
        assert norm is not None
        return norm.dtype


def head_params(config: HeadConfig, *, has_embed: bool = False, has_head: bool = True) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter of an EAGLE head, by name.

    Args:
        config: config of the head.
        has_embed: whether the head has an embedding of its own; if not, it uses the target's.
        has_head: whether an EAGLE-3 head has an output head of its own; if not, it uses the target's. EAGLE-1 heads
            and MTP layers always use the target's.
    """
    hidden, states, width = config.hidden_size, config.num_features, config.target_hidden_size
    params: dict[str, ParamSpec] = {}
    if has_embed:
        params["embed"] = ParamSpec((config.vocab_size, hidden), ("tokens", "hidden"))
    if isinstance(config, Eagle3Config) and config.norm_before_fc:
        params["input_norm"] = norm(states * width, "features")
    if isinstance(config, PEagleConfig):
        params["mask_hidden"] = ParamSpec((states * width,), ("features",))
    if isinstance(config, Eagle3Config) and config.fc_norm:
        params["fc_norm"] = ParamSpec((states, width), ("states", "hidden"), init="ones")
    if isinstance(config, MTPConfig):
        params |= {"embed_norm": norm(hidden), "feature_norm": norm(hidden)}
    if config.fuses_states or isinstance(config, EagleConfig | MTPConfig):
        inputs = states * width if config.fuses_states else 2 * hidden
        params["fc"] = ParamSpec((hidden, inputs), ("fused", "features"))
        if config.fc_bias:
            params["fc_bias"] = ParamSpec((hidden,), ("hidden",), init="zeros")
    for index, layer in enumerate(config.layers):
        is_joined = index == 0 and isinstance(config, Eagle3Config)  # reads embedding beside feature
        specs = layer_params(layer, hidden, 2 * hidden if is_joined else hidden)
        if is_joined or index > 0 or isinstance(config, MTPConfig):
            specs["input_norm"] = norm(hidden)
        if is_joined:
            specs["hidden_norm"] = norm(hidden)
        params |= prefixed(f"layers.{index}", specs)
    if isinstance(config, EagleConfig):
        return params
    params["norm"] = norm(hidden)
    if isinstance(config, MTPConfig):
        return params
    if has_head:
        params["head"] = ParamSpec((config.draft_vocab_size, hidden), ("draft_vocab", "hidden"))
    return params | {"draft_to_target": draft_ids(config)}


def draft_ids(config: HeadConfig) -> ParamSpec:
    """Return the declaration of the target id of each draft id."""
    return ParamSpec((config.draft_vocab_size,), ("draft_ids",), "range", "int32")


class HeadOut(NamedTuple):
    """The output of a head for each token, without the logits."""

    hidden: Float[Array, "batch tokens hidden"]  # feature for the tokens that follow
    # QKV projection of the normed ``hidden`` by layer 0; None without `PrecomputedFirstLayer`.
    projected: Float[Array, "batch tokens qkv"] | None


def fuse(head: EagleHead, features: Float[Array, "... features"]) -> Float[Array, "... hidden"]:
    """Compute each token's feature from the target's concatenated hidden states; EAGLE-3 uses ``fc`` for this."""
    features, eps = features.astype(head.dtype), head.config.norm_eps
    if head.fc is None or not head.config.fuses_states:
        return features
    with jax.named_scope("fuse"):
        if head.fc_norm is not None:
            states = features.reshape(*features.shape[:-1], *head.fc_norm.shape)
            features = rms_norm(states, head.fc_norm, eps).reshape(features.shape)
        if head.input_norm is not None:
            features = rms_norm(features, head.input_norm, eps)
        fused = matmul(features, head.fc)
        return fused if head.fc_bias is None else fused + head.fc_bias


def reduce_vocabulary(head: EagleHead, ids: Int[np.ndarray, "draft_vocab"]) -> EagleHead:
    """Return a head that has the target's output head with the rows of a reduced vocabulary only.

    Args:
        head: a head with the target's output head.
        ids: target ids of the reduced vocabulary.
    """
    assert head.head is not None
    rows, to_target = reduced_head(head.head, ids)
    config = replace(head.config, draft_vocab_size=len(ids))
    head = replace(head, head=rows, draft_to_target=to_target, config=config)
    return head if head.mesh is None else place(head, head.mesh)


def precompute_first_layer(head: EagleHead) -> EagleHead:
    """Add a `PrecomputedFirstLayer` to an EAGLE-3 head with a reduced draft vocabulary; return the head.

    Other heads are returned unchanged, because for a whole vocabulary the table would be larger than the head, and
    P-EAGLE feeds no draft token to the head.

    Args:
        head: a head with an embedding; its weights are arrays or `jax.ShapeDtypeStruct`.
    """
    config = head.config
    if config.method != "eagle3" or config.draft_vocab_size == config.vocab_size:
        return head
    return replace(head, precomputed=_evaluated(_precomputed, head))


def with_mask_feature(head: EagleHead) -> EagleHead:
    """Add the feature of mask pairs to a P-EAGLE head, whose weights are arrays or `jax.ShapeDtypeStruct`."""
    feature = _evaluated(_mask_feature, head)
    return replace(head, mask_feature=feature if head.mesh is None else put(feature, norm(feature.size), head.mesh))


def _mask_feature(head: EagleHead) -> Float[Array, "hidden"]:
    assert head.mask_hidden is not None
    return fuse(head, head.mask_hidden[None])[0]


def _evaluated(function: Callable[[EagleHead], Any], head: EagleHead) -> Any:
    """Compute a function of a head's weights, or only the shapes of its values if the weights are shapes."""
    is_abstract = isinstance(head.layers[0].mlp_norm, jax.ShapeDtypeStruct)
    return jax.eval_shape(function, head) if is_abstract else jax.jit(function)(head)


def _precomputed(head: EagleHead) -> PrecomputedFirstLayer:
    assert head.embed is not None and head.draft_to_target is not None
    layer, size = head.layers[0], head.config.hidden_size
    assert layer.input_norm is not None and layer.qkv is not None
    embedded = look_up(head.embed, head.draft_to_target).astype(head.dtype)
    of_embedding, of_feature = (_columns(layer.qkv, first, first + size) for first in (0, size))
    normed = rms_norm(embedded, layer.input_norm, head.config.norm_eps)
    return PrecomputedFirstLayer(matmul(normed, of_embedding), of_feature)


def _columns(weight: Weight, start: int, stop: int) -> Weight:
    assert not isinstance(weight, Shard), "weights are parts of devices only inside of a step"
    return columns_of(weight, start, stop) if isinstance(weight, Quantized) else weight[:, start:stop]


def project_inputs(
    head: EagleHead,
    tokens: Int[Array, "batch tokens"],
    features: Float[Array, "batch tokens hidden"],
    numerics: Numerics,
) -> tuple[Array, PartialSums]:
    """Compute the residual stream and the QKV projection of layer 0 for (feature, token) pairs.

    Args:
        head: weights of the head.
        tokens: tokens of the pairs.
        features: features of the pairs, after `fuse`.
        numerics: by which kernels; heads make no promise of bits.

    Returns:
        The residual stream [batch, tokens, hidden], and the partial sums of the projection.
    """
    assert head.embed is not None
    layer, eps = head.layers[0], head.config.norm_eps
    embedded = look_up(head.embed, tokens).astype(features.dtype)
    if isinstance(head.config, EagleConfig):
        assert head.fc is not None
        joined = matmul(jnp.concatenate([embedded, features], axis=-1), head.fc)
        residual = x = joined if head.fc_bias is None else joined + head.fc_bias
    elif isinstance(head.config, MTPConfig):
        assert head.fc is not None and layer.input_norm is not None
        assert head.embed_norm is not None and head.feature_norm is not None
        both = rms_norm(embedded, head.embed_norm, eps), rms_norm(features, head.feature_norm, eps)
        residual = matmul(jnp.concatenate(both, axis=-1), head.fc)
        x = rms_norm(residual, layer.input_norm, eps)
    else:
        assert layer.input_norm is not None
        normed = _norm_features(head, features)
        residual = normed if _is_residual_normed(head.config) else features
        x = jnp.concatenate([rms_norm(embedded, layer.input_norm, eps), normed], axis=-1)
    return residual, split_matmul(x, layer.qkv, implementation=numerics.implementation)


def project_draft_tokens(
    head: EagleHead, pairs: TokenBatch, ids: Int[Array, "batch tokens"], parents: HeadOut
) -> tuple[Array, PartialSums]:
    """Compute the results of `project_inputs` for draft tokens, with the `PrecomputedFirstLayer` if there is one.

    Args:
        head: weights of the head.
        pairs: batch of the draft tokens.
        ids: id of each token in the draft vocabulary.
        parents: the head's output for each token's parent, which contains the token's feature.
    """
    if head.precomputed is None or parents.projected is None:
        return project_inputs(head, pairs.tokens, parents.hidden, pairs.numerics)
    residual = _norm_features(head, parents.hidden) if _is_residual_normed(head.config) else parents.hidden
    return residual, (parents.projected + head.precomputed.projected[ids])[None]


def _is_residual_normed(config: HeadConfig) -> bool:
    return isinstance(config, Eagle3Config) and config.norm_before_residual


def _is_output_normed(config: HeadConfig) -> bool:
    return isinstance(config, Eagle3Config | MTPConfig) and config.norm_output


def _norm_features(head: EagleHead, features: Array) -> Array:
    """Norm features with the ``hidden_norm`` of layer 0, which only EAGLE-3 heads have."""
    weight = head.layers[0].hidden_norm
    assert weight is not None
    return rms_norm(features, weight, head.config.norm_eps)


def run_layers(
    head: EagleHead, residual: Array, qkv: PartialSums, attend: Attend, numerics: Numerics
) -> tuple[Any, Array]:
    """Run the layers on (feature, token) pairs, from layer 0's QKV projection to the last layer's attention.

    Args:
        head: weights of the head.
        residual: residual stream at the input of layer 0.
        qkv: partial sums of the QKV projection of layer 0.
        attend: function of a layer's index and QKV projection that returns the attended values.
        numerics: by which kernels; heads make no promise of bits.

    Returns:
        What ``attend`` returned for the last layer, and the residual stream before this layer's attention.
    """
    out = attend(0, qkv)
    for index, (layer, config) in enumerate(zip(head.layers[:-1], head.config.layers[:-1], strict=True)):
        after = head.layers[index + 1]
        norms: list[Norm] = [] if after.input_norm is None else [(after.input_norm, after.qkv)]
        options: dict[str, Any] = {"eps": head.config.norm_eps, "numerics": numerics.relaxed}
        residual, x = mlp_part(layer, config, out, residual, norms, **options)
        out = attend(index + 1, split_matmul(x, after.qkv, implementation=numerics.implementation))
    return out, residual


def run_on_cache(
    head: EagleHead, cache: Sequence[KVPool], pairs: TokenBatch, residual: Array, qkv: PartialSums, *, attends: bool
) -> tuple[Any, Array, list[KVPool]]:
    """Run the layers on (feature, token) pairs that attend to the draft cache, to which each layer writes its rows.

    Args:
        head, residual, qkv: arguments of `run_layers`.
        cache: draft cache, of each layer.
        pairs: tokens of the pairs, with positions and cache rows.
        attends: whether to run the last layer's attention; False: stop after its keys and values are written.

    Returns:
        The last layer's attended values (its queries if ``attends`` is False), the residual stream and the cache.
    """
    pools: list[KVPool] = []

    def attend(index: int, qkv: PartialSums) -> Any:
        layer, attention = head.layers[index], head.config.layers[index].attention
        arguments, eps = (layer, qkv, cache[index], pairs, head.dtype), head.config.norm_eps
        if attends or index + 1 < len(head.layers):
            out, pool = attention.mix_projected(*arguments, eps=eps, start=FIRST_ROW)
        else:
            out, pool = attention.write(*arguments, eps=eps)
        pools.append(pool)
        return out

    out, residual = run_layers(head, residual, qkv, attend, pairs.numerics)
    return out, residual, pools


def finish_layers(
    head: EagleHead,
    attended: Inputs,
    residual: Array,
    norms: Sequence[Norm],
    numerics: Numerics,
    used: Bool[Array, "batch tokens"] | None = None,
) -> tuple[Array, list[Array]]:
    """Run the last layer after its attention, and the norms that read its output.

    Args:
        head: weights of the head.
        attended: the last layer's attended values.
        residual: residual stream before the last layer's attention.
        norms: the norm before the output head, if the head has one, then others.
        numerics: by which kernels; heads make no promise of bits.
        used: as in `output_logits`.

    Returns:
        The feature for the tokens that follow, and the normed output for each norm (without norms, the output itself).
    """
    options: dict[str, Any] = {"eps": head.config.norm_eps, "used": used, "numerics": numerics.relaxed}
    hidden, *normed = mlp_part(head.layers[-1], head.config.layers[-1], attended, residual, norms, **options)
    return normed[0] if _is_output_normed(head.config) else hidden, normed


def output_logits(
    head: EagleHead,
    attended: Inputs,
    residual: Array,
    numerics: Numerics,
    used: Bool[Array, "batch tokens"] | None = None,
) -> tuple[HeadOut, PartialSums]:
    """Run the last layer after its attention, the output norm and the output head.

    With a `PrecomputedFirstLayer`, layer 0 also projects the output for the next tokens. This projection starts after
    the output head's product and runs while the next tokens are chosen.

    Args:
        head: weights of the head.
        attended: the last layer's attended values.
        residual: residual stream before the last layer's attention.
        numerics: by which kernels; heads make no promise of bits.
        used: whether each row's result is used; None: all are. It spares experts that other rows choose.

    Returns:
        The head's output for each token, and the logits [1, batch, tokens, draft_vocab] as `limited` returns them.
    """
    assert head.head is not None
    is_fed_back, feature_norm = _is_output_normed(head.config), head.layers[0].hidden_norm
    norms: list[Norm] = [] if head.norm is None else [(head.norm, None if is_fed_back else head.head)]
    if norms and head.precomputed is not None and feature_norm is not None and not is_fed_back:
        norms += [(feature_norm, head.precomputed.qkv)]  # both norms come from the same residual sum
    hidden, normed = finish_layers(head, attended, residual, norms, numerics, used)
    projected = None
    with jax.named_scope("head"):
        product = matmul_unscaled(normed[0], head.head, jnp.float32, implementation=numerics.implementation)
    if head.precomputed is not None:
        feature = normed[1] if len(norms) == 2 else _norm_features(head, hidden)
        parts = split_matmul(feature, head.precomputed.qkv, after=product, implementation=numerics.implementation)
        projected = reduce_partials(parts, jnp.float32)
    return HeadOut(hidden, projected), limited(product, *head.logit_limits)
