"""Drafting several tokens in one pass with a P-EAGLE head (arXiv:2602.01469).

The cache and the state are those of `EagleDrafter`. A round runs the head once, on the pending pairs, the root's pair
and a mask pair for each further token to draft. A mask pair attends to all pairs before it, and its output gives the
distribution of one token. Mask pairs write their rows after the root's; the next round overwrites these rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax

from jspec.core.records import Draft, SlotView
from jspec.draft.eagle import EagleDrafter, EagleState, write_pending_rows
from jspec.draft.eagle_head import EagleHead, with_mask_feature
from jspec.draft.expand_block import expand_block
from jspec.draft.expand_tree import Vocabulary
from jspec.models.decoder import Model


@final
class PEagle(EagleDrafter):
    """Drafts with a P-EAGLE head, which computes all tokens of a round in one pass.

    The tokens at one depth come from one distribution, whatever their ancestors are. The arguments are those of
    `EagleDrafter`.
    """

    method = "peagle"

    def bind(self, target: Model) -> EagleHead:
        return with_mask_feature(super().bind(target))

    def draft(self, params: EagleHead, state: EagleState, view: SlotView) -> tuple[Draft, EagleState]:
        with jax.named_scope("block"):
            _, logits, cache = write_pending_rows(params, state, view, self.draft_window, self.tree.depth - 1)
        vocabulary = Vocabulary(params.draft_to_target, params.config.vocab_size)
        return expand_block(self.tree, view, vocabulary, logits), replace(state, cache=cache)
