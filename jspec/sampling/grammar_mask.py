"""Grammars on the device: each node's state follows its parent's, and what may not follow it becomes -inf.

The tables are those of `jspec.engine.grammar.token_table`. A token that violates a grammar leads to no state; from
there everything may
come, which never counts, for the token itself is taken out at its parent. For a grammar that fits no table the host
gives masks (`jspec.engine.grammar.cfg_matcher`).

From every state there is a way to the grammar's end, so something is always left, unless bad words of several tokens
take it out: there nothing but a stop id may come, and outside a final state that tells the host what happened. So it
does where a mask leaves nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.core.bitmask import EVERYTHING, WORD, words_of
from jspec.core.records import Controls, Grammars, SlotView

NO_STATE = -1


def unused(tables: int, cells: int, vocab: int) -> Grammars:
    """Empty tables."""
    return Grammars(
        class_of=jnp.zeros((tables, vocab), jnp.int16),
        next=jnp.zeros((tables, cells), jnp.int16),
        classes=jnp.zeros(tables, jnp.int16),
    )


def pack(table: int, class_of: np.ndarray, next_state: np.ndarray, cells: int) -> np.ndarray:
    """A grammar as the vector that `load` reads.

    Args:
        class_of: [vocab] int16.
        next_state: [states, classes] int16.
        cells: of a table.
    """
    padding = np.zeros(cells - next_state.size, np.int16)
    return np.concatenate([np.array([table, next_state.shape[1]], np.int16), class_of, next_state.reshape(-1), padding])


def packed_size(grammars: Grammars) -> int:
    """Numbers of a packed grammar."""
    return 2 + grammars.class_of.shape[1] + grammars.next.shape[1]


def load(grammars: Grammars, packed: Int[Array, "packed"]) -> Grammars:
    """The tables (donated) with one of them replaced."""
    table, classes = packed[0].astype(jnp.int32), packed[1]
    class_of, next_state = jnp.split(packed[2:], [grammars.class_of.shape[1]])
    return Grammars(
        class_of=grammars.class_of.at[table].set(class_of),
        next=grammars.next.at[table].set(next_state),
        classes=grammars.classes.at[table].set(classes),
    )


def follow(
    grammars: Grammars, table: Int[Array, "batch"], state: Int[Array, "batch *more"], token: Int[Array, "batch *more"]
) -> Int[Array, "batch *more"]:
    """The states behind one token each; negative tokens leave them as they are."""
    table = table.reshape(-1, *(1,) * (state.ndim - 1))
    column = grammars.class_of[table, jnp.maximum(token, 0)].astype(jnp.int32)
    cell = jnp.maximum(state, 0) * grammars.classes[table].astype(jnp.int32) + column
    behind = grammars.next[table, cell].astype(jnp.int32)
    return jnp.where((token < 0) | (state < 0), state, behind)


def states(view: SlotView, path: Int[Array, "batch nodes depth"]) -> Int[Array, "batch nodes"]:
    """The states behind paths from the root; `NO_STATE` where there is no grammar, or the path violates it."""
    assert view.controls is not None and view.grammars is not None
    row = _rows(view.controls, view)
    state = jnp.broadcast_to(row[1][:, None], path.shape[:2])
    for index in range(path.shape[-1]):
        state = follow(view.grammars, row[0], state, path[..., index])
    return state


def only_allowed(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """The logits with -inf for every token that may not follow a node.

    Args:
        path: the tokens from behind the root to each node.
    """
    assert view.controls is not None and view.grammars is not None
    grammars, (table, root_state) = view.grammars, _rows(view.controls, view)
    vocab = logits.shape[-1]

    def allowed() -> UInt32[Array, "batch nodes words"]:
        state = states(view, path)[..., None]
        cell = jnp.maximum(state, 0) * grammars.classes[table].astype(jnp.int32)[:, None, None]
        cell = cell + grammars.class_of[table].astype(jnp.int32)[:, None]
        may_come = (state < 0) | (grammars.next[table[:, None, None], cell] >= 0)
        return _to_bits(_or_end(may_come, logits, view))

    everything = jnp.full((*logits.shape[:2], words_of(vocab)), EVERYTHING)
    # A conditional copies what it returns, so that is small.
    bits = jax.lax.cond(jnp.any(root_state >= 0), allowed, lambda: everything)
    return jnp.where(_from_bits(bits, vocab), logits, -jnp.inf)


def only_masked(logits: Float[Array, "batch nodes vocab"], view: SlotView) -> Float[Array, "batch nodes vocab"]:
    """The logits with -inf for every token that the view's masks leave out."""
    assert view.masks is not None
    may_come = _or_end(_from_bits(view.masks, logits.shape[-1]), logits, view)
    return jnp.where(may_come, logits, -jnp.inf)


def _or_end(
    may_come: Bool[Array, "batch nodes vocab"], logits: Float[Array, "batch nodes vocab"], view: SlotView
) -> Bool[Array, "batch nodes vocab"]:
    """What may come; where none of it is left, the tokens that end the request."""
    is_left = jnp.any(may_come & (logits > -jnp.inf), axis=-1, keepdims=True)
    is_end = jnp.any(jnp.arange(logits.shape[-1]) == view.sampling.stop_ids[..., None], axis=1)
    return jnp.where(is_left, may_come, is_end[:, None])


def _rows(controls: Controls, view: SlotView) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """Each row's table, and its state behind the root."""
    table, state, used = (
        field.at[view.slots].get(mode="fill", fill_value=0)
        for field in (controls.table, controls.grammar_state, controls.used)
    )
    return table, jnp.where(used & view.active, state, NO_STATE)


def _to_bits(flags: Bool[Array, "batch nodes vocab"]) -> UInt32[Array, "batch nodes words"]:
    padded = jnp.pad(flags, ((0, 0), (0, 0), (0, -flags.shape[-1] % WORD)))
    words = padded.reshape(*flags.shape[:2], -1, WORD).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _from_bits(bits: UInt32[Array, "batch nodes words"], vocab: int) -> Bool[Array, "batch nodes vocab"]:
    flags = (bits[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1 == 1
    return flags.reshape(*bits.shape[:2], -1)[..., :vocab]
