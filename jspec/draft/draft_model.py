"""Drafting with a smaller model that has the target's vocabulary (speculative decoding, arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self, final

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jspec.core.records import Draft, KVCache, SlotView, TokenBatch, Verdict
from jspec.core.tree import DEFAULT_TREE, Tree, tree_of
from jspec.draft.base import CHECK_HEAD, CHECK_PROMPT, Drafter, active_slots, check_part, check_window
from jspec.draft.expand_tree import Level, Vocabulary, expand_tree
from jspec.models.decoder import Model, TargetOut, forward
from jspec.models.kv_cache import PoolShape, commit, create
from pallas_kernels.layers.quantized import PartialSums


@struct.dataclass
class DraftModelState:
    """The state of a draft model: its KV cache, and for each slot the token whose row is missing in the cache.

    The model does not run on tree nodes without children. If such a node is accepted, the cache has no row for the last
    committed token. Every round therefore first runs the model on the last committed token and the root. If the row of
    the last committed token exists already, it is not written again, because its page may be shared.
    """

    cache: KVCache  # KV cache of the draft model
    previous: Int[Array, "slots"]  # last committed token if its row is missing, else -1
    rows: Int[Array, "slots nodes"]  # cache row of each node of the last draft; the root's is 0; -1: no row


@final
class DraftModel(Drafter):
    """Drafts with a smaller model that has the target's vocabulary.

    Args:
        model: the draft model.
        tree: draft tree of any kind, or its text such as "chain:4".
        draft_window: number of newest tokens that the model attends to; None: all.

    Raises:
        ValueError: a node of the tree has more children than the vocabulary has tokens, or the window is not larger
            than the tree's depth.
    """

    has_pending_rows = True

    def __init__(self, model: Model, tree: Tree | str = DEFAULT_TREE, *, draft_window: int | None = None) -> None:
        tree = tree_of("DraftModel", tree)
        check_part("DraftModel", "model", model, Model, "DraftModel.from_pretrained(path)")
        if tree.branching > model.config.vocab_size:
            raise ValueError(
                f"DraftModel: {tree} needs {tree.branching} children of a node, the vocabulary has "
                f"{model.config.vocab_size} tokens; take a narrower tree"
            )
        self.model = model
        self.tree = tree
        self.draft_window = check_window("DraftModel", draft_window, tree)

    def with_window(self, draft_window: int) -> DraftModel:
        return DraftModel(self.model, self.tree, draft_window=draft_window)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str = DEFAULT_TREE,
        dtype: str | None = None,
        quantize: str | None = None,
        draft_window: int | None = None,
    ) -> Self:
        """Load a draft model.

        Args:
            path: Hugging Face folder, converted folder or hub id ("owner/name").
            tree: draft tree of any kind, or its text such as "chain:4".
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            quantize: how the weight matrices are quantised, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`);
                None: as stored.
            draft_window: number of newest tokens that the model attends to; None: all.
        """
        return cls(Model.from_pretrained(path, dtype=dtype, quantize=quantize), tree, draft_window=draft_window)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT} and that the draft model has the target's tokenizer, and {CHECK_HEAD}"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Model:
        own, wanted = self.model.config.vocab_size, target.config.vocab_size
        if own != wanted:
            raise ValueError(
                f"DraftModel: expected the target's vocabulary of {wanted} tokens, got {own}; "
                "use a draft model of the target's tokenizer and vocab_size (sizes may also differ by padding alone: "
                "then pad or cut the draft model's embedding and output head)"
            )
        return self.model

    def init(self, params: Model, pool: PoolShape) -> DraftModelState:
        return DraftModelState(
            cache=create(params.config.layers, pool, pool.draft_dtype),
            previous=jnp.full(pool.slots, -1, jnp.int32),
            rows=jnp.zeros((pool.slots, self.tree.nodes), jnp.int32),
        )

    def prefill(
        self, params: Model, state: DraftModelState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> DraftModelState:
        batch = replace(batch, window=self.draft_window, deterministic=False)
        _, cache = forward(params, state.cache, batch, with_logits=False)
        return replace(state, cache=cache, previous=state.previous.at[view.slots].set(-1, mode="drop"))

    def draft(self, params: Model, state: DraftModelState, view: SlotView) -> tuple[Draft, DraftModelState]:
        previous = state.previous.at[view.slots].get(mode="fill", fill_value=0)
        with jax.named_scope("root"):
            out, cache = _run_root(params, state.cache, view, previous, window=self.draft_window)

        assert out.product is not None

        def run_level(cache: KVCache, level: Level) -> tuple[PartialSums, KVCache]:
            return _run_level(params, cache, view, level, self.draft_window)

        vocabulary = Vocabulary(None, params.config.vocab_size)
        expanded, cache = expand_tree(self.tree, view, vocabulary, out.product, cache, run_level)
        rows = state.rows.at[view.slots, : self.tree.nodes].set(expanded.rows, mode="drop")
        return expanded.draft, replace(state, cache=cache, rows=rows)

    def commit(
        self,
        params: Model,
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

    def write_pending_rows(self, params: Model, state: DraftModelState, view: SlotView) -> DraftModelState:
        previous = state.previous.at[view.slots].get(mode="fill", fill_value=0)
        window = self.draft_window
        _, cache = _run_root(params, state.cache, view, previous, window=window, with_logits=False)
        return replace(state, cache=cache)


def _run_root(
    params: Model,
    cache: KVCache,
    view: SlotView,
    previous: Int[Array, "batch"],
    *,
    window: int | None,
    with_logits: bool = True,
) -> tuple[TargetOut, KVCache]:
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
    tokens = jnp.stack([jnp.where(is_missing, previous, 0), view.root], axis=1)
    batch = TokenBatch(
        tokens=tokens,
        positions=first_row[:, None] + jnp.arange(2),
        valid=view.active[:, None] & jnp.stack([is_missing, jnp.ones_like(is_missing)], axis=1),
        first_row=first_row,
        page_table=view.page_table,
        bits=None,
        implementation=view.implementation,
        window=window,
    )
    newest = jnp.ones((tokens.shape[0], 1), jnp.int32)
    return forward(params, cache, batch, logit_rows=newest, with_logits=with_logits)


def _run_level(
    params: Model, cache: KVCache, view: SlotView, level: Level, window: int | None
) -> tuple[PartialSums, KVCache]:
    """Run the model on all nodes of a tree level; return the logits after each node and the new cache."""
    out, cache = forward(params, cache, level.batch(view, view.lengths + level.depth, window))
    assert out.product is not None
    return out.product, cache
