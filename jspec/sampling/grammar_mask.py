"""Follows grammar states along a draft tree on the device, and sets the logits of disallowed tokens to -inf.

`jspec.engine.grammar.token_table` makes the tables. The grammar state of a draft node follows from the state of its
parent. A token that violates a grammar leads to `NO_STATE`, after which every token is allowed. This does no harm,
because the violating token has logit -inf at its parent. A grammar that waits for the end of the request's reasoning
(`jspec.sampling.thinking`) has two more states, which allow what comes before. If a grammar fits into no table, the
host computes token masks (`jspec.engine.grammar.cfg_matcher`).

Every grammar state allows some token, because it can reach the grammar's end. But bad words of several tokens may ban
all allowed tokens, and a mask from the host may allow none. Then only stop ids are allowed, and a stop id in a state
that is not final tells the host that no token was left.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.core.bitmask import EVERYTHING, WORD, words_of
from jspec.core.records import Controls, Grammars, SlotView
from jspec.core.thinking import AT_START, INSIDE

NO_STATE = -1  # grammar state of a row without a grammar, and after a token that violates the grammar


def unused(tables: int, cells: int, vocab: int) -> Grammars:
    """Make empty grammar tables for a new engine.

    Args:
        tables: number of tables.
        cells: cells per table.
        vocab: size of the vocabulary.
    """
    return Grammars(
        class_of=jnp.zeros((tables, vocab), jnp.int16),
        next=jnp.zeros((tables, cells), jnp.int16),
        classes=jnp.zeros(tables, jnp.int16),
    )


def pack(table: int, class_of: np.ndarray, next_state: np.ndarray, cells: int) -> np.ndarray:
    """Pack a grammar into the int16 vector that `load` reads.

    Args:
        table: index of the table to fill.
        class_of: token class of each token, int16 [vocab].
        next_state: next state for each state and token class, int16 [states, classes]; -1: the token is not allowed.
        cells: number of cells per table.
    """
    padding = np.zeros(cells - next_state.size, np.int16)
    return np.concatenate([np.array([table, next_state.shape[1]], np.int16), class_of, next_state.reshape(-1), padding])


def packed_size(grammars: Grammars) -> int:
    """Return the length of the int16 vector that `pack` returns."""
    return 2 + grammars.class_of.shape[1] + grammars.next.shape[1]


def load(grammars: Grammars, packed: Int[Array, "packed"]) -> Grammars:
    """Replace one of the grammar tables (which are donated) by a grammar that `pack` packed."""
    table, classes = packed[0].astype(jnp.int32), packed[1]
    class_of, next_state = jnp.split(packed[2:], [grammars.class_of.shape[1]])
    return Grammars(
        class_of=grammars.class_of.at[table].set(class_of),
        next=grammars.next.at[table].set(next_state),
        classes=grammars.classes.at[table].set(classes),
    )


def follow(
    grammars: Grammars, row: Controls, state: Int[Array, "batch *more"], token: Int[Array, "batch *more"]
) -> Int[Array, "batch *more"]:
    """Return the grammar state that follows each given state and token; a negative token leaves the state unchanged.

    Args:
        row: controls of each row.
    """
    fields = row.table, row.think_markers[:, 0], row.think_markers[:, 1]
    table, start, end = (field.reshape(-1, *(1,) * (state.ndim - 1)) for field in fields)
    column = grammars.class_of[table, jnp.maximum(token, 0)].astype(jnp.int32)
    cell = jnp.maximum(state, 0) * grammars.classes[table].astype(jnp.int32) + column
    next_state = grammars.next[table, cell].astype(jnp.int32)
    begins = ((state == AT_START) & (token == start)) | ((state == INSIDE) & (token != end))
    next_state = jnp.where(begins, INSIDE, jnp.where(state == INSIDE, 0, next_state))
    return jnp.where((token < 0) | (state == NO_STATE), state, next_state)


def states(view: SlotView, path: Int[Array, "batch nodes depth"]) -> Int[Array, "batch nodes"]:
    """Return the grammar state after each path of tokens from the root.

    It is `NO_STATE` in rows without a grammar, and after a token that violates the grammar.
    """
    assert view.controls is not None and view.grammars is not None
    row = _rows(view.controls, view)
    state = jnp.broadcast_to(row.grammar_state[:, None], path.shape[:2])
    for index in range(path.shape[-1]):
        state = follow(view.grammars, row, state, path[..., index])
    return state


def apply_grammars(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """Set the logit of each token to -inf at the nodes after which the grammar does not allow the token.

    Args:
        path: token ids on the path to each node (`jspec.sampling.penalties.node_paths`).
    """
    assert view.controls is not None and view.grammars is not None
    grammars, row = view.grammars, _rows(view.controls, view)
    table, vocab = row.table, logits.shape[-1]

    def allowed() -> UInt32[Array, "batch nodes words"]:
        state = states(view, path)[..., None]
        cell = jnp.maximum(state, 0) * grammars.classes[table].astype(jnp.int32)[:, None, None]
        cell = cell + grammars.class_of[table].astype(jnp.int32)[:, None]
        is_start = (state == AT_START) & (jnp.arange(vocab) == row.think_markers[:, :1, None])
        is_allowed = (state == NO_STATE) | (grammars.next[table[:, None, None], cell] >= 0) | is_start
        is_allowed = jnp.where(state == INSIDE, ~_ends_inside(row, view, vocab), is_allowed)
        return _to_bits(_or_stop_ids(is_allowed, logits, view))

    everything = jnp.full((*logits.shape[:2], words_of(vocab)), EVERYTHING)
    # A conditional copies its result; packed bits keep this copy small.
    bits = jax.lax.cond(jnp.any(row.grammar_state != NO_STATE), allowed, lambda: everything)
    return jnp.where(_from_bits(bits, vocab), logits, -jnp.inf)


def apply_host_masks(logits: Float[Array, "batch nodes vocab"], view: SlotView) -> Float[Array, "batch nodes vocab"]:
    """Set the logit of each token to -inf at the nodes where the host's masks (``view.masks``) ban the token."""
    assert view.masks is not None
    is_allowed = _or_stop_ids(_from_bits(view.masks, logits.shape[-1]), logits, view)
    return jnp.where(is_allowed, logits, -jnp.inf)


