"""Controls that look at what a token follows: bias, penalties, bad words, the least length, allowed tokens.

They edit the target's raw logits at every node of a draft before any accept rule sees them, as if the node's ancestors
and the node itself had been generated already: so drafting changes neither a token nor a law. What comes behind them,
temperature and the cuts by rank and probability, is `jspec.sampling.process`.

In the order of transformers' processors: bias, repetition, presence and frequency, bad words, least length, allowed
tokens and grammar (`jspec.sampling.grammar_mask`); then a user's own (`jspec.sampling.logits_processor`). Those before
it that only take tokens out
are never undone, so what holds for a whole request (tokens that are not allowed, bad words of one token) is -inf in the
bias.

A slot's counts are made once, when its request is admitted, and kept with every token that is committed; a node's
ancestors are at most ``depth`` tokens more, compared where the logits are read. In a round of rows that use none of
this nothing runs but the counting of what is committed, and nothing large is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.core.records import NO_TOKEN, AncestorMask, Controls, Draft, SlotView
from jspec.sampling import grammar_mask, logits_processor
from pallas_kernels.layers.quantized import PartialSums, reduce_partials

MAX_BAD_WORDS = 128  # of more than one token, a request
MAX_BAD_WORD_TOKENS = 16
LOOK_BACK = MAX_BAD_WORD_TOKENS - 1  # tokens of the text that decide whether a bad word's last may follow
Decision = tuple[Int[Array, "batch"], Int[Array, "batch"]]  # the last node that stands, and the token behind it
IN_PROMPT, GENERATED = 1, 2  # what a token of the text adds to its count; the prompt's counts once


def unused(slots: int, vocab: int, args: int = 0) -> Controls:
    """Slots without controls; every array is its own.

    Args:
        args: numbers that a request may give a processor.
    """
    return Controls(
        used=jnp.zeros(slots, bool),
        repetition=jnp.ones(slots, jnp.float32),
        presence=jnp.zeros(slots, jnp.float32),
        frequency=jnp.zeros(slots, jnp.float32),
        may_end_at=jnp.zeros(slots, jnp.int32),
        recent=jnp.full((slots, LOOK_BACK), NO_TOKEN, jnp.int32),
        bad_beginnings=jnp.full((slots, MAX_BAD_WORDS, LOOK_BACK), NO_TOKEN, jnp.int32),
        bad_ends=jnp.full((slots, MAX_BAD_WORDS), vocab, jnp.int32),
        bias=jnp.zeros((slots, vocab), jnp.float32),
        counts=jnp.zeros((slots, vocab), jnp.int32),
        table=jnp.zeros(slots, jnp.int32),
        grammar_state=jnp.full(slots, grammar_mask.NO_STATE, jnp.int32),
        prompt_size=jnp.zeros(slots, jnp.int32),
        processor_args=jnp.zeros((slots, args), jnp.float32),
    )


def pack(slot: int, row: Mapping[str, np.ndarray]) -> np.ndarray:
    """One slot's controls as the vector that `admit` reads.

    Args:
        row: by the names of `Controls`, 4 bytes a number; floats travel by their bits.
    """
    fields = [np.ravel(row[field.name]) for field in dataclasses.fields(Controls)]
    assert len(fields) == len(row) and all(field.dtype.itemsize == 4 for field in fields)
    return np.concatenate([np.array([slot], np.int32), *[field.view(np.int32) for field in fields]])


def packed_size(controls: Controls) -> int:
    """Words of a packed row."""
    return 1 + sum(math.prod(field.shape[1:]) for field in jax.tree.leaves(controls))


def admit(controls: Controls, packed: Int[Array, "packed"]) -> Controls:
    """The controls (donated) with one slot's entered."""
    slot, words = packed[0], packed[1:]
    fields, structure = jax.tree.flatten(controls)
    ends = np.cumsum([math.prod(field.shape[1:]) for field in fields])[:-1]
    rows = [row.reshape(field.shape[1:]) for row, field in zip(jnp.split(words, ends), fields, strict=True)]
    return jax.tree.unflatten(
        structure, [field.at[slot].set(_as_type(row, field.dtype)) for field, row in zip(fields, rows, strict=True)]
    )


def _as_type(words: Int[Array, "..."], dtype: jnp.dtype) -> Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(words, dtype)
    return words.astype(dtype)


def advance(
    controls: Controls,
    slots: Int[Array, "batch"],
    tokens: Int[Array, "batch new"],
    count: Int[Array, "batch"],
    grammar_state: Int[Array, "batch"] | None,
) -> Controls:
    """The controls with the first ``count`` of each slot's new tokens taken into its text.

    Args:
        grammar_state: behind the last of them; of a slot that ends with them it has no meaning.
    """
    stands = jnp.arange(tokens.shape[1]) < count[:, None]
    rows = jnp.where(stands, slots[:, None], controls.used.shape[0])
    line = jnp.concatenate([controls.recent.at[slots].get(mode="fill", fill_value=NO_TOKEN), tokens], axis=1)
    recent = jnp.take_along_axis(line, count[:, None] + jnp.arange(LOOK_BACK), axis=1)
    if grammar_state is not None:
        moved = jnp.where(count > 0, slots, controls.used.shape[0])
        states = controls.grammar_state.at[moved].set(grammar_state, mode="drop")
        controls = replace(controls, grammar_state=states)
    return replace(
        controls,
        counts=controls.counts.at[rows, tokens].add(GENERATED, mode="drop"),
        recent=controls.recent.at[slots].set(recent, mode="drop"),
    )


