"""Test how processes find each other: the sockets before jax is started, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import jax
import pytest

from jspec import distributed
from jspec.distributed import meeting as module
from jspec.distributed.frames import LENGTHS, Message
from jspec.distributed.link import send_message
from jspec.distributed.meeting import Meeting
from tests.support.processes import environment, free_port

MANY = json.dumps({"kind": "hello", "fields": {}, "arrays": [["int8", *[1] * 65]]}).encode()
MANY_DIMENSIONS = LENGTHS.pack(len(MANY), 1) + MANY + b"1"


class Store:
    """A key-value store as jax's client has one."""

    def __init__(self, *, token: str | None = None) -> None:
        self._values, self._token = dict[str, str](), token

    def key_value_set(self, key: str, value: str) -> None:
        self._values[key] = value

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        while self._token is None and key not in self._values:
            time.sleep(0.01)
        return self._token or self._values[key]


@contextmanager
def meetings(*, others: int = 1, count: int = 2, seconds: float = 5.0) -> Iterator[tuple[Meeting, list[Meeting]]]:
    address = f"127.0.0.1:{free_port()}"
    first = Meeting(address, count, 0, seconds)
    rest = [Meeting(address, count, 1 + other, seconds) for other in range(others)]
    try:
        yield first, rest
    finally:
        for meeting in (first, *rest):
            meeting.close()


def run_all(first: Meeting, rest: list[Meeting]) -> list[Future[None]]:
    with ThreadPoolExecutor() as pool:
        return [pool.submit(first.gather), *(pool.submit(meeting.join) for meeting in rest)]


def test_three_processes_learn_their_names_and_where_jax_will_be() -> None:
    with meetings(others=2, count=3) as (first, rest):
        for future in run_all(first, rest):
            future.result()
        assert first.names == rest[0].names == rest[1].names
        assert [name.split(" (")[0] for name in first.names] == ["process 0", "process 1", "process 2"]
        assert first.jax_address == rest[0].jax_address and first.connections.keys() == {1, 2}
        store = Store()
        with ThreadPoolExecutor() as pool:
            for future in [pool.submit(meeting.prove, store) for meeting in (first, *rest)]:
                future.result()


def test_process_that_does_not_know_the_token_is_refused() -> None:
    with meetings() as (first, rest):
        for future in run_all(first, rest):
            future.result()
        with ThreadPoolExecutor() as pool:
            found = [pool.submit(first.prove, Store()), pool.submit(rest[0].prove, Store(token="other"))]
        for future in found:
            with pytest.raises(ConnectionError, match=r"process \d .* does not know the job's token"):
                future.result()


def test_process_0_names_the_processes_that_do_not_come() -> None:
    with meetings(count=4, seconds=0.5) as (first, rest):
        found = run_all(first, rest)
        with pytest.raises(TimeoutError, match=r"expected 4 processes within 0.5 s, process 2, process 3 did not come"):
            found[0].result()
        with pytest.raises((ValueError, TimeoutError), match="expected"):
            found[1].result()


def test_strangers_that_send_slowly_or_never_stop_to_come_do_not_hold_process_0_beyond_its_time() -> None:
    ended = threading.Event()

    def come() -> None:
        """Connect again and again, and send a frame byte by byte."""
        while not ended.is_set():
            with suppress(OSError), socket.create_connection(first.address, timeout=1.0) as stranger:
                for byte in LENGTHS.pack(2**15, 0) + b"{" * 2**10:
                    stranger.sendall(bytes([byte]))
                    if ended.wait(0.05):
                        return

    with meetings(seconds=0.5) as (first, _), ThreadPoolExecutor() as pool:
        gathered, began = pool.submit(first.gather), time.monotonic()
        others = [pool.submit(come) for _ in range(3)]
        try:
            with pytest.raises(TimeoutError, match=r"process 1 did not come"):
                gathered.result(timeout=10.0)
            assert time.monotonic() - began < 2.0
        finally:
            ended.set()
        for other in others:
            other.result()


