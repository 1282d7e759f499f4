"""The ASGI application: the routes, the guards before them, and the errors in the form of the route's API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jspec.core.config import EngineConfig
from jspec.engine.callers.api import Engine
from jspec.engine.callers.replicas import Replicas
from jspec.engine.reading.answers import template_of
from jspec.engine.request.sampling_params import SamplingParams
from jspec.server.http.counts import CountRequests, Counts
from jspec.server.http.errors import ApiError, body_for
from jspec.server.http.guards import Guard
from jspec.server.http.settings import Settings
from jspec.server.routes.adapters import LoadAdapter, UnloadAdapter
from jspec.server.routes.answers import Generate
from jspec.server.routes.anthropic import CountTokens, MessageAnswer
from jspec.server.routes.chat import ChatAnswer
from jspec.server.routes.completions import CompletionAnswer
from jspec.server.routes.responses import ResponseAnswer
from jspec.server.routes.service import READY, UNHEALTHY, WARMING, Service
from jspec.server.routes.status import Status
from jspec.server.routes.tokens import Detokenize, Tokenize
from jspec.server.tool_calls.choose import check_formats

CODES = {404: "route_not_found", 405: "method_not_allowed"}

logger = logging.getLogger("jspec.server")


def make_app(engine: Engine | Replicas, settings: Settings | None = None) -> Starlette:
    """Make the ASGI application of an engine; its lifespan starts and stops the engine's thread.

    An application that mounts it runs its lifespan: ``app.router.lifespan_context(app)``.

    Args:
        engine: the engine or the engines, which the caller closes afterwards.
        settings: the server's options; ``app.state.service`` is what the routes share.

    Raises:
        ValueError: there is no format of tool calls or of reasoning with the name in the settings, or reasoning in this
            format cannot be left in the content; or the engine was built without what the default sampling needs.
    """
    settings = settings or Settings()
    check_formats(template_of(engine.tokenizer), settings)
    _check_sampling(settings, engine.config)
    service, counts = Service(engine, settings), Counts()
    routes = [*_posts(service), *Status(service, counts).routes()]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _bug}
    app = Starlette(
        routes=routes,
        middleware=_middleware(settings, counts, frozenset(route.path for route in routes)),
        exception_handlers=handlers,  # type: ignore[arg-type]
        lifespan=lambda app: _running(service),
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _check_sampling(settings: Settings, config: EngineConfig) -> None:
    """Refuse defaults of requests, such as those that a checkpoint recommends, that would fail every request."""
    params = SamplingParams(**settings.sampling)
    needed = ", ".join(f"{name}={getattr(params, name)!r:.50}" for name in params.controls_used)
    if needed and not config.controls:
        raise ValueError(
            "sampling: expected no such default for an engine that was built with controls=False, got "
            f"{needed}, from the settings or the model's generation_config.json; build the engine without that, or "
            "give its neutral value in the server's sampling, such as repetition_penalty=1"
        )


def _posts(service: Service) -> list[Route]:
    """Return the routes that take a body."""
    apps: dict[str, ASGIApp] = {
        "/v1/completions": Generate(service, CompletionAnswer),
        "/v1/chat/completions": Generate(service, ChatAnswer),
        "/v1/responses": Generate(service, ResponseAnswer),
        "/v1/messages": Generate(service, MessageAnswer),
        "/v1/messages/count_tokens": CountTokens(service),
        "/tokenize": Tokenize(service),
        "/detokenize": Detokenize(service),
    }
    if service.settings.adapter_routes:
        apps |= {"/v1/load_lora_adapter": LoadAdapter(service), "/v1/unload_lora_adapter": UnloadAdapter(service)}
    return [Route(path, app, methods=["POST"]) for path, app in apps.items()]


def _middleware(settings: Settings, counts: Counts, paths: frozenset[str]) -> list[Middleware]:
    """Return what a request passes before the routes, in order."""
    cors: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"])
    origins = list(settings.allow_origins)
    return [
        Middleware(CountRequests, counts=counts, routes=paths),
        *([Middleware(CORSMiddleware, allow_origins=origins, **cors)] if origins else []),  # a browser asks without key
        Middleware(Guard, settings=settings),
    ]


@contextlib.asynccontextmanager
async def _running(service: Service) -> AsyncIterator[None]:
    """Serve, and compile what the settings ask for, while the application runs."""
    service.calls.start()
    service.state = WARMING if service.settings.warm else READY
    warming: asyncio.Task[None] | None = None
    if service.state == WARMING:
        warming = asyncio.create_task(_warm(service))
    try:
        yield
    finally:
        if warming is not None:
            warming.cancel()
        service.close()


async def _warm(service: Service) -> None:
    """Compile, and then serve; without memory for the programs the server ends."""
    try:
        await service.in_thread(service.warm)
    except Exception:
        logger.exception("--warm: the programs could not be compiled")
        service.state = UNHEALTHY
    if service.state == WARMING:
        service.state = READY
        logger.info("compiled: %s", ", ".join(service.settings.warm))


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(body_for(request.scope, error), error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    made = ApiError(error.status_code, message, code=CODES.get(error.status_code), headers=error.headers)
    return JSONResponse(body_for(request.scope, made), made.status, made.headers)


async def _bug(request: Request, error: Exception) -> Response:
    made = ApiError(500, "the server failed; see its log", code="internal_error")
    return JSONResponse(body_for(request.scope, made), made.status)
