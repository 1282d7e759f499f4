"""The decoder of targets and draft models: its weights and its forward pass.

`jspec.models.block` computes one layer; the loop over layers is unrolled. Linear weights are stored as [out, in], as in
checkpoints. The query, key and value projections are fused into one weight, and so are the gate and up projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jspec.core.foreign_names import keywords_checked
from jspec.core.numerics import AUTO, Numerics
from jspec.core.records import TokenBatch
from jspec.models import load
from jspec.models.block import Norm, convolved, mlp_part
from jspec.models.config.decoder_config import DecoderConfig, ModelConfig
from jspec.models.mlps.mlp_config import Dense
from jspec.models.parts.layer_embeddings import LayerEmbeddings, embeddings_of
from jspec.models.parts.layer_weights import LayerWeights, optional
from jspec.models.parts.layers import head_product, limited, norm_rows, scaled
from jspec.models.parts.param_spec import Params
from jspec.models.weights.params import EMBEDDINGS, model_params
from pallas_kernels.layers.gated_matmul import kernel_padding
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.shard import look_up
from pallas_kernels.layers.weights import Inputs, Weight


@struct.dataclass
class Layer(LayerWeights):
    """The weights of one layer of a target or a draft model."""

    attn_norm: Float[Array, "hidden"] | None = optional()  # norm before the attention; None: the layer has none

    @property
    def first_norm(self) -> Norm | None:
        """The norm before the layer's first part, and the weight that alone reads its output; None: there is none."""
        if self.qkv is None:
            assert self.mlp_norm is not None
            return self.mlp_norm, self.gate_up if self.router is None else None
        # The input of gates and of convolutions, which stay unquantised, must not be quantised for qkv.
        return None if self.attn_norm is None else (self.attn_norm, self.qkv if self.reads_input_once else None)


@struct.dataclass
class Model:
    """The weights and the config of a target or a draft model."""

    embed: Float[Array, "vocab hidden"]  # embedding
    layers: list[Layer]  # weights of each layer
    norm: Float[Array, "hidden"]  # final norm
    head: Weight | None  # output head [vocab, hidden]; None: tied to the embedding
    config: ModelConfig = struct.field(pytree_node=False)
    # Mesh over whose devices the weights are divided (`jspec.models.weights.tensor_parallel`); None: they are not.
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    layer_embeddings: LayerEmbeddings | None = None  # embeddings that each token has for every layer; None: none

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the activations."""
        return self.embed.dtype

    def declared(self) -> Params:
        """Return the declarations of the weights, by name."""
        return model_params(self.config)

    @classmethod
    def from_weights(cls, config: ModelConfig, weights: Mapping[str, Any], mesh: Mesh | None = None) -> Model:
        """Make a model from its config and the tree of weights that `jspec.models.load.load` returns for a mesh."""
        layers = [Layer(**layer) for layer in weights["layers"]]
        embeddings = weights.get(EMBEDDINGS)
        return cls(
            embed=weights["embed"],
            layers=layers,
            norm=weights["norm"],
            head=weights.get("head"),
            config=config,
            mesh=mesh,
            layer_embeddings=None if embeddings is None else LayerEmbeddings(**embeddings),
        )

    @classmethod
    @keywords_checked
    def from_pretrained(cls, path: str | Path, *, dtype: str | None = None, quantize: str | None = None) -> Model:
        """Load a target or a draft model.

        Args:
            path: Hugging Face folder, folder written by ``jspec convert``, or hub id ("owner/name").
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            quantize: "int8", "fp8", "fp8_dynamic", "int4" or "mxfp4", how weight matrices are quantised; "none": widen
                those that a Hugging Face folder quantises; None: as stored (`jspec.models.load.load`).
        """
        checkpoint = load.load(path, dtype=dtype, quantize=quantize)
        return cls.from_weights(checkpoint.config, checkpoint.weights)

    @property
    def output_head(self) -> Weight:
        return self.embed if self.head is None else self.head

    def embedded(self, tokens: Int[Array, "*rows"], numerics: Numerics = AUTO) -> Float[Array, "*rows hidden"]:
        """Return the embedding of tokens, normed or multiplied by a factor as the config says."""
        x = look_up(self.embed, tokens)
        if self.config.norms_embedding:
            x = norm_rows(x, jnp.ones(x.shape[-1], jnp.float32), self.config.norm_eps, numerics)
        return scaled(x, self.config.embed_scale)

    def logits_of(self, x: Float[Array, "*rows hidden"], numerics: Numerics = AUTO) -> Float[Array, "*rows vocab"]:
        """Return the logits of normed hidden states in float32.

        Args:
            x: hidden states after the final norm.
            numerics: by which kernel, and whether a row's bits may depend on the number of rows.
        """
        return reduce_partials(self.logit_sums(x, numerics), jnp.float32)

    def logit_sums(self, x: Float[Array, "*rows hidden"], numerics: Numerics) -> PartialSums:
        """Return the logits as one partial sum [1, *rows, vocab].

        The scales of a quantised output head are applied only if the config has a divisor or a limit of the logits.
        """
        sums = head_product(x, self.output_head, numerics)
        return limited(sums, self.config.logit_divisor, self.config.logit_softcap)


class HasLayers(Protocol):
    """What `run_layers` reads of a decoder."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def layers(self) -> list[Layer]: ...

    @property
    def norm(self) -> Float[Array, "hidden"]: ...


