"""Drafting a block of tokens in one pass with a DSpark head (arXiv:2607.05147).

The block and the draft cache are those of a DFlash head (`jspec.draft.dflash`). The tokens are chosen one depth after
another, because the Markov head corrects the logits of each depth by the token before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.core.ancestors import ancestors, depths
from jspec.core.records import Draft, SlotView
from jspec.core.shorten import short
from jspec.draft.dflash import DFlash, DraftedBlock
from jspec.draft.dspark_head import BoundDSpark, DSparkHead
from jspec.draft.expand_block import expand_block, expand_corrected
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import KVPool


@final
class DSpark(DFlash):
    """Drafts with a DSpark head, whose distributions within a block depend on the token before.

    The record of a round (``trace=True``) has the confidence head's estimates in `Round.confidence`.

    The arguments and errors are those of `DFlash`.
    """

    method = "dspark"
    weights_type = DSparkHead
    head: DSparkHead
    temperatures: tuple[float, ...] | None = None  # divisors of the confidences' logits at depths 1, 2, ...; None: 1

    def calibrated(self, temperatures: Sequence[float]) -> Self:
        """Return a copy whose confidences are sigmoid(logit / temperature) (paper, section 3.2.1).

        Args:
            temperatures: one for each depth that a block can draft, from 1 on, above 0.

        Raises:
            ValueError: the head has no confidence head, or the temperatures are others.
        """
        deepest = self.head.config.max_depth
        if self.head.confidence is None:
            raise ValueError("DSpark: temperatures: expected a head with a confidence head, got none; leave them out")
        values = np.asarray(temperatures, float)
        if values.shape != (deepest,) or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(
                f"DSpark: temperatures: expected {deepest} numbers above 0, one for each depth, got "
                f"{short(temperatures)}"
            )
        other = copy.copy(self)
        other.temperatures = tuple(values.tolist())
        return other

    def bind(self, target: Model) -> BoundDSpark:
        bound, markov = super().bind(target), self.head.markov
        if markov is not None and self.draft_vocab is not None:
            markov = replace(markov, project=markov.project[self.draft_vocab])
        return BoundDSpark(**vars(bound), markov=markov, confidence=self.head.confidence)

    def draft(self, params: BoundDSpark, state: list[KVPool], view: SlotView) -> tuple[Draft, list[KVPool]]:  # type: ignore[override]
        with jax.named_scope("block"):
            block, cache = self.run_block(params, state, view)
        chosen = (self.tree, view, params.vocabulary, block.logits)
        if (markov := params.markov) is None:
            draft = expand_block(*chosen)
        else:

            def correct(depth: int, tokens: Array, state: Array | None) -> tuple[Array, Array | None]:
                return markov.correct(tokens, block.hidden[:, depth], state, view.numerics)

            draft = expand_corrected(*chosen, correct, markov.start(view.root.shape[0]))
        return replace(draft, confidence=self.confidence(params, block, draft)), cache

    def confidence(self, params: BoundDSpark, block: DraftedBlock, draft: Draft) -> Float[Array, "batch nodes"] | None:
        """Return the confidence of each node as in `Draft`; None if there is no confidence head."""
        if params.confidence is None:
            return None
        depth, before = depths(ancestors(draft.parents)), None
        if self.head.config.reads_markov:
            assert params.markov is not None
            before = params.markov.embed[jnp.take_along_axis(draft.tokens, jnp.maximum(draft.parents, 0), axis=1)]
        logits = params.confidence.logits(block.hidden, depth, before)
        if self.temperatures is not None:
            logits = logits / jnp.asarray((1.0, *self.temperatures))[depth]
        return jnp.where(depth == 0, 1.0, jax.nn.sigmoid(logits))
