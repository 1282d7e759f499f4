"""Test what the processes of a job tell each other, and what they notice of each other; all are in this process."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial

import pytest

from jspec.distributed import job as module_of_jobs
from jspec.distributed import link as module
from jspec.distributed.frames import Message
from jspec.distributed.job import ProcessLost
from jspec.distributed.service import allow_end
from tests.support.jobs import in_all, jobs


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


def test_exchange_after_a_refused_one_gives_the_values_of_the_new_one() -> None:
    with jobs() as (found, _):
        in_all(found, lambda job: job.exchange("memory" if job.process_id == 1 else "Engine", "old"))
        assert in_all(found, lambda job: job.exchange("memory", job.process_id)) == [[0, 1, 2]] * 3


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


def test_call_of_the_devices_that_ends_just_when_the_wait_times_out_gives_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(Future[str]):
        """A call that ends after the first wait for it has timed out."""

        def result(self, timeout: float | None = None) -> str:
            found = super().result()
            if timeout is not None:
                raise TimeoutError
            return found

    monkeypatch.setattr(module_of_jobs, "Future", Late)
    with jobs() as (found, _):
        assert found[0].do(lambda: "result") == "result"


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


def test_function_that_the_devices_thread_has_called_is_not_kept() -> None:
    class JobWeights:
        pass

    with jobs() as (found, _):
        weights = JobWeights()
        kept = weakref.ref(weights)
        assert found[0].do(lambda own=weights: own) is weights
        del weights
        deadline = time.monotonic() + 5.0
        while kept() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert kept() is None


def test_all_functions_of_the_end_are_called_also_if_one_removes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # an error that ends the script; pytest sets it
    called: list[str] = []
    with jobs() as (found, _):
        at_end = found[0].at_end

        def close() -> None:
            called.append("close")
            at_end.remove(close)

        at_end += [close, lambda: called.append("allow the service to end")]
        in_all(found, lambda job: job._end())
    assert called == ["close", "allow the service to end"] and all(job.is_whole for job in found)


def test_end_goes_on_if_the_coordination_service_has_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    called: list[str] = []
    with subprocess.Popen([sys.executable, "-c", ""], bufsize=0, stdin=subprocess.PIPE) as served:
        served.wait()
        with jobs() as (found, _):
            found[0].at_end += [partial(allow_end, served), lambda: called.append("next")]
            assert in_all(found, lambda job: job._end()) == [None] * 3
            assert all(job.is_whole for job in found)
    assert called == ["next"]


def test_process_that_sends_a_message_without_its_field_is_lost() -> None:
    with jobs() as (found, _):
        found[1].links[0].send(Message("failed"))
        with pytest.raises(ProcessLost, match=r"process 1 \(b\) is lost: a message of it .* \(KeyError: 'text'\)"):
            found[0].take("call", 1)
