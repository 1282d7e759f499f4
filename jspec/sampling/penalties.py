"""Edits logits by a request's controls: bias, penalties, bad words, minimum length, allowed tokens and grammar.

The controls edit the target's raw logits at every draft node, before the accept rule reads them. At each node, the node
and its ancestors count as generated tokens. Therefore drafting changes no token and no distribution. Temperature,
top-k, top-p and min-p follow in `jspec.sampling.sampler.process`.

The order of the edits is that of transformers' processors: bias, repetition penalty, presence and frequency penalties,
bad words, minimum length, allowed tokens and grammar (`jspec.sampling.grammar_mask`); then the user's processor
(`jspec.sampling.logits_processor`), and last the thinking budget (`jspec.sampling.thinking`). No edit but the last one
allows a token that an earlier edit has banned. Tokens banned for the whole request (single-token bad words, tokens not
in allowed_token_ids) have -inf in the logit bias.

A slot's token counts are computed when its request is admitted, and updated with every committed token. The tokens on
the path to a draft node are counted when the node's logits are edited. In a step whose rows use no controls, only the
counts of committed tokens are updated, and no array as wide as the vocabulary is read.
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

from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import AncestorMask, Controls, Draft, SlotView
from jspec.core.thinking import ENDED, MAX_FORCED
from jspec.sampling import grammar_mask, logits_processor, thinking
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.shard import OwnColumns

MAX_BAD_WORDS = 128  # largest number of bad words of several tokens per request
MAX_BAD_WORD_TOKENS = 16
LOOK_BACK = MAX_BAD_WORD_TOKENS - 1  # number of newest tokens to compare with the beginning of a bad word
Decision = tuple[Int[Array, "batch"], Int[Array, "batch"]]  # the last accepted node, and the token after it
EARLY = -2  # instead of a forced token: the node forces none, and is before the minimum length
IN_PROMPT, GENERATED = (
    1,
    2,
)  # added to a token's count: the first once if the prompt has the token, the second per occurrence in the output


def unused(slots: int, vocab: int, args: int = 0) -> Controls:
    """Make the unused controls of a new engine; no two fields share an array.

    Args:
        slots: number of slots.
        vocab: size of the vocabulary.
        args: number of values that a request may pass to the user's logits processor. There is a column at least,
            because XLA of jax 0.11 crashes on arrays without elements in programs for several GPUs.
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
        thought=jnp.full(slots, ENDED, jnp.int32),
        think_markers=jnp.full((slots, 2), NO_TOKEN, jnp.int32),
        thinking_budget=jnp.full(slots, -1, jnp.int32),
        forced=jnp.full((slots, MAX_FORCED), NO_TOKEN, jnp.int32),
        forced_size=jnp.zeros(slots, jnp.int32),
        prompt_size=jnp.zeros(slots, jnp.int32),
        processor_args=jnp.zeros((slots, max(args, 1)), jnp.float32),
    )


def pack(slot: int, row: Mapping[str, np.ndarray]) -> np.ndarray:
    """Pack one slot's controls into the int32 vector that `admit` reads.

    Args:
        slot: index of the slot.
        row: the slot's values by field name of `Controls`, as arrays of 4-byte numbers; floats keep their bits.
    """
    fields = [np.ravel(row[field.name]) for field in dataclasses.fields(Controls)]
    assert len(fields) == len(row) and all(field.dtype.itemsize == 4 for field in fields)
    return np.concatenate([np.array([slot], np.int32), *[field.view(np.int32) for field in fields]])


def packed_size(controls: Controls) -> int:
    """Return the length of the int32 vector that `pack` returns."""
    return 1 + sum(math.prod(field.shape[1:]) for field in jax.tree.leaves(controls))


