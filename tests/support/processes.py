"""Runs one script in several processes, which find each other over the loopback, and collects what they print.

The scripts are functions of `tests.support.process_scripts`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 150.0  # after this time the processes are killed


@dataclass(frozen=True)
class EndedProcess:
    """What is left of a process.

    Attributes:
        status: exit status; negative: the number of the signal that ended it.
        said: objects that the script passed to `say`, in order.
        text: the rest of the standard output, without what gloo prints of its connections.
        errors: text of the standard error.
        end: time at which it had ended, as of `time.time`.
    """

    status: int
    said: list[Any]
    text: str
    errors: str
    end: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def environment(devices: int) -> dict[str, str]:
    """Return the environment of a process with a number of CPU devices."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def script(name: str, port: int, process_id: int, *arguments: str) -> list[str]:
    """Return the command of one of the two processes of a script."""
    return [sys.executable, "-m", "tests.support.process_scripts", name, str(port), "2", str(process_id), *arguments]


def run(commands: Sequence[Sequence[str]], *, devices: int = 2) -> list[EndedProcess]:
    """Run commands at once, and wait for all of them."""
    options: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(devices))
    started = [subprocess.Popen(command, start_new_session=True, **options) for command in commands]
    try:
        return [_ended(process) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _ended(process: subprocess.Popen[str]) -> EndedProcess:
    out, errors = process.communicate(timeout=SECONDS)
    lines = re.sub(r"\[Gloo\] [^\n]*?: \d+", "", out).splitlines()
    said = [json.loads(line.removeprefix("said ")) for line in lines if line.startswith("said ")]
    text = "\n".join(line for line in lines if line and not line.startswith("said "))
    return EndedProcess(process.returncode, said, text, errors, time.time())


def run_script(name: str, *arguments: str, devices: int = 2) -> list[EndedProcess]:
    """Run a script of `tests.support.process_scripts` in two processes."""
    port = free_port()
    return run([script(name, port, process_id, *arguments) for process_id in range(2)], devices=devices)
