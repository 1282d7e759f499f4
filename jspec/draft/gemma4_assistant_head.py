"""The weights and the computation of assistants of Gemma 4.

An assistant is a small Gemma 4 decoder whose layers have queries alone: they attend to the target's committed rows, the
keys and values of the target's last layer of the same type. So it has no cache and reads no prompt. It computes the
token after token x from the embedding of x in the target and a state s of the target's width:

    z = fc [factor * embed[x]; s]                        factor: the target's, sqrt(width)
    n = norm(layers(z))                                  n gives the logits
    s' = project n                                       the state for the tokens after the next one

The first s of a round is the target's state after the final norm at the last committed row. The rotary position of all
queries of a round is that of this row.

The output head is the assistant's own. With clusters, only the tokens of a few clusters have logits: those whose
centroids have the largest products with n.

Source: transformers (`models/gemma4_assistant`). There the position is one later, and after a rejected token its row is
visible too. SGLang's position is the one of this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from convert.fields import CheckpointError
from jspec.core.records import TokenBatch
from jspec.draft.expand_tree import EXCLUDED, Vocabulary
from jspec.draft.head_pair import Size
from jspec.models.config.decoder_config import DecoderConfig, ModelConfig
from jspec.models.decoder import Layer, run_layers
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.shared_kv import TargetKV
from jspec.models.parts.checks import positive
from jspec.models.parts.layers import head_product, norm_rows, scaled, small_product
from jspec.models.parts.param_spec import Params, ParamSpec, norm, prefixed
from jspec.models.weights.params import layer_params
from pallas_kernels.layers.partial_sums import PartialSums
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.shard import look_up
from pallas_kernels.layers.weights import Inputs, Weight

NORM_DTYPE = "float32"  # norms multiply by their weight in float32, as those of all Gemma models


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(DecoderConfig):
    """The config of an assistant of Gemma 4.

    Attributes:
        target_hidden_size: number of channels of the target's hidden states.
        clusters: number of clusters of equally many tokens; 0: all tokens have logits.
        top_clusters: number of clusters whose tokens have logits.
    """

    method: ClassVar[str] = "gemma4_assistant"

    target_hidden_size: int
    clusters: int = 0
    top_clusters: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("config", self, ("target_hidden_size",))
        if not all(isinstance(layer.mixer, TargetKV) for layer in self.layers):
            raise CheckpointError("layers", "expected layers that read the target's keys and values, got others")
        if not self.clusters:
            return
        if self.vocab_size % self.clusters:
            raise CheckpointError(
                "num_centroids",
                f"expected a divisor of vocab_size {self.vocab_size}, got {self.clusters}; correct config.json",
            )
        if not 1 <= self.top_clusters <= self.clusters:
            raise CheckpointError(
                "centroid_intermediate_top_k",
                f"expected 1 to {self.clusters}, the number of clusters, got {self.top_clusters}; correct config.json",
            )

    @property
    def candidates(self) -> int:
        """Number of tokens that have logits after a token."""
        return self.top_clusters * (self.vocab_size // self.clusters) if self.clusters else self.vocab_size


@struct.dataclass
class ClusterHead:
    """An output head whose rows are ordered by cluster, of which it multiplies those of a few clusters."""

    centroids: Float[Array, "clusters hidden"]
    rows: Float[Array, "vocab hidden"]  # rows of the first cluster, then those of the second, ...
    ids: Int[Array, "vocab"]  # token id of each row

    def logits(
        self, normed: Float[Array, "batch tokens hidden"], count: int, batch: TokenBatch
    ) -> Float[Array, "1 batch tokens vocab"]:
        """Return logits in the order of the rows, `EXCLUDED` for tokens of other than the best ``count`` clusters.

        The rows of each token's clusters are copied before they are multiplied. If the tokens have together as many
        clusters as there are, or more, the copies are no smaller than all rows, so all rows are multiplied in place.
        """
        clusters = len(self.centroids)
        rows = self.rows.reshape(clusters, -1, self.rows.shape[-1])
        _, best = jax.lax.top_k(small_product(normed, self.centroids, batch.numerics), count)
        normed = normed.astype(rows.dtype)
        exact: Any = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        if best.size >= clusters:
            is_best = jnp.any(best[..., None] == np.arange(clusters), axis=2)
            logits = jnp.einsum("bth,csh->btcs", normed, rows, **exact)
            logits = jnp.where(is_best[..., None], logits, EXCLUDED)
        else:
            sequences, tokens = (np.arange(size) for size in best.shape[:2])
            products = jnp.einsum("bth,btcsh->btcs", normed, rows[best], **exact)
            logits = jnp.full((*best.shape[:2], *rows.shape[:2]), EXCLUDED, jnp.float32)
            logits = logits.at[sequences[:, None, None], tokens[:, None], best].set(products)
        return logits.reshape(1, *best.shape[:2], -1)


@struct.dataclass
class AssistantHead:
    """The weights and the config of an assistant of Gemma 4."""

    fc: Weight  # projection of embedding and state [hidden, 2 * target_hidden]
    layers: list[Layer]  # weights of each layer
    norm: Float[Array, "hidden"]  # norm before the output head
    project: Float[Array, "target_hidden hidden"]  # projection to the state for the next tokens
    head: Weight | None = None  # output head [vocab, hidden]; None: it has clusters
    clusters: ClusterHead | None = None
    embed: Float[Array, "vocab target_hidden"] | None = (
        None  # the target's embedding, which `Gemma4Assistant.bind` sets
    )
    embed_scale: float = struct.field(pytree_node=False, default=1.0)  # factor of the embedding
    sources: tuple[int, ...] = struct.field(pytree_node=False, default=())  # target's layer that each layer reads
    config: AssistantConfig = struct.field(pytree_node=False, kw_only=True)
    # Mesh over whose devices the weights are divided (`jspec.models.weights.tensor_parallel`); None: they are not.
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def from_weights(cls, config: AssistantConfig, weights: Mapping[str, Any]) -> AssistantHead:
        """Build a head from the tree of weights that `jspec.models.load.read_checkpoint` returns."""
        made = {**weights, "layers": [Layer(**layer) for layer in weights["layers"]]}
        if "clusters" in weights:
            made["clusters"] = ClusterHead(**weights["clusters"])
        return cls(**made, config=config)

    def declared(self) -> Params:
        """Return the declarations of the weights, by name; that of the target's embedding too."""
        config = self.config
        embed = ParamSpec((config.vocab_size, config.target_hidden_size), ("vocab", "hidden"))
        return {**assistant_params(config), "embed": embed}

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the activations."""
        return self.project.dtype

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(None if self.clusters is None else self.clusters.ids, self.config.vocab_size)

    def run(
        self,
        caches: Sequence[Any],
        batch: TokenBatch,
        states: Float[Array, "batch tokens target_hidden"],
    ) -> tuple[PartialSums, Float[Array, "batch tokens target_hidden"]]:
        """Run the assistant on tokens.

        Args:
            caches: state of each of the target's layers.
            batch: the tokens, with the target's rows that they see; nothing is written.
            states: the state of each token.

        Returns:
            The logits after each token in the order of `vocabulary`, without the scales of a quantised head, and the
            states of the tokens after these.
        """
        assert self.embed is not None, "bind the head to a target"
        embedded = scaled(look_up(self.embed, batch.tokens), self.embed_scale)
        joined = jnp.concatenate([embedded.astype(self.dtype), states.astype(self.dtype)], axis=-1)
        x, numerics, eps = matmul(joined, self.fc), batch.numerics, self.config.norm_eps
        first_norm = self.layers[0].attn_norm
        assert first_norm is not None

        def attend(index: int, normed: Inputs) -> Any:
            mixer, cache = self.config.layers[index].mixer, caches[self.sources[index]]
            return mixer.mix(self.layers[index], normed, cache, batch, self.dtype, eps=eps)[0]

        *_, normed = run_layers(
            self, x, norm_rows(x, first_norm, eps, numerics), attend, numerics=numerics, used=batch.valid
        )
        with jax.named_scope("head"):
            logits: Any
            if self.clusters is not None:
                logits = self.clusters.logits(normed, self.config.top_clusters, batch)
            else:
                assert self.head is not None
                logits = head_product(normed, self.head, numerics)
        return logits, matmul(normed, self.project)


def assistant_params(config: AssistantConfig) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter of an assistant, by name."""
    hidden, wide, vocab = config.hidden_size, config.target_hidden_size, config.vocab_size
    params = {"fc": ParamSpec((hidden, 2 * wide), ("hidden", "features"))}
    for index, layer in enumerate(config.layers):
        specs = {**layer_params(layer, hidden, hidden, NORM_DTYPE), "attn_norm": norm(hidden, dtype=NORM_DTYPE)}
        params |= prefixed(f"layers.{index}", specs)
    params["norm"] = norm(hidden, dtype=NORM_DTYPE)
    params["project"] = ParamSpec((wide, hidden), ("features", "hidden"))
    if not config.clusters:
        return params | {"head": ParamSpec((vocab, hidden), ("draft_vocab", "hidden"))}
    # Every device has all clusters, of which it multiplies those of each token.
    clusters = {
        "centroids": ParamSpec((config.clusters, hidden), ("clusters", "hidden")),
        "rows": ParamSpec((vocab, hidden), ("draft_ids", "hidden")),
        "ids": ParamSpec((vocab,), ("draft_ids",), "range", "int32"),
    }
    return params | prefixed("clusters", clusters)


