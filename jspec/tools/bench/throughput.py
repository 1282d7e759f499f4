"""`jspec bench throughput`: tokens a second of random weights at a stated, synthetic acceptance.

Drafts of random weights are accepted at random, at stated rates, until each row has its tokens. A rate is the share of
steps that accept the draft token at a position, and so all before it: .75, .55, .42, .31 give chains of 1 to 4 tokens
the mean acceptance lengths 1.75, 2.30, 2.72 and 3.03.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import verify
from jspec.core.ancestors import ancestors, depths
from jspec.core.records import Draft, SlotState, SlotView, StepOutput, StepResult, Verdict
from jspec.core.tree import ROOT_ONLY, Tree
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.step import decode
from jspec.step.program import Params, Program, init_state, view_of
from jspec.tools.bench import step
from jspec.tools.bench.options import ROW_TOKENS
from jspec.tools.bench.report import Column, Report

REPEATS = 3
ABOUT = "SYNTHETIC acceptance: drafts of random weights are accepted at random, at stated rates"
Rates = tuple[float, ...]
RATES: Rates = (0.75, 0.55, 0.42, 0.31)  # published for EAGLE-3 on MT-Bench


def rates_of(tree: Tree | None, positions: Sequence[float]) -> Rates:
    """Return the acceptance rate of each level of a tree."""
    depth = (tree or ROOT_ONLY).depth
    if tree is not None and tree.paths is None:  # its depth depends on scores of random weights
        raise ValueError(f"throughput: expected no tree, a chain or a static one, got {tree}; take chain:LENGTH")
    if list(positions) != sorted(positions, reverse=True) or not all(0 <= rate <= 1 for rate in positions):
        raise ValueError(f"positions: expected shares from 0 to 1 that never rise, such as .75,.55, got {positions}")
    if len(positions) < depth:
        raise ValueError(f"positions: expected {depth} for {tree}, got {len(positions)}; state more or draft less")
    return tuple(positions[:depth])


def draw(rates: Rates, batch: int, tokens: int, seed: int) -> Int[np.ndarray, "steps batch"]:
    """Draw the number of draft tokens that each row accepts in each step, until every row has ``tokens`` tokens."""
    chance = np.random.default_rng(seed).random((tokens, batch, 1))  # a step emits at least one token
    accepted = np.asarray(np.sum(chance < np.array(rates), axis=-1), np.int32)
    emitted = np.cumsum(accepted + 1, axis=0)
    return accepted[: 1 + np.sum(emitted.min(axis=1) < tokens)]


def impose(verdict: Verdict, draft: Draft, view: SlotView, tree: Tree, accepted: Int[Array, "batch"]) -> Verdict:
    """Return a verdict that accepts a given number of draft tokens a row, whatever the target's probabilities.

    The first node at that depth and its ancestors are accepted; the last token of the given verdict follows.
    """
    ancestor_mask = ancestors(draft.parents)
    within = draft.valid & (depths(ancestor_mask) <= accepted[:, None])
    deepest = jnp.argmax(jnp.where(within, depths(ancestor_mask), -1), axis=-1).astype(jnp.int32)
    newest = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.counts - 1, 0)[:, None], axis=1)[:, 0]
    return verify.verdict_of(deepest, newest, draft, ancestor_mask, view, tree)


def synthetic_step(
    program: Program,
    params: Params,
    state: SlotState,
    slots: Int[Array, "batch"],
    accepted: Int[Array, "batch"],
) -> tuple[SlotState, StepOutput]:
    """Run the stages of `jspec.step.decode.spec_step`, and impose a verdict after the accept rule."""
    view = view_of(state, slots, program)
    draft, state = decode.draft_stage(program, params, state, view)
    out, target = decode.verify_stage(program, params, state, view, draft)
    verdict = decode.accept_stage(program, out, view, draft)
    with jax.named_scope("impose"):
        verdict = impose(verdict, draft, view, program.drafter.tree, accepted)
    state = replace(state, target=target)
    state = decode.commit_stage(program, params, state, view, draft, verdict, out)
    return state, StepOutput(report=decode.report_stage(view, draft, verdict)[None], trace=None)


@dataclass(frozen=True)
class ThroughputCase:
    """The settings of one measured throughput."""

    point: step.StepCase  # model, batch and tree; its context is the rows' first one
    rates: Rates  # share of steps that accept each level of the tree
    tokens: Annotated[int, Column("new tokens")] = ROW_TOKENS  # number of tokens that each row emits
    seed: int = 0  # seed of the accepted numbers


@dataclass(frozen=True)
class Throughput:
    """The measured throughput and times of one case at its stated acceptance."""

    case: ThroughputCase
    stated_length: Annotated[float, Column("stated", ".2f")]  # mean acceptance length by the rates, tokens a step
    length: Annotated[float, Column("measured", ".2f")]  # mean tokens a step without the cut at the end of a row
    rounds: Annotated[int, Column("steps")]  # number of steps of a repeat, until the last row has its tokens
    live: Annotated[float, Column("live", ".1f")]  # mean number of active rows
    milliseconds: Annotated[float, Column("ms", ".3f")]  # time of a step, median over repeats
    spread: Annotated[float, Column("spread", ".3f")]  # largest less smallest time of a step over repeats, milliseconds
    floor: Annotated[float | None, Column("floor", ".3f")]  # of a step midway in the text; None: unknown device
    milliseconds_per_token: Annotated[float, Column("ms/token", ".3f")]  # mean time between two tokens of a row
    tokens_per_second: Annotated[float, Column("tokens/s", ".0f")]  # of all rows


def measure(case: ThroughputCase, target: Model, head: EagleHead | None) -> Throughput:
    """Compile a case's step, decode all its tokens `REPEATS` times and return the throughput."""
    program, params, pool = step.build(case.point, target, head, growth=case.tokens)
    state = step.filled_state(init_state(program, params, pool), case.point)
    executable = step.compile_step(program, params, state, case.point.batch, synthetic_step, inputs=2)
    accepted = draw(case.rates, case.point.batch, case.tokens, case.seed)
    state, _, _ = run_steps(executable, params, restart(state, case), accepted[: step.WARM_UP])
    seconds = []
    for _ in range(REPEATS):
        state, spent, seen = run_steps(executable, params, restart(state, case), accepted)
        seconds.append(spent)
    assert seen.counts.sum() == case.point.batch * case.tokens, "every row emits its tokens and no more"
    active, median = seen.counts > 0, statistics.median(seconds)
    steps, rows = active.shape
    midway = replace(case.point, context=case.point.context + case.tokens // 2)
    stated, length = 1 + math.fsum(case.rates), float(np.mean(seen.accept_len[active] + 1))
    spread, floor = (max(seconds) - min(seconds)) / steps * 1e3, step.floor_milliseconds(midway, stated)
    times = (median / steps * 1e3, spread, floor, median / case.tokens * 1e3, rows * case.tokens / median)
    return Throughput(case, stated, length, steps, float(active.sum() / steps), *times)


def restart(state: SlotState, case: ThroughputCase) -> SlotState:
    """Return the state with every row active, at the case's context length, and with all tokens left to emit."""
    rows = case.point.batch
    return replace(
        state,
        lengths=jnp.full(rows, case.point.context, jnp.int32),
        active=jnp.ones(rows, bool),
        remaining=jnp.full(rows, case.tokens, jnp.int32),
    )


def run_steps(
    executable: Any, params: Params, state: SlotState, accepted: Int[np.ndarray, "steps batch"]
) -> tuple[SlotState, float, StepResult]:
    """Run steps without waiting between them; return the next state, the seconds of all steps, and their results."""
    slots = jnp.arange(accepted.shape[1], dtype=jnp.int32)
    lines = [jnp.asarray(line) for line in accepted]
    jax.block_until_ready((state, slots, lines))
    reports: list[Array] = []
    began = time.perf_counter()
    for line in lines:
        state, output = executable(params, state, slots, line)
        reports.append(output.report)
    jax.block_until_ready((state, reports))
    seconds = time.perf_counter() - began
    return state, seconds, StepResult.read(np.concatenate([np.asarray(report) for report in reports]))


def run(arguments: argparse.Namespace) -> Report:
    a = arguments
    cases = [ThroughputCase(case, rates_of(case.tree, a.positions), a.tokens, a.seed) for case in step.cases_of(a)]
    target, head = step.models_of([case.point for case in cases])
    results = (measure(case, target, head) for case in cases)
    return Report(f"tokens/s; {ABOUT}", results, about={"acceptance": ABOUT})
