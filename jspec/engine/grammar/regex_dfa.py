"""Byte automata of regular expressions, built by the library outlines_core within limits of time and memory. No jax.

The size of an automaton may be exponential in the length of the expression and is only known once it is built.
Therefore a separate process builds the automata. The process runs this file as a script, serves one expression after
another, and is killed if an expression takes too much time or memory. This file must import nothing of jspec.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, final

import numpy as np
from jaxtyping import Bool, Int

NOWHERE = -1
END = "\U0010ffff"  # a code point that is not and will never be a character
INSTALL = "install outlines_core (in the folder of jspec: pip install -e '.[grammar]')"
SECONDS, GIB = 30.0, 4  # time and memory limits for one automaton
STDERR_TAIL = 2000  # characters of the process's stderr to show in an error

Automaton = tuple[Int[np.ndarray, "states 256"], Bool[np.ndarray, "states"]]
Build = Callable[[str], Automaton]


class TooLarge(ValueError):
    """Error: an automaton exceeds the limits of time or memory."""


def library() -> Any:
    """Import outlines_core and return the module.

    Raises:
        ImportError: outlines_core is missing; the message names the remedy.
    """
    try:
        import outlines_core
    except ImportError as error:
        raise ImportError(f"regex and json_schema need a library: {INSTALL}") from error
    return outlines_core


def build(regex: str) -> Automaton:
    """Build the automaton of a regular expression; the start state is 0.

    The library omits transitions from final to non-final states. Therefore the library gets the expression followed by
    an end character. Then only the state after the end character is final, and the final states of the expression
    itself are those with a transition by the end character.

    Returns:
        The next state for each state and byte, [states, 256] (`NOWHERE`: no such transition), and whether each state is
        final, [states].

    Raises:
        ValueError: the expression is invalid; the message is the library's.
        ImportError: the library is missing.
    """
    outlines, stop_id = library(), 256
    vocabulary = outlines.Vocabulary(stop_id, {bytes([byte]): [byte] for byte in range(256)})
    outlines.Index(regex, vocabulary)  # refuses an unbalanced ")", which the group in the next line would hide
    index = outlines.Index(f"(?:{regex}){END}", vocabulary)
    transitions, final_states = index.get_transitions(), index.get_final_states()
    names = dict.fromkeys([index.get_initial_state(), *transitions, *final_states])
    numbers = {name: number for number, name in enumerate(names)}
    step = np.full((len(numbers), 256), NOWHERE, np.int64)
    for name, row in transitions.items():
        for byte, target in row.items():
            if byte != stop_id:
                step[numbers[name], byte] = numbers[target]
    is_after_end, reached = np.array([name in final_states for name in numbers]), np.arange(len(numbers))
    for byte in END.encode():
        reached = np.where(reached == NOWHERE, NOWHERE, step[reached, byte])
    step[(step != NOWHERE) & is_after_end[step]] = NOWHERE
    return step, (reached != NOWHERE) & is_after_end[reached]


@final
class Builder:
    """Calls `build` in a separate process, which starts at the first call and ends when this object is deleted.

    Args:
        seconds: time limit for one automaton.
        gib: memory limit of the process in GiB, if the system supports one (Linux).
    """

    def __init__(self, seconds: float = SECONDS, gib: float = GIB) -> None:
        self._seconds, self._gib = seconds, gib
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes]
        self._lock = threading.Lock()

    def __call__(self, regex: str) -> Automaton:
        """Build the automaton of a regular expression, as `build` does.

        Raises:
            TooLarge: the automaton exceeds the limits.
            ValueError, ImportError: raised by `build`.
        """
        with self._lock:
            answer = self._ask(regex)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, regex: str) -> Any:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._seconds, kill)
        timer.start()
        try:
            pickle.dump(regex, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)  # to get the return code of a process that ended by itself
            self.close()
            stderr = self._stderr_tail()
            if is_late.is_set() or "memory" in stderr.lower() or process.returncode == -signal.SIGKILL:
                return TooLarge(
                    f"its automaton takes more than {self._seconds:g} seconds or {self._gib:g} GiB; lower its "
                    "repetitions and lengths"
                )
            return RuntimeError(
                f"the process that builds automata, {sys.executable}, ended with {process.returncode}: {stderr}"
            )
        except BaseException:  # an interrupt: the unread answer would be taken for the answer to the next expression
            self.close()
            raise
        finally:
            timer.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-P", __file__, str(int(self._gib * 2**30)), str(int(self._seconds) + 1)]
            pipe, self._stderr = subprocess.PIPE, tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
            try:
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=self._stderr, start_new_session=True
                )
            except OSError as error:
                raise RuntimeError(
                    f"cannot start the process that builds automata, sys.executable={sys.executable!r}"
                ) from error
            weakref.finalize(self, _close, self._process)
        return self._process

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-STDERR_TAIL:].strip()

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # flushing to a process that has ended
                pipe.close()


def serve(limit: int, seconds: int) -> None:
    """Read pickled expressions from stdin and write their automata, or errors, to stdout, until stdin ends.

    Args:
        limit: memory limit in bytes.
        seconds: time limit for one expression, after which the process ends itself, as its parent may be gone.
    """
    alarm = getattr(signal, "alarm", lambda seconds: None)  # Windows has no alarm
    with contextlib.suppress(ImportError, OSError, ValueError):  # some systems have no memory limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            regex = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        alarm(seconds)
        try:
            answer: Any = build(regex)
        except (ValueError, ImportError) as error:
            answer = error
        alarm(0)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
