"""The jobs of three processes, which are all in this one: their connections and threads are real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from jspec.distributed.job import Job

NAMES = ["process 0 (a)", "process 1 (b)", "process 2 (c)"]


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def jobs(*, started: bool = True) -> Iterator[tuple[list[Job], list[socket.socket]]]:
    """Yield the jobs of three processes, and the sockets of processes 1 and 2; nothing ends this process."""
    pairs = [connected(), connected()]
    arrived = {2: pairs[1][0], 1: pairs[0][0]}  # the last process is the first to connect
    first = Job(0, NAMES, arrived)
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
