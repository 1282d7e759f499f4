"""uvicorn's HTTP/1.1 protocol, with limits of the size and the time of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jspec.server.http.errors import ApiError
from jspec.server.http.events import dumps

MAX_HEAD = 2**16  # bytes of request line and headers
HEAD_SECONDS = 30.0  # time for the head to arrive


class Protocol(HttpToolsProtocol):
    """One connection. A head that is too large is answered with 400, one that is too late closes the connection."""

    _num_head_bytes = 0
    _is_in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.access_log = False  # it would show the query, which is the client's text
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_head:
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"head: expected at most {MAX_HEAD} bytes of headers; send less")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is no HTTP, or whose head is too large, and close the connection."""
        body = dumps(ApiError(400, msg, code="invalid_http").body).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a request that also offers another protocol is served in this one."""

    def _await_head(self) -> None:
        self._stop_timer()
        self._is_in_head, self._num_head_bytes = True, 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