def paths(draft: Draft, ancestor_mask: AncestorMask, depth: int) -> Int[Array, "batch nodes depth"]:
    """The tokens from behind the root to each node, itself the last; `NO_TOKEN` beyond.

    Args:
        ancestor_mask: ancestors of each node (`jspec.core.ancestors.ancestors`).
        depth: of the tree.
    """
    node_depth = ancestor_mask.sum(axis=-1, dtype=np.int32) - 1
    is_there = ancestor_mask[:, :, None] & (node_depth[:, None] == np.arange(1, depth + 1)[:, None])[:, None]
    token = jnp.sum(jnp.where(is_there, draft.tokens[:, None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(is_there.any(axis=-1), token, NO_TOKEN)


def by_use(
    view: SlotView,
    product: PartialSums,
    path: Callable[[], Int[Array, "batch nodes depth"]],
    run: Callable[[PartialSums], Decision],
) -> tuple[Decision, Int[Array, "batch"] | None]:
    """Run a decision by logits, or, where a row uses controls, by logits edited.

    Args:
        product: the logits, [1, batch, nodes, vocab], perhaps to be scaled.
        path: gives the tokens from behind the root to each node (`paths`); called where they are needed.
        run: takes the logits in the same form.

    Returns:
        What ``run`` decides, and the state of each row's grammar behind that.
    """
    if view.controls is None:
        return run(product), None
    none = None if view.grammars is None else jnp.full(view.lengths.shape, grammar_mask.NO_STATE, jnp.int32)

    def with_controls() -> tuple[Decision, Array | None]:
        to_nodes = path()
        best, bonus = run(edit(reduce_partials(product, jnp.float32), view, to_nodes)[None])
        if none is None:
            return (best, bonus), None
        kept = jnp.take_along_axis(to_nodes, best[:, None, None], axis=1)
        return (best, bonus), grammar_mask.states(view, jnp.concatenate([kept, bonus[:, None, None]], axis=-1))[:, 0]

    if view.processor is not None:  # which edits every row
        return with_controls()
    return jax.lax.cond(_is_used(view), with_controls, lambda: (run(product), none))


def edit_one(logits: Float[Array, "batch 1 vocab"], view: SlotView) -> Float[Array, "batch 1 vocab"]:
    """`edit` where there is nothing behind the root; small enough to be returned by a conditional."""
    if view.controls is None:
        return logits
    nothing = jnp.zeros((*logits.shape[:2], 0), jnp.int32)
    if view.processor is not None:
        return edit(logits, view, nothing)
    return jax.lax.cond(_is_used(view), lambda: edit(logits, view, nothing), lambda: logits)


def _is_used(view: SlotView) -> Bool[Array, ""]:
    assert view.controls is not None
    return jnp.any(view.controls.used.at[view.slots].get(mode="fill", fill_value=False) & view.active)


def edit(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """The logits under each row's controls; those of a row without any are returned as they are.

    Args:
        logits: raw, behind every node.
        path: the tokens from behind the root to each node, `NO_TOKEN` beyond; the slot's own text includes the root.
    """
    assert view.controls is not None
    row: Controls = jax.tree.map(lambda field: field.at[view.slots].get(mode="fill", fill_value=0), view.controls)
    depth = jnp.sum(path != NO_TOKEN, axis=-1)
    edited = _penalised(logits + row.bias[:, None], row, path)
    vocab = jnp.arange(logits.shape[-1])
    is_early = view.lengths[:, None] + depth + 1 < row.may_end_at[:, None]
    for index in range(view.sampling.stop_ids.shape[1]):
        is_end = vocab == view.sampling.stop_ids[:, None, index, None]
        edited = jnp.where(is_early[..., None] & is_end, -jnp.inf, edited)
    edited = jnp.where(row.used[:, None, None], edited, logits)
    edited = _without_bad_words(edited, row, path, depth)  # last, in place: all before it is one pass over the logits
    if view.grammars is not None:
        edited = grammar_mask.only_allowed(edited, view, path)
    if view.masks is not None:
        edited = grammar_mask.only_masked(edited, view)
    return edited if view.processor is None else logits_processor.apply(edited, view, path)


def _penalised(
    logits: Float[Array, "batch nodes vocab"], row: Controls, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """Repetition over the whole text, then presence and frequency over what was generated."""
    vocab = jnp.arange(logits.shape[-1])
    counts = jnp.broadcast_to(row.counts[:, None], logits.shape)
    for index in range(path.shape[-1]):
        counts = counts + GENERATED * (path[..., index, None] == vocab)
    repetition = row.repetition[:, None, None]
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    generated = counts // GENERATED
    penalty = row.frequency[:, None, None] * generated + row.presence[:, None, None] * (generated > 0)
    return logits - penalty


def _without_bad_words(
    logits: Float[Array, "batch nodes vocab"],
    row: Controls,
    path: Int[Array, "batch nodes depth"],
    depth: Int[Array, "batch nodes"],
) -> Float[Array, "batch nodes vocab"]:
    """-inf for the last token of every bad word whose beginning the text ends with."""
    batch, nodes, _ = path.shape
    line = jnp.concatenate([jnp.broadcast_to(row.recent[:, None], (batch, nodes, LOOK_BACK)), path], axis=-1)
    newest = jnp.take_along_axis(line, depth[..., None] + jnp.arange(LOOK_BACK), axis=-1)
    beginnings = row.bad_beginnings[:, None]
    follows = jnp.all((beginnings == NO_TOKEN) | (beginnings == newest[:, :, None]), axis=-1)
    follows &= row.used[:, None, None]
    tokens = jnp.where(follows, row.bad_ends[:, None], logits.shape[-1])
    where = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[:, None], tokens
    return logits.at[where].set(-jnp.inf, mode="drop")
