"""`jspec bench throughput`: tokens a second of random weights at a stated, synthetic acceptance.

Drafts of random weights are accepted at random, at stated rates, until each row has its tokens. The accept rule is part
of a step that this module assembles from the stages of `jspec.step.decode`; neither `Program` nor `Engine` has such a
mode, so it cannot be used to serve.

A rate is the share of steps that accept the draft token at a position, and so all before it: rates .75, .55, .42, .31
give chains of 1 to 4 tokens the mean acceptance lengths 1.75, 2.30, 2.72 and 3.03.

With `--rival` nothing is measured: `compare` reads another engine's step times beside ours.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from jspec.tools.bench import compare, step
from jspec.tools.bench.report import Column, Mark, Report, file_option, floats, option, tree_label

TOKENS = 256
REPEATS = 3
ABOUT = "SYNTHETIC acceptance: drafts of random weights are accepted at random, at stated rates"
Rates = tuple[float, ...]
RATES: Rates = (0.75, 0.55, 0.42, 0.31)  # published for EAGLE-3 on MT-Bench


def check_rates(rates: Sequence[float]) -> Rates:
    """The rates, if a drafter can have them."""
    falling = all(later <= earlier for earlier, later in itertools.pairwise(rates))
    if not rates or not all(0 <= rate <= 1 for rate in rates) or not falling:
        raise ValueError(f"positions: expected shares from 0 to 1 that never rise, such as .75,.55, got {list(rates)}")
    return tuple(rates)


def rates_of_length(length: float, tree: Tree | None) -> Rates:
    """Rates with a given mean acceptance length, as vLLM's ``synthetic_acceptance_length``: 2.5 is 1, .5, 0."""
    depth = (tree or ROOT_ONLY).depth
    if not 1 <= length <= depth + 1:
        raise ValueError(f"length: expected 1 to {depth + 1} tokens a step of {tree or ROOT_ONLY}, got {length:g}")
    return tuple(min(max(length - position, 0.0), 1.0) for position in range(1, depth + 1))


def rates_of_tree(rates: Rates, tree: Tree | None) -> Rates:
    """The first rates, one for each level of the tree."""
    depth = (tree or ROOT_ONLY).depth
    if len(rates) < depth:
        raise ValueError(f"positions: expected {depth} for {tree}, got {len(rates)}; state more or draft fewer tokens")
    return rates[:depth]


def draw(rates: Rates, batch: int, tokens: int, seed: int) -> Int[np.ndarray, "steps batch"]:
    """Number of draft tokens that each row accepts in each step, until every row has emitted ``tokens``."""
    chance = np.random.default_rng(seed).random((tokens, batch, 1))  # a step emits at least one token
    accepted = np.asarray(np.sum(chance < np.array(rates), axis=-1), np.int32)
    emitted = np.cumsum(accepted + 1, axis=0)
    return accepted[: 1 + np.sum(emitted.min(axis=1) < tokens)]


