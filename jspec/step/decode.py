"""The verb: one round, draft -> verify -> accept -> commit, as one device program. A prompt: `jspec.step.prefill`.

Invariants:
1. ``root`` is the newest sampled token; its KV is not in the cache yet.
2. ``lengths[s]`` rows of slot s are committed; what lies beyond is never read, so rejection costs nothing.
3. Verify writes root and nodes at rows [lengths, lengths + N). Commit adds ``1 + accept_len`` to lengths; for a chain
   that is all, no row moves.
4. The draft's cache lags the target's by the rows accepted in the last round and no more; the next round makes it good,
   whether it drafts or not. The draft's state has the shapes of the drafter's whole tree; a round may cut it.
5. Stop ids and length limits are decided here, not on the host, so rounds may be dispatched before earlier ones are
   read: an ended row is inactive from the next round on. It then has length 0 and an empty page table, so it reads
   nothing, writes nothing and emits nothing.
6. The tokens have the target's distribution for any drafter.
7. A padding row has slot index S: gathers fill zeros, scatters drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jspec import verify
from jspec.core.accept_rule import AcceptRule
from jspec.core.ancestors import ancestors, by_depth, depths
from jspec.core.records import (
    Draft,
    LogProbs,
    Sampling,
    SlotState,
    SlotView,
    StepOutput,
    TokenBatch,
    Trace,
    Verdict,
    pack_result,
)
from jspec.draft.base import Drafter, static_draft
from jspec.models import kv_cache
from jspec.models.decoder import Model, TargetOut, forward
from jspec.sampling import grammar_mask, logprobs, penalties
from jspec.sampling.logits_processor import LogitsProcessor
from pallas_kernels.attention.ancestor_bits import ancestor_bits
from pallas_kernels.state.gather_rows import gather_rows
from pallas_kernels.state.scatter_rows import scatter_rows


@dataclass(frozen=True)
class Program:
    """What a compiled step depends on besides the shapes of its arguments."""

    drafter: Drafter
    feature_layers: tuple[int, ...]
    accept: AcceptRule | str  # a rule, or the name of one
    implementation: str
    rounds: int = 1
    trace: bool = False
    controls: bool = False  # serves requests that use `jspec.sampling.penalties`
    grammar_cells: int = 0  # of a table of `jspec.sampling.grammar_mask`; 0: no grammars
    processor: LogitsProcessor | None = None  # a user's own; wants controls
    processor_args: int = 0  # numbers that a request may give it
    logprobs: str | None = None  # of emitted tokens, by a mode of `jspec.sampling.logprobs`; None: none
    prompt_logprobs: bool = False  # of a prompt's tokens
    deterministic: bool = False  # a token's logits are the same bits in every program

    @property
    def compiler_options(self) -> dict[str, Any]:
        """With which it is compiled.

        A tree's launches that need nothing of each other run side by side in their CUDA graph. Such a graph starts
        later, which costs a chain as much as it gains. XLA may leave out a rounding where that saves a conversion, but
        not in a deterministic program.
        """
        options: dict[str, Any] = {"xla_allow_excess_precision": False} if self.deterministic else {}
        if not self.drafter.tree.is_chain and jax.default_backend() != "tpu":  # whose compiler has no such option
            options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
        return options


@struct.dataclass
class Params:
    """All weights; never donated."""

    target: Model
    draft: Any


def view_of(state: SlotState, slots: Int[Array, "batch"], program: Program) -> SlotView:
    """The rows of a bucket; rows that are padding or have ended come out inactive, empty, all zeros."""
    with jax.named_scope("view"):
        names = ("root", "lengths", "active", "remaining", "page_table", "sampling")
        fields = {name: getattr(state, name) for name in names}
        taken = gather_rows(fields, slots, state.active, implementation=program.implementation)
        return SlotView(
            slots=slots,
            **taken,
            accept=verify.resolve(program.accept),
            all_greedy=False,
            implementation=program.implementation,
            deterministic=program.deterministic,
            controls=state.controls,
            grammars=state.grammars,
            processor=program.processor,
            token_history=None if program.processor is None else text_of(state, taken["page_table"]),
        )


def text_of(state: SlotState, page_table: Int[Array, "batch pages"]) -> Int[Array, "batch positions"]:
    """The tokens of all rows of some slots."""
    assert state.token_history is not None
    return state.token_history[page_table].reshape(page_table.shape[0], -1)


def spec_step(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, StepOutput]:
    """`program.rounds` rounds for a bucket of slots.

    Args:
        state: donated.
        slots: slot of each row of the bucket; S for padding rows.
    """
    if program.rounds == 1:
        state, *results = spec_round(program, params, state, slots)
        return state, output_of_one(results)

    def body(index: Int[Array, ""], carry: Any) -> Any:
        state, outputs = carry
        state, *result = spec_round(program, params, state, slots)
        return state, jax.tree.map(lambda all_, one: all_.at[index].set(one), outputs, tuple(result))

    shapes = jax.eval_shape(lambda s: spec_round(program, params, s, slots)[1:], state)
    empty = jax.tree.map(lambda x: jnp.zeros((program.rounds, *x.shape), x.dtype), shapes)
    state, results = jax.lax.fori_loop(0, program.rounds, body, (state, empty))
    return state, _output_of(results)


def output_of_one(results: Sequence[Any]) -> StepOutput:
    """What the host gets of a single round."""
    return _output_of([jax.tree.map(lambda x: x[None], result) for result in results])


def _output_of(results: Sequence[Any]) -> StepOutput:
    """What the host gets of rounds: report, trace and log-probabilities."""
    report, trace, scores = results
    return StepOutput(report=report, trace=trace, logprobs=scores)


def spec_round(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, Int[Array, "batch columns"], Trace | None, LogProbs | None]:
    """One round: the five stages in order, and what else of it is asked for."""
    view = view_of(state, slots, program)
    draft, draft_state = draft_stage(program, params, state, view)
    return verify_and_commit(program, params, replace(state, draft=draft_state), view, draft)


def verify_and_commit(
    program: Program, params: Params, state: SlotState, view: SlotView, draft: Draft
) -> tuple[SlotState, Int[Array, "batch columns"], Trace | None, LogProbs | None]:
    """The stages of a round behind the draft's.

    Args:
        state: as the draft's stage leaves it.
    """
    out, target = verify_stage(program, params, state, view, draft)
    verdict = accept_stage(program, out, view, draft)
    scores = logprobs_stage(program, out, view, draft, verdict)
    state = commit_stage(program, params, replace(state, target=target), view, draft, verdict, out)
    trace = None
    if program.trace:
        with jax.named_scope("trace"):
            parents = jnp.where(draft.valid, draft.parents, -1)
            trace = Trace(tokens=draft.tokens, parents=parents, scores=draft.scores, path=verdict.path)
    return state, report_stage(view, draft, verdict), trace, scores


def draft_stage(program: Program, params: Params, state: SlotState, view: SlotView) -> tuple[Draft, Any]:
    """Propose, and leave out what lies deeper than a row's cap; with nothing to draft, keep the draft's state true."""
    with jax.named_scope("draft"):
        if program.drafter.tree.depth == 0:
            draft_state = program.drafter.write_pending_rows(params.draft, state.draft, view)
            return static_draft(program.drafter.tree, view, [], []), draft_state
        draft, draft_state = program.drafter.draft(params.draft, state.draft, view)
        within_cap = depths(ancestors(draft.parents)) <= view.sampling.draft_cap[:, None]
        return replace(draft, valid=draft.valid & within_cap), draft_state


def verify_stage(
    program: Program, params: Params, state: SlotState, view: SlotView, draft: Draft
) -> tuple[TargetOut, kv_cache.KVCache]:
    """The target's forward over root and nodes, each seeing the committed rows and its own ancestors."""
    with jax.named_scope("verify"):
        tree, fixed = program.drafter.tree, view.deterministic
        batch = TokenBatch(
            tokens=draft.tokens,
            positions=view.lengths[:, None] + depths(ancestors(draft.parents)),
            valid=jnp.broadcast_to(view.active[:, None], draft.tokens.shape),
            first_row=view.lengths,
            page_table=view.page_table,
            bits=None if tree.is_chain or fixed else ancestor_bits(draft.parents),
            implementation=view.implementation,
            deterministic=fixed,
            paths=by_depth(ancestors(draft.parents), tree.depth) if fixed and not tree.is_chain else None,
        )
        return forward(params.target, state.target, batch, feature_layers=program.feature_layers)


