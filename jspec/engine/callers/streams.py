"""Streams of chunks from running requests, for threads and for asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

from jspec.engine.callers.loop import EngineLoop
from jspec.engine.callers.watch import Watch
from jspec.engine.request.request import Chunk, Request


def stream(loop: EngineLoop, request: Request) -> Iterator[Chunk]:
    """Queue a request, run steps and yield the chunks of its completions; closing the iterator aborts them.

    Raises:
        Exception: a completion failed; its error is raised after the last chunk.
    """
    watch = Watch(request.samples)
    try:
        loop._queue(request.samples)
        while watch.num_sent:
            # The steps of other callers serve this request too, so new output may exist without a step here.
            while not (updated := watch.with_new_output()):
                loop._advance(watch)
            for sample in updated:
                yield watch.next_chunk(sample)
        raise_error(request)
    finally:
        loop._abort(request.samples)
        watch.close()


class SharedSteps:
    """Steps of an engine that the waiting tasks of one event loop share, as long as any task waits.

    After each step only the tasks are woken whose requests may have changed, because thousands may wait.

    Attributes:
        changed: watches of tasks whose requests may have changed; the threads that run steps add to it.
    """

    def __init__(self) -> None:
        self.changed: dict[TaskWatch, None] = {}
        self._waiting: dict[TaskWatch, asyncio.Future[asyncio.Future[None]]] = {}
        self._is_stepping = False

    async def wait(self, loop: EngineLoop, watch: TaskWatch) -> None:
        """Wait for the end of a step after which the task's requests may have changed.

        Raises:
            BaseException: a step raised it; all tasks that wait get it.
        """
        woken = self._waiting[watch] = asyncio.get_running_loop().create_future()
        try:
            if watch.started:
                self.changed[watch] = None
            if not self._is_stepping:
                self._start(loop)
            step = await woken
        finally:
            self._waiting.pop(watch, None)
        step.result()

    def _start(self, loop: EngineLoop) -> None:
        """Start a step in another thread."""
        event_loop = asyncio.get_running_loop()
        try:
            step = event_loop.run_in_executor(None, loop._advance)
        except RuntimeError as error:  # the executor takes no more work
            step = event_loop.create_future()
            step.set_exception(error)
        self._is_stepping = True
        step.add_done_callback(partial(self._end, loop))

    def _end(self, loop: EngineLoop, step: asyncio.Future[None]) -> None:
        """Wake the tasks that a step concerns, and start another step for those that wait on."""
        self._is_stepping = False
        has_failed = step.cancelled() or step.exception() is not None
        for watch in list(self._waiting if has_failed else self.changed):
            self.changed.pop(watch, None)
            woken = self._waiting.pop(watch, None)
            if woken is not None and not woken.done():
                woken.set_result(step)
        if self._waiting:
            self._start(loop)


class TaskWatch(Watch):
    """The requests for which an asyncio task waits.

    Args:
        steps: the steps that the task shares with others.
        requests: requests that are not queued yet.
    """

    def __init__(self, steps: SharedSteps, requests: Sequence[Request]) -> None:
        self._steps = steps
        super().__init__(requests)

    def start(self, request: Request) -> None:
        super().start(request)
        self._steps.changed[self] = None

    async def advance(self, loop: EngineLoop) -> None:
        """Wait for a step; if programs of the requests' rounds are not compiled yet, compile them instead."""
        if self.needs_rounds():
            await asyncio.to_thread(loop._compile_rounds, list(self.num_sent))
        else:
            await self._steps.wait(loop, self)

    async def leave(self, loop: EngineLoop) -> None:
        """Forget all requests, and abort first those that have not ended.

        A thread does this, because an event loop must not wait for the engine's lock. It goes on if the task is
        cancelled while it waits.
        """
        if any(request.finish_reason is None for request in self.num_sent):
            await asyncio.shield(asyncio.to_thread(self._abort, loop))
        else:
            self.close()

    def _abort(self, loop: EngineLoop) -> None:
        loop._abort(list(self.num_sent))
        self.close()

    def close(self) -> None:
        super().close()
        self._steps.changed.pop(self, None)


class AsyncSteps:
    """Runs the steps of an engine in threads, so that asyncio tasks can wait for their requests.

    The methods take the loop as an argument. A reference to it in this object would keep a deleted engine alive until a
    garbage collection.
    """

    def __init__(self) -> None:
        self._checks = ThreadPoolExecutor(16, "check")  # for making requests; steps never wait for slow grammars
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, SharedSteps] = WeakKeyDictionary()

    def close(self) -> None:
        """Let the threads that make requests end."""
        self._checks.shutdown(wait=False)

    async def stream(self, loop: EngineLoop, make: Callable[[], Request]) -> AsyncIterator[Chunk]:
        """Queue a request and yield the chunks of its completions; cancelling the task aborts the request.

        Args:
            make: function that makes and checks the request; called in a thread, because it may compile a grammar.
        """
        loop._check_open()
        request = await asyncio.wrap_future(self._checks.submit(make))
        watch = self._watch(request.samples)
        try:
            await asyncio.to_thread(loop._queue, request.samples)
            while watch.num_sent:
                while not (updated := watch.with_new_output()):
                    await watch.advance(loop)
                await _make_records(updated)
                for sample in updated:
                    yield watch.next_chunk(sample)
            raise_error(request)
        finally:
            await watch.leave(loop)

    async def finish(self, loop: EngineLoop, make: Callable[[], list[Request]]) -> list[Request]:
        """Queue requests, wait until all have ended, and return them; cancelling the task aborts them.

        Args:
            make: function that makes and checks the requests; called in a thread, because it may compile grammars.
        """
        loop._check_open()
        asked = await asyncio.wrap_future(self._checks.submit(make))
        requests = [sample for request in asked for sample in request.samples]
        watch = self._watch(requests)
        try:
            await asyncio.to_thread(loop._queue, requests)
            while watch.has_unended():
                await watch.advance(loop)
            await _make_records(requests)
            return asked
        finally:
            await watch.leave(loop)

    def _watch(self, requests: Sequence[Request]) -> TaskWatch:
        steps = self._shared.setdefault(asyncio.get_running_loop(), SharedSteps())
        return TaskWatch(steps, requests)


async def _make_records(requests: Sequence[Request]) -> None:
    """Make the log-probability records of prompts in a thread: 32,000 tokens take 0.2 s, an event loop must not."""
    scores = [request.output.prompt_logprobs for request in requests]
    waiting = [one for one in scores if one is not None and one.has_arrays]
    if waiting:
        await asyncio.to_thread(lambda: [one.records() for one in waiting])


def raise_error(request: Request) -> None:
    """Raise the error of a request's first failed completion, if any failed."""
    for sample in request.samples:
        if sample.error is not None:
            raise sample.error
