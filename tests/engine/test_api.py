"""Test an engine that threads and asyncio tasks share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from jspec.engine.callers.fair_lock import FairLock
from jspec.engine.request.request import Request
from tests.support.brittle import PARAMS, PATIENCE, PROMPTS, Fault, make_events, run_together

pytestmark = pytest.mark.once


def test_engine_shared_by_threads_returns_the_right_tokens_to_each_thread(
    engine: Engine, expected: list[list[int]]
) -> None:
    """Threads generate, stream and submit at the same time."""

    def generates(i: int) -> None:
        assert engine.generate(PROMPTS[i], PARAMS[i])[0].token_ids == expected[i]

    def streams(i: int) -> None:
        chunks = list(engine.stream(PROMPTS[i], PARAMS[i]))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[i]
        text = "".join(chunk.text or "" for chunk in chunks)
        assert text == engine.generate(PROMPTS[i], PARAMS[i])[0].text and chunks[-1].finish_reason == "length"

    def submits(i: int) -> None:
        request = engine.submit(PROMPTS[i], PARAMS[i])
        assert engine.result(request).token_ids == expected[i]

    run_together([lambda i=i, use=use: use(i) for i in range(len(PROMPTS)) for use in (generates, streams, submits)])


def test_request_aborted_by_another_thread_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the request has tokens, each step waits until it is aborted."""
    request, has_tokens, is_aborted = engine.submit([1, 2], SamplingParams(max_tokens=50)), *make_events(2)
    done: list[Any] = []
    step = engine.step

    def steps() -> None:
        step()
        if request.token_ids:
            has_tokens.set()
            assert is_aborted.wait(PATIENCE)

    def abort() -> None:
        assert has_tokens.wait(PATIENCE)
        engine.abort(request)
        is_aborted.set()

    monkeypatch.setattr(engine, "step", steps)
    run_together([abort, lambda: done.append(engine.result(request))])
    assert done[0].finish_reason == "abort" and 0 < len(done[0].token_ids) < 50


def test_engine_that_queues_many_requests_takes_its_lock_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborting many running requests takes the lock once too; aborting ended ones does not take it."""
    taken: list[str] = []
    enter, step = FairLock.__enter__, Engine.step

    def counted(self: FairLock) -> None:
        taken.append("lock")
        enter(self)

    def steps(self: Engine) -> bool:
        has_work = step(self)
        taken.pop()
        return has_work

    monkeypatch.setattr(FairLock, "__enter__", counted)
    monkeypatch.setattr(Engine, "step", steps)
    engine.generate(PROMPTS, PARAMS)
    assert len(taken) == 1
    requests = [engine.submit(prompt) for prompt in PROMPTS]
    engine._abort(requests)
    assert len(taken) == 1 + len(PROMPTS) + 1
    engine.abort(requests[0])
    assert len(taken) == 1 + len(PROMPTS) + 1 and engine.metrics.finished["abort"] >= len(PROMPTS)


def test_async_stream_closed_while_the_lock_is_held_does_not_block_the_loop(engine: Engine) -> None:
    """A thread holds the engine's lock until the event loop has run another task."""
    is_held, gone_on = make_events(2)

    def holds() -> None:
        with engine._lock:
            is_held.set()
            assert gone_on.wait(PATIENCE), "the event loop is blocked"

    async def main() -> None:
        stream = engine.astream(PROMPTS[0], SamplingParams(max_tokens=40))
        await anext(stream)
        holder = asyncio.ensure_future(asyncio.to_thread(holds))
        await asyncio.to_thread(is_held.wait, PATIENCE)
        closing = asyncio.ensure_future(stream.aclose())  # type: ignore[attr-defined]
        for _ in range(3):
            await asyncio.sleep(0)
        gone_on.set()
        await holder
        await closing

    asyncio.run(main())


