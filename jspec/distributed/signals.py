"""What SIGTERM and Ctrl-C do to a process of a job, and to other work that ends by itself after them."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger("jspec.distributed")


def end_at_sigterm() -> None:
    """End the script at SIGTERM as at `sys.exit`, unless it has a handler, so that the others are told."""
    if _is_main() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def end_at_second(name: str) -> AbstractContextManager[None]:
    """Only log the first SIGINT and the first SIGTERM while the context is open (`at_first`).

    A signal to all processes of a job, such as Ctrl-C in their terminal, thus ends none of those that process 0 still
    needs; a second one ends this process, and with it all.

    Args:
        name: name of this process.
    """

    def log(number: int) -> None:
        second = signal.Signals(number).name
        logger.warning("%s ends when process 0 closes its engine; a second %s ends all processes", name, second)

    return at_first(log)


@contextmanager
def at_first(call: Callable[[int], None]) -> Iterator[None]:
    """Only call a function at the first SIGINT and the first SIGTERM while the context is open.

    A second one of the same kind does what it did before. A signal that is ignored stays so, and in a thread that is
    not the main one nothing changes.

    Args:
        call: function that is given the number of the signal.
    """

    def handle(number: int, frame: object) -> None:
        signal.signal(number, before[number])
        call(number)

    handlers = {number: signal.getsignal(number) for number in SIGNALS} if _is_main() else {}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
