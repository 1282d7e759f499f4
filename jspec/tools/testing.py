"""Proof that a drafter is lossless, for users' own drafters too, and fake drafters that go wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, UInt32

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, DraftState, StatelessDrafter, require_static, static_draft
from jspec.draft.draft_model import DraftModel
from jspec.engine.core import Engine
from jspec.engine.request import Completion
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.sampling import sampler
from jspec.sampling.sampler import Purpose
from jspec.tools.replay import run_texts

NEAR_TIE = 1e-5  # a float32 forward of another width may round the other way where the best two logits are this close


def always_right(target: Model, tree: Tree) -> DraftModel:
    """The target drafts for itself: every draft token is accepted, round after round."""
    return DraftModel(target, tree)


@struct.dataclass
class Script:
    """Known outputs, one a line; a line is found by a hash of its prompt, its seed and whether it is greedy."""

    names: UInt32[Array, "lines"]
    tokens: Int[Array, "lines longest"]
    vocab: int = struct.field(pytree_node=False)


@struct.dataclass
class ScriptState:
    """What has been seen of each slot's prompt."""

    names: UInt32[Array, "slots"]
    prompt_len: Int[Array, "slots"]


@final
class Scripted(Drafter):
    """Drafts what is known to come, moved on by ``shift``: always right with 0, always wrong with 1 or more.

    Of several siblings the last is the right one and those before it are off by one each.

    Args:
        known: completions of plain decoding, with the parameters each was made with.
    """

    reads_text = True

    def __init__(
        self, known: Sequence[Completion], params: Sequence[SamplingParams], tree: Tree, *, shift: int = 0
    ) -> None:
        self.tree = require_static("Scripted", tree)
        self._shift = shift
        longest = max(len(completion.token_ids) for completion in known) + tree.depth
        self._tokens = np.zeros((len(known), longest), np.int32)
        self._names = np.zeros(len(known), np.uint32)
        for line, (completion, p) in enumerate(zip(known, params, strict=True)):
            self._tokens[line, : len(completion.token_ids)] = completion.token_ids
            ids = np.asarray(completion.prompt_token_ids)
            self._names[line] = _prompt_name(ids, np.arange(len(ids)), xp=np).sum(dtype=np.uint32) + _run_name(
                np.uint32(p.temperature > 0), np.uint32(p.seed or 0)
            )
        assert len(set(self._names.tolist())) == len(known), "two lines have one name"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Script:
        vocab = target.config.vocab_size
        return Script(names=jnp.asarray(self._names), tokens=jnp.asarray(self._tokens), vocab=vocab)

    def init(self, params: Script, pool: PoolShape) -> ScriptState:
        return ScriptState(names=jnp.zeros(pool.slots, jnp.uint32), prompt_len=jnp.zeros(pool.slots, jnp.int32))

    def prefill(
        self, params: Script, state: ScriptState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> ScriptState:
        ends = batch.first_row + jnp.maximum(jnp.sum(batch.valid, axis=1), 1)
        if view.token_history is not None:
            positions = jnp.arange(view.token_history.shape[1])
            named = jnp.where(positions < ends[:, None], _prompt_name(view.token_history, positions, xp=jnp), 0)
            names = jnp.sum(named, axis=1, dtype=jnp.uint32)
        else:
            seen = state.names.at[view.slots].get(mode="fill", fill_value=0)
            new = jnp.where(batch.valid, _prompt_name(batch.tokens, batch.positions, xp=jnp), 0)
            names = jnp.where(batch.first_row == 0, 0, seen) + jnp.sum(new, axis=1, dtype=jnp.uint32)
        return ScriptState(
            names=state.names.at[view.slots].set(names, mode="drop"),
            prompt_len=state.prompt_len.at[view.slots].set(ends, mode="drop"),
        )

    def draft(self, params: Script, state: ScriptState, view: SlotView) -> tuple[Draft, ScriptState]:
        is_sampled = (view.sampling.temperature > 0).astype(jnp.uint32)
        name = state.names.at[view.slots].get(mode="fill", fill_value=0)
        name = name + _run_name(is_sampled, view.sampling.seed[:, 1])
        line = jnp.argmax(params.names == name[:, None], axis=1)
        done = view.lengths - state.prompt_len.at[view.slots].get(mode="fill", fill_value=0)
        tokens = []
        for depth, level in enumerate(self.tree.levels[1:], 1):
            last = {
                parent: max(r for r, p in zip(level.ranks, level.parents, strict=True) if p == parent)
                for parent in level.parents
            }
            off = np.array([last[parent] - rank for rank, parent in zip(level.ranks, level.parents, strict=True)])
            tokens.append((params.tokens[line, done + depth][:, None] + self._shift + off) % params.vocab)
        return static_draft(self.tree, view, tokens, [jnp.zeros(level.shape) for level in tokens]), state

    def commit(
        self,
        params: Script,
        state: ScriptState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> ScriptState:
        return state


def _prompt_name(tokens: Any, positions: Any, *, xp: Any) -> Any:
    """A hash of each token at its place; those of a prompt are added up, modulo 2**32."""
    mixed = (tokens.astype(xp.uint32) + xp.uint32(1)) * xp.uint32(2654435761)
    mixed = mixed ^ (positions.astype(xp.uint32) * xp.uint32(2246822519) + xp.uint32(374761393))
    return (mixed ^ (mixed >> xp.uint32(15))) * xp.uint32(3266489917)


def _run_name(is_sampled: Any, seed: Any) -> Any:
    return is_sampled * (seed * 2 + 1)


@struct.dataclass
class Alphabet:
    """The size of the vocabulary to draw from."""

    size: int = struct.field(pytree_node=False)


@final
class Random(StatelessDrafter):
    """Uniformly random tokens, siblings drawn without replacement."""

    def __init__(self, tree: Tree) -> None:
        self.tree = require_static("Random", tree)

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Alphabet:
        return Alphabet(target.config.vocab_size)

    def draft(self, params: Alphabet, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        rows, tokens, log_probs, probs = view.root.shape[0], [], [], []
        uniform = jnp.full((rows, params.size), 1 / params.size)
        for depth, level in enumerate(self.tree.levels[1:], 1):
            place = (view.lengths[:, None], jnp.asarray([[depth]]), jnp.arange(level.num_parents)[None])
            noise = sampler.gumbel(sampler.keys(view.sampling.seed[:, None], Purpose.DRAFT, *place), params.size)
            drawn = jax.lax.top_k(noise, max(level.ranks) + 1)[1]
            tokens.append(drawn[:, np.array(level.fed_parents), np.array(level.ranks)])
            log_probs.append(jnp.full(tokens[-1].shape, -np.log(params.size), jnp.float32))
            probs.append([uniform] * level.num_parents)
        is_drawn = view.accept.draft_sampling is DraftSampling.OWN_DISTRIBUTION
        return static_draft(self.tree, view, tokens, log_probs, probs if is_drawn else ()), state


@dataclass(frozen=True)
class Difference:
    """Where a speculative output leaves plain decoding's."""

    prompt: int
    position: int  # in the output
    plain: int
    speculative: int
    gap: float  # between the best two (perturbed) logits of the target there


def differences(
    target: Model, plain: Sequence[Completion], other: Sequence[Completion], seeds: Any
) -> list[Difference]:
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
            key = sampler.keys(words, Purpose.TOKEN, jnp.asarray([len(context)]))
            scores = scores / temperature + np.asarray(sampler.gumbel(key, scores.shape[-1]))[0]
        best = np.sort(scores)[-2:]
        a, b = (ids[position] if position < len(ids) else -1 for ids in (one.token_ids, two.token_ids))
        found.append(Difference(index, position, plain=a, speculative=b, gap=float(best[1] - best[0])))
    return found


def last_logits(target: Model, ids: Sequence[int]) -> np.ndarray:
    """The target's logits behind a text, [vocab], by one forward over all of it."""
    logits = run_texts(target, jnp.asarray([ids], jnp.int32)).logits
    assert logits is not None
    return np.asarray(logits[0, -1])


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
    with (
        make_engine(target, **options) as plain_engine,
        make_engine(target, drafter=drafter, **options) as engine,
    ):
        for temperature in temperatures:
            seeds = [1000 + index for index in range(len(prompts))]
            params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed) for seed in seeds]
            plain, other = (
                [completion.raise_for_error() for completion in one.generate(list(prompts), params)]
                for one in (plain_engine, engine)
            )
            found = differences(target, plain, other, (temperature, seeds) if temperature else None)
            for difference in found:
                assert difference.gap < NEAR_TIE, f"not lossless at temperature {temperature}: {difference}"
            forgiven[temperature] = found
    return forgiven
