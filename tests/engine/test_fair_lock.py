"""`FairLock`: order, and interrupts at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jspec.engine.fair_lock import FairLock
from tests.support.brittle import PATIENCE, Fault, run_together

pytestmark = pytest.mark.once


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def test_fair_lock_contended_serves_threads_in_order() -> None:
    """Whoever had it comes behind those that asked meanwhile."""
    turns, order = FairLock(), []

    def asks(number: int) -> None:
        with turns, turns:  # also from within
            order.append(number)

    def first() -> None:
        with turns:
            for number in range(1, 4):
                threads.append(threading.Thread(target=asks, args=(number,), daemon=True))
                threads[-1].start()
                wait_until(lambda count=number + 1: len(turns._queue) == count)
            order.append(0)
        asks(4)

    threads: list[threading.Thread] = []
    run_together([first])
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [0, 1, 2, 3, 4] and not turns._queue


class Interrupts:
    """A lock that an interrupt comes into once, in the thread that made it."""

    def __init__(self, original: Any, *, behind: bool) -> None:
        self.original, self.behind, self.thread = original, behind, threading.get_ident()

    def __enter__(self) -> None:
        if not self.behind:
            self.interrupt()
        self.original.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.original.__exit__(*exc)
        self.interrupt()

    def interrupt(self) -> None:
        if self.thread == threading.get_ident():
            self.thread = 0
            raise KeyboardInterrupt


@pytest.mark.parametrize("behind", [False, True])
def test_fair_lock_interrupted_release_wakes_the_next_thread(behind: bool) -> None:
    turns, served = FairLock(), []

    def waits() -> None:
        with turns:
            served.append(1)

    thread = threading.Thread(target=waits, daemon=True)
    turns.__enter__()
    thread.start()
    wait_until(lambda: len(turns._queue) == 2)
    turns._guard = Interrupts(turns._guard, behind=behind)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        turns.__exit__()
    thread.join(PATIENCE)
    assert served and not turns._queue and not turns.is_mine


def test_fair_lock_interrupted_acquire_releases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = FairLock()
    with monkeypatch.context() as patch:
        patch.setattr("jspec.engine.fair_lock.threading.get_ident", Fault(threading.get_ident, 2, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
    assert not turns._queue and not turns.is_mine


def test_fair_lock_interrupted_wait_leaves_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = FairLock()

    class Interrupted:
        def __init__(self) -> None:
            self.calls = 0

        def acquire(self) -> None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    def wait() -> None:
        monkeypatch.setattr("jspec.engine.fair_lock.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
        monkeypatch.undo()

    with turns:
        run_together([wait])
        assert len(turns._queue) == 1
    run_together([lambda: turns.__enter__() or turns.__exit__()])
    assert not turns._queue