def admit(controls: Controls, packed: Int[Array, "packed"]) -> Controls:
    """Return the controls with one slot's row replaced by ``packed``, the result of `pack`.

    The memory of the old ``controls`` is reused (donated).
    """
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
    """Update each slot's token counts and grammar state with the tokens that the slot has emitted.

    Args:
        slots: slot index of each row.
        tokens: new tokens of each row.
        count: number of new tokens to count in each row, from the first.
        grammar_state: grammar state after the last counted token; undefined if the slot's request ends with this token.
    """
    is_committed = jnp.arange(tokens.shape[1]) < count[:, None]
    rows = jnp.where(is_committed, slots[:, None], controls.used.shape[0])
    if grammar_state is not None:
        moved = jnp.where(count > 0, slots, controls.used.shape[0])
        states = controls.grammar_state.at[moved].set(grammar_state, mode="drop")
        controls = replace(controls, grammar_state=states)
    return replace(controls, counts=controls.counts.at[rows, tokens].add(GENERATED, mode="drop"))


def text_after(
    controls: Controls, slots: Int[Array, "batch"], tokens: Int[Array, "batch new"], count: Int[Array, "batch"]
) -> dict[str, Int[Array, "batch ..."]]:
    """Return the new rows of the other fields that change with the text, by name; the caller stores them.

    Args:
        slots: slot index of each row.
        tokens: new tokens of each row, then `NO_TOKEN`.
        count: number of new tokens of each row.
    """
    history = jnp.concatenate([controls.recent.at[slots].get(mode="fill", fill_value=NO_TOKEN), tokens], axis=1)
    recent = jnp.take_along_axis(history, count[:, None] + jnp.arange(LOOK_BACK), axis=1)
    return dict(recent=recent, thought=thinking.states(controls.rows(slots), tokens[:, None])[:, 0])


