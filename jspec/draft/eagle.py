"""EAGLE drafting (EAGLE-1: arXiv:2401.15077, EAGLE-2: 2406.16858, EAGLE-3: 2503.01840).

Row i of the draft cache holds the keys and values of the pair (feature at position i - 1, token i), at rotary position
i - 1. Row 0 is masked, because token 0 has no feature before it. The draft rows of a page therefore depend only on the
tokens up to the page's end.

Tokens accepted in a round have no rows in the draft cache yet. `EagleState` stores their features. The first forward
pass of the next round writes their rows and the row of the root (the newest token). Draft nodes write their rows after
the root's. The next round overwrites these rows with rows computed from the target's features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jspec.core.records import Draft, PromptBatch, SlotView, TokenBatch, Verdict
from jspec.core.replaced_rows import replaced_rows
from jspec.core.tree import DEFAULT_TREE, Tree, tree_of
from jspec.draft.base import (
    CHECK_HEAD,
    CHECK_PROMPT,
    active_slots,
    check_layer_windows,
    check_part,
    check_window,
)
from jspec.draft.draft_vocab import DraftVocab, check_vocabulary
from jspec.draft.eagle_head import (
    FIRST_ROW,
    EagleHead,
    HeadOut,
    fuse,
    output_logits,
    precompute_first_layer,
    project_draft_tokens,
    project_inputs,
    reduce_vocabulary,
    run_on_cache,
)
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.expand_tree import Level, Vocabulary, expand_tree
from jspec.draft.formats.eagle_formats import head_format
from jspec.draft.head_config import Overrides, PEagleConfig
from jspec.draft.head_pair import Size, check_fit, common_sizes
from jspec.draft.pretrained import PretrainedHead
from jspec.models.decoder import Model
from jspec.models.kv_cache import create, places
from jspec.models.load import Format
from jspec.models.mixers.gqa import GQA
from jspec.models.parts.kv_pool import KVPool, PoolShape
from jspec.models.weights.tensor_parallel import place
from pallas_kernels.layers.partial_sums import PartialSums

Carry = tuple[HeadOut, list[KVPool]]  # what one level of a tree hands to the next


@struct.dataclass
class EagleState:
    """The draft cache, and each slot's pending (feature, token) pairs, whose rows are not in the cache yet."""

    cache: list[KVPool]  # KV cache of the head
    features: Float[Array, "slots depth1 hidden"]  # feature of each pending pair, after `fuse`
    tokens: Int[Array, "slots depth1"]  # token of each pending pair, one position after the feature
    count: Int[Array, "slots"]  # number of pending pairs; the last one is the root's
    # Feature at the last row of each page, for prompts with cached pages; None without a prefix cache.
    page_end_features: Float[Array, "pages hidden"] | None


