"""A connection between process 0 and another process, whose threads notice when the other side is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from jspec.distributed.frames import MAX_DATA, BadFrame, Message, decode, encode

BEAT_SECONDS = 2.0  # time between two signs of life
SILENT_SECONDS = 12.0  # after this time without a byte the other side is lost
SOON = 0.001  # timeout of a call whose time is over, in seconds; 0 would mean that the socket never waits
BEAT = Message("beat")


def send_message(connection: socket.socket, message: Message) -> None:
    """Send a message, or raise OSError."""
    connection.sendall(encode(message))


def read_message(connection: socket.socket, most: int = MAX_DATA, *, seconds: float | None = None) -> Message:
    """Read the next message.

    Args:
        most: largest size of the message in bytes.
        seconds: time for the whole message; None: the timeout of the connection, for each part that arrives.

    Raises:
        OSError, BadFrame: the other side is lost, or sends something else.
    """
    until = None if seconds is None else time.monotonic() + seconds

    def read(count: int) -> bytes:
        if count > most:
            raise BadFrame(f"expected at most {most} bytes, got {count}")
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            if until is not None:
                connection.settimeout(max(until - time.monotonic(), SOON))
            received = connection.recv_into(view)
            if received == 0:
                raise ConnectionResetError("the connection ended")
            view = view[received:]
        return bytes(data)

    return decode(read)


class Link:
    """Sends and receives messages.

    Args:
        connection: a connected socket.
        receive: called with each message, by a thread of the link.
        lose: called once with the reason if the other side is lost, by a thread of the link.
    """

    def __init__(
        self, connection: socket.socket, receive: Callable[[Message], None], lose: Callable[[str], None]
    ) -> None:
        self._socket, self._receive, self._lose = connection, receive, lose
        self._sending = threading.Lock()
        self._closed = threading.Event()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENT_SECONDS)

    def start(self) -> None:
        """Start to read messages and to send signs of life."""
        for run in (self._read_all, self._beat):
            threading.Thread(target=run, name="jspec-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the other side is lost.
        """
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def _read_all(self) -> None:
        try:
            while True:
                message = read_message(self._socket)
                if message.kind != BEAT.kind:
                    self._receive(message)
        except TimeoutError:
            self._fail(f"is lost: it was silent for {SILENT_SECONDS:g} s")
        except BadFrame as error:
            self._fail(f"is lost: it sent something else than a message ({error})")
        except OSError:
            self._fail("is lost: its connection ended")
        except Exception as error:  # a message without a field that its kind has, for instance
            self._fail(f"is lost: a message of it could not be read ({type(error).__name__}: {error!s:.200})")

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send(BEAT)
            except OSError:
                return  # the reading thread notices it too, and knows why

    def _fail(self, reason: str) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._lose(reason)
