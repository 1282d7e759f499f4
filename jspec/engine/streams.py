"""Streams of chunks from running requests, for threads and for asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from jspec.engine.loop import EngineLoop, needs_rounds
from jspec.engine.output_processor import make_chunk
from jspec.engine.request import Chunk, Request


def stream(loop: EngineLoop, request: Request) -> Iterator[Chunk]:
    """Queue a request, run steps and yield the chunks of its completions; closing the iterator aborts them.

    Raises:
        Exception: a completion failed; its error is raised after the last chunk.
    """
    num_sent = dict.fromkeys(request.samples, 0)
    try:
        loop._queue(request.samples)
        while num_sent:
            # The steps of other callers serve this request too, so new output may exist without a step here.
            while not (updated := with_new_output(num_sent)):
                loop._advance(request.samples)
            for sample in updated:
                yield next_chunk(sample, num_sent)
        raise_error(request)
    finally:
        loop._abort(request.samples)


class AsyncSteps:
    """Runs the steps of an engine in threads, so that asyncio tasks can wait for their requests.

    The methods take the loop as an argument. A reference to it in this object would keep a deleted engine alive until a
    garbage collection.
    """

    def __init__(self) -> None:
        self._checks = ThreadPoolExecutor(16, "check")  # for making requests; steps never wait for slow grammars
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[None]] = WeakKeyDictionary()

    async def stream(self, loop: EngineLoop, make: Callable[[], Request]) -> AsyncIterator[Chunk]:
        """Queue a request and yield the chunks of its completions; cancelling the task aborts the request.

        Args:
            make: function that makes and checks the request; called in a thread, because it may compile a grammar.
        """
        request = await asyncio.wrap_future(self._checks.submit(make))
        num_sent = dict.fromkeys(request.samples, 0)
        try:
            await asyncio.to_thread(loop._queue, request.samples)
            while num_sent:
                while not (updated := with_new_output(num_sent)):
                    await self._step(loop, request.samples)
                await _make_records(updated)
                for sample in updated:
                    yield next_chunk(sample, num_sent)
            raise_error(request)
        finally:
            await _abort(loop, request.samples)

    async def finish(self, loop: EngineLoop, make: Callable[[], list[Request]]) -> list[Request]:
        """Queue requests, wait until all have ended, and return them; cancelling the task aborts them.

        Args:
            make: function that makes and checks the requests; called in a thread, because it may compile grammars.
        """
        asked = await asyncio.wrap_future(self._checks.submit(make))
        requests = [sample for request in asked for sample in request.samples]
        try:
            await asyncio.to_thread(loop._queue, requests)
            while any(request.finish_reason is None for request in requests):
                await self._step(loop, requests)
            await _make_records(requests)
            return asked
        finally:
            await _abort(loop, requests)

    async def _step(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        """Run a step in another thread and wait for it; all waiting tasks of this event loop share one step.

        If programs of the requests' rounds are not compiled yet, wait for their compilation instead.
        """
        if any(map(needs_rounds, requests)):
            await asyncio.to_thread(loop._compile_rounds, requests)
            return
        event_loop = asyncio.get_running_loop()
        step = self._shared.get(event_loop)
        if step is None or step.done():
            step = self._shared[event_loop] = event_loop.run_in_executor(None, loop._advance, ())
        await asyncio.shield(step)


async def _abort(loop: EngineLoop, requests: Sequence[Request]) -> None:
    """Abort the unfinished requests in a thread, because an event loop must not wait for the engine's lock."""
    if any(request.finish_reason is None for request in requests):
        await asyncio.shield(asyncio.to_thread(loop._abort, requests))


async def _make_records(requests: Sequence[Request]) -> None:
    """Make the log-probability records of prompts in a thread: 32,000 tokens take 0.2 s, an event loop must not."""
    scores = [request.output.prompt_logprobs for request in requests]
    waiting = [one for one in scores if one is not None and one.has_arrays]
    if waiting:
        await asyncio.to_thread(lambda: [one.records() for one in waiting])


def with_new_output(num_sent: dict[Request, int]) -> list[Request]:
    """Return the completions that have ended or have unsent tokens; ``num_sent`` counts the tokens sent so far."""
    return [
        sample
        for sample, count in num_sent.items()
        if len(sample.output.pieces) > count or sample.finish_reason is not None
    ]


def next_chunk(sample: Request, num_sent: dict[Request, int]) -> Chunk:
    """Make a chunk of a completion's unsent tokens, and update ``num_sent``; ended completions are removed from it."""
    chunk = make_chunk(sample, num_sent[sample])
    num_sent[sample] += len(chunk.token_ids)
    if chunk.finish_reason is not None:
        del num_sent[sample]
    return chunk


def raise_error(request: Request) -> None:
    """Raise the error of a request's first failed completion, if any failed."""
    for sample in request.samples:
        if sample.error is not None:
            raise sample.error
