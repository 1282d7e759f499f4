"""Overlap of host and device: the engine dispatches the next step before it reads a result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jspec import Engine, SamplingParams, Tree
from jspec.tools.bench.host import ready_engine
from jspec.tools.bench.step import StepCase
from jspec.tools.bench.step_costs import max_tokens

pytestmark = pytest.mark.once

CASE = StepCase("least", 4, 64, Tree.chain(1), dtype="float32")
STEPS = 25
DEVICE = HOST = 0.004  # seconds


class LateResult:
    """Result of a step that is ready at a given time."""

    def __init__(self, report: np.ndarray, at: float) -> None:
        self._report, self._at = np.asarray(report), at

    def block_until_ready(self) -> None:
        time.sleep(max(self._at - time.perf_counter(), 0.0))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._report


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Engine whose simulated device needs `DEVICE` seconds a step, and whose host needs `HOST` seconds."""
    engine, free_at = ready_engine(CASE, CASE.context + max_tokens(CASE, STEPS)), 0.0
    read, programs = engine.core._read, engine.core.runner.programs

    def late(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal free_at
            state, output = program(*args)
            free_at = max(time.perf_counter(), free_at) + DEVICE
            return state, replace(output, report=LateResult(output.report, free_at))

        return run

    def reads(*args: Any) -> Any:
        time.sleep(HOST)
        return read(*args)

    late_steps = {key: late(one) for key, one in programs.compiled.items() if key.kind == "round"}
    monkeypatch.setattr(programs, "compiled", programs.compiled | late_steps)
    monkeypatch.setattr(engine.core, "_read", reads)
    return engine


def test_engine_overlap_with_a_slow_host_is_over_1_3_times_faster(slow: Engine) -> None:
    """Negative control: two runs without overlap take equal times."""

    def seconds(overlap: bool) -> float:
        slow.config = replace(slow.config, overlap=overlap)
        request = slow.submit([5] * 8, SamplingParams(max_tokens=max_tokens(CASE, STEPS), temperature=0.0))
        began = time.perf_counter()
        for _ in range(STEPS):
            slow.step()
        slow.abort(request)  # no answer of these programs ends it
        slow.result(request)
        slow.step()
        return time.perf_counter() - began

    times = [[seconds(overlap) for overlap in (True, False, False)] for _ in range(5)]
    gain, nothing = (statistics.median(line[a] / line[b] for line in times) for a, b in ((1, 0), (1, 2)))
    assert 0.8 < nothing < 1.25 < 1.3 < gain
