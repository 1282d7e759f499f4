"""The routes that tell about the server: /health, /metrics, /stats, /v1/models, and the page at /."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jspec.server.counts import Counts
from jspec.server.errors import ApiError
from jspec.server.page import page
from jspec.server.service import READY, REASONS, UNHEALTHY, Service


def routes(service: Service, counts: Counts) -> list[Route]:
    """Return the routes; ``counts`` are the counters of HTTP requests."""

    async def health(request: Request) -> Response:
        if service.state == READY and not service.calls.thread.healthy:
            service.state = UNHEALTHY
        if service.state != READY:
            raise ApiError(503, REASONS[service.state], code=service.state)
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.settings.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.settings.names:
            known = ", ".join(service.settings.names)
            raise ApiError(404, f"model: expected {known}, got {name[:80]!r}", param="model", code="model_not_found")
        return JSONResponse(_model(service, name))

    async def metrics(request: Request) -> Response:
        text = await service.in_thread(lambda: service.engine.prometheus(service.name))
        return PlainTextResponse(text + counts.exposition(), media_type="text/plain; version=0.0.4")

    async def stats(request: Request) -> Response:
        return JSONResponse(await service.in_thread(lambda: _stats(service)))

    async def live_page(request: Request) -> Response:
        raw, headers = page()
        return Response(raw, headers=headers)

    return [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/metrics", metrics),
        Route("/stats", stats),
        Route("/", live_page),
    ]


def _model(service: Service, name: str) -> dict[str, Any]:
    own = {"id": name, "object": "model", "created": 0, "owned_by": "jspec"}
    return own | {"max_model_len": service.engine.config.max_len}


def _stats(service: Service) -> dict[str, Any]:
    """Return the engine's counters and what it offers, for the page; it takes the engine's lock."""
    metrics, calls = service.engine.metrics, service.calls
    template = getattr(service.engine.tokenizer, "chat_template", None)
    pages = service.engine.scheduler.pages
    return {
        "running": calls.thread.num_running,
        "waiting": calls.thread.num_waiting,
        "slots": service.engine.config.slots,
        "pages_used": metrics.pages_in_use,
        "pages_total": pages.pages - 1,  # without the null page
        "tokens": metrics.num_tokens,
        "tokens_per_second": calls.rate.tokens_per_second(),
        "rounds": metrics.num_drafts,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "acceptance_by_position": metrics.acceptance_per_position,
        "prefix_hit_rate": metrics.prefix_hit_rate,
        "live": service.settings.live,  # whether requests may record rounds
        "chat": template is not None,  # whether conversations can be formatted
    }
