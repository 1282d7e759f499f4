"""`jspec bench host` and `jspec bench batching`: the host's part of a round, and what batching and overlap gain."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Engine, SamplingParams, Tree
from jspec.__main__ import main
from jspec.engine.request import Request
from jspec.engine.scheduler import Scheduler
from jspec.engine.tokenizer import ByteTokenizer
from jspec.tools import demo
from jspec.tools.bench import batching, host
from jspec.tools.bench.pair import Pair
from tests.support import tiny

pytestmark = pytest.mark.once

CASE = host.Case(rows=4, contexts=(64, 16384), length=1, accepted=1, rounds=20, blocks=5)
FULL = host.Case()
DEVICE = HOST = 0.004  # seconds


@pytest.fixture(scope="module")
def pair() -> list[Engine]:
    return [host.ready_engine(CASE) for _ in CASE.contexts]


@pytest.fixture
def ready(pair: list[Engine]) -> Engine:
    return pair[0]


def reads_all(self: Scheduler, request: Request, rows: int, keep: Callable[..., None] = Scheduler.cache_prefix) -> None:
    """Negative control: every round looks at all of every request's text, over and over."""
    for _ in range(16):
        request.tokens_between(0, rows)
    keep(self, request, rows)


def test_every_round_is_a_full_one(pair: list[Engine]) -> None:
    """All rows are at work at the context that is named, and accept as many drafts as the case says."""
    before = [engine.metrics for engine in pair]
    (short, _) = host.measure_with(pair, replace(CASE, blocks=1))
    assert short.context == 64 and short.milliseconds > 0 and short.ratio == 1.0
    for engine, was, context in zip(pair, before, CASE.contexts, strict=True):
        metrics = engine.metrics
        assert metrics.num_prompt_tokens - was.num_prompt_tokens == 4 * context
        rounds = metrics.num_drafts - was.num_drafts
        assert rounds >= 4 * (CASE.rounds + host.WARM_UP - 1)
        assert metrics.num_accepted_tokens - was.num_accepted_tokens == CASE.accepted * rounds
        assert engine.pages_in_use == 0


def test_a_cost_that_grows_with_the_context_shows(pair: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, a round at 256 times the context is no matter; with a glance at the whole text it is."""
    assert host.measure_with(pair, CASE)[1].ratio < 2
    monkeypatch.setattr(Scheduler, "cache_prefix", reads_all)
    assert host.measure_with(pair, CASE)[1].ratio > 2


def test_the_table_has_the_results(tmp_path: Path) -> None:
    results = [host.Host(64, 0.5, 0.1, 0.6, 1.0), host.Host(16384, 0.55, 0.2, 0.7, 1.1)]
    rows = [line.split() for line in host.text(CASE, results).splitlines()[2:]]
    assert rows == [["4", "64", "0.500", "0.100", "0.600", "1.000"], ["4", "16384", "0.550", "0.200", "0.700", "1.100"]]
    host.write_json(tmp_path / "out", CASE, results)
    written = json.loads((tmp_path / "out").read_text())
    assert written["results"][1]["ratio"] == 1.1 and written["case"]["contexts"] == [64, 16384]


@pytest.mark.parametrize("words", [("--rows", "0"), ("--context", "0"), ("--rounds", "0")])
def test_no_other_case(words: tuple[str, str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "host", *words]) == 2
    assert "expected at least" in capsys.readouterr().err


class Late:
    """A result that is ready at its time."""

    def __init__(self, report: np.ndarray, at: float) -> None:
        self._report, self._at = np.asarray(report), at

    def block_until_ready(self) -> None:
        time.sleep(max(self._at - time.perf_counter(), 0.0))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._report


@pytest.fixture
def slow(ready: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A device that takes its time for a round, one after the other, and a host that does so too."""
    free_at, read = 0.0, ready.core._read

    def late(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal free_at
            state, output = program(*args)
            free_at = max(time.perf_counter(), free_at) + DEVICE
            return state, replace(output, report=Late(output.report, free_at))

        return run

    def reads(*args: Any) -> Any:
        time.sleep(HOST)
        return read(*args)

    programs = ready.core.runner.programs
    late_rounds = {key: late(one) for key, one in programs.compiled.items() if key.kind == "round"}
    monkeypatch.setattr(programs, "compiled", programs.compiled | late_rounds)
    monkeypatch.setattr(ready.core, "_read", reads)
    return ready


def test_overlap_hides_the_host_behind_the_device(slow: Engine) -> None:
    """Two that take as long as each other: half of the time is saved; without overlap, twice, nothing."""

    def run() -> None:
        request = slow.submit([5] * 8, SamplingParams(max_tokens=CASE.tokens, temperature=0.0))
        for _ in range(25):
            slow.step()
        slow.abort(request)  # no answer of these programs ends it
        slow.result(request)

    config = slow.config
    times = [[batching.timed(slow, run, overlap) for overlap in (True, False, False)] for _ in range(3)]
    slow.config = config
    gain, nothing = (statistics.median(line[a] / line[b] for line in times) for a, b in ((1, 0), (1, 2)))
    assert 0.8 < nothing < 1.25 < 1.3 < gain


def test_batching_tells_every_way_beside_the_first(tmp_path: Path) -> None:
    pair = Pair(tiny.model(256, layers=1), ByteTokenizer(), (), None, None)
    ways, gain = batching.measure(pair, None, requests=2, tokens=3, repeats=1)
    assert [way.name for way in ways] == list(batching.WAYS)
    assert ways[0].ratio == 1.0 and gain == pytest.approx(ways[1].ratio / ways[2].ratio)
    assert ways[1].ratio == pytest.approx(ways[1].tokens_per_second / ways[0].tokens_per_second)
    assert batching.text(ways, gain).splitlines()[2].split()[:3] == ["one", "by", "one"]
    batching.write_json(tmp_path / "out", ways, gain)
    assert json.loads((tmp_path / "out").read_text())["overlap_gain"] == gain
    with pytest.raises(ValueError, match="requests: expected at least 2"):
        batching.measure(pair, None, requests=1)


# -- how fast it is, on a machine that does little else


@pytest.mark.timing
def test_the_host_takes_less_than_a_millisecond_whatever_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with host.ready_engine(FULL) as first, host.ready_engine(FULL) as second:
        short, long = host.measure_with([first, second], FULL)
        print(host.text(FULL, [short, long]))
        assert max(short.milliseconds, long.milliseconds) < 1.0
        assert abs(long.ratio - 1) < 0.1
        monkeypatch.setattr(Scheduler, "cache_prefix", reads_all)
        assert host.measure_with([first, second], replace(FULL, blocks=1))[1].ratio > 1.1


@pytest.mark.timing
@pytest.mark.parametrize("tree", [None, Tree.chain(3)], ids=str)
def test_batching_is_three_times_as_fast_and_overlap_no_slower(tree: Tree | None) -> None:
    ways, gain = batching.measure(Pair.load(demo.TARGET), tree)
    print(batching.text(ways, gain))
    assert ways[1].ratio >= 3.0
    assert gain >= 0.98  # as fast, but for what two medians differ by
