"""The decode step as one program. Each round of it has four stages: draft, verify, accept and commit.

A round also computes log-probabilities, if requested, and a report for the host. `jspec.step.program` documents the
state and its invariants. `jspec.step.prefill` computes prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import verify
from jspec.core.ancestors import ancestors, by_depth, depths
from jspec.core.packing import Packing
from jspec.core.records import (
    COLUMNS,
    Draft,
    LayerState,
    LogProbs,
    SlotState,
    SlotView,
    StepOutput,
    TokenBatch,
    Trace,
    Verdict,
    pack_result,
)
from jspec.core.replaced_rows import replaced_rows
from jspec.draft.base import static_draft
from jspec.models import kv_cache
from jspec.models.decoder import TargetOut, forward
from jspec.sampling import logprobs, penalties
from jspec.sampling.forced_draft import draft_forced_text
from jspec.sampling.sampler import with_noise
from jspec.step.budget import apply_budget
from jspec.step.program import Params, Program, view_of
from pallas_kernels.attention.ancestor_bits import ancestor_bits


def spec_step(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, StepOutput]:
    """Run `program.rounds` rounds for a batch of slots.

    Args:
        state: the slot state; its buffers are donated.
        slots: slot of each batch row; a padding row has the number of slots.
    """
    if program.rounds == 1:
        state, *results = spec_round(program, params, state, slots)
        return state, output_of_one(program, results)

    def body(index: Int[Array, ""], carry: Any) -> Any:
        state, outputs = carry
        state, *result = spec_round(program, params, state, slots)
        return state, jax.tree.map(lambda all_, of_round: all_.at[index].set(of_round), outputs, tuple(result))

    shapes = jax.eval_shape(lambda s: spec_round(program, params, s, slots)[1:], state)
    empty = jax.tree.map(lambda x: jnp.zeros((program.rounds, *x.shape), x.dtype), shapes)
    state, results = jax.lax.fori_loop(0, program.rounds, body, (state, empty))
    return state, _output_of(program, results)


def output_of_one(program: Program, results: Sequence[Any]) -> StepOutput:
    """Make the output of a step with one round from the results of `spec_round` except the state."""
    return _output_of(program, [jax.tree.map(lambda x: x[None], result) for result in results])


def _output_of(program: Program, results: Sequence[Any]) -> StepOutput:
    """Make a step's output from report, trace and log-probabilities, whose first axis is rounds."""
    report, trace, scores = results
    by_source = report.shape[-1] > program.drafter.tree.depth + 1 + COLUMNS
    return StepOutput(report=report, trace=trace, logprobs=scores, by_source=by_source)


def spec_round(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, Int[Array, "batch columns"], Trace | None, LogProbs | None]:
    """Run the four stages of one round, and return its results.

    Returns:
        The new state, the packed report, the trace and the log-probabilities. The last two are None if the program does
        not return them.
    """
    view = round_view(program, params, state, slots)
    draft, state = draft_stage(program, params, state, view)
    state, _, results = verify_and_commit(program, params, state, view, draft)
    return state, *results


def round_view(program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]) -> SlotView:
    """Gather the state of a batch of slots, with the noise of all positions of the round."""
    view = view_of(state, slots, program)
    return with_noise(view, program.drafter.tree.depth + 1, params.main.config.vocab_size)


def verify_and_commit(
    program: Program, params: Params, state: SlotState, view: SlotView, draft: Draft
) -> tuple[SlotState, Verdict, tuple[Int[Array, "batch columns"], Trace | None, LogProbs | None]]:
    """Run the stages of a round after the draft stage (verify, accept and commit), and return its results.

    Args:
        state: the state after the draft stage.
        draft: the result of the draft stage.

    Returns:
        The new state, the verdict, and the other results of `spec_round`.
    """
    packing = None
    if program.nodes is not None:
        count, is_chain = draft.tokens.shape[0] * (1 + program.nodes), program.drafter.tree.is_chain
        draft, packing = apply_budget(draft, view.active, count, is_chain=is_chain)
    out, target = verify_stage(program, params, state, view, draft, packing)
    verdict = accept_stage(program, out, view, draft)
    scores = logprobs_stage(program, out, view, draft, verdict)
    state = commit_stage(program, params, replace(state, target=target), view, draft, verdict, out)
    trace = None
    if program.trace:
        with jax.named_scope("trace"):
            parents = jnp.where(draft.valid, draft.parents, -1)
            names = ("tokens", "scores", "confidence", "from_lookup", "match_length")
            trace = Trace(**{name: getattr(draft, name) for name in names}, parents=parents, path=verdict.path)
    return state, verdict, (report_stage(view, draft, verdict), trace, scores)


def draft_stage(program: Program, params: Params, state: SlotState, view: SlotView) -> tuple[Draft, SlotState]:
    """Draft a tree, with the text that a thinking budget forces, and no deeper than each request allows.

    If the tree has depth 0, the drafter only writes its pending rows.
    """
    with jax.named_scope("draft"):
        drafter = program.drafter
        if drafter.tree.depth == 0:
            state = replace(state, draft=drafter.write_pending_rows(params.draft, state.draft, view))
            return static_draft(drafter.tree, view, [], []), state
        if drafter.writes_target:
            draft, target = drafter.draft_with_target(params.draft, state.target, view)
            state = replace(state, target=target)
        else:
            seen = replace(view, target=state.target) if drafter.reads_target else view
            draft, draft_state = drafter.draft(params.draft, state.draft, seen)
            state = replace(state, draft=draft_state)
        if view.controls is not None and drafter.reads_accepted_tokens:
            rows = view.controls.rows(view.slots)
            draft = draft_forced_text(draft, rows, is_chain=drafter.tree.is_chain)
        within_cap = depths(ancestors(draft.parents)) <= view.sampling.draft_cap[:, None]
        return replace(draft, valid=draft.valid & within_cap), state