def accept_stage(program: Program, out: TargetOut, view: SlotView, draft: Draft) -> Verdict:
    """Apply the accept rule and cut the result where the row ends."""
    with jax.named_scope("accept"):
        assert out.product is not None
        return verify.accept(out.product, draft, ancestors(draft.parents), view, program.drafter.tree)


def logprobs_stage(program: Program, out: TargetOut, view: SlotView, draft: Draft, verdict: Verdict) -> LogProbs | None:
    """Score the tokens that the round emits, in a program that is to."""
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
    """Keep the accepted rows, hand the drafter its features, move every row's root and length on."""
    with jax.named_scope("commit"):
        tree = program.drafter.tree
        target = kv_cache.commit(state.target, tree, view, verdict)
        draft_state = program.drafter.commit(params.draft, state.draft, view, draft, verdict, out.features)
        newest = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.counts - 1, 0)[:, None], axis=1)[:, 0]
        moved = dict(
            root=newest,
            lengths=view.lengths + verdict.counts,
            active=view.active & ~verdict.ended,
            remaining=view.remaining - verdict.counts,
        )
        fields = {name: getattr(state, name) for name in moved}
        put = scatter_rows(fields, view.slots, moved, implementation=view.implementation)
        if state.token_history is not None:
            rows = jnp.concatenate([view.root[:, None], verdict.tokens[:, :-1]], axis=1)
            count = jnp.where(view.active, verdict.counts, 0)
            put["token_history"] = kv_cache.write_text(state.token_history, view.page_table, view.lengths, rows, count)
        if state.controls is not None:
            put["controls"] = penalties.advance(
                state.controls, view.slots, verdict.tokens, verdict.counts, verdict.grammar_state
            )
        return replace(state, target=target, draft=draft_state, **put)


