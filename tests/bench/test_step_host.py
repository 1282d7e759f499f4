"""`jspec bench step --measure host`, and the gain of overlap with a slow device and a slow host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jspec import Engine, SamplingParams, Tree
from jspec.__main__ import main
from jspec.engine.request import Request
from jspec.engine.scheduler import Scheduler
from jspec.tools.bench import step_costs
from jspec.tools.bench.report import table_of
from jspec.tools.bench.step import Case
from jspec.tools.bench.step_costs import HOST_COLUMNS, HostTime, max_tokens, measure_host, ready_engine

pytestmark = pytest.mark.once

CASES = [Case("least", 4, context, Tree.chain(1), dtype="float32") for context in (64, 16384)]
FULL = [Case("least", 64, context, Tree.chain(4), dtype="float32") for context in (1024, 32768)]
STEPS = 20
DEVICE = HOST = 0.004  # seconds


def max_len(cases: list[Case]) -> int:
    return cases[-1].context + max_tokens(cases[-1], 50)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [ready_engine(case, max_len(CASES)) for case in CASES]


def read_all(self: Scheduler, request: Request, rows: int, keep: Callable[..., None] = Scheduler.cache_prefix) -> None:
    """Negative control: every step reads each request's whole text several times."""
    for _ in range(16):
        request.tokens_between(0, rows)
    keep(self, request, rows)


def test_measure_host_every_step_is_full(engines: list[Engine]) -> None:
    """All rows are active at the context that is named, and accept as many drafts as the case says."""
    before = [engine.metrics for engine in engines]
    short, _ = measure_host(engines, CASES, STEPS, 1)
    assert short.case.context == 64 and short.milliseconds > 0 and short.ratio == 1.0
    for engine, was, case in zip(engines, before, CASES, strict=True):
        metrics = engine.metrics
        assert metrics.num_prompt_tokens - was.num_prompt_tokens == 4 * case.context
        steps = metrics.num_drafts - was.num_drafts
        assert steps >= 4 * (STEPS + step_costs.WARM_UP - 1)
        assert metrics.num_accepted_tokens - was.num_accepted_tokens == steps
        assert engine.pages_in_use == 0


def test_measure_host_cost_that_grows_with_context_shows(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_host(engines, CASES, STEPS, 5)[1].ratio < 2
    monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
    assert measure_host(engines, CASES, STEPS, 5)[1].ratio > 2


def test_table_has_the_results() -> None:
    results = [HostTime(case, *[0.1 * (i + 1)] * 4) for i, case in enumerate(CASES)]
    rows = [line.split() for line in table_of(HOST_COLUMNS, results).splitlines()[2:]]
    assert rows == [["4", "64", "chain:1", *["0.100"] * 4], ["4", "16384", "chain:1", *["0.200"] * 4]]


@pytest.mark.parametrize("words", [("--batch", "0"), ("--context", "0"), ("--steps", "0")])
def test_command_wrong_case_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "step", "--measure", "host", *words]) == 2
    assert "at least 1 row, token of context, step and block" in capsys.readouterr().err


class LateResult:
    """A result that is ready at a given time."""

    def __init__(self, report: np.ndarray, at: float) -> None:
        self._report, self._at = np.asarray(report), at

    def block_until_ready(self) -> None:
        time.sleep(max(self._at - time.perf_counter(), 0.0))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._report


@pytest.fixture
def slow(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with a device that needs `DEVICE` seconds a step, one after the other, and a host that needs `HOST`."""
    engine, free_at = engines[0], 0.0
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


def test_overlap_host_as_slow_as_device_saves_half(slow: Engine) -> None:
    """Without overlap, the same run twice gains nothing."""

    def seconds(overlap: bool) -> float:
        slow.config = replace(slow.config, overlap=overlap)
        request = slow.submit([5] * 8, SamplingParams(max_tokens=max_tokens(CASES[0], STEPS), temperature=0.0))
        began = time.perf_counter()
        for _ in range(25):
            slow.step()
        slow.abort(request)  # no answer of these programs ends it
        slow.result(request)
        slow.step()
        return time.perf_counter() - began

    config = slow.config
    times = [[seconds(overlap) for overlap in (True, False, False)] for _ in range(3)]
    slow.config = config
    gain, nothing = (statistics.median(line[a] / line[b] for line in times) for a, b in ((1, 0), (1, 2)))
    assert 0.8 < nothing < 1.25 < 1.3 < gain


@pytest.mark.timing
def test_host_time_is_below_a_millisecond_at_any_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready_engine(FULL[0], max_len(FULL)) as first, ready_engine(FULL[1], max_len(FULL)) as second:
        short, long = measure_host([first, second], FULL, 50, 5)
        print(table_of(HOST_COLUMNS, [short, long]))
        assert max(short.milliseconds, long.milliseconds) < 1.0
        assert abs(long.ratio - 1) < 0.1
        monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
        assert measure_host([first, second], FULL, 50, 1)[1].ratio > 1.1