class EagleDrafter(PretrainedHead):
    """Base class of the EAGLE drafters; they differ only in the head's forward pass (`jspec.draft.eagle_head`).

    Args:
        head: weights and config of the head.
        tree: draft tree of any kind, or its text such as "chain:4".
        draft_window: number of newest tokens that the head attends to; None: all.
        draft_vocab: tokens that a head with the target's output head drafts (`read_draft_vocab`); None: all.

    Raises:
        ValueError: the head is of another method, a node of the tree has more children than the draft vocabulary has
            tokens, a window is not larger than the tree's depth, or ``draft_vocab`` is given for a head with an output
            head of its own.
    """

    weights_type = EagleHead
    has_pending_rows = True

    @refuses_device(READS_FEATURES)
    def __init__(
        self,
        head: EagleHead,
        tree: Tree | str = DEFAULT_TREE,
        *,
        draft_window: int | None = None,
        draft_vocab: DraftVocab = None,
    ) -> None:
        name = type(self).__name__
        check_part(name, "head", head, EagleHead, f"{name}.from_pretrained(path)")
        tree, config = tree_of(name, tree), head.config
        if config.method != self.method:
            raise ValueError(f"{name}: expected a head of method {self.method!r}, got {config.method!r}")
        self.draft_vocab = check_vocabulary(name, draft_vocab, config, head.head, tree)
        self.head = head
        self.tree = tree
        self.draft_window = check_window(name, draft_window, tree)
        check_layer_windows(f"{name}: a layer of the head", config, tree)

    @classmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        return head_format(kind, overrides)

    def with_window(self, draft_window: int) -> Self:
        return type(self)(self.head, self.tree, draft_window=draft_window, draft_vocab=self.draft_vocab)

    def on_mesh(self, mesh: Mesh) -> Self:
        head, vocab = place(self.head, mesh), self.draft_vocab
        return type(self)(head, self.tree, draft_window=self.draft_window, draft_vocab=vocab)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT}, the head's feature layers, rope theta and vocabulary map, and {CHECK_HEAD}"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return self.head.config.states_of(target.config.num_layers)

    def with_shared(self, target: Model) -> EagleHead:
        """Return the head with the target's embedding and output head in place of those that it lacks.

        Raises:
            ValueError: the head does not fit the target.
        """
        _check_pair(type(self).__name__, self.head, target, self.feature_layers(target))
        head, config = self.head, target.config
        if head.embed is None:
            head = replace(head, embed=target.embed)
        if head.head is None:
            limits = config.logit_divisor, config.logit_softcap
            head = replace(head, head=target.output_head, logit_limits=limits)
        return head

    def bind(self, target: Model) -> EagleHead:
        head = self.with_shared(target)
        return precompute_first_layer(head if self.draft_vocab is None else reduce_vocabulary(head, self.draft_vocab))

    def init(self, params: EagleHead, pool: PoolShape) -> EagleState:
        pairs, width = (pool.slots, self.tree.depth + 1), params.config.hidden_size
        return EagleState(
            cache=create(params.config.layers, pool, pool.draft_dtype),
            features=jnp.zeros((*pairs, width), params.dtype),
            tokens=jnp.zeros(pairs, jnp.int32),
            count=jnp.zeros(pool.slots, jnp.int32),
            page_end_features=jnp.zeros((pool.pages, width), params.dtype) if pool.prefix_cache else None,
        )

    def prefill(
        self, params: EagleHead, state: EagleState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> EagleState:
        assert features is not None
        fused = fuse(params, features)
        # First the features at the ends of pages: a piece may begin after a page that another piece fills.
        ends = _keep_page_ends(state, batch.page_table, batch.positions, batch.valid, fused)
        state = replace(state, page_end_features=ends)
        slots = batch.of_piece(view.slots, padding=state.count.shape[0])
        before = _feature_before(state, slots, batch.page_table, batch.first_row)
        flat = fused.reshape(-1, fused.shape[-1])
        shifted = jnp.roll(flat, 1, axis=0).reshape(fused.shape)
        first = jnp.where(batch.is_first[:, None], before, shifted[:, 0])
        shifted = shifted.at[:, 0].set(first)
        valid = batch.valid & (batch.positions >= FIRST_ROW)
        pairs = _pairs(batch, batch.tokens, batch.first_row, valid, self.draft_window)
        inputs = project_inputs(params, pairs.tokens, shifted, pairs.numerics)
        *_, cache = run_on_cache(params, state.cache, pairs, *inputs, attends=False)
        return replace(
            state,
            cache=cache,
            features=state.features.at[view.slots, 0].set(batch.newest_of(fused), mode="drop"),
            count=state.count.at[view.slots].set(1, mode="drop"),
        )

    def draft(self, params: EagleHead, state: EagleState, view: SlotView) -> tuple[Draft, EagleState]:
        with jax.named_scope("root"):
            out, product, cache = write_pending_rows(params, state, view, self.draft_window)

        def run_level(carry: Carry, level: Level) -> tuple[PartialSums, Carry]:
            parents, cache = carry
            if not self.tree.is_chain:
                rows = jnp.arange(level.parents.shape[0])[:, None]
                parents = jax.tree.map(lambda of: of[rows, level.parents], parents)
            out, product, cache = draft_step(params, cache, view, level, parents, self.draft_window)
            return product, (out, cache)

        vocabulary = Vocabulary(params.draft_to_target, params.config.vocab_size)
        expanded, (_, cache) = expand_tree(self.tree, view, vocabulary, product, (out, cache), run_level)
        return expanded.draft, replace(state, cache=cache)

    def commit(
        self,
        params: EagleHead,
        state: EagleState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> EagleState:
        assert features is not None
        accepted = fuse(params, jnp.take_along_axis(features, jnp.maximum(verdict.path, 0)[..., None], axis=1))
        steps = jnp.arange(accepted.shape[1])
        is_row = view.active[:, None] & (steps < verdict.counts[:, None])
        slots = active_slots(view, state.count.shape[0])
        old = {"features": state.features, "tokens": state.tokens, "count": state.count}
        new = {"features": accepted, "tokens": verdict.tokens, "count": verdict.counts}  # shorter in a cut tree
        return replace(
            state,
            **replaced_rows(old, slots, new),
            page_end_features=_keep_page_ends(state, view.page_table, view.lengths[:, None] + steps, is_row, accepted),
        )

    def write_pending_rows(self, params: EagleHead, state: EagleState, view: SlotView) -> EagleState:
        return replace(state, cache=_write_pending(params, state, view, self.draft_window)[-1])


@final
class Eagle3(EagleDrafter):
    """Drafts with an EAGLE-3 head (arXiv:2503.01840); the arguments are those of `EagleDrafter`."""

    method = "eagle3"


@final
class Eagle(EagleDrafter):
    """Drafts with an EAGLE-1 or EAGLE-2 head; the arguments are those of `EagleDrafter`.

    Both methods use the same checkpoints; EAGLE-2 is EAGLE-1 with a dynamic tree.
    """

    method = "eagle"


def write_pending_rows(
    params: EagleHead, state: EagleState, view: SlotView, window: int | None = None, masks: int = 0
) -> tuple[HeadOut, PartialSums, list[KVPool]]:
    """Write the draft cache rows of the pending pairs, and run the head on the root's pair and the mask pairs after it.

    In the last layer, only these pairs run through attention and feed-forward. The other pending pairs need only keys
    and values, because the tokens after them are committed.

    Args:
        window: number of newest tokens that the head attends to; None: all.
        masks: number of mask pairs after the root's pair, for a P-EAGLE head.

    Returns:
        The head's output for the root and the mask pairs, its logits before the scales of a quantised output head, and
        the draft cache.
    """
    attention = params.config.layers[-1].attention
    is_gated = isinstance(attention, GQA) and attention.output_gate  # queries alone lack the gates of their outputs
    last, out, residual, cache = _write_pending(params, state, view, window, masks, attends=is_gated)
    block = last + np.arange(1 + masks)
    out = jnp.take_along_axis(out, block.reshape(*block.shape, *(1,) * (out.ndim - 2)), axis=1)
    residual = jnp.take_along_axis(residual, block[..., None], axis=1)
    rows = jnp.broadcast_to(view.root[:, None], block.shape), jnp.broadcast_to(view.active[:, None], block.shape)
    pairs = _pairs(view, rows[0], view.lengths, rows[1], window)
    attended = out if is_gated else attention.attend(params.layers[-1], out, cache[-1], pairs, start=FIRST_ROW)
    return *output_logits(params, attended, residual, view.numerics, rows[1]), cache


def _write_pending(
    params: EagleHead,
    state: EagleState,
    view: SlotView,
    window: int | None,
    masks: int = 0,
    *,
    attends: bool = False,
) -> tuple[Int[Array, "batch 1"], Array, Array, list[KVPool]]:
    """Write the draft cache rows of the pending pairs and of the mask pairs after them.

    Returns:
        The index of the root's pair, and what `run_on_cache` returns for all pairs.
    """
    features = state.features.at[view.slots].get(mode="fill", fill_value=0)
    pending = state.tokens.at[view.slots].get(mode="fill", fill_value=0)
    count = state.count.at[view.slots].get(mode="fill", fill_value=0)
    last = jnp.where(view.active, jnp.maximum(count - 1, 0), 0)[:, None]
    steps = jnp.arange(features.shape[1] + masks)
    if masks:
        assert isinstance(params.config, PEagleConfig) and params.mask_feature is not None
        is_mask = steps > last
        features = jnp.where(is_mask[..., None], params.mask_feature, jnp.pad(features, ((0, 0), (0, masks), (0, 0))))
        pending = jnp.where(is_mask, params.config.mask_token_id, jnp.pad(pending, ((0, 0), (0, masks))))
    tokens = jnp.where(steps == last, view.root[:, None], pending)
    valid = (steps <= last + masks) & view.active[:, None]
    pairs = _pairs(view, tokens, view.lengths - last[:, 0], valid, window)
    inputs = project_inputs(params, pairs.tokens, features, pairs.numerics)
    return last, *run_on_cache(params, state.cache, pairs, *inputs, attends=attends)


def _feature_before(
    state: EagleState, slots: Int[Array, "batch"], page_table: Int[Array, "batch pages"], first_row: Int[Array, "batch"]
) -> Float[Array, "batch hidden"]:
    """Return the feature at the position before a piece, from the page before it or from the slot's state."""
    pending = state.features.at[slots, 0].get(mode="fill", fill_value=0)
    if state.page_end_features is None:
        return pending
    page_size = state.cache[0].page_size
    column = jnp.maximum(first_row // page_size - 1, 0)[:, None]
    page_end = state.page_end_features[jnp.take_along_axis(page_table, column, axis=1)[:, 0]]
    return jnp.where((first_row % page_size == 0)[:, None], page_end, pending)


def _keep_page_ends(
    state: EagleState,
    page_table: Int[Array, "batch columns"],
    rows: Int[Array, "batch rows"],
    valid: Bool[Array, "batch rows"],
    features: Float[Array, "batch rows hidden"],
) -> Float[Array, "pages hidden"] | None:
    """Return ``page_end_features`` with the features of new rows; only valid rows at the end of a page count."""
    if state.page_end_features is None:
        return None
    shape = (state.page_end_features.shape[0], state.cache[0].page_size)
    pages, row_in_page = places(page_table, rows, valid, shape)
    pages = jnp.where(row_in_page == shape[1] - 1, pages, shape[0])
    return state.page_end_features.at[pages].set(features, mode="drop")


def draft_step(
    params: EagleHead,
    cache: list[KVPool],
    view: SlotView,
    level: Level,
    parents: HeadOut,
    window: int | None = None,
) -> tuple[HeadOut, PartialSums, list[KVPool]]:
    """Run the head on the draft tokens of one tree level; a token's feature is the head's output for its parent.

    All nodes of a level have one rotary position: that of their features, one before the position of their tokens.

    Args:
        level: the nodes of the level that have children.
        parents: the head's output for the parent of each node.

    Returns:
        The head's output for each node, its logits before the scales of a quantised output head, and the draft cache.
    """
    pairs = level.batch(view, view.lengths + level.depth - 1, window)
    projected = project_draft_tokens(params, pairs, level.ids, parents)
    attended, residual, cache = run_on_cache(params, cache, pairs, *projected, attends=True)
    return *output_logits(params, attended, residual, view.numerics, pairs.valid), cache


def _pairs(
    view: SlotView | TokenBatch,
    tokens: Int[Array, "batch tokens"],
    first_row: Int[Array, "batch"],
    valid: Bool[Array, "batch tokens"],
    window: int | None,
) -> TokenBatch:
    """Make a batch of (feature, token) pairs for draft cache rows from ``first_row`` on; position i is row i + 1."""
    return TokenBatch(
        tokens=tokens,
        positions=first_row[:, None] + jnp.arange(tokens.shape[1]) - 1,
        valid=valid,
        first_row=first_row,
        page_table=view.page_table,
        bits=None,
        numerics=view.numerics.relaxed,
        window=window,
    )


def _check_pair(name: str, head: EagleHead, target: Model, feature_layers: tuple[int, ...]) -> None:
    """Raise ValueError if the head's vocabulary, sizes or feature layers do not match the target."""
    config, target_config = head.config, target.config
    sizes = common_sizes(config, target_config, has_embed=head.embed is not None, has_head=head.head is not None)
    if head.fc is not None and config.fuses_states:
        sizes.append(Size("fc input width", head.fc.shape[1], len(feature_layers) * target_config.hidden_size))
    check_fit(name, feature_layers, target_config.num_layers, sizes)
