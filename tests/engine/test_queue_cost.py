"""Test that a step costs the host no more if more requests wait or have ended, by counting function calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from tests.support import paper, tiny
from tests.support.brittle import PATIENCE

pytestmark = pytest.mark.once

STEPS = 20
# Calls per step by which two runs may differ. A look at each of 300 more requests makes at least 300, if it calls a
# function or a property. Reading a plain attribute in a loop is no event of the profiler, so it is not counted.
MARGIN = 100
SHORT, LONG = SamplingParams(max_tokens=2), SamplingParams(max_tokens=200)


@cache
def make_engine() -> Engine:
    engine = paper.make(
        tiny.model(64, layers=1), slots=2, buckets=(2,), prefill_buckets=(16,), max_len=256, page_size=16
    )
    engine.generate([[1, 2], [3]], LONG)
    return engine


class Counter:
    """Counts the calls of functions, those written in C included, from turn to turn of an engine's thread.

    Args:
        ended: number of requests that must have ended before it counts.
    """

    def __init__(self, engine: Engine, ended: int) -> None:
        self._engine, self._turn = engine, engine.threads.turn
        self._finished = sum(engine.metrics.finished.values()) + ended
        self._calls, self._marks = 0, list[int]()
        self.done = threading.Event()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the engine's thread."""

        def count(frame: Any, event: str, argument: Any) -> None:
            self._calls += event in ("call", "c_call")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._engine.threads, "turn", self.turn)
            self._engine.threads.do(lambda: sys.setprofile(count))
            try:
                yield
            finally:
                self._engine.threads.do(lambda: sys.setprofile(None))

    def turn(self) -> bool:
        if sum(self._engine.core.ended_metrics.finished.values()) >= self._finished:
            self._marks.append(self._calls)
        if len(self._marks) > STEPS + 4:
            self.done.set()
        return self._turn()

    @property
    def calls_per_step(self) -> float:
        return (self._marks[STEPS + 4] - self._marks[4]) / STEPS  # after the first prefills


def calls_per_step(*, whole: bool, ended: int, queued: int) -> float:
    engine = make_engine()
    counter, params = Counter(engine, ended), [SHORT] * ended + [LONG] * queued
    asked = {number: engine.prepare([1, 2], own) for number, own in enumerate(params)}
    with counter.counting():
        engine.threads.submit(asked, lambda deliveries: None, whole=whole)
        assert counter.done.wait(PATIENCE)
        for number in asked:
            engine.threads.abort(number)
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    return counter.calls_per_step


@pytest.mark.parametrize("whole", [True, False])
def test_step_with_300_more_waiting_requests_makes_no_more_calls(whole: bool) -> None:
    few, many = (calls_per_step(whole=whole, ended=0, queued=queued) for queued in (20, 320))
    assert abs(many - few) < MARGIN


@pytest.mark.parametrize("whole", [True, False])
def test_step_after_the_end_of_300_requests_makes_no_more_calls(whole: bool) -> None:
    none, many = (calls_per_step(whole=whole, ended=ended, queued=20) for ended in (0, 300))
    assert abs(many - none) < MARGIN
