"""How good a drafter's chains are, measured on texts of which the target's part is known already.

Greedy decoding gives the same text whatever drafts. So the target runs first and once; what of a drafter's chains it
would have accepted is then found by drafting alone, and another option of the drafter compiles no target again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jspec.core.records import UNLIMITED, Sampling, SlotView, TokenBatch, Verdict
from jspec.draft.base import Drafter
from jspec.models.decoder import Model, TargetOut, forward
from jspec.models.kv_cache import PoolShape, create

PAGE_SIZE = 16


@struct.dataclass
class Texts:
    """Texts of one length and what the target makes of them; all fields begin with ``[rows, size]``.

    Attributes:
        choices: the target's argmax behind each token.
        states: hidden states by index, as `forward` counts them.
    """

    tokens: Int[Array, "rows size"]
    choices: Int[Array, "rows size"]
    states: dict[int, Float[Array, "rows size hidden"]]


class Rounds(NamedTuple):
    """What came of the drafts; a row's rounds stand in order, from `False` in ``is_round`` on it has none."""

    is_round: Bool[np.ndarray, "rounds rows"]
    positions: Int[np.ndarray, "rounds rows"]  # of the roots
    hits: Bool[np.ndarray, "rounds rows"]  # the first draft token is the target's argmax behind the root
    accept_len: Int[np.ndarray, "rounds rows"]  # draft tokens that stand in the text, up to the first that does not


def observe(target: Model, tokens: Int[np.ndarray, "rows size"], layers: Sequence[int]) -> Texts:
    """The target's part of texts, by one forward over each.

    Args:
        layers: indices of the states to keep.
    """
    kept = tuple(sorted(set(layers)))
    look = jax.jit(partial(_look, kept))
    parts = [look(target, jnp.asarray(row[None], jnp.int32)) for row in tokens]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


def continue_greedily(
    target: Model, prompts: Int[np.ndarray, "rows prompt"], count: int
) -> Int[np.ndarray, "rows size"]:
    """Prompts of one length with ``count`` tokens more, each the target's argmax.

    The whole text is run again for every token: for a few short texts that is quicker than to compile a cached step.
    """
    rows, size = prompts.shape
    tokens = np.concatenate([prompts, np.zeros((rows, count), prompts.dtype)], axis=1)
    look = jax.jit(partial(_look, ()))
    for place in range(size, size + count):
        tokens[:, place] = np.asarray(look(target, jnp.asarray(tokens, jnp.int32)).choices[:, place - 1])
    return tokens


class Replay:
    """Drafts chains along texts, round by round; a call with other texts of the same shape compiles nothing.

    A round moves a row on as decoding would where the text is the target's own greedy one: by the draft tokens that
    are right and one. A row that is stepwise moves on by one token, whatever is right: every place of any text is
    then a root once. A row ends where a round could reach beyond its text.

    Args:
        drafter: drafts chains, from a row's own text alone.
    """

    def __init__(self, drafter: Drafter, target: Model) -> None:
        self._params = drafter.bind(target)
        self._run = jax.jit(partial(_rounds, drafter))

    def __call__(
        self, texts: Texts, *, layers: Sequence[int], start: Sequence[int], stepwise: Sequence[bool]
    ) -> Rounds:
        """All rounds of all rows.

        Args:
            layers: of ``texts.states``, which become the features, in this order.
            start: position of each row's first root, at least 1.
        """
        features = jnp.concatenate([texts.states[layer] for layer in layers], axis=-1) if layers else None
        seen = self._run(self._params, texts, features, jnp.asarray(start, jnp.int32), jnp.asarray(stepwise))
        return Rounds(*map(np.asarray, seen))


def run_texts(target: Model, tokens: Int[Array, "rows size"], layers: Sequence[int] = ()) -> TargetOut:
    """The target's logits and hidden states at every token of texts, by one forward over all of them."""
    rows, size = tokens.shape
    pool = _pool(rows, size, size, str(target.embed.dtype))
    cache = create(target.config.layers, pool, pool.dtype)
    every = jnp.full(rows, size, jnp.int32)
    return forward(target, cache, _prompts(tokens, every, _page_table(pool)), feature_layers=tuple(layers))[0]


