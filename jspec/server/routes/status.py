"""The routes that tell about the server: /health, /ping, /version, /metrics, /stats, /v1/models, and the page at /."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jspec.core.version import VERSION
from jspec.engine.callers.replica_threads import ReplicaThreads
from jspec.server.http.counts import Counts
from jspec.server.http.page import page
from jspec.server.routes.service import Service


class Status:
    """The routes that tell about the server.

    Args:
        service: what the routes share.
        counts: counters of HTTP requests.
    """

    def __init__(self, service: Service, counts: Counts) -> None:
        self._service, self._counts = service, counts

    def routes(self) -> list[Route]:
        return [
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/metrics", self._metrics),
            Route("/stats", self._stats),
            Route("/", self._page),
        ]

    async def _health(self, request: Request) -> Response:
        self._service.check_ready()
        threads = self._service.calls.threads
        if isinstance(threads, ReplicaThreads):
            return JSONResponse({"status": "ok", "replicas": threads.num_replicas, "failed": len(threads.failed)})
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _models(self, request: Request) -> Response:
        service = self._service
        names = *service.settings.names, *service.engine.adapters
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in names]})

    async def _model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["name"])
        return JSONResponse(_model(self._service, request.path_params["name"]))

    async def _metrics(self, request: Request) -> Response:
        service = self._service
        text = await service.in_thread(lambda: service.engine.prometheus(service.name))
        return PlainTextResponse(text + self._counts.exposition(), media_type="text/plain; version=0.0.4")

    async def _stats(self, request: Request) -> Response:
        return JSONResponse(await self._service.in_thread(lambda: _stats(self._service)))

    async def _page(self, request: Request) -> Response:
        raw, headers = page()
        return Response(raw, headers=headers)


def _model(service: Service, name: str) -> dict[str, Any]:
    entry = {"id": name, "object": "model", "created": service.created, "owned_by": "jspec"}
    path = None if name in service.settings.names else service.engine.adapters.get(name)
    adapter = {} if path is None else {"parent": service.name, "root": path}
    return entry | {"max_model_len": service.engine.config.max_len} | adapter


def _stats(service: Service) -> dict[str, Any]:
    """Return the engine's counters and what it offers, for the page; it waits for the engine's thread."""
    metrics, calls = service.engine.metrics, service.calls
    template = getattr(service.engine.tokenizer, "chat_template", None)
    return {
        "running": calls.threads.num_running,
        "waiting": calls.threads.num_unfinished - calls.threads.num_running,
        "slots": service.engine.num_slots,
        "pages_used": metrics.pages_in_use,
        "pages_total": service.engine.num_pages,
        "tokens": metrics.num_tokens,
        "rounds": metrics.num_drafts,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "acceptance_by_position": metrics.acceptance_per_position,
        "prefix_hit_rate": metrics.prefix_hit_rate,
        "live": service.settings.live,  # whether requests may record rounds
        "chat": template is not None,  # whether conversations can be formatted
    }
