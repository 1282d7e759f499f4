"""Medusa heads (arXiv:2401.10774): each guesses a token further on from the target's last state, all at once.

Head h reads the target's state after its final norm at the position before the root, and predicts the token h + 1
behind the root; it does not know what the heads before it chose. So a node's token depends on its depth and rank
alone, and nothing is cached but that one state a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, require_static, static_draft
from jspec.draft.head_config import MedusaConfig
from jspec.models import load
from jspec.models.decoder import Model, logits_of
from jspec.models.kv_cache import PoolShape
from jspec.sampling import sampler
from pallas_kernels.layers.quantized import matmul


@struct.dataclass
class MedusaBlock:
    """A residual block: ``x + silu(weight x + bias)``."""

    weight: Float[Array, "hidden hidden"]
    bias: Float[Array, "hidden"]


@struct.dataclass
class MedusaHead:
    """Residual blocks, then scores over the vocabulary."""

    blocks: list[MedusaBlock]
    output: Float[Array, "vocab hidden"]


@struct.dataclass
class MedusaHeads:
    """All heads with their config; head h predicts the token at depth h + 1."""

    heads: list[MedusaHead]
    config: MedusaConfig = struct.field(pytree_node=False)

    @classmethod
    def from_weights(cls, config: MedusaConfig, weights: Mapping[str, Any]) -> MedusaHeads:
        """Build from the tree of arrays that `jspec.models.load.load` returns."""
        heads = [
            MedusaHead([MedusaBlock(**block) for block in head["blocks"]], head["output"]) for head in weights["heads"]
        ]
        return cls(heads, config)


@struct.dataclass
class MedusaState:
    """The target's state, after its final norm, at the position before each slot's root."""

    hidden: Float[Array, "slots hidden"]


@final
class Medusa(Drafter):
    """Medusa heads, under lossless accept rules; the authors' typical acceptance is ``accept="typical"``.

    Args:
        heads: the weights.
        tree: a chain or a static tree no deeper than there are heads.

    Raises:
        NotImplementedError: a dynamic tree.
        ValueError: a tree that is too deep, or asks for more children than there are tokens.
    """

    def __init__(self, heads: MedusaHeads, tree: Tree) -> None:
        self.heads = heads
        self.tree = require_static("Medusa", tree)
        if tree.depth > len(heads.heads):
            raise ValueError(f"Medusa: {tree} is {tree.depth} deep, there are {len(heads.heads)} heads; cut the tree")
        if tree.branching > heads.config.vocab_size:
            raise ValueError(
                f"Medusa: {tree} needs {tree.branching} children of a node, the vocabulary has "
                f"{heads.config.vocab_size} tokens; take a narrower tree"
            )

    @classmethod
    def from_pretrained(cls, path: str | Path, *, tree: Tree, dtype: str | None = None) -> Self:
        """Load heads from a folder as released, a converted folder or a hub id."""
        checkpoint = load.load(path, dtype=dtype, kind="medusa")
        return cls(MedusaHeads.from_weights(checkpoint.config, checkpoint.weights), tree)

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return (target.config.num_layers + 1,)

    def bind(self, target: Model) -> MedusaHeads:
        own, config = target.config, self.heads.config
        for what, got, expected in (
            ("hidden size", config.hidden_size, own.hidden_size),
            ("vocabulary", config.vocab_size, own.vocab_size),
        ):
            if got != expected:
                raise ValueError(
                    f"Medusa: {what}: the target has {expected}, the heads have {got}; use heads made for this target"
                )
        return self.heads

    def init(self, params: MedusaHeads, pool: PoolShape) -> MedusaState:
        output = params.heads[0].output
        return MedusaState(jnp.zeros((pool.slots, output.shape[1]), output.dtype))

    def prefill(
        self, params: MedusaHeads, state: MedusaState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> MedusaState:
        assert features is not None
        last = jnp.maximum(jnp.sum(batch.valid, axis=1) - 1, 0)
        return _keep(state, view, features, last)

    def draft(self, params: MedusaHeads, state: MedusaState, view: SlotView) -> tuple[Draft, MedusaState]:
        hidden = state.hidden.at[view.slots].get(mode="fill", fill_value=0)[:, None]
        choose = sampler.child_chooser(view, self.tree.depth, None, params.config.vocab_size)
        tokens, log_probs, probs = [], [], []
        for depth, level in enumerate(self.tree.levels[1:], 1):
            with jax.named_scope(f"head{depth}"):
                logits = head_logits(params.heads[depth - 1], hidden)
                ids, parent_probs = choose(logits[None], depth, max(level.ranks) + 1)
                ranks = np.array(level.ranks)
                tokens.append(ids[:, 0, ranks])
                log_probs.append(sampler.log_prob(logits, ids)[:, 0, ranks])
                if parent_probs is not None:
                    probs.append([parent_probs[:, 0]] * level.num_parents)
        return static_draft(self.tree, view, tokens, log_probs, probs), state

    def commit(
        self,
        params: MedusaHeads,
        state: MedusaState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> MedusaState:
        assert features is not None
        last = jnp.take_along_axis(verdict.path, verdict.accept_len[:, None], axis=1)[:, 0]
        return _keep(state, view, features, last)


def head_logits(head: MedusaHead, hidden: Float[Array, "batch rows hidden"]) -> Float[Array, "batch rows vocab"]:
    """A head's scores over the vocabulary, float32."""
    for block in head.blocks:
        hidden = hidden + jax.nn.silu(matmul(hidden, block.weight) + block.bias)
    return logits_of(hidden, head.output)


def _keep(state: MedusaState, view: SlotView, features: Array, at: Array) -> MedusaState:
    """Remember the feature at one place of each row."""
    newest = jnp.take_along_axis(features, at[:, None, None], axis=1)[:, 0]
    return MedusaState(state.hidden.at[view.slots].set(newest.astype(state.hidden.dtype), mode="drop"))
