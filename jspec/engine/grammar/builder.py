"""Compiles grammars in processes of their own, within limits of CPU time and memory (`regex_dfa.serve`)."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, final

from jspec.engine.grammar import regex_dfa
from jspec.engine.grammar.regex_dfa import MEMORY, TooLarge

SECONDS, GIB = 10.0, 2.0  # CPU time and memory for one grammar
PROCESSES = 4  # grammars that are compiled at the same time
IDLE = 2  # processes that wait for another task
WAIT = 30  # a process without an answer after this many times its CPU limit is taken for stuck
STDERR_TAIL = 300  # characters of a process's stderr to show in an error
OUT_OF_MEMORY = ("memory", "overflowed its stack", "Cannot allocate")
HAS_CPU_LIMIT = hasattr(signal, "ITIMER_PROF")
ERRORS = {error.__name__: error for error in regex_dfa.ERRORS}


Task = tuple[str, tuple[Any, ...], float]  # name, arguments, seconds of CPU time


class Ended(Exception):
    """Error: a process ended without an answer, and not because of its limits."""


@final
class Builder:
    """Runs tasks of `regex_dfa` in processes, which start when needed and end when this object is deleted.

    Args:
        vocabulary: makes the pair (bytes of each token, size of the vocabulary) that the task "table" needs; called
            once.
        seconds: limit of CPU time for one task. Where the system has none, of time.
        gib: memory limit of a process in GiB, if the system supports one (Linux).
    """

    def __init__(
        self, vocabulary: Callable[[], Any] = lambda: None, seconds: float = SECONDS, gib: float = GIB
    ) -> None:
        self._vocabulary = vocabulary
        self._pickled: bytes | None = None
        self.seconds, self.gib = seconds, gib
        self._start()

    def _start(self) -> None:
        """Begin without processes; after a fork too, because the processes and the locks are the parent's."""
        self._owner = os.getpid()
        self._lock, self._turns = threading.Lock(), threading.Semaphore(PROCESSES)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()

    def __call__(self, name: str, *args: Any, seconds: float | None = None) -> Any:
        """Run a task: "build", "table" or "lark".

        Args:
            seconds: a lower limit of CPU time.

        Raises:
            TooLarge: the task exceeds the limits.
            NoText, ValueError, ImportError: raised by the task.
            RuntimeError: a process cannot be started, fails, or is ended from outside, twice in a row.
        """
        if self._owner != os.getpid():
            self._start()
        task = name, args, min(seconds or self.seconds, self.seconds)
        with self._turns:
            try:
                kind, answer = self._ask(task)
            except Ended:
                try:
                    kind, answer = self._ask(task)
                except Ended as error:
                    raise RuntimeError(str(error)) from None
        if kind == MEMORY:
            raise self.too_large()
        if kind is not None:
            raise ERRORS[kind](answer)
        return answer

    def _ask(self, task: Task) -> tuple[str | None, Any]:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process(self)
        with self._lock:
            self._busy.add(process)
        is_whole = False
        try:
            answer = process.ask(task)
            is_whole = True
        finally:  # also after an interrupt: the unread answer would be taken for the answer to the next task
            with self._lock:
                self._busy.discard(process)
                is_whole &= process.is_open and len(self._idle) < IDLE
                if is_whole:
                    self._idle.append(process)
            if not is_whole:
                process.close()
        return answer

    def too_large(self) -> TooLarge:
        """The error of a task that exceeds the limits."""
        return TooLarge(
            f"it takes more than {self.seconds:g} seconds of CPU time or {self.gib:g} GiB to compile; lower its "
            "repetitions and lengths"
        )

    def command(self) -> list[str]:
        """The command that starts a process."""
        return [sys.executable, "-P", regex_dfa.__file__, str(int(self.gib * 2**30))]

    def pickled_vocabulary(self) -> bytes:
        if self._pickled is None:
            self._pickled = pickle.dumps(self._vocabulary())
        return self._pickled

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes that run now."""
        with self._lock:
            return [process.popen for process in (*self._idle, *self._busy)]

    def close(self) -> None:
        """End all processes, so tasks that run raise RuntimeError; the next task starts a new process."""
        with self._lock:
            processes, self._idle = [*self._idle, *self._busy], []
        for process in processes:
            process.close()


class _Process:
    """One process of a `Builder`, which ends when the builder is deleted."""

    def __init__(self, builder: Builder) -> None:
        self._too_large = builder.too_large()
        self._wait = builder.seconds * (WAIT if HAS_CPU_LIMIT else 1)
        self.is_open = True
        self._is_late = False
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        pipe, threads = subprocess.PIPE, dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        try:
            self.popen = subprocess.Popen(
                builder.command(),
                stdin=pipe,
                stdout=pipe,
                stderr=self._stderr,
                start_new_session=True,
                env={**os.environ, **threads},  # each thread's stack counts as memory
            )
        except OSError as error:
            raise RuntimeError(
                f"cannot start the process that compiles grammars, sys.executable={sys.executable!r}"
            ) from error
        self._end = weakref.finalize(builder, _end, self.popen)
        self._unsent: bytes | None = builder.pickled_vocabulary()

    def ask(self, task: Task) -> tuple[str | None, Any]:
        """Run one task; return the kind of its error, or None, and its result.

        Raises:
            Ended: the process ended by itself or from outside.
            TooLarge: the process was ended by its limits.
            RuntimeError: the process failed, gave no answer, or was closed.
        """
        assert self.popen.stdin is not None and self.popen.stdout is not None
        timer = threading.Timer(self._wait, self._stop_late)
        timer.daemon = True
        timer.start()
        try:
            if self._unsent is not None:
                self.popen.stdin.write(self._unsent)
                self._unsent = None
            pickle.dump(task, self.popen.stdin)
            self.popen.stdin.flush()
            return pickle.load(self.popen.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            raise self._why() from None
        finally:
            timer.cancel()

    def _stop_late(self) -> None:
        self._is_late = True
        self.popen.kill()

    def _why(self) -> Exception:
        """The error that says why the process gave no answer."""
        if not self.is_open:
            return RuntimeError("the engine was closed while it compiled a grammar")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=5)  # to get the return code
        code, stderr = self.popen.returncode, self._stderr_tail()
        if self._is_late and HAS_CPU_LIMIT:
            return RuntimeError(
                f"the process that compiles grammars gave no answer in {self._wait:g} seconds; try again"
            )
        is_over = self._is_late or code in (-getattr(signal, "SIGPROF", 0), -getattr(signal, "SIGSEGV", 0))
        if is_over or any(sign in stderr for sign in OUT_OF_MEMORY):
            return self._too_large
        if code is not None and code <= 0:
            return Ended(f"the process that compiles grammars was ended from outside twice (signal {-code}); try again")
        return RuntimeError(f"the process that compiles grammars, {sys.executable}, ended with {code}: {stderr}")

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-STDERR_TAIL:].strip()

    def close(self) -> None:
        """End the process."""
        self.is_open = False
        self._end()


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):  # flushing to a process that has ended; in use elsewhere
                pipe.close()
