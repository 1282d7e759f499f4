"""A lock that serves threads in the order in which they ask for it."""

from __future__ import annotations

import os
import threading
from collections import deque


class FairLock:
    """A reentrant lock that serves threads in the order in which they ask for it.

    With `threading.Lock` a thread that steps an engine in a loop could take the lock again and again, while threads
    that submit or abort requests wait.

    Each thread that wants the lock appends a ticket, which is a `threading.Lock`, to a queue. The first ticket belongs
    to the owner of the lock. Every other ticket is locked, and its thread waits for it until it is first in the queue.

    Only the process that made the lock can take it. In a forked child the owner may be a thread of the parent, and the
    threads of jax are missing.
    """

    def __init__(self) -> None:
        self._queue: deque[threading.Lock] = deque()
        self._guard = threading.Lock()  # protects the queue
        self._owner: int | None = None
        self._depth = 0
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise an error in a forked child of the process that made the lock.

        Raises:
            RuntimeError: this process is such a child.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"expected the process that made the engine ({self._process}), got its forked child ({os.getpid()}), "
                'where jax would hang; make an engine in the child, which multiprocessing must start with "spawn"'
            )

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self.check_process()
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
        """Remove a ticket, if it is in the queue, and wake the thread of the first remaining ticket."""
        with self._guard:
            if ticket in self._queue:
                self._queue.remove(ticket)
            if self._queue and self._queue[0].locked():
                self._queue[0].release()
