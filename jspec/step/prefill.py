"""Programs that run pieces of prompts, and that write the missing draft cache rows of an ended request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jspec import verify
from jspec.core.prefill_input import PrefillInput, PromptPiece
from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import PromptBatch, SlotState, SlotView, StepOutput, StepResult, Verdict, of_piece, pack_result
from jspec.models import kv_cache
from jspec.models.decoder import TargetOut, forward
from jspec.sampling import grammar_mask, logprobs, penalties, sampler
from jspec.step.program import Params, Program, token_history, view_of


@jax.named_scope("prefill")
def prefill_step(
    program: Program,
    params: Params,
    state: SlotState,
    packed: PrefillInput,
    masks: UInt32[Array, "pieces 1 words"] | None = None,
) -> tuple[SlotState, StepOutput]:
    """Run pieces of any number of prompts; a prompt's last piece samples its first token, the root of the next round.

    Args:
        state: the slot state; its buffers are donated.
        packed: the pieces and their tokens; their shapes are fixed for the program.
        masks: mask of each piece's first token, if the host masks a request's grammar (`jspec.step.split_decode`).
    """
    assert params.target is not None
    state, pieces, view, batch = _begin(program, state, packed)
    view = replace(view, masks=masks)
    if state.token_history is not None:
        count = jnp.sum(batch.valid, axis=1)
        history = kv_cache.write_token_history(
            state.token_history, batch.page_table, batch.first_row, batch.tokens, count
        )
        state = replace(state, token_history=history)
        view = replace(view, token_history=token_history(state, view.page_table))
    adapted = replace(batch, adapters=params.adapters, adapter=batch.of_piece(view.sampling.adapter))
    with jax.named_scope("target"):
        normed = (params.target.config.num_layers + 1,) if program.prompt_logprobs else ()
        out, target = forward(
            params.target,
            state.target,
            adapted,
            feature_layers=program.feature_layers + normed,
            logit_rows=batch.newest[:, None],
        )
    prompt = None
    if program.prompt_logprobs:
        with jax.named_scope("logprobs"):
            assert out.features is not None
            features, states = logprobs.without_normed(out.features, params.target.config.hidden_size)
            prompt = logprobs.of_prompts(
                states, batch, pieces.root, partial(params.target.logits_of, numerics=view.numerics), view
            )
            out = replace(out, features=features)
    with jax.named_scope("draft"):
        draft_state = program.drafter.prefill(params.draft, state.draft, view, batch, out.features)
    state, output = _first_tokens(program, replace(state, target=target, draft=draft_state), pieces, batch, view, out)
    return state, replace(output, prompt=prompt)


@jax.named_scope("draft_prefill")
def draft_prefill_step(
    program: Program, params: Params, state: SlotState, packed: PrefillInput, report: Int[Array, "1 pieces columns"]
) -> SlotState:
    """Run pieces of prompts on devices that have only the draft model.

    Args:
        state: the slot state; its buffers are donated.
        packed: the input of `prefill_step`.
        report: that of the output of `prefill_step`, which has the first tokens.
    """
    state, pieces, view, batch = _begin(program, state, packed)
    draft_state = program.drafter.prefill(params.draft, state.draft, view, batch, None)
    result = StepResult.read(report[0])
    return _end(replace(state, draft=draft_state), pieces, batch, result.tokens[:, 0], result.ended == 1)


def _begin(
    program: Program, state: SlotState, packed: PrefillInput
) -> tuple[SlotState, PromptPiece, SlotView, PromptBatch]:
    """Enter the pieces into the slot state, and return them with their view and their tokens."""
    pieces, tokens = packed.unpack()
    state = _admit(state, pieces)
    # A slot becomes active only in its last piece, but the view of an inactive slot would be empty.
    view = view_of(replace(state, active=state.active.at[pieces.slot].set(True, mode="drop")), pieces.slot, program)
    view = replace(view, lengths=pieces.start, remaining=pieces.remaining)  # `_end` writes those after the piece
    return state, pieces, view, _blocks(pieces, tokens, view)


@jax.named_scope("admit")
def _admit(state: SlotState, pieces: PromptPiece) -> SlotState:
    """Write pages and sampling parameters of requests into their slots; every piece repeats this."""
    put = partial(_put, pieces)
    used = state.controls
    return replace(
        state,
        page_table=put(state.page_table, pieces.page_row),
        sampling=jax.tree.map(put, state.sampling, pieces.sampling),
        controls=None if used is None else replace(used, used=put(used.used, pieces.controlled == 1)),
    )


def _put(pieces: PromptPiece, all_: Array, values: Array) -> Array:
    """Return the values of all slots with those of the pieces' slots replaced."""
    return all_.at[pieces.slot].set(values, mode="drop")


