"""A lock that is handed on in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A fair lock: who steps an engine in a loop does not keep others from submitting or aborting.

    `threading.Lock` may go back to the thread that just released it, again and again. Who holds it may take it again.
    """

    def __init__(self) -> None:
        self._line: deque[threading.Lock] = deque()  # closed, but for the first; it stands for who holds the lock
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self.is_mine:
            self._depth += 1
            return
        turn = threading.Lock()
        try:
            with self._guard:
                if self._line:
                    turn.acquire()
                self._line.append(turn)
            turn.acquire()
            self._owner = threading.get_ident()
        except BaseException:  # an interrupt while it waits
            self._owner = None if self.is_mine else self._owner
            self._leave(turn)
            raise

    def __exit__(self, *exc: object) -> None:
        if self._depth:
            self._depth -= 1
            return
        turn = self._line[0]
        try:
            self._owner = None
            self._leave(turn)
        except BaseException:  # an interrupt: whoever waits must be woken all the same
            self._owner = None
            self._leave(turn)
            raise

    def _leave(self, turn: threading.Lock) -> None:
        """Give up a place in the line; twice is fine, and so is to open the lock of who had its turn already."""
        with self._guard:
            if turn in self._line:
                self._line.remove(turn)
            if self._line and self._line[0].locked():
                self._line[0].release()
