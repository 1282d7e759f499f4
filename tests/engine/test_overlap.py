"""Overlap of host and device: the engine dispatches the next step before it reads a result."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jspec import Engine, NGram, SamplingParams, Tree
from jspec.engine.callers.by_hand import ByHand
from jspec.step.executable_key import ExecutableKey
from tests.support import paper, tiny

pytestmark = pytest.mark.once

STEPS = 25
DEVICE = HOST = 0.004  # seconds
PARAMS = SamplingParams(max_tokens=4 * STEPS, temperature=0.0)


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
    options: dict[str, Any] = dict(slots=1, max_len=16 + 8 * STEPS, prefill_buckets=(16,), log_interval=None)
    engine, free_at = paper.make(tiny.model(64, layers=1), NGram(Tree.chain(1)), **options), 0.0
    read, device = engine.core._read, engine.core.runner.target_side
    start = device.run

    def run(key: ExecutableKey, *inputs: Any) -> Any:
        nonlocal free_at
        output = start(key, *inputs)
        if key.kind != "round":
            return output
        free_at = max(time.perf_counter(), free_at) + DEVICE
        return replace(output, report=LateResult(output.report, free_at))

    def reads(*args: Any) -> Any:
        time.sleep(HOST)
        return read(*args)

    monkeypatch.setattr(device, "run", run)
    monkeypatch.setattr(engine.core, "_read", reads)
    return engine


def test_engine_overlap_with_a_slow_host_is_over_1_3_times_faster(slow: Engine) -> None:
    """Negative control: two runs without overlap take equal times."""

    def seconds(overlap: bool) -> float:
        slow.threads.config = replace(slow.config, overlap=overlap)
        with ByHand(slow) as by_hand:
            request = by_hand.submit([5] * 8, PARAMS)
            began = time.perf_counter()
            for _ in range(STEPS):
                by_hand.step()
            by_hand.abort(request)
            while by_hand.step():
                pass
        return time.perf_counter() - began

    times = [[seconds(overlap) for overlap in (True, False, False)] for _ in range(5)]
    gain, nothing = (statistics.median(line[a] / line[b] for line in times) for a, b in ((1, 0), (1, 2)))
    assert 0.8 < nothing < 1.25 < 1.3 < gain
