"""Runs the server until a signal or a failure of the engine ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jspec.engine.callers.api import Engine
from jspec.engine.callers.replicas import Replicas
from jspec.server.app import make_app
from jspec.server.http.errors import ApiError
from jspec.server.http.protocol import Protocol
from jspec.server.http.settings import Settings
from jspec.server.routes.service import DRAINING, READY, REASONS, UNHEALTHY, Service

SWITCH_SECONDS = 0.0005  # how long a thread keeps the interpreter while others wait; Python's default is ten times that
KEEP_ALIVE_SECONDS = 30  # how long an idle connection stays open
CLOSE_SECONDS = 2.0  # time for answers to be sent after their requests have ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit status after Ctrl-C, 128 + SIGINT

logger = logging.getLogger("jspec.server")


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address, at which nobody listens yet; port 0 takes any free port.

    Raises:
        OSError: the address is in use, or it is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror}; choose another --host or --port") from None
    return listener


def serve(
    engine: Engine | Replicas,
    settings: Settings,
    listener: socket.socket,
    listens: Callable[[], None],
    ready: Callable[[], None],
) -> int:
    """Serve an engine until SIGTERM, Ctrl-C or a failure of the engine.

    Args:
        engine: the engine or the engines, which the caller closes.
        listener: a socket of `bind`.
        listens: called once the server listens.
        ready: called once requests are served, which is when the programs that the settings name are compiled.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if the engine failed.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(make_app(engine, settings), listens, ready)
    try:
        server.run([listener])
    finally:
        sys.setswitchinterval(before)
        listener.close()
    return server.status


class Server(uvicorn.Server):
    """uvicorn's server, which lets running requests end before it does.

    Args:
        app: the application of `make_app`.
        listens, ready: as for `serve`.

    Attributes:
        status: exit status of the process.
    """

    def __init__(
        self,
        app: Starlette,
        listens: Callable[[], None] = lambda: None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(CLOSE_SECONDS),
            )
        )
        self.status = 0
        self._service: Service = app.state.service
        self._listens = listens
        self._ready: Callable[[], None] | None = ready  # None after its call
        self._end_at: float | None = None  # when to abort what still runs, on the clock `time.monotonic`

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listens()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the context is open; unlike uvicorn's own, it does not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or at the second signal end the process at once."""
        if self._end_at is not None:
            os._exit(128 + sig)
        self.status = INTERRUPTED if sig == signal.SIGINT else 0
        self.drain()

    def drain(self) -> None:
        """Refuse new requests, and end when the running ones have ended or their time is over."""
        seconds = self._service.settings.drain_seconds
        logger.info("ending: %d requests have %g s", self._service.num_active, seconds)
        self._service.state = DRAINING
        self._end_at = time.monotonic() + seconds

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends; uvicorn calls this ten times a second."""
        self._check_health()
        if self._ready is not None and self._service.state == READY:
            self._ready()
            self._ready = None
        if self._end_at is not None:
            late = time.monotonic() - self._end_at
            if late > 0:
                self._service.calls.fail_all(ApiError(503, REASONS[self._service.state], code=self._service.state))
            if self._service.num_active == 0 or late > CLOSE_SECONDS:
                return True
        return await super().on_tick(counter)

    def _check_health(self) -> None:
        """End with status 1 if the engine can serve no more."""
        if self.status == 1 or (self._service.calls.threads.healthy and self._service.state != UNHEALTHY):
            return
        logger.error("the engine failed, so the server ends")
        self._service.state, self.status, self._end_at = UNHEALTHY, 1, time.monotonic()