def report_stage(view: SlotView, draft: Draft, verdict: Verdict) -> Int[Array, "batch columns"]:
    """What the host reads of the round."""
    with jax.named_scope("report"):
        num_drafted = jnp.where(view.active, jnp.sum(draft.valid[:, 1:], axis=1, dtype=jnp.int32), 0)
        return pack_result(verdict, num_drafted)


def init_state(program: Program, params: Params, pool: kv_cache.PoolShape) -> SlotState:
    """Empty slots and zeroed pools."""

    def fill(value: float, dtype: jnp.dtype = jnp.int32, *inner: int) -> Array:
        return jnp.full((pool.slots, *inner), value, dtype)  # never shared: each is donated on its own

    config, cells = params.target.config, program.grammar_cells
    return SlotState(
        root=fill(0),
        lengths=fill(0),
        active=fill(False, jnp.bool_),
        remaining=fill(0),
        page_table=fill(0, jnp.int32, pool.width(program.drafter.tree)),
        sampling=Sampling.greedy(pool.slots),
        target=kv_cache.create(config.num_layers, config, pool, pool.dtype),
        draft=program.drafter.init(params.draft, pool),
        token_history=jnp.zeros((pool.pages, pool.page_size), jnp.int32) if _keeps_text(program, pool) else None,
        controls=penalties.unused(pool.slots, config.vocab_size, program.processor_args) if program.controls else None,
        grammars=grammar_mask.unused(pool.slots, cells, config.vocab_size) if cells else None,
    )


def _keeps_text(program: Program, pool: kv_cache.PoolShape) -> bool:
    """Whether a processor is shown the text, or a drafter the tokens of pages that another request filled."""
    return program.processor is not None or (pool.prefix_cache and program.drafter.reads_text)
