"""Drafting a block of tokens in one pass with a DFlash2 head.

The block and the draft cache are those of a DFlash head (`jspec.draft.dflash`). At each depth the head's likeliest
tokens are candidates; a selector scores them by the token before, so the candidates of all depths are a lattice, and a
draft is a chain or a tree of paths through it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.core.records import Draft, SlotView
from jspec.draft.dflash import DFlash, DraftedBlock
from jspec.draft.dflash2_head import BoundDFlash2, DFlash2Head
from jspec.draft.expand_block import expand_corrected
from jspec.draft.expand_tree import EXCLUDED
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import KVPool
from jspec.sampling import sampler


@final
class DFlash2(DFlash):
    """Drafts with a DFlash2 head, whose selector scores the candidates at each depth by the token before.

    Trees are best-first over the lattice of the candidates (``topk``), static, or chains. A node has at most as many
    children as there are candidates. The other arguments and errors are those of `DFlash`.
    """

    method = "dflash2"
    weights_type = DFlash2Head
    head: DFlash2Head

    def _check_tree(self) -> None:
        super()._check_tree()
        if self.tree.branching > (most := self.head.config.selector_top_k):
            raise ValueError(
                f"DFlash2: tree: expected at most {most} children of a node, the selector_top_k of the head, got "
                f"{self.tree} with {self.tree.branching}; take a tree with fewer"
            )

    def bind(self, target: Model) -> BoundDFlash2:
        bound, config = super().bind(target), self.head.config
        decoder = replace(
            bound.model.config,
            embed_scale=config.input_scale,
            logit_divisor=1 / config.output_multiplier,
            logit_softcap=config.output_softcap,
        )
        model = replace(bound.model, config=decoder)
        return BoundDFlash2(**{**vars(bound), "model": model}, selector=self.head.selector)

    def draft(self, params: BoundDFlash2, state: list[KVPool], view: SlotView) -> tuple[Draft, list[KVPool]]:  # type: ignore[override]
        with jax.named_scope("block"):
            block, cache = self.run_block(params, state, view)
        with jax.named_scope("candidates"):
            candidates = self._candidates(block, view)

        def correct(depth: int, tokens: Array, state: None) -> tuple[Float[Array, "batch nodes draft_vocab"], None]:
            ids = candidates[:, depth]
            scores = params.selector.scores(tokens, block.hidden[:, depth], params.vocabulary.lift(ids))
            return _scattered(scores, ids, block.logits.shape[-1]), None

        return expand_corrected(self.tree, view, params.vocabulary, block.logits, correct), cache

    def _candidates(self, block: DraftedBlock, view: SlotView) -> Int[Array, "batch depth candidates"]:
        """Return the draft ids of the likeliest tokens at each depth."""
        count = min(self.head.config.selector_top_k, block.logits.shape[-1])
        _, ids = sampler.most_likely(block.logits, count, implementation=view.implementation)
        return ids.reshape(*block.logits.shape[1:3], count)


def _scattered(
    scores: Float[Array, "batch nodes candidates"], ids: Int[Array, "batch candidates"], size: int
) -> Float[Array, "batch nodes size"]:
    """Return scores by draft id; `EXCLUDED` for other tokens."""
    batch, nodes, _ = scores.shape
    rows = np.arange(batch)[:, None, None], np.arange(nodes)[None, :, None], ids[:, None]
    return jnp.full((batch, nodes, size), EXCLUDED).at[rows].set(scores)
