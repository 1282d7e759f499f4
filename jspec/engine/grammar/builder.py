"""Compiles grammars in separate processes with limits of CPU time and memory (`regex_dfa.serve`)."""

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

SECONDS, GIB = 10.0, 2.0  # limits for one grammar: seconds of CPU time, and GiB of memory
PROCESSES = 4  # most processes that compile at the same time
IDLE = 2  # most idle processes that are kept
WAIT = 30  # a process without an answer after WAIT times its CPU limit counts as stuck
STDERR_TAIL = 300  # last characters of a process's stderr that an error shows
OUT_OF_MEMORY = ("memory", "overflowed its stack", "Cannot allocate")
HAS_CPU_LIMIT = hasattr(signal, "ITIMER_PROF")
ERRORS = {error.__name__: error for error in regex_dfa.ERRORS}


Task = tuple[str, tuple[Any, ...], float]  # name, arguments, seconds of CPU time


class Ended(Exception):
    """Error: a process ended without an answer, although it kept within its limits."""


@final
class Builder:
    """Runs tasks of `regex_dfa` in processes.

    A process starts when a task needs one. All processes end when this object is deleted.

    Args:
        vocabulary: function that returns (bytes of each token, size of the vocabulary) for the task "table"; called at
            most once.
        seconds: limit of CPU time for one task in seconds; on a system without such a limit, of wall-clock time.
        gib: memory limit of each process in GiB, on systems that support one (Linux).
    """

    def __init__(
        self, vocabulary: Callable[[], Any] = lambda: None, seconds: float = SECONDS, gib: float = GIB
    ) -> None:
        self._vocabulary = vocabulary
        self._pickled: bytes | None = None
        self.seconds, self.gib = seconds, gib
        self._start()

    def _start(self) -> None:
        """Set up without processes. A forked child does this again, because its copies belong to the parent."""
        self._owner = os.getpid()
        self._lock, self._turns = threading.Lock(), threading.Semaphore(PROCESSES)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()

    def __call__(self, name: str, *args: Any, seconds: float | None = None) -> Any:
        """Run the task "build", "table" or "lark" and return its result.

        Args:
            seconds: limit of CPU time for this task, if lower than the builder's; None: the builder's.

        Raises:
            TooLarge: the task exceeds the limits.
            NoText, ValueError, ImportError: the task raised this error.
            RuntimeError: a process cannot be started or fails, or two processes in a row are ended from outside.
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
        finally:  # after an interrupt too, so that the next task does not read this task's answer
            with self._lock:
                self._busy.discard(process)
                is_whole &= process.is_open and len(self._idle) < IDLE
                if is_whole:
                    self._idle.append(process)
            if not is_whole:
                process.close()
        return answer

    def too_large(self) -> TooLarge:
        """Return the error for a task that exceeds the limits."""
        return TooLarge(
            f"it takes more than {self.seconds:g} seconds of CPU time or {self.gib:g} GiB to compile; lower its "
            "repetitions and lengths"
        )

    def command(self) -> list[str]:
        """Return the command line that starts a process."""
        return [sys.executable, "-P", regex_dfa.__file__, str(int(self.gib * 2**30))]

    def pickled_vocabulary(self) -> bytes:
        if self._pickled is None:
            self._pickled = pickle.dumps(self._vocabulary())
        return self._pickled

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that run now, idle or busy."""
        with self._lock:
            return [process.popen for process in (*self._idle, *self._busy)]

    def close(self) -> None:
        """End all processes.

        Tasks that are running raise RuntimeError. A later task starts a new process.
        """
        with self._lock:
            processes, self._idle = [*self._idle, *self._busy], []
        for process in processes:
            process.close()


class _Process:
    """A process of a `Builder`; it ends when the builder is deleted."""

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
                env={**os.environ, **threads},  # the memory limit counts each thread's stack
            )
        except OSError as error:
            raise RuntimeError(
                f"cannot start the process that compiles grammars, sys.executable={sys.executable!r}"
            ) from error
        self._end = weakref.finalize(builder, _end, self.popen)
        self._unsent: bytes | None = builder.pickled_vocabulary()

    def ask(self, task: Task) -> tuple[str | None, Any]:
        """Run one task; return (None, its result), or (kind of its error, message).

        Raises:
            Ended: the process was ended from outside, or exited without an answer.
            TooLarge: the process exceeded its limits.
            RuntimeError: the process failed, gave no answer in time, or was closed.
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
        """Return an error that says why the process gave no answer."""
        if not self.is_open:
            return RuntimeError("the engine was closed while it compiled a grammar")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=5)  # sets the return code
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
            with contextlib.suppress(OSError, ValueError):  # the process has ended, or another thread uses the pipe
                pipe.close()
