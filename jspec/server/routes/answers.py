"""The part of an answer that all generating routes share: its request, its stream or body, and its usage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Chunk, Request
from jspec.server.ask.fields import Ask, Field
from jspec.server.http.errors import ApiError, failed, invalid, refused
from jspec.server.http.events import DONE, PING, EventStream, event, send_json, while_there
from jspec.server.reading.acceptance import acceptance_json
from jspec.server.reading.rounds import rounds_json
from jspec.server.routes.calls import Output
from jspec.server.routes.service import Service

MIN_WAIT = 0.001  # seconds to wait for output when a ping is due
FINISH = {"eos": "stop"}  # OpenAI's finish_reason where it differs from the engine's

logger = logging.getLogger("jspec.server")


class Answer(ABC):
    """One request to a generating route, and its answer.

    Args:
        service: what the routes share.
        ask: the request's fields.

    Attributes:
        table: the route's fields.
        prefix, kind, chunk_kind: beginning of the id, and "object" of a body and of a chunk of a stream.
        prompt_field: the field that has the prompt.
        model: name of the model, or of its adapter.
        has_grammar: whether the completions follow a grammar.
        requests: the engine's requests, one a prompt, after `prepare`.
    """

    table: Mapping[str, Field]
    prefix: str
    kind: str
    chunk_kind: str
    prompt_field: str
    num_prompts = 1

    def __init__(self, service: Service, ask: Ask) -> None:
        self.service, self.own = service, ask.own
        self.id, self.created = f"{self.prefix}{uuid4().hex}", int(time.time())
        self.names = {**ask.names, "json_schema": ask.names.get("json_schema", "response_format")}
        self.is_stream: bool = self.own.get("stream", False)
        self.options: dict[str, bool] = self.own.get("stream_options", {})
        own_options: dict[str, bool] = self.own.get("jspec", {})
        self.is_traced, self.wants_metrics = (own_options.get(name, False) for name in ("rounds", "metrics"))
        self.wants_ids: bool = self.own.get("return_token_ids", False)
        self.requests: Sequence[Request] = ()
        self.num_tokens = self.num_cached = self.num_ended = 0
        self._unsent_rounds: list[dict[str, Any]] = []
        self._metrics = Metrics()  # of the completions that have ended
        self._check(ask)
        self.params = ask.sampling_params(service.settings.sampling)
        self.model = self.params.adapter or service.name
        self.n = self.params.n
        self.has_grammar = self.params.grammar_field is not None

    def _check(self, ask: Ask) -> None:
        """Check fields that depend on one another."""
        if self.own.get("best_of", 1) > ask.params.get("n", 1):
            raise invalid(
                "best_of", f"expected at most n, because all completions are returned, got {self.own['best_of']}"
            )
        if self.options and not self.is_stream:
            raise invalid("stream_options", "expected nothing without stream; set stream, or leave it out")
        if self.is_stream and "prompt_logprobs" in ask.params:
            raise invalid("prompt_logprobs", "expected nothing with stream; leave one of the two out")
        if self.is_traced and self.num_prompts * ask.params.get("n", 1) > 1:
            raise invalid("jspec.rounds", "expected one prompt and n = 1 beside it; send one request for each")

    @property
    def count(self) -> int:
        """The number of completions."""
        return self.num_prompts * self.n

    # -- what the routes define

    @abstractmethod
    def make_requests(self) -> list[Request]:
        """Tokenise and check the prompts; runs in a worker thread."""

    @abstractmethod
    def choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Return a completion's whole output as an entry of "choices"."""

    @abstractmethod
    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return new output of a completion as entries of "choices" of a stream's chunks; there may be none."""

    # -- the answer

    def prepare(self) -> list[Request]:
        """Make the engine's requests; runs in a worker thread.

        Raises:
            ApiError: a prompt or a parameter cannot be served.
        """
        if self.is_traced or self.params.logprobs is not None or self.params.prompt_logprobs is not None:
            self.service.texts.prepare()
        try:
            return self.make_requests()
        except (TypeError, ValueError) as error:
            raise refused(error, self.names, self.table, self.prompt_field) from error
        except ImportError as error:  # of a grammar's library
            raise invalid(self.names[self.params.grammar_field or ""], f"expected nothing, because {error}") from error
        except RuntimeError as error:  # of the engine, or of a process that compiles grammars or renders templates
            raise failed(error) from error

    def count_output(self, outputs: Sequence[Output]) -> None:
        """Add new output to the counters of the usage."""
        for index, chunk in outputs:
            self.num_tokens += len(chunk.token_ids)
            self.num_ended += chunk.finish_reason is not None
            if chunk.metrics is not None:
                self._metrics += chunk.metrics
                self.num_cached += chunk.metrics.num_cached_tokens if index % self.n == 0 else 0

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the whole answer."""
        self.count_output(outputs)
        choices = [self.choice(index, chunk) for index, chunk in outputs]
        if self.is_traced:
            self._unsent_rounds = [entry for _, chunk in outputs for entry in rounds_json(chunk, self.service.texts)]
        return {
            **self._envelope(self.kind, choices),
            "usage": self.usage(),
            **self._acceptance(),
            **self._take_rounds(),
        }

    def events(self, outputs: Sequence[Output]) -> str:
        """Return the events of new output, as text."""
        self.count_output(outputs)
        bodies: list[dict[str, Any]] = []
        for index, chunk in outputs:
            if self.is_traced:
                self._unsent_rounds += rounds_json(chunk, self.service.texts)
            bodies += [self._envelope(self.chunk_kind, [d]) | self._take_rounds() for d in self.deltas(index, chunk)]
        usage = {"usage": self.usage()} if self.options.get("continuous_usage_stats") else {}
        if bodies and self.num_ended == self.count:
            bodies[-1] |= self._acceptance()
        return "".join(event(body | usage) for body in bodies)

    def last_events(self) -> str:
        """Return the events after a stream's last output: the usage, if the request asked for it, and the end."""
        if not self.options.get("include_usage"):
            return DONE
        return event({**self._envelope(self.chunk_kind, []), "usage": self.usage()}) + DONE

    def error_events(self, error: ApiError) -> str:
        """Return the events with which an error ends a stream."""
        return event(error.body) + DONE

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        header = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**header, "choices": choices}

    def _acceptance(self) -> dict[str, Any]:
        """Return how many draft tokens were accepted, if the request asked for it."""
        return {"metrics": {"speculative_decoding": acceptance_json(self._metrics)}} if self.wants_metrics else {}

    def _take_rounds(self) -> dict[str, Any]:
        """Return the recorded rounds that no event has; they wait while a parser holds their text back."""
        rounds, self._unsent_rounds = self._unsent_rounds, []
        return {"jspec": {"rounds": rounds}} if self.is_traced else {}


