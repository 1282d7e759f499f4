"""Drafting a block of tokens in one pass with a DFlash head (arXiv:2602.06036).

Row i of the draft cache holds the keys and values of the target's hidden states at token i, at rotary position i. The
round that commits a token writes its row, so the cache lacks no row between rounds. The root and the mask tokens of a
block write their rows after the committed ones; the next commit and the next block overwrite these rows.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, UInt32

from jspec.core.records import Draft, PromptBatch, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree, tree_of
from jspec.draft.base import CHECK_HEAD, CHECK_PROMPT, check_part, check_window
from jspec.draft.dflash_head import BoundDFlash, DFlashHead, bind_head, write_context
from jspec.draft.draft_vocab import DraftVocab, check_vocabulary
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.expand_block import expand_block
from jspec.draft.formats.dflash_format import dflash_format
from jspec.draft.head_config import Overrides
from jspec.draft.head_pair import check_fit, common_sizes
from jspec.draft.pretrained import PretrainedHead
from jspec.models.decoder import Model, forward
from jspec.models.kv_cache import create
from jspec.models.load import Format
from jspec.models.parts.kv_pool import KVPool, PoolShape
from pallas_kernels.attention.ancestor_bits import own_bits
from pallas_kernels.layers.partial_sums import PartialSums


@struct.dataclass
class DraftedBlock:
    """What a head computes for a block, at depths 1, 2, ..."""

    logits: PartialSums  # logits of the token at each depth [1, batch, depth, draft_vocab]
    hidden: Float[Array, "batch depth hidden"]  # normed states from which the logits are computed


class DFlash(PretrainedHead):
    """Drafts with a DFlash head, which computes all tokens of a block in one pass.

    A tree of depth d takes a block of d + 1 tokens, or of d tokens if the head samples from the anchor. The tokens at
    one depth come from one distribution, whatever their ancestors are.

    Args:
        head: weights and config of the head.
        tree: draft tree, or its text such as "chain:4", at most as deep as a block drafts (`DFlashConfig.max_depth`);
            None: a chain of 5 tokens, or of as many as a block drafts if fewer.
        draft_window: number of newest tokens that the head attends to; None: all.
        draft_vocab: tokens that a head with the target's output head drafts (`read_draft_vocab`); None: all.

    Raises:
        ValueError: the tree is too deep, a node has more children than the draft vocabulary has tokens, the window is
            not larger than the tree's depth, or ``draft_vocab`` is given for a head with an output head of its own.
    """

    method = "dflash"
    weights_type: ClassVar[type[DFlashHead]] = DFlashHead

    @refuses_device(READS_FEATURES)
    def __init__(
        self,
        head: DFlashHead,
        tree: Tree | str | None = None,
        *,
        draft_window: int | None = None,
        draft_vocab: DraftVocab = None,
    ) -> None:
        name = type(self).__name__
        check_part(name, "head", head, self.weights_type, f"{name}.from_pretrained(path)")
        config = head.config
        if config.method != self.method:
            raise TypeError(f"{name}: head: expected a head of method {self.method!r}, got one of {config.method!r}")
        tree = tree_of(name, self.chain(head) if tree is None else tree)
        self.head = head
        self.tree = tree
        self.draft_window = check_window(name, draft_window, tree)
        self._check_tree()
        self.draft_vocab = check_vocabulary(name, draft_vocab, config, head.head, tree)

    def _check_tree(self) -> None:
        """Raise a ValueError if the head cannot draft the tree."""
        tree, deepest = self.tree, self.max_depth(self.head)
        if tree.depth > deepest:
            raise ValueError(
                f"{type(self).__name__}: expected a tree at most {deepest} deep, because the head's block_size is "
                f"{self.head.config.block_size}, got {tree}, which is {tree.depth} deep; cut the tree"
            )

    @classmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        return dflash_format(kind, overrides)

    @staticmethod
    def max_depth(weights: DFlashHead) -> int:
        return weights.config.max_depth

    def with_window(self, draft_window: int) -> Self:
        other = copy.copy(self)
        other.draft_window = check_window(type(self).__name__, draft_window, self.tree)
        return other

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT}, the head's feature layers and rope theta, and {CHECK_HEAD}"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return self.head.config.states_of(target.config.num_layers)

    def bind(self, target: Model) -> BoundDFlash:
        head, target_config, name = self.head, target.config, type(self).__name__
        sizes = common_sizes(
            head.config, target_config, has_embed=head.embed is not None, has_head=head.head is not None
        )
        check_fit(name, self.feature_layers(target), target_config.num_layers, sizes)
        if head.hidden_norm.dtype != target.embed.dtype:
            raise ValueError(
                f"{name}: dtype: the target has {target.embed.dtype}, the head has {head.hidden_norm.dtype}; load both "
                "with the same dtype"
            )
        return bind_head(head, target, self.draft_vocab)

    def init(self, params: BoundDFlash, pool: PoolShape) -> list[KVPool]:
        return create(params.model.config.layers, pool, pool.draft_dtype)

    def prefill(
        self, params: BoundDFlash, state: list[KVPool], view: SlotView, batch: PromptBatch, features: Array | None
    ) -> list[KVPool]:
        assert features is not None
        return write_context(params, state, batch, features)

    def draft(self, params: BoundDFlash, state: list[KVPool], view: SlotView) -> tuple[Draft, list[KVPool]]:
        with jax.named_scope("block"):
            block, cache = self.run_block(params, state, view)
        return expand_block(self.tree, view, params.vocabulary, block.logits), cache

    def commit(
        self,
        params: BoundDFlash,
        state: list[KVPool],
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> list[KVPool]:
        assert features is not None
        accepted = jnp.take_along_axis(features, jnp.maximum(verdict.path, 0)[..., None], axis=1)
        rows = _new_rows(view, jnp.maximum(verdict.tokens, 0))
        steps = np.arange(accepted.shape[1])
        rows = replace(rows, valid=rows.valid & (steps < verdict.counts[:, None]))
        return write_context(params, state, rows, accepted)

    def run_block(self, params: BoundDFlash, cache: list[KVPool], view: SlotView) -> tuple[DraftedBlock, list[KVPool]]:
        """Run the head on the root and the mask tokens; return what drafts, and the draft cache."""
        first = 0 if self.head.config.sample_from_anchor else 1  # place in the block of the first output that drafts
        rows, size = view.root.shape[0], self.tree.depth + first
        mask = jnp.full((rows, size - 1), self.head.config.mask_token_id, jnp.int32)
        block = _new_rows(view, jnp.concatenate([view.root[:, None], mask], axis=1))
        bits = jnp.broadcast_to(_all_bits(size), (rows, size, _all_bits(size).shape[-1]))
        block = replace(block, bits=bits, window=self.draft_window)
        drafting = jnp.asarray(size * np.arange(rows)[:, None] + np.arange(first, size))
        states = (params.model.config.num_layers + 1,)
        out, cache = forward(params.model, cache, block, feature_layers=states, logit_rows=drafting)
        assert out.product is not None and out.features is not None
        return DraftedBlock(out.product, out.features[:, first:]), cache


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
        numerics=view.numerics.relaxed,
    )


def _all_bits(size: int) -> UInt32[np.ndarray, "words"]:
    """Return the packed mask of a token that sees all ``size`` tokens of its block."""
    return np.bitwise_or.reduce(own_bits(np.arange(size), size))
