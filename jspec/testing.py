"""Proof that a drafter is lossless, for users' own drafters too, and fake drafters that go wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec import sampling
from jspec.cache import PoolShape
from jspec.draft import Drafter, DraftState, Params, chain_draft
from jspec.draft.model import DraftModel
from jspec.engine import Engine
from jspec.models.decoder import Model, forward
from jspec.records import Draft, SlotView, TokenBatch, Verdict
from jspec.requests import Completion, SamplingParams
from jspec.tree import Tree

NEAR_TIE = 1e-5  # a float32 forward of another width may round the other way where the best two logits are this close


def always_right(target: Model, tree: Tree) -> DraftModel:
    """The target drafts for itself: every draft token is accepted."""
    return DraftModel(target, tree)


@final
class AlwaysWrong(Drafter):
    """Another drafter's chain with every token moved on by one: with `always_right` inside, no draft token stands."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.tree = inner.tree
        self._vocab = 0

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return self.inner.feature_layers(target)

    def bind(self, target: Model) -> Params:
        self._vocab = target.config.vocab_size
        return self.inner.bind(target)

    def init(self, params: Params, pool: PoolShape) -> DraftState:
        return self.inner.init(params, pool)

    def prefill(
        self, params: Params, state: DraftState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> DraftState:
        return self.inner.prefill(params, state, view, batch, features)

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        draft, state = self.inner.draft(params, state, view)
        moved = (draft.tokens + 1) % self._vocab
        probs = None if draft.probs is None else jnp.roll(draft.probs, 1, axis=-1)
        return draft.replace(tokens=moved.at[:, 0].set(view.root), probs=probs), state

    def commit(
        self, params: Params, state: DraftState, view: SlotView, draft: Draft, verdict: Verdict, features: Array | None
    ) -> DraftState:
        return self.inner.commit(params, state, view, draft, verdict, features)


@final
class Random(Drafter):
    """A chain of uniformly random tokens."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._vocab = 0

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        self._vocab = target.config.vocab_size
        return ()

    def init(self, params: Params, pool: PoolShape) -> DraftState:
        return ()

    def prefill(
        self, params: Params, state: DraftState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> DraftState:
        return state

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        uniform = jnp.full((view.root.shape[0], self._vocab), 1 / self._vocab)
        tokens = []
        for depth in range(1, self.tree.depth + 1):
            at_depth = jnp.full_like(view.lengths, depth)
            key = sampling.keys(view.sampling.seed, sampling.Purpose.DRAFT, view.lengths, at_depth)
            tokens.append(jnp.argmax(sampling.gumbel(key, self._vocab), axis=-1).astype(jnp.int32))
        log_probs = [jnp.log(uniform[:, 0])] * self.tree.depth
        drawn = [uniform] * self.tree.depth if view.accept == "rejection" else None
        return chain_draft(view, tokens, log_probs, drawn, None), state

    def commit(
        self, params: Params, state: DraftState, view: SlotView, draft: Draft, verdict: Verdict, features: Array | None
    ) -> DraftState:
        return state


@dataclass(frozen=True)
class Difference:
    """Where a speculative output leaves plain decoding's."""

    prompt: int
    position: int  # in the output
    plain: int
    speculative: int
    gap: float  # between the best two (perturbed) logits of the target there


def differences(target: Model, plain: Sequence[Completion], other: Sequence[Completion], seeds: Any) -> list[Difference]:
    """The first token of each output that differs, with the target's gap between its best two choices there.

    Args:
        seeds: None for greedy outputs; else (temperature, seed of each prompt), without other controls.
    """
    found = []
    for index, (one, two) in enumerate(zip(plain, other, strict=True)):
        pairs = enumerate(zip(one.token_ids, two.token_ids, strict=False))
        position = next((i for i, (a, b) in pairs if a != b), min(len(one.token_ids), len(two.token_ids)))
        if one.token_ids == two.token_ids:
            continue
        context = [*one.prompt_token_ids, *one.token_ids[:position]]
        scores = last_logits(target, context)
        if seeds is not None:
            temperature, all_seeds = seeds
            words = jnp.asarray([[all_seeds[index] >> 32, all_seeds[index] & 0xFFFFFFFF]], jnp.uint32)
            key = sampling.keys(words, sampling.Purpose.TOKEN, jnp.asarray([len(context)]))
            scores = scores / temperature + np.asarray(sampling.gumbel(key, scores.shape[-1]))[0]
        best = np.sort(scores)[-2:]
        tokens = [ids[position] if position < len(ids) else -1 for ids in (one.token_ids, two.token_ids)]
        found.append(Difference(index, position, *tokens, gap=float(best[1] - best[0])))
    return found


def last_logits(target: Model, ids: Sequence[int]) -> np.ndarray:
    """The target's logits behind a text, [vocab], by one forward over all of it."""
    from jspec.cache import create

    size = len(ids)
    pool = PoolShape(1, 2, size, size, str(target.embed.dtype), str(target.embed.dtype))
    cache = create(target.config.num_layers, target.config, pool, pool.dtype)
    batch = TokenBatch(
        tokens=jnp.asarray([ids], jnp.int32),
        positions=jnp.arange(size)[None],
        valid=jnp.ones((1, size), bool),
        first_row=jnp.zeros(1, jnp.int32),
        page_table=jnp.ones((1, 1), jnp.int32),
        bits=None,
        implementation="reference",
    )
    out, _ = forward(target, cache, batch, logit_rows=jnp.asarray([[size - 1]]))
    assert out.logits is not None
    return np.asarray(out.logits[0, 0])


def check_lossless(
    drafter: Drafter,
    target: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 1.0),
    make_engine: Callable[..., Engine] = Engine,
    **options: Any,
) -> dict[float, list[Difference]]:
    """Decode prompts with and without a drafter and compare token by token, greedy and sampled.

    Under the default accept rule every token must be the same. A difference is forgiven, and returned, only where the
    target's best two (perturbed) logits are closer than `NEAR_TIE` in float32.

    Args:
        target: float32 weights.
        prompts: token ids.
        options: for both engines.

    Returns:
        The forgiven differences by temperature.

    Raises:
        AssertionError: naming the first token that differs.
    """
    forgiven = {}
    with make_engine(target, **options) as plain_engine, make_engine(target, drafter=drafter, **options) as engine:
        for temperature in temperatures:
            seeds = [1000 + index for index in range(len(prompts))]
            params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed) for seed in seeds]
            plain, other = plain_engine.generate(list(prompts), params), engine.generate(list(prompts), params)
            found = differences(target, plain, other, (temperature, seeds) if temperature else None)
            for difference in found:
                assert difference.gap < NEAR_TIE, f"not lossless at temperature {temperature}: {difference}"
            forgiven[temperature] = found
    return forgiven