def test_process_without_a_coordinator_ends_in_time() -> None:
    expected = r"coordinator: expected process 0 at 127.0.0.1:\d+ within 0.5 s"
    with meetings(seconds=0.5) as (_, (other,)), pytest.raises(TimeoutError, match=expected):
        other.join()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"_count": 3}, r"num_processes: expected 2 as in process 0 .*, got 3 in process 1"),
        ({"_own": 2}, "process_id: expected one from 1 to 1 that no other process has, got 2"),
        ({"_about": lambda: {"num_processes": 2, "version of jspec": "9"}}, "version of jspec: expected .*, got 9 in"),
    ],
)
def test_process_with_another_setting_is_refused_on_both_sides(change: dict[str, Any], expected: str) -> None:
    with meetings() as (first, (other,)):
        for name, value in change.items():
            setattr(other, name, value)
        for future in run_all(first, [other]):
            with pytest.raises(ValueError, match=expected):
                future.result()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", LENGTHS.pack(2**15, 2**62), b"", b"\0" * 16 + b"{}", MANY_DIMENSIONS],
)
def test_strangers_are_closed_and_the_others_still_meet(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with meetings() as (first, rest), ThreadPoolExecutor() as pool, caplog.at_level(logging.WARNING):
        gathered = pool.submit(first.gather)
        stranger = Meeting._connect(rest[0])
        stranger.sendall(sent)
        with suppress(OSError):  # it may be closed already
            stranger.shutdown(socket.SHUT_WR)
        rest[0].join()
        gathered.result()
        stranger.settimeout(5)
        try:
            answer = stranger.recv(1)
        except ConnectionResetError:
            answer = b""
        stranger.close()
    assert answer == b"" and "none of a process of this job was closed" in caplog.text


def test_answer_of_something_else_is_no_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        other = Meeting(f"127.0.0.1:{listener.getsockname()[1]}", 2, 1, 5.0)
        with pytest.raises(ConnectionError, match="expected an answer of process 0"):
            other.join()
        other.close()


def test_second_process_of_one_number_is_refused() -> None:
    with meetings(others=2, count=3) as (first, (one, other)):
        other._own = 1
        found = run_all(first, [one, other])
        with pytest.raises(ValueError, match="process_id: expected one from 1 to 2 that no other process has, got 1"):
            found[0].result()
        errors = [future.exception() for future in found[1:]]
        assert any(isinstance(error, ValueError) and "process_id" in str(error) for error in errors)


def test_address_that_is_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Meeting(f"127.0.0.1:{listener.getsockname()[1]}", 2, 0, 1.0)
        with pytest.raises(OSError, match=r"in use"):
            first.gather()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("host", 2, 0), 'coordinator: expected "host:port"'),
        (("host:0", 2, 0), "coordinator: "),
        (("host:port", 2, 0), "coordinator: "),
        ((":80", 2, 0), "coordinator: "),
        (("host:65536", 2, 0), "coordinator: "),
        ((None, 2, 0), "coordinator: "),
        (("host:80", 1, 0), "num_processes: expected an int of at least 2, got 1"),
        (("host:80", "2", 0), "num_processes: expected an int"),
        (("host:80", 2, 2), "process_id: expected 0 to 1, got 2; count from 0"),
        (("host:80", 2, -1), "process_id: expected an int of at least 0, got -1"),
        (("host:80", 2, True), "process_id: expected an int"),
    ],
)
def test_initialize_with_a_wrong_argument_is_refused(
    arguments: tuple[Any, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(ValueError, match=expected):
        distributed.initialize(*arguments)
    assert distributed.current() is None and distributed.process_id() == 0 and distributed.num_processes() == 1


@pytest.mark.parametrize("timeout", [0, -1.0, "9", float("nan")])
def test_initialize_with_a_wrong_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout: expected a number of seconds above 0"):
        distributed.initialize("host:80", 2, 0, timeout=timeout)


def test_initialize_after_a_use_of_a_device_is_refused() -> None:
    jax.devices()
    with pytest.raises(RuntimeError, match="before any use of a device"):
        distributed.initialize(f"127.0.0.1:{free_port()}", 2, 0)


def test_address_of_ipv6_is_split() -> None:
    assert module.address_of("[::1]:80") == ("::1", 80) and module.address_of("a.b:9000") == ("a.b", 9000)


def test_message_larger_than_a_hello_is_not_read_from_a_stranger() -> None:
    left, right = socket.socketpair()
    with left, right:
        send_message(left, Message("hello", {"text": "x" * module.HELLO_BYTES}))
        with pytest.raises(ValueError, match="at most"):
            module.read_message(right, module.HELLO_BYTES)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--coordinator", "127.0.0.1:9"], "--num-processes, --process-id: expected beside"),
        (["--coordinator", "9", "--num-processes", "2", "--process-id", "0"], 'coordinator: expected "host:port"'),
    ],
)
def test_command_line_with_a_part_of_the_options_is_refused(words: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "jspec", "generate", "--target", "demo", *words, "text"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(1), cwd=os.getcwd(), timeout=60)
    assert ended.returncode == 2 and expected in ended.stderr and "Traceback" not in ended.stderr
