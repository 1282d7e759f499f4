"""Test Ctrl-C on the command line: it prints one line and exits with 130 during imports, compilation and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jspec.tools import interrupt
from tests.support import folders

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SECONDS = 60.0  # most seconds that a process may take to print the line that a test waits for


LIKE_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def start(code: str) -> subprocess.Popen[str]:
    """Start Python code in a process that receives Ctrl-C like a process in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", LIKE_A_TERMINAL + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def interrupted(code: str, *, after: str, presses: int = 1) -> tuple[int, str, float]:
    """Run code, send SIGINT after the line ``after``; return exit status, standard error, and seconds until the end."""
    process = start(code)
    assert process.stdout is not None
    try:
        while (line := process.stdout.readline().strip()) != after:
            assert line or process.poll() is None, process.communicate()[1]
        began = time.monotonic()
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, error = process.communicate(timeout=SECONDS)
        return process.returncode, error, time.monotonic() - began
    finally:
        process.kill()
        process.wait()


GUARDED = """
import sys, time
from jspec.tools import interrupt
def command():
    {body}
    return 0
def load():
    {load}
    return command
sys.exit(interrupt.guard(load))
"""
COMMAND_LINE = """
import sys
import jspec.__main__
{before}
sys.argv = ["jspec", "generate", "--target", {target!r}, "--tokenizer", "bytes", "--max-len", "64", "def main("]
sys.exit(jspec.__main__.main())
"""
SAY_WHEN_COMPILING = """
import jax
from jspec.step.executables import Executables
compile_one = Executables._compile_one
def say(*arguments):
    print("ready")
    return compile_one(*arguments)
Executables._compile_one = say
"""
SAY_WHEN_IMPORTING = """
import sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "jspec.models":
            print("ready")
            import time
            time.sleep(60)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("before", [SAY_WHEN_IMPORTING, SAY_WHEN_COMPILING], ids=["while importing", "while compiling"])
def test_command_line_interrupted_before_it_answers_ends_with_one_line_and_status_130(
    before: str, tmp_path: Path
) -> None:
    config = {**folders.TARGET, "num_hidden_layers": 1, "vocab_size": 256, "eos_token_id": None}
    target = str(folders.write(tmp_path, config, folders.target_tensors(config)))
    status, error, seconds = interrupted(COMMAND_LINE.format(before=before, target=target), after="ready")
    *progress, last = error.splitlines()
    assert (status, last) == (130, "jspec: interrupted")
    assert all(line.startswith("jspec: ") for line in progress)
    assert seconds < SECONDS / 2


def test_interrupted_command_cleans_up_and_prints_nothing_more(tmp_path: Path) -> None:
    body = f"""
    try:
        print("ready"); time.sleep(60)
    finally:
        open({str(tmp_path / "cleaned")!r}, "w").close()
        print("a word", file=sys.stderr)
    """
    assert interrupted(GUARDED.format(body=body, load="pass"), after="ready")[:2] == (130, "jspec: interrupted\n")
    assert (tmp_path / "cleaned").exists()


def test_interrupted_command_that_does_not_stop_ends_after_the_grace_period() -> None:
    body = """
    while True:
        try:
            print("ready"); time.sleep(60)
        except KeyboardInterrupt:
            pass
    """
    status, error, seconds = interrupted(GUARDED.format(body=body, load="pass"), after="ready")
    assert (status, error) == (130, "jspec: interrupted\n")
    assert interrupt.GRACE / 2 < seconds < SECONDS / 2
    status, error, seconds = interrupted(GUARDED.format(body=body, load="pass"), after="ready", presses=2)
    assert (status, error) == (130, "jspec: interrupted\n")
    assert seconds < interrupt.GRACE


def test_interrupted_callback_that_swallows_the_exception_ends_the_process() -> None:
    body = """
    class Last:
        def __del__(self):
            print("ready"); time.sleep(60)
    Last()
    time.sleep(60)
    """
    status, error, seconds = interrupted(GUARDED.format(body=body, load="pass"), after="ready")
    assert (status, error) == (130, "jspec: interrupted\n")
    assert seconds < interrupt.GRACE


def test_ctrl_c_while_a_command_is_imported_ends_the_process_without_an_exception(tmp_path: Path) -> None:
    load = f"""
    try:
        print("ready"); time.sleep(60)
    except KeyboardInterrupt:
        open({str(tmp_path / "raised")!r}, "w").close()
    """
    assert interrupted(GUARDED.format(body="pass", load=load), after="ready")[:2] == (130, "jspec: interrupted\n")
    assert not (tmp_path / "raised").exists()


def test_interrupt_guard_returns_the_commands_status_and_passes_on_its_errors() -> None:
    def fail() -> int:
        raise ValueError("no")

    def make(command: Callable[[], int]) -> Callable[[], Callable[[], int]]:
        return lambda: command

    before = signal.getsignal(signal.SIGINT)
    try:
        assert interrupt.guard(make(lambda: 7)) == 7
        with pytest.raises(ValueError, match="no"):
            interrupt.guard(make(fail))
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_context_makes_ctrl_c_an_exception_and_restores_the_handler() -> None:
    def other(*arguments: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, other)
    try:
        with pytest.raises(KeyboardInterrupt), interrupt.raised():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is other
    finally:
        signal.signal(signal.SIGINT, before)
