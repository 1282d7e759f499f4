"""What all routes share: the engine, the open calls, worker threads, and whether requests are served now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from jspec.engine.callers.api import Engine
from jspec.engine.callers.replicas import Replicas
from jspec.server.ask.fields import Ask, Field, read_fields
from jspec.server.http.body import read_json
from jspec.server.http.errors import ApiError
from jspec.server.http.settings import Settings
from jspec.server.reading.logprobs import ShownTokens
from jspec.server.routes.calls import OpenCalls

T = TypeVar("T")
QUEUE_PER_SLOT = 5  # completions that may run or wait, for each slot
GRAMMAR_SECONDS = 5.0  # CPU time to compile one grammar
TEXT_THREADS = 2  # threads that tokenise and render templates
STARTING, WARMING, READY, DRAINING, UNHEALTHY = "starting", "warming", "ready", "draining", "unhealthy"
REASONS = {
    STARTING: "the application has not started; what serves or mounts it must run its lifespan",
    WARMING: "the server compiles its programs; try again",
    DRAINING: "the server ends; try another one",
    UNHEALTHY: "the engine failed and the server ends; try again after its restart",
}

logger = logging.getLogger("jspec.server")


class Service:
    """What the routes share: an engine with its thread, the queue, the texts of tokens and the state of the server.

    Args:
        engine: the engine or the engines, which the caller closes.
        settings: the server's options.

    Attributes:
        state: "starting", "warming", "ready", "draining" or "unhealthy"; requests are served while it is "ready".
        created: when the service was made, in seconds since 1970.
        calls: the open calls.
        texts: texts of single tokens.
        num_active: number of requests whose fields were read and whose answers are not sent yet.
    """

    def __init__(self, engine: Engine | Replicas, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.state, self.created = STARTING, int(time.time())
        engine.input_processor.limit_grammars(GRAMMAR_SECONDS)
        limit = QUEUE_PER_SLOT * engine.num_slots if settings.max_queue is None else settings.max_queue
        self.calls = OpenCalls(engine, limit)
        self.texts = ShownTokens(engine.tokenizer)
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "jspec-text")
        self._adapter_thread = ThreadPoolExecutor(1, "jspec-adapter")  # a load may wait for a download
        self._grammar_thread = ThreadPoolExecutor(1, "jspec-grammar")  # grammars are compiled one at a time
        self.num_active = 0
        self._is_tracing = False

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.settings.names[0]

    def check_ready(self) -> None:
        """Raise an `ApiError` with status 503 unless requests are served now."""
        if self.state == READY and not self.calls.threads.healthy:
            self.state = UNHEALTHY
        if self.state != READY:
            raise ApiError(503, REASONS[self.state], code=self.state)

    async def read(self, scope: Scope, receive: Receive, table: Mapping[str, Field]) -> Ask:
        """Read the body of a request and its fields.

        Raises:
            ApiError: requests are not served now, or the body or a field is wrong.
            ClientGone: the client left before the end of the body.
        """
        self.check_ready()
        most, seconds = self.settings.max_body, self.settings.body_seconds
        body = await read_json(scope, receive, most=most, seconds=seconds)
        if self.settings.log_text:
            logger.info("request to %s: %r", scope["path"], body)
        ask = read_fields(body, table, ignore_unknown=self.settings.ignore_unknown)
        if "model" in ask.own:
            self.check_model(ask.own["model"])
            if ask.own["model"] not in self.settings.names:
                ask.set("model", {"adapter": ask.own["model"]})
        return ask

    def check_model(self, name: str) -> None:
        """Raise an `ApiError` with status 404 unless the model or one of its adapters has this name."""
        known = (*self.settings.names, *self.engine.adapters)
        if name not in known:
            names = ", ".join(known)
            raise ApiError(404, f"model: expected {names}, got {name[:80]!r}", param="model", code="model_not_found")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Count a request as active while the context is open."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    async def in_thread(self, work: Callable[[], T], *, has_grammar: bool = False, loads_adapter: bool = False) -> T:
        """Run work that may take long in a worker thread; work with a grammar waits for other grammars."""
        threads = self._grammar_thread if has_grammar else self._text_threads
        threads = self._adapter_thread if loads_adapter else threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Allow the one request that records its rounds.

        Raises:
            ApiError: the server was started without --live, or another request records its rounds.
        """
        if not self.settings.live:
            raise ApiError(
                400,
                "jspec.rounds: expected false, because the server was started without --live",
                param="jspec.rounds",
                code="invalid_value",
            )
        if self._is_tracing:
            raise ApiError(
                429,
                "jspec.rounds: expected one request at a time that records its rounds, got another; try again",
                param="jspec.rounds",
                code="rounds_busy",
                headers={"Retry-After": "1"},
            )
        self._is_tracing = True
        try:
            yield
        finally:
            self._is_tracing = False

    def warm(self) -> None:
        """Compile the programs that the settings name; a worker thread does this while the state is "warming"."""
        wanted: dict[str, Any] = {name: name in self.settings.warm for name in ("logprobs", "grammar")}
        self.engine.warmup(trace="rounds" in self.settings.warm, prompt_logprobs=wanted["logprobs"], **wanted)
        self.texts.prepare()

    def close(self) -> None:
        """Abort what runs, and end the threads that belong to the server."""
        self.calls.abort_all()
        for threads in (self._text_threads, self._grammar_thread, self._adapter_thread):
            threads.shutdown(wait=False, cancel_futures=True)
