"""Test that a caller misses no change of its requests, and that nothing of them stays once it has left."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Generator, Sequence

import pytest

from jspec import Engine, SamplingParams
from jspec.engine.callers.streams import SharedSteps, TaskWatch
from jspec.engine.callers.watch import Watch
from jspec.engine.request.request import Request
from tests.support import brittle
from tests.support.brittle import PATIENCE, PROMPTS

pytestmark = pytest.mark.once

LONG = SamplingParams(max_tokens=40)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Request]:
    """Return the set of the requests that were given to a watch while the test runs and that are alive."""
    alive, add = weakref.WeakSet[Request](), Watch.add

    def adds(self: Watch, requests: Sequence[Request]) -> None:
        alive.update(requests)
        add(self, requests)

    monkeypatch.setattr(Watch, "add", adds)
    return alive


def test_cancelled_tasks_leave_no_request_alive_while_no_step_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, watched: weakref.WeakSet[Request]
) -> None:
    """The step for which all tasks wait begins after they have left."""
    have_left, step = threading.Event(), engine.step

    def steps() -> bool:
        assert have_left.wait(PATIENCE)
        return step()

    async def read() -> None:
        async for _ in engine.astream(PROMPTS[0], LONG):
            pass

    async def main() -> None:
        shared = engine._async_steps._shared.setdefault(asyncio.get_running_loop(), SharedSteps())
        asks = [one for _ in range(20) for one in (read(), engine.agenerate(PROMPTS, LONG))]
        tasks = [asyncio.ensure_future(one) for one in asks]
        try:
            while len(shared._waiting) < len(tasks):
                await asyncio.sleep(0.001)
            assert len(watched) == 20 * (1 + len(PROMPTS))
            assert all(task.cancel() for task in tasks)
            await asyncio.wait(tasks)
            asks.clear()
            tasks.clear()
            assert not shared.changed and not shared._waiting
            gc.collect()
            assert not watched
        finally:
            have_left.set()

    monkeypatch.setattr(engine, "step", steps)
    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_task_cancelled_again_while_it_waits_for_the_lock_aborts_and_leaves_nothing(engine: Engine) -> None:
    async def main() -> None:
        steps, request = SharedSteps(), engine.prepare([1, 2])
        watch = TaskWatch(steps, [request])
        with engine._lock:
            task = asyncio.ensure_future(watch.leave(engine))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled() and request.finish_reason is None
        await asyncio.get_running_loop().shutdown_default_executor()
        assert request.finish_reason == "abort"
        assert not (steps.changed or watch.started or watch.num_sent)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_task_whose_step_cannot_start_waits_no_longer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: SharedSteps, loop: Engine) -> None:
        raise MemoryError

    async def main() -> None:
        steps = SharedSteps()
        with pytest.raises(MemoryError):
            await steps.wait(engine, TaskWatch(steps, [engine.prepare([1, 2])]))
        assert not steps._waiting

    monkeypatch.setattr(SharedSteps, "_start", fails)
    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def completions(engine: Engine) -> Generator[object]:
    asked = engine._make_requests(PROMPTS, LONG, sampling_params=None, trace=False, keywords=None)
    return engine._complete(asked)


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("ask", [lambda engine: engine.stream(PROMPTS[0], LONG), completions])
def test_caller_that_leaves_early_leaves_no_request_to_the_garbage_collector(
    engine: Engine,
    watched: weakref.WeakSet[Request],
    ask: Callable[[Engine], Generator[object]],
    is_within: bool,
) -> None:
    """The caller leaves between two steps, or within a step, which aborts the requests at its end."""
    callers = [ask(engine)]
    next(callers[0])

    def leave(ids: Sequence[int]) -> bool:
        engine.tokenizer.fails = lambda ids: False  # type: ignore[union-attr]
        callers.pop().close()
        return False

    assert watched
    gc.disable()
    try:
        engine.tokenizer.fails = leave  # type: ignore[union-attr]
        if not is_within:
            leave([])
        while engine.step():
            pass
        assert not callers and not watched
    finally:
        gc.enable()


def test_engine_that_its_tokenizer_closes_within_a_step_changes_no_ended_request() -> None:
    engine = brittle.engine.__wrapped__()
    requests = [engine.submit(prompt, LONG) for prompt in PROMPTS[: brittle.SLOTS]]
    while not all(request.token_ids for request in requests):
        engine.step()
    ends: list[list[int]] = []

    def closes(ids: Sequence[int]) -> bool:
        engine.tokenizer.fails = lambda ids: False
        engine.close()
        ends.extend(list(request.token_ids) for request in requests)
        return False

    engine.tokenizer.fails = closes
    while not ends:
        engine.step()
    assert [request.finish_reason for request in requests] == ["abort"] * len(requests)
    assert [request.error for request in requests] == [None] * len(requests)
    assert [request.token_ids for request in requests[1:]] == ends[1:]


def test_task_woken_before_a_change_is_complete_is_woken_again(engine: Engine) -> None:
    """A step of another thread has started the request, and its output comes after the task has looked."""

    async def main() -> None:
        steps, request = SharedSteps(), engine.prepare([1, 2])
        watch = TaskWatch(steps, [request])
        request.tell()
        steps.changed.clear()  # as at the end of an own step
        await watch.advance(engine)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
