"""Draft-target speculation: a smaller model of the same vocabulary drafts a chain (arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self, final

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jspec import sampling
from jspec.cache import PoolShape, create
from jspec.draft import Drafter, chain_draft, require_chain
from jspec.models.decoder import Model, forward
from jspec.records import Draft, KVCache, SlotView, TokenBatch, Verdict
from jspec.tree import Tree


@struct.dataclass
class DraftModelState:
    """The small model's cache, and the token before each root.

    After a fully accepted chain the row of its last token is missing, so every round first feeds the last committed
    token again, together with the root: the cache lags by at most that one row.
    """

    cache: KVCache
    previous: Int[Array, "slots"]


@final
class DraftModel(Drafter):
    """A draft model with the target's vocabulary.

    Args:
        model: the small model.
        tree: a chain.
    """

    def __init__(self, model: Model, tree: Tree) -> None:
        self.model = model
        self.tree = require_chain("DraftModel", tree)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, tree: Tree, dtype: str | None = None) -> Self:
        """Load a Hugging Face folder, a converted folder or a hub id."""
        return cls(Model.from_pretrained(path, dtype=dtype), tree)

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Model:
        own, wanted = self.model.config.vocab_size, target.config.vocab_size
        if own != wanted:
            raise ValueError(
                f"DraftModel: expected the target's vocabulary of {wanted} tokens, got {own}; "
                "use a draft model that shares the target's tokenizer"
            )
        return self.model

    def init(self, params: Model, pool: PoolShape) -> DraftModelState:
        config = params.config
        return DraftModelState(
            cache=create(config.num_layers, config, pool, pool.draft_dtype),
            previous=jnp.zeros(pool.slots, jnp.int32),
        )

    def prefill(
        self, params: Model, state: DraftModelState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> DraftModelState:
        _, cache = forward(params, state.cache, batch, with_logits=False)
        last = jnp.maximum(jnp.sum(batch.valid, axis=1) - 1, 0)[:, None]
        previous = jnp.take_along_axis(batch.tokens, last, axis=1)[:, 0]
        return DraftModelState(cache=cache, previous=state.previous.at[view.slots].set(previous, mode="drop"))

    def draft(self, params: Model, state: DraftModelState, view: SlotView) -> tuple[Draft, DraftModelState]:
        vocab = params.config.vocab_size
        previous = state.previous.at[view.slots].get(mode="fill", fill_value=0)
        tokens, log_probs, laws, cache = [], [], [], state.cache
        feed, position = jnp.stack([previous, view.root], axis=1), view.lengths - 1
        for depth in range(1, self.tree.depth + 1):
            with jax.named_scope(f"draft{depth}"):
                logits, cache = _step(params, cache, view, feed, position)
                token, law = sampling.draft_token(logits, view, depth, None, vocab)
                tokens.append(token)
                laws.append(law)
                log_probs.append(sampling.log_prob(logits, token))
                feed, position = token[:, None], view.lengths + depth
        return chain_draft(view, tokens, log_probs, laws, None), replace(state, cache=cache)

    def commit(
        self,
        params: Model,
        state: DraftModelState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> DraftModelState:
        last = jnp.take_along_axis(verdict.path, verdict.accept_len[:, None], axis=1)
        previous = jnp.take_along_axis(draft.tokens, last, axis=1)[:, 0]
        return replace(state, previous=state.previous.at[view.slots].set(previous, mode="drop"))


def _step(
    params: Model,
    cache: KVCache,
    view: SlotView,
    tokens: Int[Array, "batch tokens"],
    position: Int[Array, "batch"],
) -> tuple[Array, KVCache]:
    """Feed tokens from a position on; logits behind the last of them."""
    count = tokens.shape[1]
    positions = jnp.maximum(position, 0)[:, None] + jnp.arange(count)
    batch = TokenBatch(
        tokens=tokens,
        positions=positions,
        valid=jnp.broadcast_to(view.active[:, None], tokens.shape),
        first_row=jnp.maximum(position, 0),
        page_table=view.page_table,
        bits=None,
        implementation=view.implementation,
    )
    last = jnp.full((tokens.shape[0], 1), count - 1)
    out, cache = forward(params, cache, batch, logit_rows=last)
    assert out.logits is not None
    return out.logits[:, 0], cache
