"""Ctrl-C on the command line ends the process with one line and exit status 130."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STATUS = 130  # 128 + SIGINT, as shells report it
GRACE = 2.0  # seconds that a command may take to clean up


def guard(command: Callable[[], int]) -> int:
    """Run a command in a process that Ctrl-C ends with one line and exit status 130.

    Ctrl-C raises KeyboardInterrupt in the command, which may clean up. A library may swallow this exception, and a
    running compilation delays it. The process therefore ends after `GRACE` seconds, or at the second Ctrl-C, in any
    case. If the process ignores Ctrl-C, as a shell's background jobs do, it still does.

    Args:
        command: function that returns the exit status.

    Returns:
        The command's exit status, unless Ctrl-C has ended the process.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return command()
    pressed = threading.Event()
    threading.Thread(target=_end_after, args=(pressed,), daemon=True).start()

    def stop(number: int, frame: Any) -> None:
        if pressed.is_set():
            os._exit(STATUS)
        os.write(2, b"\njspec: interrupted\n" if sys.stderr.isatty() else b"jspec: interrupted\n")
        sys.unraisablehook = threading.excepthook = lambda args: None
        pressed.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        status = command()
    except BaseException:
        if not pressed.is_set():
            raise
    else:
        if not pressed.is_set():
            return status
    with contextlib.suppress(OSError):  # a closed pipe
        sys.stdout.flush()
    os._exit(STATUS)


def _end_after(pressed: threading.Event) -> None:
    """Wait for an event, and end the process `GRACE` seconds later."""
    pressed.wait()
    time.sleep(GRACE)
    os._exit(STATUS)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Make Ctrl-C only raise KeyboardInterrupt while the context is open."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