def _or_stop_ids(
    is_allowed: Bool[Array, "batch nodes vocab"], logits: Float[Array, "batch nodes vocab"], view: SlotView
) -> Bool[Array, "batch nodes vocab"]:
    """Return ``is_allowed``; at nodes whose allowed tokens all have logit -inf, allow the row's stop ids instead."""
    has_token = jnp.any(is_allowed & (logits > -jnp.inf), axis=-1, keepdims=True)
    is_stop = jnp.any(jnp.arange(logits.shape[-1]) == view.sampling.stop_ids[..., None], axis=1)
    return jnp.where(has_token, is_allowed, is_stop[:, None])


def _ends_inside(row: Controls, view: SlotView, vocab: int) -> Bool[Array, "batch 1 vocab"]:
    """Return which tokens would end a request inside its reasoning: its stop ids, but not the end marker."""
    tokens = jnp.arange(vocab)
    is_stop = jnp.any(tokens == view.sampling.stop_ids[..., None], axis=1)
    return (is_stop & (tokens != row.think_markers[:, 1:]))[:, None]


def _rows(controls: Controls, view: SlotView) -> Controls:
    """Return the controls of each row; the grammar state of rows without a grammar is `NO_STATE`."""
    row = controls.rows(view.slots)
    return replace(row, grammar_state=jnp.where(row.used & view.active, row.grammar_state, NO_STATE))


def _to_bits(flags: Bool[Array, "batch nodes vocab"]) -> UInt32[Array, "batch nodes words"]:
    padded = jnp.pad(flags, ((0, 0), (0, 0), (0, -flags.shape[-1] % WORD)))
    words = padded.reshape(*flags.shape[:2], -1, WORD).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _from_bits(bits: UInt32[Array, "batch nodes words"], vocab: int) -> Bool[Array, "batch nodes vocab"]:
    flags = (bits[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1 == 1
    return flags.reshape(*bits.shape[:2], -1)[..., :vocab]