@jax.named_scope("blocks")
def _blocks(pieces: PromptPiece, tokens: Int[Array, "blocks rows"], view: SlotView) -> PromptBatch:
    """Assign the blocks of tokens to the pieces, in order; every piece begins with a block of its own."""
    count, rows = tokens.shape
    taken = jnp.where(pieces.count > 0, -(-pieces.count // rows), 0)  # blocks of a piece; padding pieces have none
    end_blocks = jnp.cumsum(taken)
    first_blocks = end_blocks - taken
    piece = jnp.searchsorted(end_blocks, jnp.arange(count), side="right").astype(jnp.int32)
    of_block = partial(of_piece, piece=piece)
    offset = rows * (jnp.arange(count) - of_block(first_blocks))  # of a block's first token in its piece
    first_row = jnp.where(piece < len(taken), of_block(pieces.start) + offset, 0).astype(jnp.int32)
    steps = jnp.arange(rows, dtype=jnp.int32)
    is_token = offset[:, None] + steps < of_block(pieces.count)[:, None]
    return PromptBatch(
        tokens=tokens,
        positions=first_row[:, None] + steps,
        valid=is_token & (of_block(pieces.write) == 1)[:, None],
        first_row=first_row,
        page_table=of_block(view.page_table),
        bits=None,
        numerics=view.numerics,
        slots=view.slots,
        piece=piece,
        starts=pieces.start,
        ends=pieces.start + pieces.count,
        newest=jnp.maximum(rows * first_blocks + pieces.count - 1, 0),
    )


@jax.named_scope("first_token")
def _first_tokens(
    program: Program, state: SlotState, pieces: PromptPiece, batch: PromptBatch, view: SlotView, out: TargetOut
) -> tuple[SlotState, StepOutput]:
    """Sample the token after each piece, or take it from ``pieces.root``; a last piece's token becomes the root."""
    newest = batch.newest_of(batch.tokens[..., None])[:, 0]
    of_newest = replace(view, root=newest, lengths=batch.ends - 1)
    logits = penalties.apply_penalties_at_root(out.logits, of_newest)
    token = sampler.target_tokens(logits[None], of_newest, jnp.ones((len(newest), 1), jnp.int32))
    token = jnp.where(pieces.root[:, None] >= 0, pieces.root[:, None], token)
    scores = None
    if program.logprobs is not None:
        scores = logprobs.of_first(program.logprobs, out.logits, logits, token, view)
    ones = jnp.ones_like(pieces.slot)
    verdict = verify.cut(
        Verdict(accept_len=0 * ones, path=0 * ones[:, None], tokens=token, counts=ones, ended=~view.active), view
    )
    state = _end(state, pieces, batch, token[:, 0], verdict.ended)
    if state.controls is not None:
        is_new = (pieces.last == 1) & (pieces.root < 0)
        grammar_state = None if state.grammars is None else grammar_mask.states(view, token[..., None])[:, 0]
        count = is_new.astype(jnp.int32)
        new = jnp.where(is_new[:, None], token, NO_TOKEN)
        rows = penalties.text_after(state.controls, view.slots, new, count)
        controls = replace(
            state.controls, **{name: _put(pieces, getattr(state.controls, name), row) for name, row in rows.items()}
        )
        state = replace(state, controls=penalties.advance(controls, view.slots, token, count, grammar_state))
    scores = jax.tree.map(lambda x: x[None], scores)
    return state, StepOutput(report=pack_result(verdict, 0 * ones)[None], trace=None, logprobs=scores)


def _end(
    state: SlotState,
    pieces: PromptPiece,
    batch: PromptBatch,
    token: Int[Array, "pieces"],
    ended: Bool[Array, "pieces"],
) -> SlotState:
    """Enter the tokens after the pieces into the slot state; a last piece activates its slot."""
    put, is_last = partial(_put, pieces), pieces.last == 1
    return replace(
        state,
        root=put(state.root, token),
        lengths=put(state.lengths, batch.ends),
        active=put(state.active, is_last & ~ended),
        remaining=put(state.remaining, pieces.remaining - is_last),
    )


def write_pending_rows_step(
    program: Program, params: Params, state: SlotState, packed: Int[Array, "packed"]
) -> SlotState:
    """Write the missing draft cache rows of a request that has just ended.

    The next round would have written these rows. Without them the request's last page could not enter the prefix cache.

    Args:
        state: the slot state; its buffers are donated.
        packed: int32 vector of slot, root, number of committed rows, and the slot's row of the page table.
    """
    slot, root, length = packed[:3]
    running = replace(
        state,
        root=state.root.at[slot].set(root),
        lengths=state.lengths.at[slot].set(length),
        active=state.active.at[slot].set(True),
        page_table=state.page_table.at[slot].set(packed[3:]),
    )
    with jax.named_scope("write_pending_rows"):
        draft = program.drafter.write_pending_rows(params.draft, state.draft, view_of(running, slot[None], program))
    return replace(state, draft=draft)
