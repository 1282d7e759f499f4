"""Test an engine that threads and asyncio tasks share."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from tests.support import paper
from tests.support.brittle import PARAMS, PATIENCE, PROMPTS, Fault, run_together
from tests.support.serving import held, wait_until

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


def test_request_aborted_by_another_thread_ends(engine: Engine) -> None:
    """The engine waits once the request has tokens, until it is aborted."""
    request, gate = engine.submit([1, 2], SamplingParams(max_tokens=50)), threading.Event()
    done: list[Any] = []

    def waits(ids: Sequence[int]) -> bool:
        assert gate.wait(PATIENCE)
        return False

    def abort() -> None:
        wait_until(lambda: bool(request.token_ids))
        engine.tokenizer.fails = waits  # type: ignore[union-attr]
        engine.threads.abort(engine._endings[request])
        gate.set()

    run_together([abort, lambda: done.append(engine.result(request))])
    assert done[0].finish_reason == "abort" and 0 < len(done[0].token_ids) < 50
    engine.abort(request)
    assert engine.result(request).finish_reason == "abort"


def test_async_stream_that_is_closed_does_not_wait_for_a_step(engine: Engine) -> None:
    async def main() -> None:
        stream = engine.astream(PROMPTS[0], SamplingParams(max_tokens=40))
        await anext(stream)
        with held(engine):
            await asyncio.wait_for(stream.aclose(), PATIENCE)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_async_stream_cancelled_before_its_request_is_queued_leaves_no_request_queued(engine: Engine) -> None:
    async def reads() -> None:
        async for _ in engine.astream([1, 2, 3], SamplingParams(max_tokens=5)):
            pass

    async def main() -> None:
        with held(engine):
            task = asyncio.create_task(reads())
            while not engine.threads.num_unfinished:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work


def test_requests_of_one_call_are_queued_before_the_next_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two calls."""
    live: list[int] = []
    step = engine.core.step

    def steps(**options: Any) -> bool:
        live.append(len(engine.core.live))
        return step(**options)

    monkeypatch.setattr(engine.core, "step", steps)
    engine.generate(PROMPTS, PARAMS)
    assert max(live) == next(filter(None, live)) == len(PROMPTS)
    live.clear()
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.generate(prompt, params)
    assert max(live) == 1


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


# -- the thread


def test_engine_that_nobody_holds_ends_its_thread_and_frees_its_memory() -> None:
    one = paper.byte_engine()
    one.generate("a")
    thread, device = one.threads._thread, one.core.runner.target_side
    assert thread.is_alive() and device.state is not None
    del one
    assert not thread.is_alive() and device.state is None


def test_stream_keeps_its_engine() -> None:
    stream = paper.byte_engine().stream("a", max_tokens=9)
    gc.collect()
    assert [chunk.finish_reason for chunk in stream][-1] == "length"


SCRIPT = """
import os, sys
from tests.support import brittle
engine = brittle.engine()
request = engine.submit([1, 2], max_tokens=50)
stream = engine.stream([1, 2], max_tokens=50)
next(stream)
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        try:
            engine.generate([1])
        except RuntimeError as error:
            print(error, flush=True)
        sys.exit(0)
    os.waitpid(child, 0)
print("ends", flush=True)
"""


@pytest.mark.parametrize("how", ["exit", "fork"])
def test_process_with_running_requests_ends(how: str) -> None:
    """The script does not close its engine."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, how], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0 and done.stdout.endswith("ends\n") and "Traceback" not in done.stderr, done
    assert (how == "fork") == ("got its forked child" in done.stdout)