def common_sizes(config: AssistantConfig, target: ModelConfig) -> list[Size]:
    """List the sizes that an assistant and its target must have in common, besides those of `sources_in`."""
    return [
        Size("vocabulary", config.vocab_size, target.vocab_size),
        Size("target hidden size", config.target_hidden_size, target.hidden_size),
    ]


def sources_in(config: AssistantConfig, target: DecoderConfig) -> tuple[int, ...]:
    """Return the index of the target's layer whose keys and values each of an assistant's layers reads.

    Raises:
        ValueError: the target has no such layer, or other keys in it.
    """
    mixers, sources = [layer.mixer for layer in target.layers], []
    for mixer in (layer.mixer for layer in config.layers):
        assert isinstance(mixer, TargetKV)
        source = mixer.source_in(mixers)
        wanted, got = _keys(mixer), "none" if source is None else _keys(mixers[source])
        if source is None or wanted != got:
            raise ValueError(f"keys and values of {mixer.source_name}: the target has {got}, the head reads {wanted}")
        sources.append(source)
    return tuple(sources)


def _keys(mixer: Any) -> str:
    """Describe the form of a layer's keys."""
    assert isinstance(mixer, GQA)
    return f"{mixer.kv_heads} heads of {mixer.head_dim} channels, rotated with {mixer.rope.describe()}"