def node_paths(draft: Draft, ancestor_mask: AncestorMask, depth: int) -> Int[Array, "batch nodes depth"]:
    """Return the token ids on the path from the root (excluded) to each node (included), then `NO_TOKEN`.

    Args:
        ancestor_mask: ancestors of each node (`jspec.core.ancestors.ancestors`).
        depth: depth of the tree.
    """
    node_depth = ancestor_mask.sum(axis=-1, dtype=np.int32) - 1
    is_at_depth = ancestor_mask[:, :, None] & (node_depth[:, None] == np.arange(1, depth + 1)[:, None])[:, None]
    token = jnp.sum(jnp.where(is_at_depth, draft.tokens[:, None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(is_at_depth.any(axis=-1), token, NO_TOKEN)


def decide_with_penalties(
    view: SlotView,
    logits: PartialSums,
    get_paths: Callable[[], Int[Array, "batch nodes depth"]],
    decide: Callable[[PartialSums], Decision],
) -> tuple[Decision, Int[Array, "batch"] | None]:
    """Call ``decide`` with the logits; edit them first if a row uses controls or the program has a logits processor.

    Args:
        logits: raw logits after every node, [1, batch, nodes, vocab]; scales may still be unapplied.
        get_paths: function that returns the token ids on the path to each node (`node_paths`); it is called only if
            the logits are edited.
        decide: function that takes logits in the form of ``logits``, and returns the last accepted node and the token
            after this node.

    Returns:
        The result of ``decide``, and each row's grammar state after the returned token (None if no grammar is used).
    """
    if view.controls is None:
        return decide(logits), None
    no_state = None if view.grammars is None else jnp.full(view.lengths.shape, grammar_mask.NO_STATE, jnp.int32)
    if isinstance(logits, OwnColumns):  # then no row uses controls
        return decide(logits), no_state

    def with_controls() -> tuple[Decision, Array | None]:
        paths = get_paths()
        last_node, bonus = decide(apply_penalties(reduce_partials(logits, jnp.float32), view, paths)[None])
        if no_state is None:
            return (last_node, bonus), None
        accepted = jnp.take_along_axis(paths, last_node[:, None, None], axis=1)
        path = jnp.concatenate([accepted, bonus[:, None, None]], axis=-1)
        return (last_node, bonus), grammar_mask.states(view, path)[:, 0]

    if view.processor is not None:  # a processor edits every row
        return with_controls()
    return jax.lax.cond(_is_used(view), with_controls, lambda: (decide(logits), no_state))


def apply_penalties_at_root(logits: Float[Array, "batch 1 vocab"], view: SlotView) -> Float[Array, "batch 1 vocab"]:
    """Call `apply_penalties` on the root's logits if any row uses controls.

    The call is in a conditional, which copies its result. This takes little time, because the root's logits are small.
    """
    if view.controls is None:
        return logits
    no_path = jnp.zeros((*logits.shape[:2], 0), jnp.int32)
    if view.processor is not None:
        return apply_penalties(logits, view, no_path)
    return jax.lax.cond(_is_used(view), lambda: apply_penalties(logits, view, no_path), lambda: logits)


def _is_used(view: SlotView) -> Bool[Array, ""]:
    assert view.controls is not None
    return jnp.any(view.controls.used.at[view.slots].get(mode="fill", fill_value=False) & view.active)


def apply_penalties(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """Edit the logits of each row by its controls; rows without controls are returned unchanged.

    Args:
        logits: raw logits after every node.
        path: token ids on the path to each node (`node_paths`), without the root; the slot's counts include the root.
    """
    assert view.controls is not None
    row = view.controls.rows(view.slots)
    depth = jnp.sum(path != NO_TOKEN, axis=-1)
    edited = _apply_counts(logits + row.bias[:, None], row, path)
    vocab = jnp.arange(logits.shape[-1])
    is_early = view.lengths[:, None] + depth + 1 < row.may_end_at[:, None]
    forced = thinking.forced_tokens(row, path)
    forced = jnp.where((forced == NO_TOKEN) & is_early, EARLY, forced)  # one array, so one kernel on a GPU
    for index in range(view.sampling.stop_ids.shape[1]):
        is_stop = vocab == view.sampling.stop_ids[:, None, index, None]
        edited = jnp.where((forced == EARLY)[..., None] & is_stop, -jnp.inf, edited)
    edited = jnp.where(row.used[:, None, None], edited, logits)
    edited = thinking.force(edited, forced)
    edited = _ban_bad_words(edited, row, path, depth, forced)  # in place: all earlier edits are fused into one pass
    if view.grammars is None and view.masks is None and view.processor is None:
        return edited
    if view.grammars is not None:
        edited = grammar_mask.apply_grammars(edited, view, path)
    if view.masks is not None:
        edited = grammar_mask.apply_host_masks(edited, view)
    if view.processor is not None:
        edited = logits_processor.apply(edited, view, path)
    return thinking.force(edited, forced)  # again, over these edits


def _apply_counts(
    logits: Float[Array, "batch nodes vocab"], row: Controls, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """Apply repetition penalties to tokens of prompt and output, then presence and frequency penalties to output."""
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


def _ban_bad_words(
    logits: Float[Array, "batch nodes vocab"],
    row: Controls,
    path: Int[Array, "batch nodes depth"],
    depth: Int[Array, "batch nodes"],
    forced: Int[Array, "batch nodes"],
) -> Float[Array, "batch nodes vocab"]:
    """Set the logit of a bad word's last token to -inf at nodes whose newest tokens are the word's other tokens.

    Args:
        forced: token that each node forces, which no bad word bans there; negative: it forces none.
    """
    batch, nodes, _ = path.shape
    history = jnp.concatenate([jnp.broadcast_to(row.recent[:, None], (batch, nodes, LOOK_BACK)), path], axis=-1)
    newest = jnp.take_along_axis(history, depth[..., None] + jnp.arange(LOOK_BACK), axis=-1)
    beginnings = row.bad_beginnings[:, None]
    follows = jnp.all((beginnings == NO_TOKEN) | (beginnings == newest[:, :, None]), axis=-1)
    follows &= row.used[:, None, None] & (forced < 0)[..., None]
    tokens = jnp.where(follows, row.bad_ends[:, None], logits.shape[-1])
    index = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[:, None], tokens
    return logits.at[index].set(-jnp.inf, mode="drop")