def _look(layers: tuple[int, ...], target: Model, tokens: Int[Array, "rows size"]) -> Texts:
    out = run_texts(target, tokens, layers)
    states = [] if out.features is None else jnp.split(out.features, len(layers), axis=-1)
    choices = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    return Texts(tokens=tokens, choices=choices, states=dict(zip(layers, states, strict=True)))


def _rounds(
    drafter: Drafter, params: Any, texts: Texts, features: Array | None, start: Array, stepwise: Array
) -> tuple[Array, ...]:
    """The fields of `Rounds`. An ended row goes on drafting for nothing."""
    rows, size = texts.tokens.shape
    depth = drafter.tree.depth
    dtype = next(str(leaf.dtype) for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating))
    pool = _pool(rows, size, size + drafter.tree.scratch_rows, dtype)
    table = _page_table(pool)
    batch = _prompts(texts.tokens, start, table)
    view = _view(texts.tokens, start, start > 0, table)
    state = drafter.prefill(params, drafter.init(params, pool), view, batch, features)
    nodes = jnp.arange(depth + 1)

    def one(carry: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], tuple[Array, ...]]:
        roots, state = carry
        active = roots + depth + 1 < size
        view = _view(texts.tokens, roots, active, table)
        draft, state = drafter.draft(params, state, view)
        places = roots[:, None] + nodes
        ahead = jnp.take_along_axis(texts.tokens, jnp.minimum(places + 1, size - 1), axis=1)
        right = draft.valid[:, 1:] & (draft.tokens[:, 1:] == ahead[:, :-1])
        accept_len = jnp.sum(jnp.cumprod(right, axis=1), axis=1)
        choice = jnp.take_along_axis(texts.choices, roots[:, None], axis=1)[:, 0]
        hits = draft.valid[:, 1] & (draft.tokens[:, 1] == choice)
        taken = jnp.where(stepwise, 0, accept_len)
        known = None if features is None else jnp.take_along_axis(features, places[..., None], axis=1)
        state = drafter.commit(params, state, view, draft, _verdict(taken, ahead), known)
        return (jnp.where(active, roots + taken + 1, roots), state), (active, roots, hits, accept_len)

    _, seen = jax.lax.scan(one, (start, state), length=size)
    return seen


def _verdict(taken: Int[Array, "rows"], ahead: Int[Array, "rows depth1"]) -> Verdict:
    """``taken`` draft tokens and the one behind them."""
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
    """Greedy rows, each with its own slot; ended ones read and write nothing."""
    rows = tokens.shape[0]
    return SlotView(
        slots=jnp.arange(rows),
        root=jnp.take_along_axis(tokens, roots[:, None], axis=1)[:, 0],
        lengths=jnp.where(active, roots, 0),
        active=active,
        remaining=jnp.full(rows, UNLIMITED, jnp.int32),
        page_table=jnp.where(active[:, None], table, 0),
        sampling=Sampling.greedy(rows),
        accept="multi_candidate",  # for greedy rows all rules are one; this one makes no noise
        all_greedy=True,
        implementation="auto",
    )


def _prompts(tokens: Int[Array, "rows size"], counts: Int[Array, "rows"], table: Array) -> TokenBatch:
    rows, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), (rows, size))
    return TokenBatch(
        tokens=tokens,
        positions=positions,
        valid=positions < counts[:, None],
        first_row=jnp.zeros(rows, jnp.int32),
        page_table=table,
        bits=None,
        implementation="auto",
    )


def _pool(rows: int, size: int, cache_rows: int, dtype: str) -> PoolShape:
    pages = rows * math.ceil(cache_rows / PAGE_SIZE) + 1
    return PoolShape(rows, pages, PAGE_SIZE, size, dtype, dtype)


def _page_table(pool: PoolShape) -> Int[Array, "rows pages"]:
    return jnp.arange(1, pool.pages, dtype=jnp.int32).reshape(pool.slots, -1)
