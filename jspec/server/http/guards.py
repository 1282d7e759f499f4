"""ASGI middleware that refuses requests before any route sees them: by the header Host, and by the API key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.server.http.errors import ApiError, body_for, path_of
from jspec.server.http.events import send_json
from jspec.server.http.settings import Settings

OPEN = ("/", "/health", "/ping")  # need no key


class Guard:
    """Refuses requests with a foreign header Host or without a right key.

    Args:
        app: the application.
        settings: the hosts and keys to accept.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await send_json(send, body_for(scope, error), error.status, error.headers)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if not self._settings.accepts_host(headers.get("host", "")):
            return ApiError(
                403,
                "Host: expected localhost or a loopback address; for a proxy's name start the server with "
                "--allowed-host NAME",
                code="host_not_allowed",
            )
        if not self._settings.keys or path_of(scope) in OPEN:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        keys = [key] if kind.lower() == "bearer" else []
        keys += headers.getlist("x-api-key")  # of Anthropic's API
        if any(self._settings.accepts_key(key.strip().encode("latin-1")) for key in keys):
            return None
        return ApiError(
            401,
            "Authorization: expected 'Bearer KEY' with a key of this server",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