def impose(verdict: Verdict, draft: Draft, view: SlotView, tree: Tree, accepted: Int[Array, "batch"]) -> Verdict:
    """A verdict that accepts a given number of draft tokens of each row, whatever the target's probabilities.

    The first node at that depth is accepted; the last token of the rule's own verdict follows it.
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
    """One step with the stages of `jspec.step.decode.spec_step`, its accept rule included, and the verdict imposed."""
    view = view_of(state, slots, program)
    draft, draft_state = decode.draft_stage(program, params, state, view)
    out, target = decode.verify_stage(program, params, state, view, draft)
    verdict = decode.accept_stage(program, out, view, draft)
    with jax.named_scope("impose"):
        verdict = impose(verdict, draft, view, program.drafter.tree, accepted)
    state = replace(state, target=target, draft=draft_state)
    state = decode.commit_stage(program, params, state, view, draft, verdict, out)
    return state, StepOutput(report=decode.report_stage(view, draft, verdict)[None], trace=None)


@dataclass(frozen=True)
class Case:
    """One point of the table."""

    point: step.Case  # its context is the first one of the rows
    rates: Rates  # share of steps that accept each level of the tree
    tokens: int = TOKENS  # tokens that each row emits
    seed: int = 0

    @property
    def contexts(self) -> str:
        return f"{self.point.context}-{self.point.context + self.tokens}"

    def __post_init__(self) -> None:
        tree = self.point.tree
        if tree is not None and tree.paths is None:
            raise ValueError(
                f"throughput: expected no tree, a chain or a static one, got {tree}, whose depth depends on scores "
                "of random weights; take chain:LENGTH"
            )
        if self.tokens < 1:
            raise ValueError(f"tokens: expected at least 1, got {self.tokens}")


@dataclass(frozen=True)
class Throughput:
    """Figures of a case."""

    case: Case
    tokens_per_second: float  # of all rows
    milliseconds: float  # time of a step, median over repeats
    spread: float  # largest less smallest of these times
    floor: float  # floor of a step in the middle of the text, milliseconds
    milliseconds_per_token: float  # time between two tokens of a row
    stated_length: float  # mean acceptance length by the rates
    length: float  # measured mean acceptance length, without the cut at the end of a row
    rounds: int  # steps of a repeat, until the last row has its tokens
    live: float  # mean number of active rows; rows that are done wait for the last one
    compile_seconds: float


COLUMNS = (
    *(Column(f"case.point.{name}", name) for name in ("shape", "weights", "cache", "batch")),
    Column("case.contexts", "context"),
    Column("case.point.tree_text", "tree"),
    Column("stated_length", "stated", ".2f"),
    Column("length", "measured", ".2f"),
    Column("rounds", "steps"),
    Column("live", "live", ".1f"),
    Column("milliseconds", "ms", ".3f"),
    *(Column(name, name, ".3f") for name in ("spread", "floor")),
    Column("milliseconds_per_token", "ms/token", ".3f"),
    Column("tokens_per_second", "tokens/s", ".0f"),
)


def measure(case: Case, target: Model, head: EagleHead | None) -> Throughput:
    """Compile a case and time all of it `REPEATS` times, with the same acceptance."""
    program, params, pool = step.build(case.point, target, head, growth=case.tokens)
    state = step.filled_state(init_state(program, params, pool), case.point)
    started = time.perf_counter()
    executable = compile_step(program, params, state, case.point.batch)
    compile_seconds = time.perf_counter() - started
    accepted = draw(case.rates, case.point.batch, case.tokens, case.seed)
    state, _, _ = run_steps(executable, params, restart(state, case), accepted[: step.WARM_UP])
    seconds = []
    for _ in range(REPEATS):
        state, spent, seen = run_steps(executable, params, restart(state, case), accepted)
        seconds.append(spent)
    assert seen.counts.sum() == case.point.batch * case.tokens, "every row emits its tokens and no more"
    active, median = seen.counts > 0, statistics.median(seconds)
    count, rows = active.shape
    midway = replace(case.point, context=case.point.context + case.tokens // 2)
    return Throughput(
        case=case,
        tokens_per_second=rows * case.tokens / median,
        milliseconds=median / count * 1e3,
        spread=(max(seconds) - min(seconds)) / count * 1e3,
        floor=step.floor_seconds(midway) * 1e3,
        milliseconds_per_token=median / case.tokens * 1e3,
        stated_length=1 + math.fsum(case.rates),
        length=float(np.mean(seen.accept_len[active] + 1)),
        rounds=count,
        live=float(active.sum() / count),
        compile_seconds=compile_seconds,
    )


def compile_step(program: Program, params: Params, state: SlotState, batch: int) -> Any:
    """The executable of one step with imposed acceptance."""
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    executable = jax.jit(partial(synthetic_step, program), donate_argnums=(1,))
    return executable.lower(params, state, rows, rows).compile()


def restart(state: SlotState, case: Case) -> SlotState:
    """The state with every row back at the case's context and all its tokens to emit."""
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
    """Steps dispatched back to back: the next state, seconds, and the steps' results."""
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
    return state, seconds, StepResult.read(np.concatenate([np.asarray(one) for one in reports]))


def run(arguments: argparse.Namespace) -> Report:
    a = arguments
    if a.rival is not None:
        return compare.run(a.rival, a.ours, check_rates(a.positions))
    cases = []
    for point in step.cases_of(a):
        by_length = point.tree is not None and a.length is not None
        stated = rates_of_length(a.length, point.tree) if by_length else check_rates(a.positions)
        cases.append(Case(point, rates_of_tree(stated, point.tree), a.tokens, a.seed))
    target, head = step.models_of([case.point for case in cases])
    results = (measure(case, target, head) for case in cases)
    return Report(f"tokens/s; {ABOUT}", COLUMNS, results, about={"acceptance": ABOUT}, marks=_marks)


def _marks(result: Throughput) -> list[Mark]:
    label = f"{tree_label(result.case.point.tree)}, stated length {result.stated_length:.2f}"
    return [Mark(f"context {result.case.contexts}", label, result.case.point.batch, result.tokens_per_second)]


OPTIONS = (
    *step.MODEL_OPTIONS,
    *step.POINT_OPTIONS,
    option("--tokens", type=int, default=TOKENS, help="tokens that each row emits"),
    option("--length", type=float, help="stated mean acceptance length of every tree, in place of --positions"),
    option("--positions", type=floats, default=RATES, metavar=".75,.55", help="stated share of steps that accept each"),
    option("--seed", type=int, default=0, help="seed of the acceptance"),
    file_option("--rival", f"measure nothing, but read another engine's steps, each line {compare.RIVAL_LINE}"),
    file_option("--ours", "with --rival: our steps, a file of `jspec bench step --json`"),
)
