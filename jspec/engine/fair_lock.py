"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A reentrant FIFO lock: a thread that steps an engine in a loop cannot starve threads that submit or abort.

    `threading.Lock` may go back to the thread that just released it, again and again.

    Each thread that wants the lock appends a ticket, which is a `threading.Lock`, to a queue. The first ticket belongs
    to the owner; every other ticket is locked, and its thread blocks on it until the ticket moves to the front.
    """

    def __init__(self) -> None:
        self._queue: deque[threading.Lock] = deque()
        self._guard = threading.Lock()  # protects the queue
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self.is_mine:
            self._depth += 1
            return
        ticket = threading.Lock()
        try:
            with self._guard:
                if self._queue:
                    ticket.acquire()
                self._queue.append(ticket)
            ticket.acquire()
            self._owner = threading.get_ident()
        except BaseException:  # an interrupt while the thread waits
            self._owner = None if self.is_mine else self._owner
            self._remove(ticket)
            raise

    def __exit__(self, *exc: object) -> None:
        if self._depth:
            self._depth -= 1
            return
        ticket = self._queue[0]
        try:
            self._owner = None
            self._remove(ticket)
        except BaseException:  # an interrupt: the next thread must be woken nevertheless
            self._owner = None
            self._remove(ticket)
            raise

    def _remove(self, ticket: threading.Lock) -> None:
        """Remove a ticket and wake the thread of the first remaining ticket; a second removal changes nothing."""
        with self._guard:
            if ticket in self._queue:
                self._queue.remove(ticket)
            if self._queue and self._queue[0].locked():
                self._queue[0].release()
