"""Shows on the command line how far the start of an engine is."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

TICK = 0.5  # seconds between two updates of the line on a terminal
SOURCE = "jspec.step.executables"  # the logger that reports each compiled program


class StartDisplay(logging.Handler):
    """A log handler that shows how far the start of an engine is.

    On a terminal it rewrites one line and erases it at the end. Elsewhere it prints one line per log record.

    Args:
        what: what starts, for example the path of the target.
        out: stream to write to.
    """

    def __init__(self, what: str, out: TextIO) -> None:
        super().__init__(logging.INFO)
        self._what, self._out, self._is_terminal = what, out, out.isatty()
        self._began, self._ended = time.monotonic(), threading.Event()
        self._done, self._total = 0, 0
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def begin(self) -> None:
        """Show that loading begins."""
        if self._is_terminal:
            self._ticker.start()
        else:
            print(f"jspec: loading {self._what}", file=self._out, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Show one log record.

        Args:
            record: log record; its attributes ``done`` and ``total``, if it has them, are the numbers of programs that
                are compiled and that must be compiled.
        """
        if hasattr(record, "done"):
            self._done, self._total = record.done, getattr(record, "total", 0)
        elif record.getMessage().startswith("compiled "):
            self._done += 1
        if not self._is_terminal:
            print(f"jspec: {record.getMessage()}{self._share()}", file=self._out, flush=True)

    def end(self) -> None:
        """Erase the line on a terminal."""
        self._ended.set()
        if self._is_terminal:
            self._ticker.join()
            print("\r\033[K", end="", file=self._out, flush=True)

    def line(self) -> str:
        """Return the line for a terminal: phase, number of compiled programs, seconds."""
        if not self._done:
            phase = "loading"
        elif self._total:
            phase = f"compiling: {self._done} of {self._total} programs"
        else:
            phase = f"compiling: {self._done} programs done"
        return f"{self._what}: {phase}, {time.monotonic() - self._began:.0f} s"

    def _share(self) -> str:
        return f" ({self._done} of {self._total})" if self._total else ""

    def _tick(self) -> None:
        while not self._ended.wait(TICK):
            width = shutil.get_terminal_size().columns - 1  # a longer line would take two, and only one is erased
            print(f"\r\033[K{self.line()[-width:]}", end="", file=self._out, flush=True)


@contextlib.contextmanager
def starting(what: str, out: TextIO | None = None) -> Iterator[None]:
    """Show the start of an engine while the context is open.

    Args:
        what: what starts, for example the path of the target.
        out: stream to write to; None: the standard error.
    """
    display, logger = StartDisplay(what, sys.stderr if out is None else out), logging.getLogger(SOURCE)
    before = logger.level, logger.propagate
    logger.addHandler(display)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library may have given the root logger a handler, which would print each line again
    display.begin()
    try:
        yield
    finally:
        logger.removeHandler(display)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        display.end()
