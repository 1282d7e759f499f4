"""EAGLE-3 drafting (arXiv:2503.01840): one layer over the target's fused hidden states.

Row i of the draft's cache holds the pair (feature of position i - 1, token i), with rotary position i - 1; row 0 does
not exist and is masked. So a page's draft rows depend only on the tokens up to the page's end.
The cache lags the target by the rows accepted in the last round: their features wait in `EagleState` and are fed,
with the root, by the next round's first forward. Drafted nodes write their rows behind the root's; the next round
overwrites them with rows made from the target's true features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jspec import pretrained, sampling
from jspec.cache import PoolShape, create
from jspec.draft import Drafter, chain_draft, require_chain
from jspec.models.attention import attend, project
from jspec.models.config import Eagle3Config
from jspec.models.decoder import Model, linear, logits_of, mlp, rms_norm
from jspec.records import Draft, KVCache, SlotView, TokenBatch, Verdict
from jspec.tree import Tree
from pallas_kernels.residual_norm import add_rms_norm

FIRST_ROW = 1  # row 0 of the draft's cache does not exist


@struct.dataclass
class EagleLayer:
    """Weights of the draft layer; its attention reads embedding and hidden state side by side."""

    input_norm: Float[Array, "hidden"]  # of the embedding half
    hidden_norm: Float[Array, "hidden"]  # of the hidden half
    qkv: Float[Array, "qkv hidden2"]
    o: Float[Array, "hidden heads_width"]
    mlp_norm: Float[Array, "hidden"]
    gate_up: Float[Array, "gate_up hidden"]
    down: Float[Array, "hidden intermediate"]


@struct.dataclass
class EagleHead:
    """An EAGLE-3 head's weights with its config. ``embed`` is None until the target's is bound."""

    embed: Float[Array, "vocab hidden"] | None
    fc: Float[Array, "hidden features"]
    layer: EagleLayer
    norm: Float[Array, "hidden"]
    head: Float[Array, "draft_vocab hidden"]
    draft_to_target: Int[Array, "draft_vocab"]
    config: Eagle3Config = struct.field(pytree_node=False)

    @classmethod
    def from_weights(cls, config: Eagle3Config, weights: Mapping[str, Any]) -> EagleHead:
        """Build from the tree of arrays that `jspec.pretrained.load` returns."""
        own = {name: weights[name] for name in ("fc", "norm", "head", "draft_to_target")}
        return cls(embed=weights.get("embed"), layer=EagleLayer(**weights["layer"]), config=config, **own)


@struct.dataclass
class EagleState:
    """The draft's cache and the pairs it has not seen yet: features (after fc) with the token that followed each.

    The last of the ``count`` pairs belongs to the root.
    """

    cache: KVCache
    features: Float[Array, "slots depth1 hidden"]
    tokens: Int[Array, "slots depth1"]
    count: Int[Array, "slots"]


class HeadOut(NamedTuple):
    """What the layer makes of a token."""

    hidden: Float[Array, "batch 1 hidden"]  # un-normed: the next token's feature
    normed: Float[Array, "batch 1 hidden"]  # for the draft's own output head, and only there


@final
class Eagle3(Drafter):
    """An EAGLE-3 head.

    Args:
        head: the head's weights.
        tree: a chain.
    """

    def __init__(self, head: EagleHead, tree: Tree) -> None:
        self.head = head
        self.tree = require_chain("Eagle3", tree)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree,
        dtype: str | None = None,
        rope_theta: float | None = None,
        feature_layers: tuple[int, ...] | None = None,
    ) -> Self:
        """Load a head from a folder as released, a converted folder or a hub id.

        Args:
            rope_theta: overrides the file's rotary base (10000 where the file is silent).
            feature_layers: overrides the target's state indices that are fused.
        """
        checkpoint = pretrained.load(
            path, dtype=dtype, kind="eagle3", rope_theta=rope_theta, feature_layers=feature_layers
        )
        return cls(EagleHead.from_weights(checkpoint.config, checkpoint.weights), tree)

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        named = self.head.config.feature_layers
        layers = target.config.num_layers
        return (2, layers // 2, layers - 3) if named is None else named

    def bind(self, target: Model) -> EagleHead:
        _check_pair(self.head, target, self.feature_layers(target))
        return self.head if self.head.embed is not None else replace(self.head, embed=target.embed)

    def init(self, params: EagleHead, pool: PoolShape) -> EagleState:
        pairs = (pool.slots, self.tree.depth + 1)
        return EagleState(
            cache=create(1, params.config, pool, pool.draft_dtype),
            features=jnp.zeros((*pairs, params.config.hidden_size), params.fc.dtype),
            tokens=jnp.zeros(pairs, jnp.int32),
            count=jnp.zeros(pool.slots, jnp.int32),
        )

    def prefill(
        self, params: EagleHead, state: EagleState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> EagleState:
        assert features is not None
        fused = linear(features.astype(params.fc.dtype), params.fc)
        waiting = state.features.at[view.slots, 0].get(mode="fill", fill_value=0)
        shifted = jnp.concatenate([waiting[:, None], fused[:, :-1]], axis=1)
        valid = batch.valid & (batch.positions >= FIRST_ROW)
        pairs = _pairs(view, batch.tokens, batch.first_row, valid)
        _, cache = _write(params, state.cache, pairs, shifted)
        last = jnp.maximum(jnp.sum(batch.valid, axis=1) - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(fused, last, axis=1)[:, 0]
        return replace(
            state,
            cache=cache,
            features=state.features.at[view.slots, 0].set(newest, mode="drop"),
            count=state.count.at[view.slots].set(1, mode="drop"),
        )

    def draft(self, params: EagleHead, state: EagleState, view: SlotView) -> tuple[Draft, EagleState]:
        config = params.config
        with jax.named_scope("draft1"):
            out, cache = catch_up(params, state, view)
        tokens: list[Array] = []
        log_probs, laws = [], []
        for depth in range(1, self.tree.depth + 1):
            with jax.named_scope(f"draft{depth}"):
                if depth > 1:
                    out, cache = self_feed(params, cache, view, tokens[-1], out.hidden, depth)
                logits = logits_of(out.normed, params.head)[:, 0]
                draft_id, law = sampling.draft_token(logits, view, depth, params.draft_to_target, config.vocab_size)
                log_probs.append(sampling.log_prob(logits, draft_id))
                tokens.append(params.draft_to_target[draft_id])
                laws.append(law)
        return chain_draft(view, tokens, log_probs, laws, params.draft_to_target), replace(state, cache=cache)

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
        accepted = jnp.take_along_axis(features, jnp.maximum(verdict.path, 0)[..., None], axis=1)
        return replace(
            state,
            features=state.features.at[view.slots].set(
                linear(accepted.astype(params.fc.dtype), params.fc), mode="drop"
            ),
            tokens=state.tokens.at[view.slots].set(verdict.tokens, mode="drop"),
            count=state.count.at[view.slots].set(verdict.accept_len + 1, mode="drop"),
        )


def catch_up(params: EagleHead, state: EagleState, view: SlotView) -> tuple[HeadOut, KVCache]:
    """Write the rows of the waiting pairs and run the layer on the root's.

    The other rows need only their K and V: what they predict is known already.
    """
    features = state.features.at[view.slots].get(mode="fill", fill_value=0)
    waiting = state.tokens.at[view.slots].get(mode="fill", fill_value=0)
    count = state.count.at[view.slots].get(mode="fill", fill_value=0)
    last = jnp.maximum(count - 1, 0)[:, None]
    steps = jnp.arange(features.shape[1])
    tokens = jnp.where(steps == last, view.root[:, None], waiting)
    valid = (steps <= last) & view.active[:, None]
    pairs = _pairs(view, tokens, view.lengths - last[:, 0], valid)
    q, cache = _write(params, state.cache, pairs, features)
    root_q = jnp.take_along_axis(q, last[..., None, None], axis=1)
    root_feature = jnp.take_along_axis(features, last[..., None], axis=1)
    root_pair = _pairs(view, view.root[:, None], view.lengths, view.active[:, None])
    return _finish(params, cache, root_pair, root_q, root_feature), cache


def self_feed(
    params: EagleHead,
    cache: KVCache,
    view: SlotView,
    tokens: Int[Array, "batch"],
    hidden: Float[Array, "batch 1 hidden"],
    depth: int,
) -> tuple[HeadOut, KVCache]:
    """Run the layer on a drafted token with the layer's own last output as its feature.

    Args:
        depth: of the node to come; the token fed stands at depth - 1, the feature at depth - 2.
    """
    pair = _pairs(view, tokens[:, None], view.lengths + depth - 1, view.active[:, None])
    q, cache = _write(params, cache, pair, hidden)
    return _finish(params, cache, pair, q, hidden), cache


def _pairs(
    view: SlotView,
    tokens: Int[Array, "batch tokens"],
    first_row: Int[Array, "batch"],
    valid: Bool[Array, "batch tokens"],
) -> TokenBatch:
    """Pairs for the draft's cache rows from ``first_row`` on; a pair's position is its feature's, one below its row."""
    return TokenBatch(
        tokens=tokens,
        positions=first_row[:, None] + jnp.arange(tokens.shape[1]) - 1,
        valid=valid,
        first_row=first_row,
        page_table=view.page_table,
        bits=None,
        implementation=view.implementation,
    )


