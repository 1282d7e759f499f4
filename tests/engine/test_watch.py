"""Test that a caller misses no change of its requests, and that nothing of them stays once it has left."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest

from jspec import Engine, SamplingParams
from jspec.engine.callers.watch import Watch
from jspec.engine.request.request import Request
from tests.support import brittle
from tests.support.brittle import PATIENCE, PROMPTS
from tests.support.serving import wait_until

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


def test_cancelled_tasks_leave_no_request_alive(engine: Engine, watched: weakref.WeakSet[Request]) -> None:
    async def read() -> None:
        async for _ in engine.astream(PROMPTS[0], LONG):
            pass

    async def main() -> None:
        asks = [one for _ in range(20) for one in (read(), engine.agenerate(PROMPTS, LONG))]
        tasks = [asyncio.ensure_future(one) for one in asks]
        while len(watched) < 20 * (1 + len(PROMPTS)):
            await asyncio.sleep(0.001)
        assert all(task.cancel() for task in tasks)
        await asyncio.wait(tasks)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert engine.pages_in_use == 0
    gc.collect()
    assert not watched


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("name", ["stream", "generate"])
def test_caller_that_leaves_early_leaves_no_request_to_the_garbage_collector(
    engine: Engine, watched: weakref.WeakSet[Request], name: str, is_within: bool
) -> None:
    """The caller leaves between two steps, or within a step, which aborts the requests at its end."""

    def ask() -> Iterator[object]:
        if name == "stream":
            return engine.stream(PROMPTS[0], LONG)
        short = SamplingParams(max_tokens=1)
        return engine._complete(engine._make_requests(PROMPTS, [short, *[LONG] * (len(PROMPTS) - 1)]))

    callers = [ask()]
    next(callers[0])

    def leave(ids: Sequence[int]) -> bool:
        engine.tokenizer.fails = lambda ids: False  # type: ignore[union-attr]
        callers.pop().close()  # type: ignore[attr-defined]
        return False

    assert watched
    gc.disable()
    try:
        if is_within:
            engine.tokenizer.fails = leave  # type: ignore[union-attr]
        else:
            engine.threads.do(lambda: leave([]))
        wait_until(lambda: not callers)
        assert engine.pages_in_use == 0
        wait_until(lambda: not watched)
    finally:
        gc.enable()


def test_engine_that_its_tokenizer_closes_within_a_step_changes_no_ended_request() -> None:
    engine = brittle.engine.__wrapped__()
    requests = [engine.submit(prompt, LONG) for prompt in PROMPTS[: brittle.SLOTS]]
    wait_until(lambda: all(request.token_ids for request in requests))

    def closes(ids: Sequence[int]) -> bool:
        engine.tokenizer.fails = lambda ids: False
        engine.close()
        return False

    engine.tokenizer.fails = closes
    wait_until(lambda: all(request.finish_reason for request in requests))
    assert [request.finish_reason for request in requests] == ["abort"] * len(requests)
    assert [request.error for request in requests] == [None] * len(requests)
    assert all(len(request.token_ids) < LONG.max_tokens for request in requests)  # type: ignore[operator]
    engine.threads._thread.join(PATIENCE)
    assert engine.core.runner.state is None
