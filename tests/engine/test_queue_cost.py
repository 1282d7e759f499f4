"""Test that a step costs the host no more if more requests wait or have ended, by counting function calls."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from jspec.engine.callers.engine_thread import EngineThread
from tests.support import paper, tiny

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
    """Counts the calls of functions, those written in C included, from step to step of an engine.

    Args:
        ended: number of requests that must have ended before it counts.
        queued: number of requests that must run or wait before it counts.
    """

    def __init__(self, engine: Engine, ended: int, queued: int) -> None:
        self._engine, self._step = engine, engine.step
        self._finished = sum(engine.metrics.finished.values()) + ended
        self._queued, self._calls, self._marks = queued, 0, list[int]()
        self.done = threading.Event()

    @contextmanager
    def counting(self) -> Iterator[None]:
        def count(frame: Any, event: str, argument: Any) -> None:
            self._calls += event in ("call", "c_call")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._engine, "step", self.step)
            threading.setprofile(count)
            sys.setprofile(count)
            try:
                yield
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

    def step(self) -> bool:
        core = self._engine.core
        if sum(core.ended_metrics.finished.values()) >= self._finished:
            while not self._marks and len(core.live) < self._queued:
                time.sleep(0.01)  # other threads queue the requests
            self._marks.append(self._calls)
        if len(self._marks) > STEPS + 4:
            self.done.set()
        return self._step()

    @property
    def calls_per_step(self) -> float:
        return (self._marks[STEPS + 4] - self._marks[4]) / STEPS  # after the first prefills


Params = list[SamplingParams]


def step_by_generate(engine: Engine, counter: Counter, params: Params) -> None:
    asked = engine._make_requests([[1, 2]] * len(params), params, sampling_params=None, trace=False, keywords=None)
    with closing(engine._complete(asked)) as steps:
        while not counter.done.is_set():
            next(steps)


def step_by_stream(engine: Engine, counter: Counter, params: Params) -> None:
    """The first request's stream steps for all; it has as many completions as there are requests."""
    several = SamplingParams(max_tokens=200, n=len(params))
    with closing(engine.stream([1, 2], several)) as chunks:  # type: ignore[type-var]
        while not counter.done.is_set():
            next(chunks)


def step_by_thread(engine: Engine, counter: Counter, params: Params) -> None:
    thread = EngineThread(engine, lambda deliveries: None)
    for key, own in enumerate(params):
        thread.submit(key, engine.prepare([1, 2], own))
    while not counter.done.is_set():
        thread.turn()
    thread.stop()


def step_by_agenerate(engine: Engine, counter: Counter, params: Params) -> None:
    run_tasks(counter, [lambda: engine.agenerate([[1, 2]] * len(params), params)])


def step_by_tasks(engine: Engine, counter: Counter, params: Params) -> None:
    async def read(own: SamplingParams) -> None:
        async for _ in engine.astream([1, 2], own):
            pass

    run_tasks(counter, [lambda own=own: read(own) for own in params])


def run_tasks(counter: Counter, makes: list[Callable[[], Any]]) -> None:
    async def main() -> None:
        tasks = [asyncio.ensure_future(make()) for make in makes]
        await asyncio.to_thread(counter.done.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


CALLERS = (step_by_generate, step_by_stream, step_by_thread, step_by_agenerate, step_by_tasks)


def calls_per_step(caller: Callable[[Engine, Counter, Params], None], *, ended: int, queued: int) -> float:
    engine = make_engine()
    counter = Counter(engine, ended, queued)
    with counter.counting():
        caller(engine, counter, [SHORT] * ended + [LONG] * queued)
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    return counter.calls_per_step


@pytest.mark.parametrize("caller", CALLERS)
def test_step_with_300_more_waiting_requests_makes_no_more_calls(caller: Any) -> None:
    few, many = (calls_per_step(caller, ended=0, queued=queued) for queued in (20, 320))
    assert abs(many - few) < MARGIN


@pytest.mark.parametrize("caller", [one for one in CALLERS if one is not step_by_stream])
def test_step_after_the_end_of_300_requests_makes_no_more_calls(caller: Any) -> None:
    none, many = (calls_per_step(caller, ended=ended, queued=20) for ended in (0, 300))
    assert abs(many - none) < MARGIN
