"""`jspec bench overlap`: the share of time for which the device waits for the host between rounds of an engine.

    idle = 1 - loop / engine

loop is the time of a round where 64 run on the device in one dispatch, which nothing of the host can hold up; engine
the time between the steps of an engine that dispatches and reads every round. Both are engines at work, on the same
weights, at acceptance about 0.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.engine.api import Engine
from jspec.engine.metrics import LowAcceptanceWarning
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.tools.bench import report, rounds
from jspec.tools.table import table

LOOP = 64  # rounds of one dispatch
LOOPS = 4  # dispatches timed
STEPS = 200  # steps timed where each is one round
WARM_UP = 2  # of these dispatches before those that are timed


@dataclass(frozen=True)
class Idle:
    """One case, in milliseconds a round, medians."""

    case: rounds.Case
    loop: float
    engine: float

    @property
    def idle(self) -> float:
        """Share of the engine's time; noise can make it negative."""
        return 1 - self.loop / self.engine


def measure(case: rounds.Case, target: Model, head: EagleHead | None, *, overlap: bool = True) -> Idle:
    """Time a case in both ways.

    Args:
        overlap: the engine's option.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # of random weights nothing else is to be expected
        loop = statistics.median(_dispatches(case, target, head, LOOP, WARM_UP, LOOPS, overlap)) / LOOP
        # The rounds that are timed are in the same place of a text on average: attention takes longer by and by.
        behind = max((WARM_UP * 2 + LOOPS) * LOOP - STEPS, 0) // 2
        engine = statistics.median(_dispatches(case, target, head, 1, behind, STEPS, overlap))
    return Idle(case, loop * 1e3, engine * 1e3)


def _dispatches(
    case: rounds.Case, target: Model, head: EagleHead | None, size: int, behind: int, count: int, overlap: bool
) -> list[float]:
    """Seconds from one dispatch's result to the next one's, with all rows at work.

    Args:
        size: rounds of a dispatch.
        behind: dispatches before the first that is timed.
        count: dispatches timed.
    """
    total, depth = (behind + count + 2) * size, 0 if case.tree is None else case.tree.depth  # one is under way
    drafter = None if case.tree is None or head is None else Eagle3(head, case.tree)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, target.config.vocab_size, (case.batch, case.context)).tolist()
    with Engine(
        target,
        drafter=drafter,
        slots=case.batch,
        buckets=(case.batch,),
        prefill_buckets=(case.context,),
        prefill_budget=case.context * case.batch,  # all rows begin at once
        max_len=case.context + (depth + 1) * total,
        page_size=case.page_size,
        implementation=case.implementation,
        rounds_per_dispatch=size,
        overlap=overlap,
        kv_dtype=case.kv_dtype,
        draft_kv_dtype=case.kv_dtype,
        prefix_cache=False,
        log_interval=None,
    ) as engine:
        params = SamplingParams(max_tokens=(depth + 1) * total, temperature=0.0)
        requests = [engine.submit(prompt, params) for prompt in prompts]
        while not all(request.token_ids for request in requests):
            engine.step()
        times = []
        for _ in range(behind + count):
            began = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began)
        assert not any(request.finish_reason for request in requests), "every row is at work to the end"
        return times[behind:]


def text(results: Sequence[Idle]) -> str:
    """One line a case."""
    rows = [["batch", "context", "tree", "loop ms", "engine ms", "idle"]]
    for result in results:
        case = result.case
        times = (f"{result.loop:.3f}", f"{result.engine:.3f}", f"{result.idle:.1%}")
        rows.append([str(case.batch), str(case.context), str(case.tree).lower(), *times])
    return table(rows)


def write_json(path: Path, results: Sequence[Idle]) -> None:
    """Environment and results as one JSON object."""
    report.write(path, [fields(result) for result in results])


def fields(result: Idle) -> dict[str, Any]:
    """A result as it is written."""
    own = vars(result.case) | {"tree": str(result.case.tree).lower()}
    return {"case": own, "loop": result.loop, "engine": result.engine, "idle": result.idle}
