"""Drafting a block of tokens in one pass with a DFlash head (arXiv:2602.06036).

Row i of the draft cache holds the keys and values of the target's hidden states at token i, at rotary position i. The
round that commits a token writes its row, so the cache lacks no row between rounds. The root and the mask tokens of a
block write their rows after the committed ones; the next commit and the next block overwrite these rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from jspec.core.records import Draft, KVCache, PromptBatch, SlotView, TokenBatch, Verdict
from jspec.core.tree import DEFAULT_TREE, Tree, tree_of
from jspec.draft.base import CHECK_HEAD, CHECK_PROMPT, Drafter, check_part, check_window
from jspec.draft.dflash_format import dflash_format
from jspec.draft.dflash_head import BoundDFlash, DFlashHead, bind_head, write_context
from jspec.draft.expand_block import expand_block
from jspec.draft.head_config import Overrides
from jspec.draft.head_pair import check_fit, common_sizes
from jspec.models import load
from jspec.models.decoder import Model, forward
from jspec.models.kv_cache import PoolShape, create
from jspec.models.tensor_parallel import place
from pallas_kernels.attention.ancestor_bits import own_bits
from pallas_kernels.layers.quantized import PartialSums


@final
class DFlash(Drafter):
    """Drafts with a DFlash head, which computes all tokens of a block in one pass.

    A tree of depth d takes a block of d + 1 tokens. The tokens at one depth come from one distribution, whatever their
    ancestors are.

    Args:
        head: weights and config of the head.
        tree: draft tree, or its text such as "chain:4", at most ``block_size - 1`` deep; None: a chain of 5 tokens, or
            of ``block_size - 1`` if fewer.
        draft_window: number of newest tokens that the head attends to; None: all.

    Raises:
        ValueError: the tree is too deep, a node has more children than the draft vocabulary has tokens, or the window
            is not larger than the tree's depth.
    """

    def __init__(self, head: DFlashHead, tree: Tree | str | None = None, *, draft_window: int | None = None) -> None:
        check_part("DFlash", "head", head, DFlashHead, "DFlash.from_pretrained(path)")
        config = head.config
        deepest = config.block_size - 1
        tree = tree_of("DFlash", Tree.chain(min(DEFAULT_TREE.depth, deepest)) if tree is None else tree)
        self.head = head
        self.tree = tree
        self.draft_window = check_window("DFlash", draft_window, tree)
        if tree.depth > deepest:
            raise ValueError(
                f"DFlash: expected a tree at most {deepest} deep, because the head's block_size is "
                f"{config.block_size}, got {tree}, which is {tree.depth} deep; cut the tree"
            )
        if tree.branching > config.draft_vocab_size:
            raise ValueError(
                f"DFlash: {tree} needs {tree.branching} children of a node, the draft vocabulary has "
                f"{config.draft_vocab_size} tokens; take a narrower tree"
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str | None = None,
        dtype: str | None = None,
        rope_theta: float | None = None,
        feature_layers: tuple[int, ...] | None = None,
        quantize: str | None = None,
        draft_window: int | None = None,
    ) -> Self:
        """Load a DFlash head. Options that are None are taken from the head's config.json.

        Args:
            path: folder in the format of the DFlash authors, SpecForge or speculators, converted folder, or hub id
                ("owner/name").
            tree: as for `DFlash`.
            dtype: dtype of the weights, which must be the target's; None: float32 on CPU, bfloat16 elsewhere.
            rope_theta: rotary base; None: as in config.json, or 10000 if the file gives none.
            feature_layers: indices of the target's hidden states that the head reads; they count as in
                `jspec.models.decoder.forward`.
            quantize: "int8", "fp8", "fp8_dynamic" or "int4", how weights are quantised (`jspec.models.quantize`);
                None: as stored.
            draft_window: number of newest tokens that the head attends to; None: all.
        """
        layers = None if feature_layers is None else tuple(feature_layers)
        format_of = partial(dflash_format, overrides=Overrides(rope_theta, layers))
        found = load.read_checkpoint(path, format_of, kind="dflash", dtype=dtype, quantize=quantize)
        return cls(DFlashHead.from_weights(found.config, found.weights), tree, draft_window=draft_window)

    def with_window(self, draft_window: int) -> Self:
        return type(self)(self.head, self.tree, draft_window=draft_window)

    def on_mesh(self, mesh: Mesh) -> Self:
        if mesh.size == 1:
            return type(self)(place(self.head, mesh), self.tree, draft_window=self.draft_window)
        raise ValueError(
            f"DFlash: expected an engine on one device, got a mesh of {mesh.size}: its keys and values are not divided "
            "yet; set tensor_parallel=1 or take another drafter"
        )

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT}, the head's feature layers and rope theta, and {CHECK_HEAD}"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return self.head.config.states_of(target.config.num_layers)

    def bind(self, target: Model) -> BoundDFlash:
        head, own = self.head, target.config
        sizes = common_sizes(head.config, own, has_embed=False, has_head=head.head is not None)
        check_fit("DFlash", self.feature_layers(target), own.num_layers, sizes)
        if head.hidden_norm.dtype != target.embed.dtype:
            raise ValueError(
                f"DFlash: dtype: the target has {target.embed.dtype}, the head has {head.hidden_norm.dtype}; load both "
                "with the same dtype"
            )
        return bind_head(head, target)

    def init(self, params: BoundDFlash, pool: PoolShape) -> KVCache:
        return create(params.model.config.layers, pool, pool.draft_dtype)

    def prefill(
        self, params: BoundDFlash, state: KVCache, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> KVCache:
        assert features is not None
        return write_context(params, state, batch, features)

    def draft(self, params: BoundDFlash, state: KVCache, view: SlotView) -> tuple[Draft, KVCache]:
        with jax.named_scope("block"):
            logits, cache = self.run_block(params, state, view)
        return expand_block(self.tree, view, params.vocabulary, logits), cache

    def commit(
        self,
        params: BoundDFlash,
        state: KVCache,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> KVCache:
        assert features is not None
        accepted = jnp.take_along_axis(features, jnp.maximum(verdict.path, 0)[..., None], axis=1)
        rows = _new_rows(view, jnp.maximum(verdict.tokens, 0))
        steps = np.arange(accepted.shape[1])
        rows = replace(rows, valid=rows.valid & (steps < verdict.counts[:, None]))
        return write_context(params, state, rows, accepted)

    def run_block(self, params: BoundDFlash, cache: KVCache, view: SlotView) -> tuple[PartialSums, KVCache]:
        """Run the head on the root and the mask tokens.

        Returns:
            The logits of the tokens at depths 1, 2, ... [1, batch, depth, draft_vocab], and the draft cache.
        """
        rows, size = view.root.shape[0], self.tree.depth + 1
        mask = jnp.full((rows, size - 1), self.head.config.mask_token_id, jnp.int32)
        block = _new_rows(view, jnp.concatenate([view.root[:, None], mask], axis=1))
        bits = jnp.broadcast_to(_all_bits(size), (rows, size, _all_bits(size).shape[-1]))
        block = replace(block, bits=bits, window=self.draft_window)
        of_masks = size * np.arange(rows)[:, None] + np.arange(1, size)
        out, cache = forward(params.model, cache, block, logit_rows=jnp.asarray(of_masks))
        assert out.product is not None
        return out.product, cache


def _new_rows(view: SlotView, tokens: Array) -> TokenBatch:
    """Make a batch of tokens for the cache rows after the committed ones."""
    shape = tokens.shape
    return TokenBatch(
        tokens=tokens,
        positions=view.lengths[:, None] + jnp.arange(shape[1], dtype=jnp.int32),
        valid=jnp.broadcast_to(view.active[:, None], shape),
        first_row=view.lengths,
        page_table=view.page_table,
        bits=None,
        implementation=view.implementation,
    )


def _all_bits(size: int) -> UInt32[np.ndarray, "words"]:
    """Return the packed mask of a token that sees all ``size`` tokens of its block."""
    return np.bitwise_or.reduce(own_bits(np.arange(size), size))
