"""Drafting several tokens in one pass with a P-EAGLE head (arXiv:2602.01469).

The cache and the state are those of `EagleDrafter`. A round runs the head once, on the pending pairs, the root's pair
and a mask pair for each further token to draft. A mask pair attends to all pairs before it, and its output gives the
distribution of one token. Mask pairs write their rows after the root's; the next round overwrites these rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self, final

import jax

from jspec.core.records import Draft, SlotView
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.draft_vocab import DraftVocab
from jspec.draft.eagle import EagleDrafter, EagleState, load_head, write_pending_rows
from jspec.draft.eagle_head import EagleHead, with_mask_feature
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.expand_block import expand_block
from jspec.draft.expand_tree import Vocabulary
from jspec.draft.head_config import Overrides
from jspec.models.decoder import Model


@final
class PEagle(EagleDrafter):
    """Drafts with a P-EAGLE head, which computes all tokens of a round in one pass.

    The tokens at one depth come from one distribution, whatever their ancestors are. The arguments are those of
    `EagleDrafter`.
    """

    method = "peagle"

    @classmethod
    @refuses_device(READS_FEATURES)
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str = DEFAULT_TREE,
        dtype: str | None = None,
        rope_theta: float | None = None,
        feature_layers: tuple[int, ...] | None = None,
        norm_before_residual: bool | None = None,
        mask_token_id: int | None = None,
        quantize: str | None = None,
        draft_window: int | None = None,
        draft_vocab: DraftVocab = None,
    ) -> Self:
        """Load a P-EAGLE head. Options that are None are taken from the head's config.json.

        Args:
            path: folder in the format of any known exporter, converted folder, or hub id ("owner/name").
            tree: draft tree of any kind, or its text such as "chain:4".
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            rope_theta: rotary base; None: as in config.json, or 10000 if the file gives none.
            feature_layers: indices of the target's hidden states that the head reads; they count as in
                `jspec.models.decoder.forward`.
            norm_before_residual: whether the first residual is the normed feature instead of the feature itself.
            mask_token_id: target id whose embedding stands for tokens that are not drafted yet.
            quantize: how the weight matrices are quantised, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`);
                None: as stored.
            draft_window: number of newest tokens that the head attends to; None: all.
            draft_vocab: tokens that a head with the target's output head drafts (`read_draft_vocab`); None: all.
        """
        layers = None if feature_layers is None else tuple(feature_layers)
        overrides = Overrides(rope_theta, layers, norm_before_residual, mask_token_id=mask_token_id)
        head = load_head(path, cls.method, overrides, dtype=dtype, quantize=quantize)
        return cls(head, tree, draft_window=draft_window, draft_vocab=draft_vocab)

    def bind(self, target: Model) -> EagleHead:
        return with_mask_feature(super().bind(target))

    def draft(self, params: EagleHead, state: EagleState, view: SlotView) -> tuple[Draft, EagleState]:
        with jax.named_scope("block"):
            _, logits, cache = write_pending_rows(params, state, view, self.draft_window, self.tree.depth - 1)
        vocabulary = Vocabulary(params.draft_to_target, params.config.vocab_size)
        return expand_block(self.tree, view, vocabulary, logits), replace(state, cache=cache)