def verify_stage(
    program: Program,
    params: Params,
    state: SlotState,
    view: SlotView,
    draft: Draft,
    packing: Packing | None = None,
) -> tuple[TargetOut, list[LayerState]]:
    """Run the target on the root and the draft nodes; each node attends to committed rows and its own ancestors.

    Args:
        packing: nodes to run the target on; None: all.
    """
    assert params.target is not None
    with jax.named_scope("verify"):
        tree, fixed = program.drafter.tree, view.deterministic
        batch = TokenBatch(
            tokens=draft.tokens,
            positions=view.lengths[:, None] + depths(ancestors(draft.parents)),
            valid=jnp.broadcast_to(view.active[:, None], draft.tokens.shape),
            first_row=view.lengths,
            page_table=view.page_table,
            bits=None if tree.is_chain or fixed else ancestor_bits(draft.parents),
            numerics=view.numerics,
            paths=by_depth(ancestors(draft.parents), tree.depth) if fixed and not tree.is_chain else None,
            packing=packing,
            slots=view.slots,
            adapters=params.adapters,
            adapter=view.sampling.adapter,
        )
        return forward(params.target, state.target, batch, feature_layers=program.feature_layers)


def accept_stage(program: Program, out: TargetOut, view: SlotView, draft: Draft) -> Verdict:
    """Apply the accept rule, and cut the emitted tokens at stop ids and length limits."""
    with jax.named_scope("accept"):
        assert out.product is not None
        return verify.accept(out.product, draft, ancestors(draft.parents), view, program.drafter.tree)


def logprobs_stage(program: Program, out: TargetOut, view: SlotView, draft: Draft, verdict: Verdict) -> LogProbs | None:
    """Compute the log-probabilities of the emitted tokens; None if the program does not return any."""
    if program.logprobs is None:
        return None
    with jax.named_scope("logprobs"):
        return logprobs.of_round(program.logprobs, out.logits, draft, verdict, view, program.drafter.tree)


def commit_stage(
    program: Program,
    params: Params,
    state: SlotState,
    view: SlotView,
    draft: Draft,
    verdict: Verdict,
    out: TargetOut,
) -> SlotState:
    """Move the accepted cache rows into place, pass features to the drafter, and update the state of each slot."""
    with jax.named_scope("commit"):
        tree = program.drafter.tree
        target = kv_cache.commit(state.target, tree, view, verdict)
        draft_state = program.drafter.commit(params.draft, state.draft, view, draft, verdict, out.features)
        written = _advanced(state, view, verdict)
        if state.token_history is not None:
            rows = jnp.concatenate([view.root[:, None], verdict.tokens[:, :-1]], axis=1)
            count = jnp.where(view.active, verdict.counts, 0)
            history = kv_cache.write_token_history(state.token_history, view.page_table, view.lengths, rows, count)
            written["token_history"] = history
        if state.controls is not None:
            controls = replace(state.controls, **written["controls"])
            written["controls"] = penalties.advance(
                controls, view.slots, verdict.tokens, verdict.counts, verdict.grammar_state
            )
        return replace(state, target=target, draft=draft_state, **written)


def draft_commit_stage(
    program: Program, params: Params, state: SlotState, view: SlotView, draft: Draft, verdict: Verdict
) -> SlotState:
    """Do the part of `commit_stage` of devices that have only the draft model."""
    with jax.named_scope("commit"):
        draft_state = program.drafter.commit(params.draft, state.draft, view, draft, verdict, None)
        return replace(state, draft=draft_state, **_advanced(state, view, verdict))


def _advanced(state: SlotState, view: SlotView, verdict: Verdict) -> dict[str, Any]:
    """Return the fields of the slot state that say how far each slot is, after a round, and those of its controls."""
    newest = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.counts - 1, 0)[:, None], axis=1)[:, 0]
    updates: dict[str, Any] = dict(
        root=newest,
        lengths=view.lengths + verdict.counts,
        active=view.active & ~verdict.ended,
        remaining=view.remaining - verdict.counts,
    )
    fields = {name: getattr(state, name) for name in updates}
    if state.controls is not None:
        tokens = jax.lax.optimization_barrier(verdict.tokens)  # else XLA splits the kernel that computes the updates
        rows = penalties.text_after(state.controls, view.slots, tokens, verdict.counts)
        updates["controls"], fields["controls"] = rows, {name: getattr(state.controls, name) for name in rows}
    return replaced_rows(fields, view.slots, updates)


def report_stage(view: SlotView, draft: Draft, verdict: Verdict) -> Int[Array, "batch columns"]:
    """Pack the integers that the host reads after every round: tokens, counts and flags of each row."""
    with jax.named_scope("report"):
        num_drafted = jnp.where(view.active, jnp.sum(draft.valid[:, 1:], axis=1, dtype=jnp.int32), 0)
        if draft.from_lookup is None:
            return pack_result(verdict, num_drafted)
        from_lookup = draft.valid & draft.from_lookup & view.active[:, None]
        lookup_drafted = jnp.sum(from_lookup, axis=1, dtype=jnp.int32)
        on_path = jnp.take_along_axis(from_lookup, jnp.maximum(verdict.path, 0), axis=1)
        head_accepted = jnp.sum((verdict.path > 0) & ~on_path, axis=1, dtype=jnp.int32)
        return pack_result(verdict, num_drafted, (lookup_drafted, head_accepted))
