"""Sends an answer as server-sent events, or as one JSON body, while watching whether the client is still there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Send

from jspec.server.http.body import ClientGone

T = TypeVar("T")
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx passes events on at once
}
# Line separators that JSON leaves as they are. Events end lines at LF and CR alone, but clients may split at these too.
SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
DONE, PING = "data: [DONE]\n\n", ": ping\n\n"


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run the work for a client whose body has been read; cancel it when the client leaves.

    Raises:
        ClientGone: the client has left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_leaving(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Any, name: str | None = None) -> str:
    """Return one event of a stream; a name is for clients that tell events by it."""
    head, text = "" if name is None else f"event: {name}\n", dumps(data)
    for separator, written in SEPARATORS.items():
        text = text.replace(separator, written)
    return f"{head}data: {text}\n\n"


dumps = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class EventStream:
    """A response of server-sent events; its status and headers are sent with the first event.

    ``send`` waits while the client reads slowly, so the sender should ask for new output only after it returns.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, text: str, *, more: bool = True) -> None:
        """Send events; with ``more=False`` they are the last."""
        if not self.started:
            self.started = True
            await self._send(start(200, EVENT_HEADERS))
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def send_json(send: Send, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a response with a JSON body."""
    raw = dumps(body).encode()
    all_headers = {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
    await send(start(status, all_headers))
    await send({"type": "http.response.body", "body": raw, "more_body": False})


def start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the ASGI message that begins a response."""
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