@struct.dataclass
class TargetOut:
    """The logits and the features that a forward pass returns."""

    # The output head's product [1, batch, rows, vocab]; `logits` multiplies it by the scales of a quantised head.
    product: PartialSums | None
    features: Float[Array, "batch tokens features"] | None  # the requested hidden states, concatenated

    @property
    def logits(self) -> Float[Array, "batch rows vocab"]:
        """The logits of the requested tokens in float32."""
        assert self.product is not None, "the forward pass was taken with_logits=False"
        return reduce_partials(self.product, jnp.float32)


def forward(
    model: Model,
    cache: Sequence[Any],
    batch: TokenBatch,
    *,
    feature_layers: tuple[int, ...] = (),
    logit_rows: Int[Array, "*rows"] | None = None,
    with_logits: bool = True,
) -> tuple[TargetOut, list[Any]]:
    """Run the model on a batch of tokens and write their keys and values into the cache.

    Args:
        model: weights and config.
        cache: state of each layer; rows before ``batch.first_row`` are committed.
        batch: tokens with their positions and cache rows.
        feature_layers: indices of the requested hidden states. State 0 is the embedding, and state k is the input of
            layer k. In a model of L layers, state L is the last layer's output, and state L + 1 the final norm's.
        logit_rows: index among all tokens of the batch, row after row, of each token whose logits are requested;
            None: all tokens, [batch, tokens].
        with_logits: False: skip the output head.

    Returns:
        The logits and the features in a `TargetOut`, and the updated cache. The features are the requested hidden
        states, concatenated in the order of ``feature_layers``.
    """
    sequences, tokens = batch.pack(batch.tokens).shape
    if not batch.deterministic:  # pad the tokens for a kernel; ``[:, :tokens]`` below drops the padding
        gate_up, mlp = model.layers[0].gate_up, model.config.layers[0].mlp
        if isinstance(mlp, Dense) and mlp.is_gated and gate_up is not None:
            batch = batch.pad(kernel_padding(sequences, tokens, gate_up, model.embed.dtype, mlp.activation))
    if batch.adapters is not None:
        assert batch.adapter is not None
        table = batch.adapter if batch.adapter.ndim == 2 else batch.adapter[:, None]
        table = batch.pack(jnp.broadcast_to(table, batch.tokens.shape))
        model = replace(model, layers=batch.adapters.adapted(model.layers, table))
    eps, used = model.config.norm_eps, batch.pack(batch.is_used)
    x = normed = model.embedded(batch.pack(batch.tokens), batch.numerics)
    if (first_norm := model.layers[0].first_norm) is not None:
        normed = norm_rows(x, first_norm[0], eps, batch.numerics)
    new_cache: list[Any] = []

    def mix(index: int, normed: Inputs) -> Any:
        mixer, layer = model.config.layers[index].mixer, model.layers[index]
        state = cache[index] if mixer.source is None else new_cache[mixer.source]
        mixed, state = mixer.mix(layer, normed, state, batch, x.dtype, eps=eps)
        new_cache.append(state if mixer.source is None else cache[index])
        return mixed

    embedded = None
    if model.layer_embeddings is not None:
        tokens_of = batch.pack(batch.tokens)
        embedded = embeddings_of(model.layer_embeddings, tokens_of, x, eps=eps, numerics=batch.numerics)
    states = run_layers(model, x, normed, mix, numerics=batch.numerics, used=used, embedded=embedded)
    normed = states[-1]
    features = None
    if feature_layers:
        features = batch.unpack(jnp.concatenate([states[i][:, :tokens] for i in feature_layers], axis=-1)[None])[0]
    head_sums = None
    if with_logits:
        with jax.named_scope("head"):
            normed = normed[:, :tokens]
            if logit_rows is not None:
                normed = normed.reshape(-1, normed.shape[-1])[logit_rows]
            head_sums = batch.unpack(model.logit_sums(normed, batch.numerics))
    return TargetOut(product=head_sums, features=features), new_cache


def run_layers(
    model: HasLayers,
    x: Float[Array, "batch tokens hidden"],
    normed: Float[Array, "batch tokens hidden"],
    mix: Callable[[int, Any], Inputs],
    *,
    numerics: Numerics,
    used: Bool[Array, "batch tokens"] | None = None,
    embedded: Float[Array, "layers batch tokens embedded"] | None = None,
) -> list[Array]:
    """Run all layers and the final norm, with the caller's mixing of tokens.

    Args:
        model: weights and config.
        x: embedded tokens.
        normed: input of the first layer's mixer: ``x`` after the layer's norm, if it has one.
        mix: function of a layer's index and normed input that returns what its output projection multiplies.
        numerics, used: as for `jspec.models.block.mlp_part`.
        embedded: the tokens' embeddings for each layer; None: they have none.

    Returns:
        The states, counted as in `forward`.
    """
    states, eps = [x], model.config.norm_eps
    firsts = [layer.first_norm for layer in model.layers[1:]]
    norms: list[list[Norm]] = [[] if norm is None else [norm] for norm in firsts] + [[(model.norm, None)]]
    for index, (layer, config, after) in enumerate(zip(model.layers, model.config.layers, norms, strict=True)):
        options: dict[str, Any] = {"eps": eps, "numerics": numerics, "used": used}
        options |= {} if embedded is None else {"embedded": embedded[index]}
        with jax.named_scope(f"layer{index}"):
            (normed,), taps = convolved(layer.attn_taps, layer.attn_taps_project, [normed], numerics)
            x, normed = mlp_part(layer, config, mix(index, normed), x, after, taps=taps, **options)
        states.append(x)
    return [*states, normed]
