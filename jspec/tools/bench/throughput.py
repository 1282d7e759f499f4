"""Tokens a second at a stated acceptance: rows decode until each has its tokens, their drafts accepted by lot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.core.records import SlotState, StepResult
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.step.program import Params, Program, init_state
from jspec.tools.bench import report, rounds, synthetic
from jspec.tools.table import table

TOKENS = 256
REPEATS = 3
ABOUT = "SYNTHETIC acceptance: the drafts of random weights are accepted by lot, at stated rates"


@dataclass(frozen=True)
class Case:
    """One point of the table.

    Attributes:
        point: shape, batch and tree; the context is where the rows start.
        rates: share of rounds that accept each position of the tree.
        tokens: that each row emits.
        seed: of the lots.

    Raises:
        ValueError: the tree is dynamic, or the rates are not one a level.
    """

    point: rounds.Case
    rates: synthetic.Rates
    tokens: int = TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        tree = self.point.tree
        if tree is not None and tree.paths is None:
            raise ValueError(
                f"throughput: expected no tree, a chain or a static one, got {tree}: how deep a dynamic tree grows is "
                "for the head's scores to say, and those of random weights say nothing; take chain:LENGTH"
            )
        if len(self.rates) != (0 if tree is None else tree.depth):
            raise ValueError(f"throughput: expected a rate for each level of {tree}, got {list(self.rates)}")
        if self.tokens < 1:
            raise ValueError(f"tokens: expected at least 1, got {self.tokens}")


@dataclass(frozen=True)
class Throughput:
    """What a case came to.

    Attributes:
        tokens_per_second: of all rows.
        milliseconds: a round, median over repeats.
        spread: of that, largest less smallest.
        floor: of a round in the middle of the growth, milliseconds.
        milliseconds_per_token: between two tokens of a row: a repeat's time over the tokens of a row.
        stated_length: mean acceptance length that the rates come to.
        length: the measured one, over the rounds of every row, before the last one's cut.
        rounds: of a repeat, until the last row has its tokens.
        live: rows at work in a round, on average; rows that are done wait for the last one.
    """

    case: Case
    tokens_per_second: float
    milliseconds: float
    spread: float
    floor: float
    milliseconds_per_token: float
    stated_length: float
    length: float
    rounds: int
    live: float
    compile_seconds: float


def measure(case: Case, target: Model, head: EagleHead | None) -> Throughput:
    """Compile a case and run all of it `REPEATS` times by the clock, with the same lots."""
    program, params, pool = rounds.build(case.point, target, head, growth=case.tokens)
    state = rounds.filled_state(init_state(program, params, pool), case.point)
    started = time.perf_counter()
    step = compile_step(program, params, state, case.point.batch)
    compile_seconds = time.perf_counter() - started
    lots = synthetic.draw(case.rates, case.point.batch, case.tokens, case.seed)
    state, _, _ = run(step, params, restart(state, case), lots[: rounds.WARM_UP])
    seconds = []
    for _ in range(REPEATS):
        state, spent, seen = run(step, params, restart(state, case), lots)
        seconds.append(spent)
    assert seen.counts.sum() == case.point.batch * case.tokens, "every row emits its tokens and no more"
    return _result(case, seconds, seen, compile_seconds)


def compile_step(program: Program, params: Params, state: SlotState, batch: int) -> Any:
    """The executable of one round with imposed acceptance."""
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = jax.jit(partial(synthetic.synthetic_step, program), donate_argnums=(1,))
    return step.lower(params, state, rows, rows).compile()


def restart(state: SlotState, case: Case) -> SlotState:
    """Every row back at the case's context, with all its tokens to emit."""
    rows = case.point.batch
    return replace(
        state,
        lengths=jnp.full(rows, case.point.context, jnp.int32),
        active=jnp.ones(rows, bool),
        remaining=jnp.full(rows, case.tokens, jnp.int32),
    )


def run(
    step: Any, params: Params, state: SlotState, lots: Int[np.ndarray, "rounds batch"]
) -> tuple[SlotState, float, StepResult]:
    """Rounds dispatched back to back, one for each line of lots: the state behind them, seconds, what they reported."""
    slots = jnp.arange(lots.shape[1], dtype=jnp.int32)
    accepted = [jnp.asarray(line) for line in lots]
    jax.block_until_ready((state, slots, accepted))
    reports: list[Array] = []
    began = time.perf_counter()
    for line in accepted:
        state, output = step(params, state, slots, line)
        reports.append(output.report)
    jax.block_until_ready((state, reports))
    seconds = time.perf_counter() - began
    return state, seconds, StepResult.read(np.concatenate([np.asarray(one) for one in reports]))


def _result(case: Case, seconds: Sequence[float], seen: StepResult, compile_seconds: float) -> Throughput:
    at_work, median = seen.counts > 0, statistics.median(seconds)
    count, rows = at_work.shape
    midway = replace(case.point, context=case.point.context + case.tokens // 2)
    return Throughput(
        case=case,
        tokens_per_second=rows * case.tokens / median,
        milliseconds=median / count * 1e3,
        spread=(max(seconds) - min(seconds)) / count * 1e3,
        floor=rounds.floor(midway) * 1e3,
        milliseconds_per_token=median / case.tokens * 1e3,
        stated_length=synthetic.mean_length(case.rates),
        length=float(np.mean(seen.accept_len[at_work] + 1)),
        rounds=count,
        live=float(at_work.sum() / count),
        compile_seconds=compile_seconds,
    )


def text(results: Sequence[Throughput]) -> str:
    """One line a case, under a line that calls them synthetic."""
    columns = {
        "shape": lambda r: r.case.point.shape,
        "weights": lambda r: r.case.point.weights,
        "cache": lambda r: r.case.point.kv_dtype or r.case.point.dtype,
        "batch": lambda r: str(r.case.point.batch),
        "context": lambda r: f"{r.case.point.context}-{r.case.point.context + r.case.tokens}",
        "tree": lambda r: str(r.case.point.tree).lower(),
        "stated": lambda r: f"{r.stated_length:.2f}",
        "measured": lambda r: f"{r.length:.2f}",
        "rounds": lambda r: str(r.rounds),
        "live": lambda r: f"{r.live:.1f}",
        "ms": lambda r: f"{r.milliseconds:.3f}",
        "spread": lambda r: f"{r.spread:.3f}",
        "floor": lambda r: f"{r.floor:.3f}",
        "ms/token": lambda r: f"{r.milliseconds_per_token:.3f}",
        "tokens/s": lambda r: f"{r.tokens_per_second:.0f}",
    }
    return f"{ABOUT}\n{table([list(columns), *([cell(r) for cell in columns.values()] for r in results)])}"


def write_json(path: Path, results: Sequence[Throughput]) -> None:
    """Environment, the word that they are synthetic, and results as one JSON object."""
    report.write(path, [_fields(result) for result in results], acceptance=ABOUT)


def _fields(result: Throughput) -> dict[str, Any]:
    fields = asdict(result)
    fields["case"]["point"]["tree"] = str(result.case.point.tree).lower()
    return fields
