"""Test the order of threads in `FairLock`, and interrupts at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jspec.engine.callers.fair_lock import FairLock
from tests.support.brittle import PATIENCE, Fault, run_together

pytestmark = pytest.mark.once


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.001)


def test_fair_lock_under_contention_serves_threads_in_order() -> None:
    """A thread that releases the lock and asks for it again is served after the threads that asked before."""
    lock, order = FairLock(), []

    def asks(number: int) -> None:
        with lock, lock:  # the holder may take the lock again
            order.append(number)

    def first() -> None:
        with lock:
            for number in range(1, 4):
                threads.append(threading.Thread(target=asks, args=(number,), daemon=True))
                threads[-1].start()
                wait_until(lambda count=number + 1: len(lock._queue) == count)
            order.append(0)
        asks(4)

    threads: list[threading.Thread] = []
    run_together([first])
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [0, 1, 2, 3, 4] and not lock._queue


class Interrupts:
    """A lock in which one interrupt occurs, in the thread that created the lock."""

    def __init__(self, original: Any, *, on_exit: bool) -> None:
        self.original, self.on_exit, self.thread = original, on_exit, threading.get_ident()

    def __enter__(self) -> None:
        if not self.on_exit:
            self.interrupt()
        self.original.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.original.__exit__(*exc)
        self.interrupt()

    def interrupt(self) -> None:
        if self.thread == threading.get_ident():
            self.thread = 0
            raise KeyboardInterrupt


@pytest.mark.parametrize("on_exit", [False, True])
def test_fair_lock_interrupted_during_release_wakes_the_next_thread(on_exit: bool) -> None:
    lock, served = FairLock(), []

    def waits() -> None:
        with lock:
            served.append(1)

    thread = threading.Thread(target=waits, daemon=True)
    lock.__enter__()
    thread.start()
    wait_until(lambda: len(lock._queue) == 2)
    lock._guard = Interrupts(lock._guard, on_exit=on_exit)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        lock.__exit__()
    thread.join(PATIENCE)
    assert served and not lock._queue and not lock.is_mine


def test_fair_lock_interrupted_during_acquire_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FairLock()
    with monkeypatch.context() as patch:
        patch.setattr(
            "jspec.engine.callers.fair_lock.threading.get_ident", Fault(threading.get_ident, 2, KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    assert not lock._queue and not lock.is_mine


def test_fair_lock_interrupted_while_waiting_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FairLock()

    class InterruptedWait:
        def __init__(self) -> None:
            self.calls = 0

        def acquire(self) -> None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    def wait() -> None:
        monkeypatch.setattr("jspec.engine.callers.fair_lock.threading.Lock", InterruptedWait)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
        monkeypatch.undo()

    with lock:
        run_together([wait])
        assert len(lock._queue) == 1
    run_together([lambda: lock.__enter__() or lock.__exit__()])
    assert not lock._queue
