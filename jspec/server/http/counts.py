"""Counts HTTP requests by their route and status, and logs one line a request, without its text."""

from __future__ import annotations

import logging
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.server.http.body import ClientGone
from jspec.server.http.errors import path_of

logger = logging.getLogger("jspec.server")
POLLED = frozenset(("/health", "/metrics", "/ping", "/stats"))  # routes that programs ask again and again


class Counts:
    """The number of HTTP requests, by method, route and class of status, as text for Prometheus."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, method: str, route: str, status: int) -> None:
        self._counts[method, route, f"{status // 100}xx"] += 1

    def exposition(self) -> str:
        """Return the counters under the name that vLLM's dashboards read."""
        lines = ["# HELP http_requests_total HTTP requests.", "# TYPE http_requests_total counter"]
        lines += [
            f'http_requests_total{{handler="{route}",method="{method}",status="{status}"}} {float(count)!r}'
            for (method, route, status), count in sorted(self._counts.items())
        ]
        return "\n".join(lines) + "\n"


class CountRequests:
    """ASGI middleware that counts and logs HTTP requests, and ends those whose client has left.

    Args:
        app: the application.
        counts: gets the numbers.
        routes: known paths; all others count as "other", so that their number is bounded.
    """

    def __init__(self, app: ASGIApp, counts: Counts, routes: frozenset[str]) -> None:
        self._app, self._counts, self._routes = app, counts, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # the client left before the answer began

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientGone:
            pass  # nobody reads an answer
        finally:
            route = path if (path := path_of(scope)) in self._routes else "other"
            method = scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else "other"
            self._counts.add(method, route, status)
            answer = scope.get("jspec.answer")
            about_answer = "" if answer is None else f" {answer.id}: {answer.num_tokens} tokens,"
            level = logging.DEBUG if route in POLLED else logging.INFO
            logger.log(level, "%s %s %d,%s %.3f s", method, route, status, about_answer, time.monotonic() - began)
