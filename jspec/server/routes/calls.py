"""The engine's requests of each HTTP request, and the new output that the engine's thread delivers for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from jspec.engine.callers.api import Engine
from jspec.engine.callers.deliveries import Delivery
from jspec.engine.callers.replicas import Replicas
from jspec.engine.request.request import Chunk, Request
from jspec.server.http.errors import ApiError, failed

RETRY_SECONDS = 1  # what a client is told to wait after 429
Output = tuple[int, Chunk]  # index of the choice, its new output


class Call:
    """The engine's requests of one HTTP request, one for each prompt, and their output that was not taken yet.

    All methods run in the event loop.

    Args:
        requests: requests from `Engine.prepare`, each for n completions; the choice i of prompt p has index p * n + i.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.unfinished = set(range(len(requests)))  # prompts whose completions have not all ended
        self._n = len(requests[0].samples)
        self._new: dict[int, list[Chunk]] = {}
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def push(self, prompt: int, delivery: Delivery) -> None:
        """Add the new output of one prompt."""
        chunk = delivery.chunk
        self._new.setdefault(prompt * self._n + chunk.index, []).append(chunk)
        if delivery.last:
            self.unfinished.discard(prompt)
        if delivery.error is not None:
            self.fail(failed(delivery.error))
        elif chunk.finish_reason == "abort":  # by something else than this call, which takes no output then
            self.fail(ApiError(503, "the request was aborted; try again", code="aborted"))
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the call with an error, which the next `take` raises."""
        self._error = self._error or error
        self._changed.set()

    async def take(self, seconds: float | None = None) -> list[Output]:
        """Wait for new output; return it with one chunk a choice, or [] if none comes in time.

        Args:
            seconds: how long to wait; None: as long as it takes.

        Raises:
            ApiError: a completion failed, or the server ends.
        """
        timer = seconds and asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer:
                timer.cancel()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        new, self._new = self._new, {}
        return [(choice, merged(chunks)) for choice, chunks in new.items()]

    async def result(self) -> list[Output]:
        """Wait until all completions have ended; return the whole output, in the order of the choices.

        Raises:
            ApiError: a completion failed, or the server ends.
        """
        while self.unfinished and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        self._changed.set()
        return sorted(await self.take(), key=lambda output: output[0])


def merged(chunks: Sequence[Chunk]) -> Chunk:
    """Return successive chunks of one completion as one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    first, last = chunks[0], chunks[-1]
    joined: dict[str, Any] = {
        name: None if getattr(first, name) is None else [entry for chunk in chunks for entry in getattr(chunk, name)]
        for name in ("token_ids", "from_draft", "logprobs", "pieces", "rounds")
    }
    text = None if first.text is None else "".join(chunk.text or "" for chunk in chunks)
    return replace(last, text=text, prompt_logprobs=first.prompt_logprobs, **joined)


Key = tuple[Call, int]  # a call and the number of one of its prompts; names a request in the engine's thread


class OpenCalls:
    """All calls that are open, and the thread of the engine, or of the engines, that serves them.

    Args:
        engine: the engine or the engines.
        limit: largest number of completions that run or wait, those being prepared included.

    Attributes:
        pending: number of completions that run, wait or are being prepared.
    """

    def __init__(self, engine: Engine | Replicas, limit: int) -> None:
        self.limit, self.pending = limit, 0
        self.threads = engine.threads
        self._open: set[Call] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Take output in the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def check(self, count: int, field: str) -> None:
        """Check whether there is room for ``count`` more completions.

        Raises:
            ApiError: there is none now (429), or there never will be (400).
        """
        if count > self.limit:
            raise ApiError(
                400,
                f"{field}: expected at most {self.limit} completions in one request, got {count}; send fewer at once, "
                "or start the server with a larger --max-queue",
                param=field,
                code="too_many_completions",
            )
        if self.pending + count > self.limit:
            raise ApiError(
                429,
                f"the queue is full: {self.pending} completions run or wait, and the limit is {self.limit}; try again",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )

    @contextlib.contextmanager
    def room(self, count: int, field: str) -> Iterator[None]:
        """Keep room for ``count`` completions while they are prepared; the engine has none of them yet.

        Raises:
            ApiError: there is no room.
        """
        self.check(count, field)
        self.pending += count
        try:
            yield
        finally:
            self.pending -= count

    @contextlib.contextmanager
    def submitted(self, requests: Sequence[Request]) -> Iterator[Call]:
        """Submit requests; when the context ends, what has not finished is aborted.

        Raises:
            ApiError: the engine's thread has ended.
        """
        call = Call(requests)
        self._open.add(call)
        try:
            for prompt, request in enumerate(requests):
                self._submit((call, prompt), request)
            yield call
        finally:
            self._open.discard(call)
            for prompt in call.unfinished:
                self.threads.abort((call, prompt))
            self.threads.warn()

    def _submit(self, key: Key, request: Request) -> None:
        try:
            self.threads.submit({key: request}, self._deliver)
        except RuntimeError as error:
            raise ApiError(503, f"the engine serves no more: {error}", code="unhealthy") from error
        self.pending += len(request.samples)

    def fail_all(self, error: ApiError) -> None:
        """End all open calls with an error."""
        for call in self._open:
            call.fail(error)

    def abort_all(self) -> None:
        """Abort what has not finished of all open calls."""
        for call in self._open:
            for prompt in call.unfinished:
                self.threads.abort((call, prompt))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Pass the new output of a step to the event loop; called in an engine's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits for output
            self._loop.call_soon_threadsafe(self._receive, deliveries)

    def _receive(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            call, prompt = cast(Key, delivery.key)
            call.push(prompt, delivery)
            if delivery.last:
                self.pending -= len(call.requests[prompt].samples)
