"""`jspec bench throughput`: tokens a second of random weights at a stated, synthetic acceptance.

Drafts of random weights are accepted at random, at stated rates, until each row has its tokens. The step is assembled
here from the stages of `jspec.step.decode`: neither `Program` nor `Engine` has such a mode. A rate is the share of
steps that accept the draft token at a position, and so all before it: .75, .55, .42, .31 give chains of 1 to 4 tokens
the mean acceptance lengths 1.75, 2.30, 2.72 and 3.03. With `--rival`, another engine's step times are read beside ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from jspec.tools.bench.report import Mark, Report, columns, file_option, option, tree_label, tree_or_none

TOKENS = 256
REPEATS = 3
ABOUT = "SYNTHETIC acceptance: drafts of random weights are accepted at random, at stated rates"
Rates = tuple[float, ...]
RATES: Rates = (0.75, 0.55, 0.42, 0.31)  # published for EAGLE-3 on MT-Bench
RIVAL_LINE = "an object with mode, quant, k, batch, inlen and step_ms"
OUR_FILE = "what `jspec bench step --json` writes, each point once, all else of the cases equal"
VARIED = ("batch", "context", "tree", "quantize")
QUANT = {"fp8_dynamic": "fp8", "fp8": "fp8 weights"}  # other engines' "fp8" quantises weights and activations


def check_rates(rates: Sequence[float]) -> Rates:
    """Return the acceptance rates unchanged; raise if no drafter can have them."""
    falling = all(later <= earlier for earlier, later in itertools.pairwise(rates))
    if not rates or not all(0 <= rate <= 1 for rate in rates) or not falling:
        raise ValueError(f"positions: expected shares from 0 to 1 that never rise, such as .75,.55, got {list(rates)}")
    return tuple(rates)


def rates_of_length(length: float, tree: Tree | None) -> Rates:
    """Return rates with a mean acceptance length, as vLLM's ``synthetic_acceptance_length``: 2.5 gives 1, .5, 0."""
    depth = (tree or ROOT_ONLY).depth
    if not 1 <= length <= depth + 1:
        raise ValueError(f"length: expected 1 to {depth + 1} tokens a step of {tree or ROOT_ONLY}, got {length:g}")
    return tuple(min(max(length - position, 0.0), 1.0) for position in range(1, depth + 1))


def rates_of_tree(rates: Rates, tree: Tree | None) -> Rates:
    """Return the first acceptance rates, one for each level of the tree."""
    depth = (tree or ROOT_ONLY).depth
    if len(rates) < depth:
        raise ValueError(f"positions: expected {depth} for {tree}, got {len(rates)}; state more or draft fewer tokens")
    return rates[:depth]


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
    """Run one step with the stages of `jspec.step.decode.spec_step`, accept rule included, but impose the verdict."""
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
    """Settings of one measured throughput: one line of the table."""

    point: step.Case  # model, batch and tree; its context is the rows' first one
    rates: Rates  # share of steps that accept each level of the tree
    tokens: int = TOKENS  # number of tokens that each row emits
    seed: int = 0  # seed of the accepted numbers

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


class Throughput(NamedTuple):
    """Measured throughput and times of one case at its stated acceptance."""

    case: Case
    tokens_per_second: float  # tokens a second of all rows
    milliseconds: float  # time of a step, median over repeats, milliseconds
    spread: float  # largest less smallest time of a step over repeats, milliseconds
    floor: float  # least time of a step in the middle of the text, milliseconds
    milliseconds_per_token: float  # mean time between two tokens of a row, milliseconds
    stated_length: float  # mean acceptance length by the rates, tokens a step
    length: float  # measured mean acceptance length, tokens a step, without the cut at a row's end
    rounds: int  # number of steps of a repeat, until the last row has its tokens
    live: float  # mean number of active rows; rows that are done wait for the last one
    compile_seconds: float  # time to compile the step, seconds


COLUMNS = (
    *columns(case__point__shape="shape", case__point__weights="weights", case__point__cache="cache"),
    *columns(case__point__batch="batch", case__contexts="context", case__point__tree_text="tree"),
    *columns(".2f", stated_length="stated", length="measured"),
    *columns(rounds="steps"),
    *columns(".1f", live="live"),
    *columns(".3f", milliseconds="ms", spread="spread", floor="floor", milliseconds_per_token="ms/token"),
    *columns(".0f", tokens_per_second="tokens/s"),
)


def measure(case: Case, target: Model, head: EagleHead | None) -> Throughput:
    """Compile a case's step, decode all its tokens `REPEATS` times with equal acceptance, return the throughput."""
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
    """Compile one decoding step with imposed acceptance and return its executable."""
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    executable = jax.jit(partial(synthetic_step, program), donate_argnums=(1,))
    return executable.lower(params, state, rows, rows).compile()


def restart(state: SlotState, case: Case) -> SlotState:
    """Return the state with every row back at the case's context, with all its tokens still to emit."""
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
    """Run steps dispatched without waiting; return the next state, the seconds of all, and the steps' results."""
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


