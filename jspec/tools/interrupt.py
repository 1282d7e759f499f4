"""Makes Ctrl-C on the command line end the process with one line and exit status 130."""

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


def guard(load: Callable[[], Callable[[], int]]) -> int:
    """Load and run a command; Ctrl-C ends the process with one line and exit status 130.

    While the command is being loaded, Ctrl-C ends the process at once. While the command runs, Ctrl-C raises
    KeyboardInterrupt, so that the command can clean up. A library may swallow this exception, and a compilation delays
    it. Therefore the process always ends `GRACE` seconds after the first Ctrl-C, or at the second Ctrl-C. A process
    that was started to ignore Ctrl-C, such as a shell's background job, still ignores it.

    Args:
        load: function that imports the command and returns it; the command returns the exit status.

    Returns:
        The command's exit status, unless Ctrl-C has ended the process.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return load()()
    is_loaded, pressed = threading.Event(), threading.Event()
    threading.Thread(target=_end_after, args=(pressed,), daemon=True).start()

    def stop(number: int, frame: Any) -> None:
        if pressed.is_set():
            os._exit(STATUS)
        os.write(2, b"\njspec: interrupted\n" if os.isatty(2) else b"jspec: interrupted\n")
        if not is_loaded.is_set():
            os._exit(STATUS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no thread or library prints anything else
        sys.unraisablehook = _end_if_swallowed
        pressed.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        command = load()
        is_loaded.set()
        status = command()
    except BaseException:
        if not pressed.is_set():
            raise
    else:
        if not pressed.is_set():
            return status
    with contextlib.suppress(OSError):  # stderr is a closed pipe
        sys.stdout.flush()
    os._exit(STATUS)


def _end_if_swallowed(unraisable: Any) -> None:
    """End the process if a callback has swallowed the KeyboardInterrupt."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(STATUS)


def _end_after(pressed: threading.Event) -> None:
    """Wait until Ctrl-C is pressed, and end the process `GRACE` seconds later."""
    pressed.wait()
    time.sleep(GRACE)
    os._exit(STATUS)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, and nothing else, while the context is open."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