def test_async_stream_cancelled_while_queueing_leaves_no_request_queued(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that queues the request goes on after the task was cancelled."""
    is_queueing, go_on = make_events(2)
    queue = Engine._queue

    def slow(self: Engine, requests: Sequence[Request]) -> None:
        is_queueing.set()
        assert go_on.wait(PATIENCE)
        queue(self, requests)

    async def reads() -> None:
        async for _ in engine.astream([1, 2, 3], SamplingParams(max_tokens=5)):
            pass

    async def main() -> None:
        task = asyncio.create_task(reads())
        await asyncio.to_thread(is_queueing.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_queue", slow)
        asyncio.run(main())  # waits for the thread that queues the request
    assert not engine.scheduler.has_work


def test_metrics_after_a_request_that_was_never_queued_do_not_count_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.metrics.finished
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_check_open", Fault(engine._check_open, 2, RuntimeError("closed meanwhile")))
        with pytest.raises(RuntimeError, match="closed meanwhile"):
            engine.generate(PROMPTS, PARAMS)
    assert engine.metrics.finished == before


def test_async_streams_in_more_tasks_than_slots_yield_each_task_its_tokens(
    engine: Engine, expected: list[list[int]]
) -> None:
    """There are four tasks per slot; some close their stream early, and the event loop is never blocked."""
    ticks = 0

    async def one(i: int) -> list[int]:
        got: list[int] = []
        async for chunk in engine.astream(PROMPTS[i], PARAMS[i]):
            got += chunk.token_ids
        return got

    async def leaves(i: int) -> list[int]:
        got: list[int] = []
        stream = engine.astream(PROMPTS[i], PARAMS[i])
        async for chunk in stream:
            got += chunk.token_ids
            if len(got) >= 2:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return got

    async def ticking() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> list[Any]:
        ticker = asyncio.create_task(ticking())
        cancelled = asyncio.create_task(one(5))
        tasks = [one(i) for i in range(6)] + [leaves(i) for i in range(6)]
        asyncio.get_running_loop().call_later(0.02, cancelled.cancel)
        results = await asyncio.gather(*tasks, cancelled, return_exceptions=True)
        ticker.cancel()
        return results

    results = asyncio.run(main())
    assert results[:6] == expected
    assert [got == expected[i][: len(got)] and len(got) >= 2 for i, got in enumerate(results[6:12])] == [True] * 6
    assert isinstance(results[12], asyncio.CancelledError) or results[12] == expected[5]
    assert ticks > 20


def test_astream_of_an_empty_prompt_raises_at_the_first_chunk(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        asyncio.run(anext(engine.astream([])))  # type: ignore[arg-type]


def test_astream_with_a_slow_check_leaves_the_event_loop_free(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check takes long if it compiles a grammar or a program. The check here ends only once the loop has run on."""
    ran_on = threading.Event()
    make = engine.prepare

    def slow(*args: Any, **options: Any) -> Any:
        assert ran_on.wait(30)
        return make(*args, **options)

    async def run() -> list[int]:
        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        ran_on.set()
        return await task

    async def collect() -> list[int]:
        return [token async for chunk in engine.astream(PROMPTS[0], PARAMS[0]) for token in chunk.token_ids]

    monkeypatch.setattr(engine, "prepare", slow)
    assert len(asyncio.run(run())) > 0


@pytest.mark.parametrize("is_later", [False, True])
def test_stream_closed_within_a_step_leaves_other_requests_unchanged(
    engine: Engine, expected: list[list[int]], is_later: bool
) -> None:
    """As by a garbage collector, the stream is closed while the engine holds its lock."""
    first = engine.submit(PROMPTS[1], PARAMS[1]) if is_later else None
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=40))
    next(stream)
    other = engine.submit(PROMPTS[2], PARAMS[2])

    def closes(ids: Sequence[int]) -> bool:
        stream.close()
        return False

    engine.tokenizer.fails = closes  # type: ignore[union-attr]
    for request, number in ((first, 1), (other, 2)):
        if request is not None:
            done = engine.result(request)
            assert (done.error, done.token_ids) == (None, expected[number])


def test_request_aborted_within_a_step_ends_with_a_result(engine: Engine) -> None:
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=40))

    def aborts(ids: Sequence[int]) -> bool:
        engine.abort(request)
        return False

    engine.tokenizer.fails = aborts  # type: ignore[union-attr]
    assert engine.result(request).finish_reason == "abort"


def test_error_of_a_shared_step_is_raised_in_all_tasks_that_wait_for_it(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def collect(i: int) -> list[int]:
        return [token async for chunk in engine.astream(PROMPTS[i], PARAMS[i]) for token in chunk.token_ids]

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(collect(i)) for i in range(6)]
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", fails)
            patch.setattr(engine.core, "add", add)
            return await asyncio.gather(*tasks, return_exceptions=True)

    def fails() -> bool:
        assert all_queued.wait(PATIENCE)
        raise OSError("no step")

    def add(request: Request, queued_at: float) -> None:
        queue(request, queued_at)
        if len(engine.core.live) == 6:
            all_queued.set()

    all_queued, queue = threading.Event(), engine.core.add

    assert [str(error) for error in asyncio.run(asyncio.wait_for(main(), PATIENCE))] == ["no step"] * 6
    assert asyncio.run(collect(0)) == expected[0]


def test_task_that_waits_in_an_event_loop_whose_executor_takes_no_more_steps_raises(engine: Engine) -> None:
    """The first step gives no output, because the engine leaves its result unread, so the task waits on."""

    async def main() -> None:
        event_loop = asyncio.get_running_loop()
        start, taken = event_loop.run_in_executor, list[Any]()

        def refuses(executor: Any, function: Any, *args: Any) -> Any:
            if function == engine._advance:
                if taken:
                    raise RuntimeError("no more threads")
                taken.append(function)
            return start(executor, function, *args)

        event_loop.run_in_executor = refuses  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no more threads"):
            [_ async for _ in engine.astream(PROMPTS[0], SamplingParams(max_tokens=40))]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
