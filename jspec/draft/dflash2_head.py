"""The weights of DFlash2 heads: a DFlash head with convolutions in its layers, and a selector of candidates.

A head proposes its likeliest tokens at each depth of a block. The selector adds to the logit of candidate b at a depth
with the head's normed state h, after the token a before it:

    <predecessor[a] * (project h), successor[b]>

and only candidates are drafted. The convolutions are those of `jspec.models.parts.block_conv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.draft.dflash_head import BoundDFlash, DFlashHead
from jspec.draft.head_config import DFlash2Config
from jspec.models.parts.param_spec import ParamSpec
from pallas_kernels.layers.products import matmul


@struct.dataclass
class CandidateSelector:
    """The weights of a selector."""

    predecessor: Float[Array, "vocab rank"]  # of the token before, by its target id
    successor: Float[Array, "vocab rank"]  # of the candidate, by its target id
    project: Float[Array, "rank hidden"]

    def scores(
        self,
        tokens: Int[Array, "batch nodes"],
        hidden: Float[Array, "batch hidden"],
        candidates: Int[Array, "batch candidates"],
    ) -> Float[Array, "batch nodes candidates"]:
        """Return what is added to the logits of candidates after nodes of equal depth, in float32.

        Args:
            tokens: target id of each node.
            hidden: the head's normed state at the position of the nodes' children.
            candidates: target ids of the candidates at that position.
        """
        context = self.predecessor[tokens].astype(jnp.float32) * matmul(hidden, self.project)[:, None]
        return jnp.einsum("bnr,bcr->bnc", context, self.successor[candidates].astype(jnp.float32))


@struct.dataclass
class DFlash2Head(DFlashHead):
    """The weights and the config of a DFlash2 head."""

    selector: CandidateSelector = struct.field(kw_only=True)
    config: DFlash2Config = struct.field(pytree_node=False, kw_only=True)

    @classmethod
    def from_weights(cls, config: DFlash2Config, weights: Mapping[str, Any]) -> DFlash2Head:  # type: ignore[override]
        made = {**weights, "selector": CandidateSelector(**weights["selector"])}
        return super().from_weights(config, made)  # type: ignore[return-value]


@struct.dataclass
class BoundDFlash2(BoundDFlash):
    """The weights of a DFlash2 head that is bound to a target."""

    selector: CandidateSelector = struct.field(kw_only=True)


def selector_params(config: DFlash2Config) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter that a DFlash2 head has beside those of a DFlash head, by name."""
    rank, codes = config.selector_rank, (config.vocab_size, config.selector_rank)
    return {
        "selector.predecessor": ParamSpec(codes, ("tokens", "rank")),
        "selector.successor": ParamSpec(codes, ("tokens", "rank")),
        "selector.project": ParamSpec((rank, config.hidden_size), ("rank", "hidden")),
    }
