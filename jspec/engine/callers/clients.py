"""Callers of engines: they put requests into the queues of the engines' threads, and take the deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import NoReturn, Self
from weakref import WeakKeyDictionary

from jspec.core.config import EngineConfig
from jspec.engine.callers.deliveries import Delivery, Outlet
from jspec.engine.callers.engine_thread import EngineThread
from jspec.engine.callers.replica_threads import ReplicaThreads
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Chunk, Request
from jspec.engine.text.tokenizer import Tokenizer


class Ending:
    """Waits for the end of one request, whose key it is in the threads."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.wait = self._ended.wait

    def take(self, deliveries: list[Delivery]) -> None:
        if deliveries[-1].last:
            self._ended.set()


class Clients(ABC):
    """Runs requests in the thread of an engine, or in those of several.

    An interrupt or an error of a caller aborts the caller's requests. It never reaches a step.

    Attributes:
        threads: the thread of the engine, or those of the engines.
        config: the checked options of an engine.
        input_processor: makes requests from prompts.
    """

    config: EngineConfig
    input_processor: InputProcessor

    def __init__(self, threads: EngineThread | ReplicaThreads) -> None:
        self.threads = threads
        self._endings: WeakKeyDictionary[Request, Ending] = WeakKeyDictionary()  # of requests from `submit`

    @abstractmethod
    def _check_open(self) -> None:
        """Raise a RuntimeError if no request can be served any more."""

    @contextlib.contextmanager
    def _submitted(self, requests: Sequence[Request], outlet: Outlet, *, whole: bool) -> Iterator[None]:
        """Submit requests; when the context ends, what has not ended is aborted."""
        asked = {object(): request for request in requests}
        self._check_thread()
        try:
            self._check_open()
            self.threads.submit(asked, outlet, whole=whole)
            yield
        finally:
            for key, request in asked.items():
                if any(sample.finish_reason is None for sample in request.samples):
                    self.threads.abort(key)
        self.threads.warn()

    def _complete(self, requests: Sequence[Request], seconds: float | None = None) -> Iterator[None]:
        """Run requests to their end; yield after ``seconds`` at the latest, and whenever a completion has ended."""
        received: SimpleQueue[list[Delivery]] = SimpleQueue()
        with self._submitted(requests, received.put, whole=True):
            unfinished = len(requests)
            while unfinished:
                with contextlib.suppress(Empty):
                    unfinished -= sum(delivery.last for delivery in received.get(timeout=seconds))
                yield
        raise_refusal(requests)

    async def _acomplete(self, make: Callable[[], list[Request]]) -> list[Request]:
        """Make requests in a thread, run them to their end and return them; if cancelled, abort them."""
        self._check_open()
        requests = await asyncio.to_thread(make)
        received: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        with self._submitted(requests, put_into(received), whole=True):
            unfinished = len(requests)
            while unfinished:
                unfinished -= sum(delivery.last for delivery in await received.get())
        raise_refusal(requests)
        return requests

    def _stream(self, request: Request) -> Iterator[Chunk]:
        """Run a request and yield its chunks; if closed, abort it."""
        received: SimpleQueue[list[Delivery]] = SimpleQueue()
        with self._submitted([request], received.put, whole=False):
            last = False
            while not last:
                for delivery in received.get():
                    last = delivery.last
                    yield delivery.chunk
        raise_error(request)

    async def _astream(self, make: Callable[[], Request]) -> AsyncIterator[Chunk]:
        """Make a request in a thread, run it and yield its chunks; if cancelled, abort it."""
        self._check_open()
        request = await asyncio.to_thread(make)
        received: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        with self._submitted([request], put_into(received), whole=False):
            last = False
            while not last:
                for delivery in await received.get():
                    last = delivery.last
                    yield delivery.chunk
        raise_error(request)

    def _submit(self, request: Request) -> None:
        """Queue a request."""
        ending = self._endings[request] = Ending()
        self.threads.submit({ending: request}, ending.take, whole=True)

    def _wait(self, request: Request) -> None:
        """Wait until a submitted request has ended."""
        self._check_thread()
        self._ending_of("result", request).wait()
        self.threads.warn()
        raise_refusal([request])

    def _abort(self, request: Request) -> None:
        """End the unfinished ones of a request's completions; in a step of the engine itself, after the step."""
        ending = self._ending_of("abort", request)
        self.threads.abort(ending)
        if not self.threads.is_current:
            ending.wait()

    def _check_thread(self) -> None:
        """Raise a RuntimeError in the thread that makes the engine's turns, which would wait for itself."""
        if self.threads.is_current:
            raise RuntimeError(
                "expected a thread that may wait for the engine, got the one that runs its steps, as in a callback or "
                "in ByHand; submit requests from another thread, or step by hand"
            )

    def _ending_of(self, call: str, request: Request) -> Ending:
        self.threads.check_process()
        ending = self._endings.get(request)
        if ending is None:
            raise ValueError(f"{call}: expected a request that submit returned, got request {request.id}")
        return ending

    # -- as an object

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raise a ValueError if a request could never be served."""

    @abstractmethod
    def warmup(
        self, *, logprobs: bool = False, prompt_logprobs: bool = False, trace: bool = False, grammar: bool = False
    ) -> None:
        """Compile the programs of all batch sizes and prompt lengths, and those for requests with these outputs."""

    @property
    @abstractmethod
    def metrics(self) -> Metrics:
        """Return the sums of all requests' counters, and the number of pages in use now."""

    @abstractmethod
    def prometheus(self, model_name: str = "jspec") -> str:
        """Return counters, gauges and latencies (in seconds) as Prometheus text, under vLLM's metric names."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """The number of requests that may run at once."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """The number of pages that requests can hold."""

    @abstractmethod
    def close(self) -> None:
        """Abort all requests and free the device memory."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None: prompts and output are token ids."""
        return self.input_processor.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The token ids that end a request."""
        return self.input_processor.eos_ids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name}: expected an object that can be copied or pickled, got an engine, which holds device memory; make "
            "another engine from its arguments"
        )


def put_into(received: asyncio.Queue[list[Delivery]]) -> Outlet:
    """Return a function that other threads may call to put deliveries into a queue of the running event loop."""
    loop = asyncio.get_running_loop()

    def put(deliveries: list[Delivery]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits for output
            loop.call_soon_threadsafe(received.put_nowait, deliveries)

    return put


def raise_refusal(requests: Sequence[Request]) -> None:
    """Raise the error of the first request whose programs could not be compiled, if there is one."""
    for request in requests:
        if request.output.is_refused:
            raise_error(request)


def raise_error(request: Request) -> None:
    """Raise the error of a request's first failed completion, if any failed."""
    for sample in request.samples:
        if sample.error is not None:
            raise sample.error
