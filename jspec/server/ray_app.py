"""Serves several engines behind one address with Ray Serve; needs the extra `ray`.

Two tiers: one ingress reads requests and chooses a replica for each by the beginning of its prompt; the replicas hold
the engines, each with the application of `jspec.server.app`. An ASGI message travels as it is from a replica through
the ingress to the client, so all routes, errors and streams are those of `jspec serve`. ``serve run
jspec.server.ray_app:app target=PATH`` starts it; jspec/server/README.md has a file for Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convert import hub
from jspec.core.config import EngineConfig
from jspec.core.tree import Tree
from jspec.draft.auto import load_drafter
from jspec.engine.callers.api import Engine
from jspec.engine.request.model_sampling import AUTO, model_sampling
from jspec.server.app import make_app
from jspec.server.http.body import ClientGone, read_json
from jspec.server.http.errors import ANTHROPIC_PATH, ApiError, anthropic_body, body_for, path_of
from jspec.server.http.events import DONE, dumps, event, send_json, while_there
from jspec.server.http.guards import Guard
from jspec.server.http.settings import Settings, digest_of, keys_of_environment
from jspec.server.prefix_router import PrefixRouter
from jspec.server.routes.service import QUEUE_PER_SLOT, UNHEALTHY, WARMING

HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 60.0  # seconds; a compilation may keep a replica from answering for a while
WARM_POLL = 0.1  # seconds between two looks at whether a replica has compiled its programs

logger = logging.getLogger("jspec.server")


@dataclass(frozen=True)
class Options:
    """What `app` takes by name.

    Attributes:
        target, dtype, tokenizer: arguments of `Engine.from_pretrained`.
        drafter: "ngram", "suffix", or a path or hub id of a draft head or draft model; None: plain decoding.
        tree: draft tree of a head or draft model, as text; None: the default one.
        engine: fields of `EngineConfig`.
        server: fields of `Settings`.
        replicas: number of engines.
        generation_config: option of `jspec serve` with this name.
        gpus, cpus: GPUs and CPU cores that Ray sets aside for each engine.
        no_auth: serve everybody who reaches the address; else the variable JSPEC_API_KEY has the keys.
    """

    target: str
    drafter: str | None = None
    tree: str | None = None
    dtype: str | None = None
    tokenizer: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 2
    generation_config: str = AUTO
    gpus: float = 1
    cpus: float = 1
    no_auth: bool = False

    def settings(self) -> Settings:
        """Return the server's settings, with the keys of the environment.

        Raises:
            ValueError: there is no key, and ``no_auth`` is not set, or a key and ``no_auth``.
        """
        keys = keys_of_environment()
        if bool(keys) == self.no_auth:
            raise ValueError("no_auth: expected a key in JSPEC_API_KEY or no_auth=true, got both or neither")
        options: dict[str, Any] = {"names": (self.target,)}
        options |= {name: tuple(value) if isinstance(value, list) else value for name, value in self.server.items()}
        return Settings(**options | {"host": "0.0.0.0", "keys": tuple(map(digest_of, keys))})

    def limit(self, settings: Settings) -> int:
        """Return the number of completions that one engine may run or keep waiting."""
        slots = EngineConfig(**self.engine).slots
        return QUEUE_PER_SLOT * slots if settings.max_queue is None else settings.max_queue

    def make_engine(self) -> Engine:
        drafter: Any = self.drafter
        if self.tree is not None:
            drafter = load_drafter(self.drafter or "", Tree.parse(self.tree), dtype=self.dtype)
        models: dict[str, Any] = dict(drafter=drafter, dtype=self.dtype, tokenizer=self.tokenizer)
        return Engine.from_pretrained(self.target, **models, **self.engine)


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application for `serve run` and for a Serve config file.

    Args:
        args: fields of `Options` by name.

    Raises:
        ValueError, TypeError: an argument is unknown or wrong.
    """
    options = _options(args)
    settings = options.settings()
    limit = options.limit(settings)
    replica = serve.deployment(
        Replica,
        name="engine",
        num_replicas=options.replicas,
        max_ongoing_requests=limit,
        max_queued_requests=limit * options.replicas,
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        max_ongoing_requests=2 * limit * options.replicas + 16,  # beyond it the ingress could not refuse
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replica.bind(options, settings), settings)


def _options(args: Mapping[str, Any]) -> Options:
    known = [option.name for option in fields(Options)]
    if wrong := [name for name in args if name not in known] or ([] if "target" in args else ["no target"]):
        raise ValueError(f"args: expected target and some of {', '.join(known[1:])}, got {wrong[0]}")
    return Options(**args)


