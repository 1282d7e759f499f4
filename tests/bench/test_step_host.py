"""`jspec bench step --measure host`, and the gain of overlap with a slow device and a slow host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jspec import Engine, SamplingParams
from jspec.__main__ import main
from jspec.engine.request import Request
from jspec.engine.scheduler import Scheduler
from jspec.tools.bench import step_host
from jspec.tools.bench.report import table_of
from jspec.tools.bench.step_host import HOST_COLUMNS, HostCase, HostTime, measure_host

pytestmark = pytest.mark.once

CASE = HostCase(rows=4, contexts=(64, 16384), length=1, accepted=1, rounds=20, blocks=5)
FULL = HostCase()
DEVICE = HOST = 0.004  # seconds


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [step_host.ready_engine(CASE) for _ in CASE.contexts]


def read_all(self: Scheduler, request: Request, rows: int, keep: Callable[..., None] = Scheduler.cache_prefix) -> None:
    """Negative control: every step reads each request's whole text several times."""
    for _ in range(16):
        request.tokens_between(0, rows)
    keep(self, request, rows)


def test_measure_host_every_step_is_full(engines: list[Engine]) -> None:
    """All rows are active at the context that is named, and accept as many drafts as the case says."""
    before = [engine.metrics for engine in engines]
    (short, _) = measure_host(engines, replace(CASE, blocks=1))
    assert short.context == 64 and short.milliseconds > 0 and short.ratio == 1.0
    for engine, was, context in zip(engines, before, CASE.contexts, strict=True):
        metrics = engine.metrics
        assert metrics.num_prompt_tokens - was.num_prompt_tokens == 4 * context
        steps = metrics.num_drafts - was.num_drafts
        assert steps >= 4 * (CASE.rounds + step_host.WARM_UP - 1)
        assert metrics.num_accepted_tokens - was.num_accepted_tokens == CASE.accepted * steps
        assert engine.pages_in_use == 0


def test_measure_host_cost_that_grows_with_context_shows(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_host(engines, CASE)[1].ratio < 2
    monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
    assert measure_host(engines, CASE)[1].ratio > 2


def test_table_has_the_results() -> None:
    results = [HostTime(4, 64, 0.5, 0.1, 0.6, 1.0), HostTime(4, 16384, 0.55, 0.2, 0.7, 1.1)]
    rows = [line.split() for line in table_of(HOST_COLUMNS, results).splitlines()[2:]]
    assert rows == [["4", "64", "0.500", "0.100", "0.600", "1.000"], ["4", "16384", "0.550", "0.200", "0.700", "1.100"]]


@pytest.mark.parametrize("words", [("--batch", "0"), ("--context", "0"), ("--steps", "0")])
def test_command_wrong_case_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "step", "--measure", "host", *words]) == 2
    assert "expected at least" in capsys.readouterr().err


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
        request = slow.submit([5] * 8, SamplingParams(max_tokens=CASE.max_tokens, temperature=0.0))
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
    with step_host.ready_engine(FULL) as first, step_host.ready_engine(FULL) as second:
        short, long = measure_host([first, second], FULL)
        print(table_of(HOST_COLUMNS, [short, long]))
        assert max(short.milliseconds, long.milliseconds) < 1.0
        assert abs(long.ratio - 1) < 0.1
        monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
        assert measure_host([first, second], replace(FULL, blocks=1))[1].ratio > 1.1
