"""Test what the processes of a job tell each other, and what they notice of each other; all are in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from jspec.distributed import link as module
from jspec.distributed.frames import Message
from jspec.distributed.job import Job, ProcessLost

NAMES = ["process 0 (a)", "process 1 (b)", "process 2 (c)"]


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def jobs(*, started: bool = True) -> Iterator[tuple[list[Job], list[socket.socket]]]:
    """Yield the jobs of three processes, and the sockets of processes 1 and 2; nothing ends this process."""
    pairs = [connected(), connected()]
    first = Job(0, NAMES, {i + 1: pair[0] for i, pair in enumerate(pairs)})
    found = [first, *(Job(i + 1, NAMES, {0: pair[1]}) for i, pair in enumerate(pairs))]
    for job in found if started else found[:1]:
        threading.Thread(target=job._do_all, daemon=True).start()
        for link in job.links.values():
            link.start()
    yield found, [pair[1] for pair in pairs]
    for connection in [one for pair in pairs for one in pair]:
        with suppress(OSError):  # the test has ended it
            connection.shutdown(socket.SHUT_RDWR)


def in_all(found: list[Job], call: Any) -> list[Any]:
    """Return the results, or the errors, of a call in all processes at once."""
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(call, job) for job in found]
    return [future.exception() or future.result() for future in futures]


def test_exchange_gives_all_processes_the_values_of_all() -> None:
    with jobs() as (found, _):
        for number in range(3):
            values = in_all(found, lambda job, n=number: job.exchange("number", [n, job.process_id]))
            assert values == [[[number, 0], [number, 1], [number, 2]]] * 3


def test_exchange_of_different_things_is_refused_in_all_processes() -> None:
    with jobs() as (found, _):
        errors = in_all(found, lambda job: job.exchange("memory" if job.process_id == 1 else "Engine", 1))
    expected = "expected the same script in all processes, got another: process 0 (a) is at its Engine, process 1 (b)"
    assert all(isinstance(error, ValueError) and str(error).startswith(expected) for error in errors)


def test_check_same_names_each_difference_in_all_processes() -> None:
    values = [{"slots": 2, "dtype": "x"}, {"slots": 2, "dtype": "x"}, {"slots": 3, "extra": 1}]
    with jobs() as (found, _):
        assert in_all(found, lambda job: job.check_same("Engine", values[0])) == [None] * 3
        errors = in_all(found, lambda job: job.check_same("Engine", values[job.process_id]))
    for error in errors:
        assert isinstance(error, ValueError)
        for text in ("slots: 2 in process 0 (a), 3 in process 2 (c)", "dtype: x in", "extra: None in process 0"):
            assert text in str(error)
        assert "process 1" not in str(error)


def test_process_that_closes_its_connection_is_lost_in_all_others() -> None:
    with jobs() as (found, sockets):
        sockets[1].shutdown(socket.SHUT_RDWR)
        errors = in_all(found[:2], lambda job: job.take("call", 1 - job.process_id))
    assert [str(error) for error in errors] == ["process 2 (c) is lost: its connection ended"] * 2
    assert all(isinstance(error, ProcessLost) for error in errors) and not found[0].is_whole


def test_process_that_is_silent_is_lost_but_not_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 2.5)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    with jobs() as (found, _):
        time.sleep(3.0)
        assert all(job.is_whole for job in found)
    with jobs(started=False) as (found, _), pytest.raises(ProcessLost, match=r"is lost: it was silent for 2.5 s"):
        found[0].take("call", 1)


def test_process_that_sends_something_else_is_lost() -> None:
    with jobs(started=False) as (found, sockets):
        sockets[0].sendall(b"\x80\x04\x95" * 16)
        with pytest.raises(ProcessLost, match=r"process 1 \(b\) is lost: it sent something else than a message"):
            found[0].take("call", 1)


def test_call_of_the_devices_that_never_returns_ends_with_the_loss() -> None:
    blocked = threading.Event()
    with jobs() as (found, sockets):
        assert found[0].do(lambda: threading.current_thread() is not threading.main_thread())
        for error in (KeyError("own"), TimeoutError("own")):
            with pytest.raises(type(error), match="own"):
                found[0].do(lambda error=error: (_ for _ in ()).throw(error))
        threading.Timer(0.2, sockets[0].shutdown, [socket.SHUT_RDWR]).start()
        with pytest.raises(ProcessLost, match="process 1"):
            found[0].do(blocked.wait)
        blocked.set()


def test_process_that_has_ended_is_lost_for_those_that_still_need_it() -> None:
    with jobs() as (found, _):
        found[1]._tell(Message("bye"))
        found[2].send(Message("call", {"number": 1}))
        assert found[0].take("call", 2).fields == {"number": 1} and found[0].is_whole
        with pytest.raises(ProcessLost, match=r"process 1 \(b\) has ended"):
            found[0].take("call", 1)


def test_process_that_ends_while_an_engine_runs_is_lost_at_once() -> None:
    with jobs() as (found, _):
        found[0].is_busy = True
        found[1]._tell(Message("bye"))
        assert found[0].is_lost_within(5.0)