@dataclass(frozen=True)
class PlainRequest:
    """One request as plain data.

    Attributes:
        scope: the request's ASGI scope without objects of the server that received it.
        body: the request's body.
        text: the prompt, or the conversation as JSON; "" for a request without prompt.
    """

    scope: dict[str, Any]
    body: bytes
    text: str


class Replica:
    """An engine with its application; runs in a process of its own.

    Args:
        options: the models and the engine's options.
        settings: the server's options.
    """

    async def __init__(self, options: Options, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        self._engine = await asyncio.to_thread(options.make_engine)
        sampling = model_sampling(options.generation_config, hub.find(options.target))
        self._app = make_app(self._engine, replace(settings, sampling={**sampling, **settings.sampling}))
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        while self._app.state.service.state == WARMING:  # until then Ray sends no requests
            await asyncio.sleep(WARM_POLL)
        self.check_health()

    async def stream(self, ask: PlainRequest) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the answer; closing the iterator tells the application that the client left."""
        async for message in messages(self._app, ask):
            yield message

    def check_health(self) -> None:
        """Raise a RuntimeError if the engine has failed, so that Ray replaces this replica."""
        service = self._app.state.service
        if service.state == UNHEALTHY or not service.calls.threads.healthy:
            raise RuntimeError("the engine has failed")

    async def __del__(self) -> None:  # Ray awaits it too, when the replica ends
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)
            self._engine.close()


async def messages(app: ASGIApp, ask: PlainRequest) -> AsyncIterator[Message]:
    """Yield the messages that an application sends in answer to a request.

    At most one message waits to be read: the application's ``send`` waits for the reader.
    """
    queue: asyncio.Queue[Message | None] = asyncio.Queue(1)
    gone = asyncio.Event()
    received: list[Message] = [{"type": "http.request", "body": ask.body, "more_body": False}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(dict(ask.scope), receive, queue.put)
        except Exception:  # its response has been sent
            logger.exception("%s %s failed", ask.scope["method"], ask.scope["path"])
        await queue.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await queue.get()) is not None:
            yield message
    finally:
        gone.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Ingress:
    """Reads requests and passes each to a replica.

    Args:
        engine: handle of the replicas.
        settings: the server's options.
    """

    def __init__(self, engine: DeploymentHandle, settings: Settings) -> None:
        self._engine, self._settings = engine.options(stream=True), settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Guard(self._answer, self._settings)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            ask = await self._read(scope, receive)
            await while_there(receive, self._forward(ask, send))
        except ApiError as error:
            await send_json(send, body_for(scope, error), error.status, error.headers)
        except ClientGone:
            pass  # nobody reads an answer

    async def _read(self, scope: Scope, receive: Receive) -> PlainRequest:
        """Read a request, with the limits of `jspec serve`."""
        names = ("type", "http_version", "method", "query_string", "headers", "scheme", "client", "server")
        path = path_of(scope)
        plain = {name: scope[name] for name in names if name in scope} | {"path": path, "raw_path": path.encode()}
        if scope["method"] != "POST":
            return PlainRequest(plain, b"", "")
        most, limit = self._settings.max_body, self._settings.body_seconds
        body = await read_json(scope, receive, most=most, seconds=limit)
        asked = body.get("messages") or body.get("prompt") or body.get("input") or ""
        return PlainRequest(plain, dumps(body).encode(), asked if isinstance(asked, str) else dumps(asked))

    async def _forward(self, ask: PlainRequest, send: Send) -> None:
        """Send a replica's messages to the client; an error after the first one is an event, as within a replica."""
        answer = self._engine.stream.remote(ask)
        last: Message | None = None
        is_stream = False
        try:
            async for message in answer:
                last = message
                is_stream = is_stream or (b"content-type", b"text/event-stream; charset=utf-8") in _headers(message)
                await send(message)
        except (RayError, BackPressureError) as error:
            made = _lost(error)
            if last is None:
                raise made from None
            if not is_stream:
                raise  # half a JSON body: the connection ends
            is_anthropic = ask.scope["path"].startswith(ANTHROPIC_PATH)
            tail = event(anthropic_body(made), "error") if is_anthropic else event(made.body) + DONE
            await send({"type": "http.response.body", "body": tail.encode(), "more_body": False})
        finally:
            answer.cancel()


def _headers(message: Message) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in message.get("headers", [])]


def _lost(error: Exception) -> ApiError:
    """Return the client's error for one of Ray's."""
    if isinstance(error, BackPressureError):
        return ApiError(429, "the queue is full; try again", code="queue_full", headers={"Retry-After": "1"})
    logger.warning("a replica was lost: %s", error)
    return ApiError(503, "the replica with this request ended; try again", code="replica_lost")