def _write(
    params: EagleHead, cache: KVCache, pairs: TokenBatch, features: Float[Array, "batch tokens hidden"]
) -> tuple[Float[Array, "batch tokens heads head_dim"], KVCache]:
    """Write the K and V of (feature, token) pairs; their queries come back.

    The layer reads normed embedding and normed feature side by side, embedding first.
    """
    assert params.embed is not None
    layer, eps = params.layer, params.config.norm_eps
    embedded = rms_norm(params.embed[pairs.tokens].astype(features.dtype), layer.input_norm, eps)
    both = jnp.concatenate([embedded, rms_norm(features, layer.hidden_norm, eps)], axis=-1)
    q, k_pool, v_pool = project(linear(both, layer.qkv), cache.k[0], cache.v[0], pairs, params.config)
    return q, KVCache(k=[k_pool], v=[v_pool])


def _finish(
    params: EagleHead,
    cache: KVCache,
    pair: TokenBatch,
    q: Float[Array, "batch 1 heads head_dim"],
    feature: Float[Array, "batch 1 hidden"],
) -> HeadOut:
    """Attention, residual (the raw feature), feed-forward."""
    layer = params.layer
    attended = attend(q, cache.k[0], cache.v[0], pair, start=FIRST_ROW)
    add_norm = partial(add_rms_norm, eps=params.config.norm_eps, implementation=pair.implementation)
    hidden, normed = add_norm(feature, linear(attended, layer.o), layer.mlp_norm)
    return HeadOut(*add_norm(hidden, mlp(normed, layer.gate_up, layer.down), params.norm))


def _check_pair(head: EagleHead, target: Model, feature_layers: tuple[int, ...]) -> None:
    """Raise on every way in which a head cannot belong to a target."""
    config, own = head.config, target.config
    wrong = [f"state {i} of {own.num_layers} layers" for i in feature_layers if not 0 <= i <= own.num_layers]
    if wrong or len(set(feature_layers)) != len(feature_layers):
        raise ValueError(
            f"Eagle3: feature layers {feature_layers} do not exist or repeat in a target of {own.num_layers} layers; "
            "pass feature_layers= (the default 2, N//2, N-3 needs at least 7 layers)"
        )
    width = len(feature_layers) * own.hidden_size
    checks = [
        ("vocabulary", config.vocab_size, own.vocab_size),
        ("target hidden size", config.target_hidden_size, own.hidden_size),
        ("fc input width", head.fc.shape[1], width),
    ]
    if head.embed is None:
        checks.append(("hidden size (it shares the target's embedding)", config.hidden_size, own.hidden_size))
    for what, got, expected in checks:
        if got != expected:
            raise ValueError(
                f"Eagle3: {what}: the target needs {expected}, the head has {got}; use a head made for this target"
            )
