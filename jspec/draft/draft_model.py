"""Drafting with a smaller model that has the target's vocabulary (speculative decoding, arXiv:2211.17192).

The models of one family may have different numbers of padding rows after the ids of their common tokenizer. The model
then drafts only ids that both models have, and reads its last row for an id of the text that it lacks. This changes
which tokens are drafted, and not what the engine emits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self, final

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jspec.core.foreign_names import keywords_checked
from jspec.core.records import Draft, PromptBatch, SlotView, TokenBatch, Verdict
from jspec.core.tree import DEFAULT_TREE, Tree, tree_of
from jspec.draft.base import (
    CHECK_HEAD,
    CHECK_PROMPT,
    active_slots,
    check_layer_windows,
    check_part,
    check_window,
)
from jspec.draft.expand_tree import Level, Vocabulary, expand_tree
from jspec.draft.head_config import Overrides
from jspec.draft.pretrained import Pretrained
from jspec.models.config.decoder_config import DecoderConfig
from jspec.models.decoder import Model, TargetOut, forward
from jspec.models.kv_cache import commit, create
from jspec.models.load import Format, target_format
from jspec.models.mixers.attention import Attention
from jspec.models.parts.devices import Place, mesh_over
from jspec.models.parts.kv_pool import KVPool, PoolShape
from jspec.models.weights.tensor_parallel import local_config, place
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.shard import OwnColumns

MAX_PADDING = 512  # most rows by which the vocabularies of draft model and target may differ


@struct.dataclass
class BoundModel:
    """The weights of a draft model, with the size of the target's vocabulary."""

    model: Model
    target_size: int = struct.field(pytree_node=False)  # number of tokens of the target's vocabulary

    @property
    def size(self) -> int:
        """The number of ids that draft model and target both have."""
        return min(self.model.config.vocab_size, self.target_size)

    @property
    def vocabulary(self) -> Vocabulary:
        """The ids that can be drafted."""
        ids = None if self.size == self.target_size else jnp.arange(self.size, dtype=jnp.int32)
        return Vocabulary(ids, self.target_size)

    def known(self, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
        """Replace ids that the draft model lacks by its last id."""
        return tokens if self.size == self.target_size else jnp.minimum(tokens, self.size - 1)

    def common(self, logits: PartialSums) -> PartialSums:
        """Cut off the logits [..., draft_vocab] of ids that the target lacks."""
        if self.size == self.model.config.vocab_size:
            return logits
        if isinstance(logits, OwnColumns):
            return replace(logits, size=self.size)
        return reduce_partials(logits, jnp.float32)[None, ..., : self.size]


@struct.dataclass
class DraftModelState:
    """The state of a draft model: its KV cache, and for each slot the token whose row is missing in the cache.

    The model does not run on tree nodes without children. If such a node is accepted, the cache has no row for the last
    committed token. Every round therefore first runs the model on the last committed token and the root. If the row of
    the last committed token exists already, it is not written again, because its page may be shared.
    """

    cache: list[KVPool]  # KV cache of the draft model
    previous: Int[Array, "slots"]  # last committed token if its row is missing, else -1
    rows: Int[Array, "slots nodes"]  # cache row of each node of the last draft; the root's is 0; -1: no row


@final
class DraftModel(Pretrained):
    """Drafts with a smaller model that has the target's vocabulary, apart from padding.

    Args:
        model: the draft model; its vocabulary may differ from the target's by up to `MAX_PADDING` rows.
        tree: draft tree of any kind, or its text such as "chain:4".
        draft_window: number of newest tokens that the model attends to; None: all.
        device: device of the model, if it is not to be on the target's devices; or several devices or a mesh of one
            axis named "model", over which the model is divided. None: the target's devices. On other devices a round is
            several programs, and tokens cross between the devices.

    Raises:
        ValueError: a node of the tree has more children than the vocabulary has tokens, or the window is not larger
            than the tree's depth, or the model cannot be divided over the devices.
        TypeError: ``device`` is of another type.
    """

    method = "target"
    weights_type = Model
    has_pending_rows = True
    reads_accepted_tokens = False

    def __init__(
        self,
        model: Model,
        tree: Tree | str = DEFAULT_TREE,
        *,
        draft_window: int | None = None,
        device: Place | None = None,
    ) -> None:
        tree = tree_of("DraftModel", tree)
        check_part("DraftModel", "model", model, Model, "DraftModel.from_pretrained(path)")
        _check_mixers(model.config)
        _check_width(tree, model.config.vocab_size)
        self.mesh = None if device is None else _mesh_for(model.config, device)
        self.model = model if self.mesh is None else place(model, self.mesh)
        self.tree = tree
        self.draft_window = check_window("DraftModel", draft_window, tree)

    def with_window(self, draft_window: int) -> DraftModel:
        return DraftModel(self.model, self.tree, draft_window=draft_window, device=self.mesh)

    def on_mesh(self, mesh: Mesh) -> DraftModel:
        if self.mesh is not None:
            return self
        return DraftModel(place(self.model, mesh), self.tree, draft_window=self.draft_window)

    @classmethod
    @keywords_checked
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str = DEFAULT_TREE,
        dtype: str | None = None,
        quantize: str | None = None,
        draft_window: int | None = None,
        device: Place | None = None,
    ) -> Self:
        """Load a draft model.

        Args:
            path: Hugging Face folder, converted folder or hub id ("owner/name").
            tree: draft tree of any kind, or its text such as "chain:4".
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            quantize: "int8", "fp8", "fp8_dynamic" or "int4", how weights are quantised
                (`jspec.models.weights.quantize`); None: as stored.
            draft_window: number of newest tokens that the model attends to; None: all.
            device: as for `DraftModel`; the weights are read onto these devices only.
        """
        mesh = None if device is None else mesh_over("DraftModel: device", device)

        def check(config: DecoderConfig, folder: Path) -> None:
            _check_mixers(config)
            if mesh is not None:
                _mesh_for(config, mesh)

        model = cls.read(path, dtype=dtype, quantize=quantize, mesh=mesh, check=check)
        return cls(model, tree, draft_window=draft_window, device=mesh)

    @classmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        return target_format(kind, rope_theta=overrides.rope_theta, dequantize=dequantize)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT} and that the draft model has the target's tokenizer, and {CHECK_HEAD}"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> BoundModel:
        vocab, wanted = self.model.config.vocab_size, target.config.vocab_size
        if abs(vocab - wanted) > MAX_PADDING:
            raise ValueError(
                f"DraftModel: expected the target's vocabulary of {wanted} tokens, or one that differs by at most "
                f"{MAX_PADDING} rows of padding, got {vocab}; use a draft model of the target's family and tokenizer"
            )
        check_layer_windows("draft model", self.model.config, self.tree)
        _check_width(self.tree, min(vocab, wanted))
        return BoundModel(self.model, wanted)

    def init(self, params: BoundModel, pool: PoolShape) -> DraftModelState:
        return DraftModelState(
            cache=create(params.model.config.layers, pool, pool.draft_dtype),
            previous=jnp.full(pool.slots, -1, jnp.int32),
            rows=jnp.zeros((pool.slots, self.tree.nodes), jnp.int32),
        )

    def prefill(
        self, params: BoundModel, state: DraftModelState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> DraftModelState:
        tokens = params.known(batch.tokens)
        batch = replace(batch, tokens=tokens, window=self.draft_window, numerics=batch.numerics.relaxed)
        _, cache = forward(params.model, state.cache, batch, with_logits=False)
        return replace(state, cache=cache, previous=state.previous.at[view.slots].set(-1, mode="drop"))

    def draft(self, params: BoundModel, state: DraftModelState, view: SlotView) -> tuple[Draft, DraftModelState]:
        previous = state.previous.at[view.slots].get(mode="fill", fill_value=0)
        with jax.named_scope("root"):
            out, cache = _run_root(params, state.cache, view, previous, window=self.draft_window)

        assert out.product is not None

        def run_level(cache: list[KVPool], level: Level) -> tuple[PartialSums, list[KVPool]]:
            return _run_level(params, cache, view, level, self.draft_window)

        logits = params.common(out.product)
        expanded, cache = expand_tree(self.tree, view, params.vocabulary, logits, cache, run_level)
        rows = state.rows.at[view.slots, : self.tree.nodes].set(expanded.rows, mode="drop")
        return expanded.draft, replace(state, cache=cache, rows=rows)

    def commit(
        self,
        params: BoundModel,
        state: DraftModelState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> DraftModelState:
        last = jnp.take_along_axis(verdict.path, jnp.maximum(verdict.counts - 1, 0)[:, None], axis=1)
        rows = state.rows.at[view.slots, : self.tree.nodes].get(mode="fill", fill_value=-1)
        is_written = jnp.take_along_axis(rows, last, axis=1) >= 0
        previous = jnp.where(is_written, -1, jnp.take_along_axis(draft.tokens, last, axis=1))[:, 0]
        cache = commit(state.cache, self.tree, view, verdict, rows=rows)
        slots = active_slots(view, state.previous.shape[0])
        return replace(state, cache=cache, previous=state.previous.at[slots].set(previous, mode="drop"))

    def write_pending_rows(self, params: BoundModel, state: DraftModelState, view: SlotView) -> DraftModelState:
        previous = state.previous.at[view.slots].get(mode="fill", fill_value=0)
        window = self.draft_window
        _, cache = _run_root(params, state.cache, view, previous, window=window, with_logits=False)
        return replace(state, cache=cache)


def _mesh_for(config: DecoderConfig, device: Place) -> Mesh:
    """Return the mesh over a draft model's own devices, over which the model must be divisible."""
    mesh = mesh_over("DraftModel: device", device)
    try:
        local_config(config, mesh.size)
    except ValueError as error:
        raise ValueError(f"DraftModel: device: {error}") from error
    return mesh


def other_mixers(config: DecoderConfig) -> list[str]:
    """Return the names of the kinds of layers without attention, which a draft model may not have."""
    mixers = [layer.mixer for layer in config.layers if not isinstance(layer.mixer, Attention)]
    return list(dict.fromkeys(name for mixer in mixers for name in mixer.describe()))


def _check_mixers(config: DecoderConfig) -> None:
    """Raise NotImplementedError unless all layers have attention, whose cache rows a tree's levels can share."""
    if kinds := other_mixers(config):
        raise NotImplementedError(
            f"DraftModel: expected a model whose layers all have attention, got one with a {' and a '.join(kinds)}; "
            "take another draft model, the target's own MTP layer, a head, NGram or Suffix"
        )


def _check_width(tree: Tree, size: int) -> None:
    """Raise ValueError if a node of the tree has more children than there are ids to draft."""
    if tree.branching > size:
        raise ValueError(
            f"DraftModel: {tree} needs {tree.branching} children of a node, the vocabulary has {size} tokens; "
            "take a narrower tree"
        )


def _run_root(
    params: BoundModel,
    cache: list[KVPool],
    view: SlotView,
    previous: Int[Array, "batch"],
    *,
    window: int | None,
    with_logits: bool = True,
) -> tuple[TargetOut, list[KVPool]]:
    """Run the model on the root, and also on the last committed token if the cache has no row for it.

    Args:
        params: weights of the draft model.
        cache: KV cache of the draft model.
        view: the slots of the batch.
        previous: last committed token if its row is missing, else -1.
        window: number of newest tokens that the model attends to; None: all.
        with_logits: whether to compute logits; False: only write the rows.

    Returns:
        The model's output with the logits after the root, and the new cache.
    """
    first_row = jnp.maximum(view.lengths - 1, 0)
    is_missing = previous >= 0
    tokens = params.known(jnp.stack([jnp.where(is_missing, previous, 0), view.root], axis=1))
    batch = TokenBatch(
        tokens=tokens,
        positions=first_row[:, None] + jnp.arange(2),
        valid=view.active[:, None] & jnp.stack([is_missing, jnp.ones_like(is_missing)], axis=1),
        first_row=first_row,
        page_table=view.page_table,
        bits=None,
        numerics=view.numerics.relaxed,
        window=window,
    )
    newest = 2 * jnp.arange(tokens.shape[0])[:, None] + 1
    return forward(params.model, cache, batch, logit_rows=newest, with_logits=with_logits)


def _run_level(
    params: BoundModel, cache: list[KVPool], view: SlotView, level: Level, window: int | None
) -> tuple[PartialSums, list[KVPool]]:
    """Run the model on all nodes of a tree level; return the logits after each node and the new cache."""
    out, cache = forward(params.model, cache, level.batch(view, view.lengths + level.depth, window))
    assert out.product is not None
    return params.common(out.product), cache
