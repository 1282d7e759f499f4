"""Provides `check_lossless`, a test for any drafter, and two drafters for tests, `Scripted` and `Random`."""

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
from jspec.core.records import Draft, PromptBatch, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, DraftState, StatelessDrafter, require_static, static_draft
from jspec.engine.callers.api import Engine
from jspec.engine.request.request import Completion
from jspec.engine.request.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape
from jspec.sampling import sampler
from jspec.sampling.sampler import Purpose
from jspec.tools.replay import run_texts

NEAR_TIE = 1e-5  # float32 passes over another number of tokens may swap two logits that differ by less


@struct.dataclass
class Script:
    """A table of known outputs.

    The key of an output is a hash of its prompt, its seed and whether it is greedy.
    """

    hashes: UInt32[Array, "lines"]  # key of each output
    tokens: Int[Array, "lines longest"]  # token ids of each output
    vocab: int = struct.field(pytree_node=False)  # size of the target's vocabulary


@struct.dataclass
class ScriptState:
    """The hash and the length of the prefilled part of each slot's prompt."""

    hashes: UInt32[Array, "slots"]  # hash of the prompt's prefilled tokens
    prompt_len: Int[Array, "slots"]  # number of prefilled tokens


@final
class Scripted(Drafter):
    """Drafts the tokens of known outputs plus ``shift``; with shift 0 all draft tokens are right, else all are wrong.

    The last of several siblings has the known token plus ``shift``. The sibling before it has the next higher id, and
    so on.

    Args:
        known: completions of plain decoding.
        params: sampling parameters of each completion.
        tree: chain or static tree.
        shift: number that is added to every draft token, modulo the vocabulary size.
    """

    reads_text = True

    def __init__(
        self, known: Sequence[Completion], params: Sequence[SamplingParams], tree: Tree, *, shift: int = 0
    ) -> None:
        self.tree = require_static("Scripted", tree)
        self._shift = shift
        longest = max(len(completion.token_ids) for completion in known) + tree.depth
        self._tokens = np.zeros((len(known), longest), np.int32)
        self._hashes = np.zeros(len(known), np.uint32)
        for line, (completion, p) in enumerate(zip(known, params, strict=True)):
            self._tokens[line, : len(completion.token_ids)] = completion.token_ids
            ids = np.asarray(completion.prompt_token_ids)
            self._hashes[line] = _prompt_hash(ids, np.arange(len(ids)), xp=np).sum(dtype=np.uint32) + _run_hash(
                np.uint32(p.temperature > 0), np.uint32(p.seed or 0)
            )
        assert len(set(self._hashes.tolist())) == len(known), "two completions have the same hash"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Script:
        vocab = target.config.vocab_size
        return Script(hashes=jnp.asarray(self._hashes), tokens=jnp.asarray(self._tokens), vocab=vocab)

    def init(self, params: Script, pool: PoolShape) -> ScriptState:
        return ScriptState(hashes=jnp.zeros(pool.slots, jnp.uint32), prompt_len=jnp.zeros(pool.slots, jnp.int32))

    def prefill(
        self, params: Script, state: ScriptState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> ScriptState:
        if view.token_history is not None:
            positions = jnp.arange(view.token_history.shape[1])
            terms = jnp.where(positions < batch.ends[:, None], _prompt_hash(view.token_history, positions, xp=jnp), 0)
            hashes = jnp.sum(terms, axis=1, dtype=jnp.uint32)
        else:
            earlier = state.hashes.at[view.slots].get(mode="fill", fill_value=0)
            terms = jnp.where(batch.valid, _prompt_hash(batch.tokens, batch.positions, xp=jnp), 0)
            of_block = jnp.sum(terms, axis=1, dtype=jnp.uint32)
            hashes = jnp.where(batch.starts == 0, 0, earlier).at[batch.piece].add(of_block, mode="drop")
        return ScriptState(
            hashes=state.hashes.at[view.slots].set(hashes, mode="drop"),
            prompt_len=state.prompt_len.at[view.slots].set(batch.ends, mode="drop"),
        )

    def draft(self, params: Script, state: ScriptState, view: SlotView) -> tuple[Draft, ScriptState]:
        is_sampled = (view.sampling.temperature > 0).astype(jnp.uint32)
        wanted = state.hashes.at[view.slots].get(mode="fill", fill_value=0)
        wanted = wanted + _run_hash(is_sampled, view.sampling.seed[:, 1])
        line = jnp.argmax(params.hashes == wanted[:, None], axis=1)
        generated = view.lengths - state.prompt_len.at[view.slots].get(mode="fill", fill_value=0)
        tokens = []
        for depth, level in enumerate(self.tree.levels[1:], 1):
            siblings = list(zip(level.ranks, level.parents, strict=True))
            last_rank = {parent: max(r for r, p in siblings if p == parent) for parent in level.parents}
            off = np.array([last_rank[parent] - rank for rank, parent in siblings])
            tokens.append((params.tokens[line, generated + depth][:, None] + self._shift + off) % params.vocab)
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


def _prompt_hash(tokens: Any, positions: Any, *, xp: Any) -> Any:
    """Hash each token with its position; the sum of these hashes modulo 2**32 is the hash of a prompt.

    Args:
        tokens: token ids.
        positions: position of each token.
        xp: array module, numpy or jax.numpy.
    """
    mixed = (tokens.astype(xp.uint32) + xp.uint32(1)) * xp.uint32(2654435761)
    mixed = mixed ^ (positions.astype(xp.uint32) * xp.uint32(2246822519) + xp.uint32(374761393))
    return (mixed ^ (mixed >> xp.uint32(15))) * xp.uint32(3266489917)


def _run_hash(is_sampled: Any, seed: Any) -> Any:
    """Return the number that is added to a prompt's hash: one for greedy requests, one per seed for sampled requests.

    Args:
        is_sampled: 1 for sampled requests, 0 for greedy ones.
        seed: seed of the request, uint32.
    """
    return is_sampled * (seed * 2 + 1)


@struct.dataclass
class RandomVocabulary:
    """The size of the vocabulary from which `Random` draws tokens."""

    size: int = struct.field(pytree_node=False)  # number of tokens


@final
class Random(StatelessDrafter):
    """Drafts uniformly random tokens; siblings are drawn without replacement.

    Args:
        tree: chain or static tree.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = require_static("Random", tree)

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> RandomVocabulary:
        return RandomVocabulary(target.config.vocab_size)

    def draft(self, params: RandomVocabulary, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        rows, tokens, log_probs, probs = view.root.shape[0], [], [], []
        uniform = jnp.full((rows, params.size), 1 / params.size)
        for depth, level in enumerate(self.tree.levels[1:], 1):
            coordinates = (view.lengths[:, None], jnp.asarray([[depth]]), jnp.arange(level.num_parents)[None])
            noise = sampler.gumbel(sampler.keys(view.sampling.seed[:, None], Purpose.DRAFT, *coordinates), params.size)
            drawn = jax.lax.top_k(noise, max(level.ranks) + 1)[1]
            tokens.append(drawn[:, np.array(level.fed_parents), np.array(level.ranks)])
            log_probs.append(jnp.full(tokens[-1].shape, -np.log(params.size), jnp.float32))
            probs.append([uniform] * level.num_parents)
        is_drawn = view.accept.draft_sampling is DraftSampling.OWN_DISTRIBUTION
        return static_draft(self.tree, view, tokens, log_probs, probs if is_drawn else ()), state


@dataclass(frozen=True)
class Difference:
    """The first position at which the output of speculative decoding differs from that of plain decoding."""

    prompt: int  # index of the prompt
    position: int  # index in the output
    plain: int  # token of plain decoding; -1: its output ended before this position
    speculative: int  # token of speculative decoding; -1: its output ended before this position
    gap: float  # difference of the target's two highest logits here, with sampling noise if sampled


def differences(
    target: Model, plain: Sequence[Completion], other: Sequence[Completion], seeds: Any
) -> list[Difference]:
    """Find the differences between the outputs of plain and of speculative decoding.

    Args:
        target: the target, which recomputes the logits at each difference.
        plain: completions of plain decoding.
        other: completions of the same prompts with speculative decoding.
        seeds: (temperature, seed of each prompt) for sampled outputs, without other sampling options; None: greedy.

    Returns:
        One `Difference` for each prompt whose outputs differ.
    """
    mismatches = []
    for index, (expected, actual) in enumerate(zip(plain, other, strict=True)):
        pairs = enumerate(zip(expected.token_ids, actual.token_ids, strict=False))
        position = next((i for i, (a, b) in pairs if a != b), min(len(expected.token_ids), len(actual.token_ids)))
        if expected.token_ids == actual.token_ids:
            continue
        context = [*expected.prompt_token_ids, *expected.token_ids[:position]]
        scores = last_logits(target, context)
        if seeds is not None:
            temperature, all_seeds = seeds
            halves = jnp.asarray([[all_seeds[index] >> 32, all_seeds[index] & 0xFFFFFFFF]], jnp.uint32)
            key = sampler.keys(halves, Purpose.TOKEN, jnp.asarray([len(context)]))
            scores = scores / temperature + np.asarray(sampler.gumbel(key, scores.shape[-1]))[0]
        second, first = np.sort(scores)[-2:]
        a, b = (ids[position] if position < len(ids) else -1 for ids in (expected.token_ids, actual.token_ids))
        mismatches.append(Difference(index, position, plain=a, speculative=b, gap=float(first - second)))
    return mismatches


def last_logits(target: Model, ids: Sequence[int]) -> np.ndarray:
    """Compute the target's logits [vocab] for the token after the text ``ids``, in one pass over the whole text."""
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
    """Check that a drafter is lossless: decode prompts with and without the drafter, and compare every token.

    Under the default accept rule ("coupled") all tokens must be equal. A difference is tolerated only where the
    target's two highest logits (with the sampling noise, if sampled) differ by less than `NEAR_TIE` in float32.

    Args:
        drafter: the drafter to test.
        target: a model with float32 weights.
        prompts: token ids of each prompt.
        max_tokens: number of tokens generated for each prompt.
        temperatures: temperatures to test; 0 decodes greedily, others sample prompt i with seed 1000 + i.
        make_engine: function with the arguments of `Engine`, called once without and once with ``drafter=``.
        options: further arguments of both engines.

    Returns:
        The tolerated differences by temperature.

    Raises:
        AssertionError: a difference is not tolerated; the message names the prompt, the position and both tokens.
    """
    tolerated = {}
    with (
        make_engine(target, **options) as plain_engine,
        make_engine(target, drafter=drafter, **options) as engine,
    ):
        for temperature in temperatures:
            seeds = [1000 + index for index in range(len(prompts))]
            params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed) for seed in seeds]
            plain, other = (
                [completion.raise_for_error() for completion in decoder.generate(list(prompts), params)]
                for decoder in (plain_engine, engine)
            )
            mismatches = differences(target, plain, other, (temperature, seeds) if temperature else None)
            for difference in mismatches:
                assert difference.gap < NEAR_TIE, f"not lossless at temperature {temperature}: {difference}"
            tolerated[temperature] = mismatches
    return tolerated
