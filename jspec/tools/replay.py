"""Measures how many tokens of a drafter's chains agree with texts whose target outputs are known already.

Greedy decoding gives the same text with every drafter. The target therefore runs only once, before all drafters, and is
not compiled again for another drafter. Greedy decoding accepts a draft token if it equals the text's token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jspec.core.numerics import AUTO
from jspec.core.prompt_blocks import UNLIMITED
from jspec.core.records import Draft, PromptBatch, SlotView, Verdict
from jspec.core.sampling import Sampling
from jspec.draft.base import Drafter
from jspec.models.decoder import Model, TargetOut, forward
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.verify import MultiCandidate

PAGE_SIZE = 16  # cache rows per page


@struct.dataclass
class ReplayedTexts:
    """Texts of one length with the target's outputs.

    The first two axes of every field are ``[rows, size]``: text, and position in the text.

    Attributes:
        tokens: token id at each position.
        choices: the target's argmax for the token after each position.
        states: the target's hidden states at each position, by state index as in `jspec.models.decoder.forward`.
    """

    tokens: Int[Array, "rows size"]
    choices: Int[Array, "rows size"]
    states: dict[int, Float[Array, "rows size hidden"]]


class Rounds(NamedTuple):
    """The results of every round of every row (text), in order.

    Entries after the last round of a row are padding, with ``is_round`` False.
    """

    is_round: Bool[np.ndarray, "rounds rows"]  # whether the entry is a round; False after the row has ended
    positions: Int[np.ndarray, "rounds rows"]  # position of the root (the token that the chain follows)
    hits: Bool[np.ndarray, "rounds rows"]  # whether the first draft token is the target's argmax after the root
    accept_len: Int[np.ndarray, "rounds rows"]  # number of draft tokens before the first that differs from the text


def observe(target: Model, tokens: Int[np.ndarray, "rows size"], layers: Sequence[int]) -> ReplayedTexts:
    """Run the target over texts, one forward pass per text, and return the texts with the target's outputs.

    Args:
        target: the target.
        tokens: token ids of each text.
        layers: indices of the hidden states to return, as in `jspec.models.decoder.forward`.
    """
    run = jax.jit(partial(_target_outputs, tuple(sorted(set(layers)))))
    parts = [run(target, jnp.asarray(row[None], jnp.int32)) for row in tokens]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


def continue_greedily(
    target: Model, prompts: Int[np.ndarray, "rows prompt"], count: int
) -> Int[np.ndarray, "rows size"]:
    """Append ``count`` tokens of greedy decoding to each prompt.

    Each token is a forward pass over the whole text: for a few short texts this is faster than compiling a step with a
    cache.
    """
    rows, size = prompts.shape
    tokens = np.concatenate([prompts, np.zeros((rows, count), prompts.dtype)], axis=1)
    run = jax.jit(partial(_target_outputs, ()))
    for position in range(size, size + count):
        tokens[:, position] = np.asarray(run(target, jnp.asarray(tokens, jnp.int32)).choices[:, position - 1])
    return tokens


class Replay:
    """Drafts chains along given texts, round by round, and compares the draft tokens with the texts.

    A round advances a row (text) by the number of correct draft tokens plus one. Greedy decoding does so too if the
    text is the target's own greedy text. A stepwise row advances by one token per round, so every position is a root
    once. A row ends when its next round could pass the end of its text. Calls with texts of one shape compile once.

    Args:
        drafter: drafter of chains, which drafts each row from the row's own text only.
        target: target that the drafter is bound to.
    """

    def __init__(self, drafter: Drafter, target: Model) -> None:
        self._params = drafter.bind(target)
        self._target = target if drafter.reads_target else None
        self._run = jax.jit(partial(_rounds, drafter))

    def __call__(
        self, texts: ReplayedTexts, *, layers: Sequence[int], start: Sequence[int], stepwise: Sequence[bool]
    ) -> Rounds:
        """Draft all rounds of all rows, and return the results of each round.

        Args:
            texts: texts with the target's outputs.
            layers: keys of ``texts.states`` that are concatenated to the drafter's features, in this order.
            start: position of each row's first root, at least 1.
            stepwise: whether each row advances by one token per round.
        """
        features = jnp.concatenate([texts.states[layer] for layer in layers], axis=-1) if layers else None
        begin = jnp.asarray(start, jnp.int32), jnp.asarray(stepwise)
        seen = self._run(self._params, self._target, texts, features, *begin)
        return Rounds(*map(np.asarray, seen))


def run_texts(target: Model, tokens: Int[Array, "rows size"], layers: Sequence[int] = ()) -> TargetOut:
    """Compute the target's logits and hidden states at every token of the texts, in one forward pass over all texts.

    Args:
        target: the target.
        tokens: token ids of each text.
        layers: indices of the hidden states to return, as in `jspec.models.decoder.forward`.
    """
    rows, size = tokens.shape
    return _forward(target, tokens, _pool(rows, size, size, str(target.embed.dtype)), layers)[0]


def _forward(target: Model, tokens: Array, pool: PoolShape, layers: Sequence[int] = ()) -> tuple[TargetOut, list[Any]]:
    """Run the target on all texts; return the output of `run_texts`, and the target's caches with the texts' rows."""
    cache = create(target.config.layers, pool, pool.dtype)
    every = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    return forward(target, cache, _prompts(tokens, every, _page_table(pool)), feature_layers=tuple(layers))


def _target_outputs(layers: tuple[int, ...], target: Model, tokens: Int[Array, "rows size"]) -> ReplayedTexts:
    out = run_texts(target, tokens, layers)
    states = [] if out.features is None else jnp.split(out.features, len(layers), axis=-1)
    choices = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    return ReplayedTexts(tokens=tokens, choices=choices, states=dict(zip(layers, states, strict=True)))


def _rounds(
    drafter: Drafter,
    params: Any,
    target: Model | None,
    texts: ReplayedTexts,
    features: Array | None,
    start: Array,
    stepwise: Array,
) -> tuple[Array, ...]:
    """Compute the fields of `Rounds` in one compiled function.

    Rows that have ended are still drafted for, and the results are ignored. A drafter that reads the target's caches
    gets those of whole texts, of which it sees the rows before each root.
    """
    rows, size = texts.tokens.shape
    dtype = next(str(leaf.dtype) for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating))
    pool = _pool(rows, size, size + drafter.tree.scratch_rows, dtype)
    table = _page_table(pool)
    batch = _prompts(texts.tokens, start, table)
    view = _view(texts.tokens, start, start > 0, table)
    state = drafter.prefill(params, drafter.init(params, pool), view, batch, features)
    caches = None if target is None else _forward(target, texts.tokens, replace(pool, dtype=str(target.dtype)))[1]

    def step(carry: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], tuple[Array, ...]]:
        roots, state = carry
        active = roots + drafter.tree.depth + 1 < size
        view = _view(texts.tokens, roots, active, table)
        draft, state = drafter.draft(params, state, replace(view, target=caches))
        positions = roots[:, None] + jnp.arange(draft.tokens.shape[1])
        ahead = jnp.take_along_axis(texts.tokens, jnp.minimum(positions + 1, size - 1), axis=1)
        hits, accept_len = _agreement(draft, ahead, jnp.take_along_axis(texts.choices, roots[:, None], axis=1)[:, 0])
        taken = jnp.where(stepwise, 0, accept_len)
        known = None if features is None else jnp.take_along_axis(features, positions[..., None], axis=1)
        state = drafter.commit(params, state, view, draft, _verdict(taken, ahead), known)
        return (jnp.where(active, roots + taken + 1, roots), state), (active, roots, hits, accept_len)

    _, seen = jax.lax.scan(step, (start, state), length=size)
    return seen


def _agreement(
    draft: Draft, ahead: Int[Array, "rows nodes"], choices: Int[Array, "rows"]
) -> tuple[Bool[Array, "rows"], Int[Array, "rows"]]:
    """Return the fields ``hits`` and ``accept_len`` of `Rounds` for one round.

    Args:
        draft: the chains of the round.
        ahead: tokens of the text after the root.
        choices: the target's argmax after the root.
    """
    right = draft.valid[:, 1:] & (draft.tokens[:, 1:] == ahead[:, :-1])
    hits = draft.valid[:, 1] & (draft.tokens[:, 1] == choices)
    return hits, jnp.sum(jnp.cumprod(right, axis=1), axis=1)


def _verdict(taken: Int[Array, "rows"], ahead: Int[Array, "rows depth1"]) -> Verdict:
    """Return a `Verdict` that accepts the first ``taken`` draft tokens and emits the token of the text after them.

    Args:
        taken: number of draft tokens to accept.
        ahead: tokens of the text after the root.
    """
    nodes = jnp.arange(ahead.shape[1])
    kept = nodes <= taken[:, None]
    return Verdict(
        accept_len=taken,
        path=jnp.where(kept, nodes, -1),
        tokens=jnp.where(kept, ahead, -1),
        counts=taken + 1,
        ended=jnp.zeros_like(kept[:, 0]),
    )


def _view(tokens: Array, roots: Array, active: Array, table: Array) -> SlotView:
    """Return a `SlotView` of greedy rows, with row i in slot i; rows that are not ``active`` read and write nothing."""
    rows = tokens.shape[0]
    return SlotView(
        slots=jnp.arange(rows),
        root=jnp.take_along_axis(tokens, roots[:, None], axis=1)[:, 0],
        lengths=jnp.where(active, roots, 0),
        active=active,
        remaining=jnp.full(rows, UNLIMITED, jnp.int32),
        page_table=jnp.where(active[:, None], table, 0),
        sampling=Sampling.greedy(rows),
        accept=MultiCandidate(),  # all accept rules agree for greedy rows; this one draws no random numbers
        all_greedy=True,
        numerics=AUTO,
    )


def _prompts(tokens: Int[Array, "rows size"], counts: Int[Array, "rows"], table: Array) -> PromptBatch:
    rows, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), (rows, size))
    return PromptBatch.whole(
        counts,
        tokens=tokens,
        positions=positions,
        valid=positions < counts[:, None],
        first_row=jnp.zeros(rows, jnp.int32),
        page_table=table,
        bits=None,
        numerics=AUTO,
    )


def _pool(rows: int, size: int, cache_rows: int, dtype: str) -> PoolShape:
    pages = rows * math.ceil(cache_rows / PAGE_SIZE) + 1
    return PoolShape(rows, pages, PAGE_SIZE, size, dtype, dtype)


def _page_table(pool: PoolShape) -> Int[Array, "rows pages"]:
    return jnp.arange(1, pool.pages, dtype=jnp.int32).reshape(pool.slots, -1)
