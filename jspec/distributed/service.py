"""Runs jax's coordination service in a process of its own, which outlives process 0 for a while if that is lost.

jax aborts a process at once when the service is gone. In a process of its own the service is still there when process 0
is lost, so that the others can end with an error that says what happened.

This file runs as a script, with the address and the number of processes as arguments. It prints a line once it serves.
It ends with its parent if that has sent a line, which says that the job has ended well; else `AFTER_SECONDS` later.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

AFTER_SECONDS = 30.0


def start(address: str, num_processes: int) -> subprocess.Popen[bytes]:
    """Start the service in a new process.

    Raises:
        OSError: it cannot serve at this address.
    """
    command = [sys.executable, "-P", __file__, address, str(num_processes)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
    assert process.stdout is not None
    if not process.stdout.readline():
        raise OSError(f"{address}: expected to start jax's coordination service, it ended ({process.wait()})")
    return process


def allow_end(process: subprocess.Popen[bytes]) -> None:
    """Let the service end together with this process, if it has not ended before."""
    assert process.stdin is not None
    with suppress(OSError):  # it has ended
        process.stdin.write(b"end\n")


def main(address: str, num_processes: int) -> None:
    from jaxlib import _jax

    service = _jax.get_distributed_runtime_service(address, num_processes)
    print("ready", flush=True)
    if not sys.stdin.read():  # returns when the parent has ended
        time.sleep(AFTER_SECONDS)
    service.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
