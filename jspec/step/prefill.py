"""Programs that run one chunk of a prompt, and that write the missing draft cache rows of an ended request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jspec import verify
from jspec.core.records import PrefillInput, Sampling, SlotState, SlotView, StepOutput, TokenBatch, Verdict, pack_result
from jspec.models import kv_cache
from jspec.models.decoder import TargetOut, forward
from jspec.sampling import grammar_mask, logprobs, penalties, sampler
from jspec.step.program import Params, Program, token_history, view_of


@jax.named_scope("prefill")
def prefill_step(
    program: Program,
    params: Params,
    state: SlotState,
    packed: Int[Array, "packed"],
    masks: UInt32[Array, "1 1 words"] | None = None,
) -> tuple[SlotState, StepOutput]:
    """Run one chunk of one prompt; the last chunk samples the first token, which becomes the root of the next round.

    Args:
        state: the slot state; its buffers are donated.
        packed: a packed `PrefillInput`, whose number of tokens is fixed for the program.
        masks: mask of the first token, if the host masks the request's grammar (`jspec.step.split_decode`).
    """
    chunk = PrefillInput.unpack(packed, pages=state.page_table.shape[1])
    state = _admit(state, chunk)
    # The slot becomes active only in its last chunk, but the view of an inactive slot would be empty.
    view = view_of(replace(state, active=state.active.at[chunk.slot].set(True)), chunk.slot[None], program)
    view = replace(view, masks=masks)
    offsets = jnp.arange(chunk.tokens.shape[0])
    is_written = (offsets < chunk.count) & (chunk.write == 1)
    if state.token_history is not None:
        count = jnp.where(chunk.write == 1, chunk.count, 0)[None]
        history = kv_cache.write_token_history(
            state.token_history, view.page_table, chunk.start[None], chunk.tokens[None], count
        )
        state = replace(state, token_history=history)
        view = replace(view, token_history=token_history(state, view.page_table))
    batch = TokenBatch(
        tokens=chunk.tokens[None],
        positions=(chunk.start + offsets)[None],
        valid=is_written[None],
        first_row=chunk.start[None],
        page_table=view.page_table,
        bits=None,
        implementation=view.implementation,
        deterministic=view.deterministic,
    )
    with jax.named_scope("target"):
        normed = (params.target.config.num_layers + 1,) if program.prompt_logprobs else ()
        out, target = forward(
            params.target,
            state.target,
            batch,
            feature_layers=program.feature_layers + normed,
            logit_rows=(chunk.count - 1)[None, None],
        )
    prompt = None
    if program.prompt_logprobs:
        with jax.named_scope("logprobs"):
            assert out.features is not None
            features, states = logprobs.without_normed(out.features, params.target.config.hidden_size)
            head = partial(
                params.target.logits_of,
                implementation=view.implementation,
                deterministic=view.deterministic,
            )
            prompt = logprobs.of_chunk(states, chunk, head, view)
            out = replace(out, features=features)
    with jax.named_scope("draft"):
        draft_state = program.drafter.prefill(params.draft, state.draft, view, batch, out.features)
    state, output = _first_token(program, replace(state, target=target, draft=draft_state), chunk, view, out)
    return state, replace(output, prompt=prompt)


@jax.named_scope("admit")
def _admit(state: SlotState, chunk: PrefillInput) -> SlotState:
    """Write a request's length, pages and sampling parameters into its slot; every chunk repeats this."""
    row: Sampling = jax.tree.map(lambda x: x[0], chunk.sampling())
    used = state.controls
    return replace(
        state,
        lengths=state.lengths.at[chunk.slot].set(chunk.start),
        remaining=state.remaining.at[chunk.slot].set(chunk.remaining),
        page_table=state.page_table.at[chunk.slot].set(chunk.page_row),
        sampling=jax.tree.map(lambda all_, one: all_.at[chunk.slot].set(one), state.sampling, row),
        controls=None if used is None else replace(used, used=used.used.at[chunk.slot].set(chunk.controlled == 1)),
    )


@jax.named_scope("first_token")
def _first_token(
    program: Program, state: SlotState, chunk: PrefillInput, view: SlotView, out: TargetOut
) -> tuple[SlotState, StepOutput]:
    """Sample the token after the chunk, or take it from ``chunk.root``; the last chunk's token becomes the root."""
    length = chunk.start + chunk.count
    newest = chunk.tokens[chunk.count - 1]
    of_newest = replace(view, root=newest[None], lengths=length[None] - 1)
    logits = penalties.apply_penalties_at_root(out.logits, of_newest)
    token = sampler.target_tokens(logits[None], of_newest, jnp.ones((1, 1), jnp.int32))
    token = jnp.where(chunk.root >= 0, chunk.root, token)
    scores = None
    if program.logprobs is not None:
        scores = logprobs.of_first(program.logprobs, out.logits, logits, token, view)
    one = jnp.ones(1, jnp.int32)
    verdict = verify.cut(
        Verdict(accept_len=0 * one, path=0 * one[:, None], tokens=token, counts=one, ended=~view.active), view
    )
    is_last: Bool[Array, ""] = chunk.last == 1
    state = replace(
        state,
        root=state.root.at[chunk.slot].set(token[0, 0]),
        lengths=state.lengths.at[chunk.slot].set(length),
        active=state.active.at[chunk.slot].set(is_last & ~verdict.ended[0]),
        remaining=state.remaining.at[chunk.slot].set(chunk.remaining - is_last),
    )
    if state.controls is not None:
        is_new = is_last & (chunk.root < 0)
        grammar_state = None if state.grammars is None else grammar_mask.states(view, token[..., None])[:, 0]
        count = is_new.astype(jnp.int32)[None]
        state = replace(state, controls=penalties.advance(state.controls, view.slots, token, count, grammar_state))
    scores = jax.tree.map(lambda x: x[None], scores)
    return state, StepOutput(report=pack_result(verdict, 0 * one)[None], trace=None, logprobs=scores)


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