class Row(NamedTuple):
    """Step times and throughput of our engine and of a rival in one case; None where a side was not measured."""

    quant: str  # kind of quantisation, or "none"
    context: int  # committed tokens of a row
    batch: int  # number of batch rows
    draft: str  # drafter and tree, or "none"
    rival: float | None  # time of the rival's step, milliseconds
    ours: float | None  # time of our step, milliseconds
    floor: float | None  # least time of our step, milliseconds
    ratio: float | None  # our time over the rival's: below 1 ours is faster
    rival_tokens: float | None  # tokens a second of the rival's batch; None without a step or rates for the draft
    our_tokens: float | None  # tokens a second of our batch


RIVAL_COLUMNS = (
    *columns(quant="quant", context="context", batch="batch", draft="draft"),
    *columns(".3f", rival="rival ms", ours="our ms", floor="floor"),
    *columns(".2f", ratio="ours/rival"),
    *columns(".0f", rival_tokens="rival tok/s", our_tokens="our tok/s"),
)


def _rival_times(path: Path) -> Iterator[tuple[Any, ...]]:
    for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
        one = json.loads(line)
        if (one["mode"] == "none") != (one["k"] == 0):
            raise ValueError(f"k {one['k']} with mode {one['mode']}")
        draft = f"{one['mode']} {Tree.chain(one['k'])}" if one["k"] else "none"
        yield str(one["quant"] or "none"), one["inlen"], one["batch"], draft, one["step_ms"]


def _our_times(path: Path) -> Iterator[tuple[Any, ...]]:
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    for one in results:
        case, first = ({k: v for k, v in r["case"].items() if k not in VARIED} for r in (one, results[0]))
        if case != first:
            raise ValueError(f"{first} and {case}")
        batch, context, tree, quant = (one["case"][name] for name in VARIED)
        draft = tree if tree == "none" else f"eagle3 {tree}"
        yield QUANT.get(quant, quant or "none"), context, batch, draft, one["milliseconds"], one["floor"]


def read_times(path: Path, *, is_rival: bool) -> dict[tuple[Any, ...], tuple[float, ...]]:
    """Read step times by case, milliseconds: the rival's, or ours and the least one; a wrong file is a ValueError."""
    found: dict[tuple[Any, ...], tuple[float, ...]] = {}
    try:
        for line in _rival_times(path) if is_rival else _our_times(path):
            point, times = line[:4], line[4:]
            if point in found or not all(0 < one < math.inf for one in (*point[1:3], *times)):
                raise ValueError(f"{line}, twice or not above 0")
            found[point] = times
        if not found:
            raise ValueError("no point")
    except (ValueError, TypeError, KeyError) as error:
        expected = f"lines, each {RIVAL_LINE}" if is_rival else OUR_FILE
        raise ValueError(f"{path}: expected {expected}, got {error!r}") from None
    return found


def length(draft: str, rates: Sequence[float]) -> float | None:
    """Return the mean tokens a step of a draft at the acceptance rates; None without rates for this draft."""
    tree = tree_or_none(draft.split()[-1])
    depth = 0 if tree is None else tree.depth
    return 1 + math.fsum(rates[:depth]) if (tree is None or tree.is_chain) and depth <= len(rates) else None


def compare(rival: Path, ours: Path | None, rates: Sequence[float]) -> Report:
    """Report our step times beside a rival engine's, read from two files, with throughput at the rates."""
    if ours is None:
        raise ValueError("throughput: expected --ours with --rival, a file of `jspec bench step --json`; give both")
    theirs, own = read_times(rival, is_rival=True), read_times(ours, is_rival=False)
    found, best = [], dict[tuple[Any, ...], list[float]]()
    for point in sorted(theirs.keys() | own.keys()):
        (rival_ms,), (our_ms, floor) = theirs.get(point, (None,)), own.get(point, (None, None))
        tokens = length(point[3], rates)
        speeds = [point[2] * tokens / ms * 1e3 if ms and tokens else None for ms in (rival_ms, our_ms)]
        ratio = our_ms / rival_ms if rival_ms and our_ms else None
        found.append(Row._make([*point, rival_ms, our_ms, floor, ratio, *speeds]))
        most = best.setdefault(point[:3], [0.0, 0.0])
        most[:] = [max(one, speed or 0.0) for one, speed in zip(most, speeds, strict=True)]
    gains = [f"best draft, {', '.join(map(str, at))}: ours/rival {b / a:.2f}" for at, (a, b) in best.items() if a]
    text = f"tokens/s from STATED shares of steps that accept each position of a chain, {', '.join(map(str, rates))}"
    about = {"rival": rival, "ours": ours, "stated_rates": rates}
    return Report(f"ms a step, rival: {rival}; ours: {ours}", RIVAL_COLUMNS, found, "\n".join([*gains, text]), about)


def run(arguments: argparse.Namespace) -> Report:
    a = arguments
    if a.rival is not None:
        return compare(a.rival, a.ours, check_rates(a.positions))
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


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


OPTIONS = (
    *step.MODEL_OPTIONS,
    *step.POINT_OPTIONS,
    option("--tokens", type=int, default=TOKENS, help="tokens that each row emits"),
    option("--length", type=float, help="stated mean acceptance length of every tree, in place of --positions"),
    option("--positions", type=_rates, default=RATES, metavar=".75,.55", help="stated share of steps that accept each"),
    option("--seed", type=int, default=0, help="seed of the acceptance"),
    file_option("--rival", f"measure nothing, but read another engine's steps, each line {RIVAL_LINE}"),
    file_option("--ours", "with --rival: our steps, a file of `jspec bench step --json`"),
)