def finish_reason(chunk: Chunk) -> str | None:
    """Return OpenAI's name of the reason for which a completion ended; None: it goes on."""
    return chunk.finish_reason and FINISH.get(chunk.finish_reason, chunk.finish_reason)


def stop_reason(chunk: Chunk) -> int | str | None:
    """Return the stop token or stop string that ended a completion; None for the model's own end."""
    return None if chunk.finish_reason == "eos" else chunk.stop_reason


class Generate:
    """The ASGI application of a generating route.

    Args:
        service: what the routes share.
        answer: makes the answer to a request from its fields.
    """

    def __init__(self, service: Service, answer: type[Answer]) -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask = await self._service.read(scope, receive, self._answer.table)
        answer = self._answer(self._service, ask)
        scope["jspec.answer"] = answer  # for the log
        with self._service.active():
            await while_there(receive, self._serve(answer, send))

    async def _serve(self, answer: Answer, send: Send) -> None:
        service, seconds = self._service, self._service.settings.request_timeout
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        with service.tracing() if answer.is_traced else contextlib.nullcontext():
            with service.calls.room(answer.count, "n" if answer.num_prompts == 1 else answer.prompt_field):
                async with _until(deadline):
                    answer.requests = await service.in_thread(answer.prepare, has_grammar=answer.has_grammar)
            await (self._stream if answer.is_stream else self._whole)(answer, send, deadline)

    async def _whole(self, answer: Answer, send: Send, deadline: float | None) -> None:
        """Send the whole output as one JSON body."""
        with self._service.calls.submitted(answer.requests) as call:
            async with _until(deadline):
                outputs = await call.result()
        await send_json(send, answer.body(outputs))

    async def _stream(self, answer: Answer, send: Send, deadline: float | None) -> None:
        """Send the output as events, and pings between them; an error after the first event is an event too."""
        events, clock, quiet = EventStream(send), asyncio.get_running_loop().time, self._service.settings.ping_seconds
        try:
            with self._service.calls.submitted(answer.requests) as call:  # ends before the last event, which may wait
                async with _until(deadline):
                    ping_at = clock() + quiet
                    while answer.num_ended < answer.count:
                        outputs = await call.take(max(ping_at - clock(), MIN_WAIT))
                        text = answer.events(outputs) if outputs else ""
                        if text or clock() >= ping_at:  # a parser may hold text back
                            await events.write(text or PING)
                            ping_at = clock() + quiet
            last = answer.last_events()
        except ApiError as error:
            if not events.started:
                raise
            last = answer.error_events(error)
            logger.warning("%s ended with an error: %s", answer.id, error.code)
        await events.write(last, more=False)


@contextlib.asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Bound the time of the context.

    Args:
        deadline: the event loop's time at which the context ends; None: no limit.

    Raises:
        ApiError: the time is over.
    """
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise ApiError(504, "the request took longer than the server's --request-timeout", code="timeout") from None
