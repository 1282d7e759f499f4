"""The automaton over bytes of a regular expression, by the library outlines_core, within bounds. No jax.

How many states there are is only known once they are made, and may be two to the power of the expression's size. So
they are made in a process of its own, which runs this file alone, is asked again and again, and is ended when it takes
too long or too much memory.
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
LAST = "\U0010ffff"  # no character, nor ever one
INSTALL = "install outlines_core (pip install 'jspec[grammar]')"
SECONDS, GIB = 30.0, 4  # that an automaton may take
LAST_WORDS = 2000  # characters of what the process said before it ended

Automaton = tuple[Int[np.ndarray, "states 256"], Bool[np.ndarray, "states"]]
Build = Callable[[str], Automaton]


class TooLarge(ValueError):
    """An automaton that takes more than there is."""


def library() -> Any:
    """outlines_core.

    Raises:
        ImportError: it is missing; naming the remedy.
    """
    try:
        import outlines_core
    except ImportError as error:
        raise ImportError(f"regex and json_schema need a library: {INSTALL}") from error
    return outlines_core


def build(regex: str) -> Automaton:
    """The state behind each state and byte, and whether each state is final. It starts in 0.

    The library leaves out what leads from a final state to one that is not final. So it gets the expression with a last
    letter behind it, before which no state is final: those from which it can come are the final ones.

    Raises:
        ValueError: the library's, of what is no expression.
        ImportError: the library is missing.
    """
    outlines, end = library(), 256
    letters = outlines.Vocabulary(end, {bytes([byte]): [byte] for byte in range(256)})
    outlines.Index(regex, letters)  # by itself, for it may close a bracket that is not its own
    index = outlines.Index(f"(?:{regex}){LAST}", letters)
    transitions, final_states = index.get_transitions(), index.get_final_states()
    names = dict.fromkeys([index.get_initial_state(), *transitions, *final_states])
    numbers = {name: number for number, name in enumerate(names)}
    step = np.full((len(numbers), 256), NOWHERE, np.int64)
    for name, row in transitions.items():
        for byte, target in row.items():
            if byte != end:
                step[numbers[name], byte] = numbers[target]
    is_behind, before = np.array([name in final_states for name in numbers]), np.arange(len(numbers))
    for byte in LAST.encode():
        before = np.where(before == NOWHERE, NOWHERE, step[before, byte])
    step[(step != NOWHERE) & is_behind[step]] = NOWHERE
    return step, (before != NOWHERE) & is_behind[before]


@final
class Builder:
    """`build`, in a process of its own; it is started when first asked and ends with this object.

    Args:
        seconds: that an automaton may take.
        gib: of memory that it may take, where the system can bound that (Linux).
    """

    def __init__(self, seconds: float = SECONDS, gib: float = GIB) -> None:
        self._seconds, self._gib = seconds, gib
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes]
        self._turn = threading.Lock()

    def __call__(self, regex: str) -> Automaton:
        """As `build`.

        Raises:
            TooLarge: it takes more than there is.
            ValueError, ImportError: as `build`.
        """
        with self._turn:
            answer = self._ask(regex)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, regex: str) -> Any:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        clock = threading.Timer(self._seconds, end)
        clock.start()
        try:
            pickle.dump(regex, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)  # for the code it ends with by itself
            self.close()
            said = self._last_words()
            if is_late.is_set() or "memory" in said.lower() or process.returncode == -signal.SIGKILL:
                return TooLarge(
                    f"its automaton takes more than {self._seconds:g} seconds or {self._gib:g} GiB; lower its "
                    "repetitions and lengths"
                )
            return RuntimeError(f"{sys.executable} that makes automata ended with {process.returncode}: {said}")
        except BaseException:  # an interrupt: an answer that nobody read would be taken for the next one's
            self.close()
            raise
        finally:
            clock.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-P", __file__, str(int(self._gib * 2**30)), str(int(self._seconds) + 1)]
            pipe, self._said = subprocess.PIPE, tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
            try:
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=self._said, start_new_session=True
                )
            except OSError as error:
                raise RuntimeError(f"automata are made by another Python, sys.executable={sys.executable!r}") from error
            weakref.finalize(self, _close, self._process)
        return self._process

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-LAST_WORDS:].strip()

    def close(self) -> None:
        """End the process; another one is started when next asked."""
        process, self._process = self._process, None
        if process is not None:
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what it did not take any more
                pipe.close()


def serve(limit: int, seconds: int) -> None:
    """Answer expressions from the input with automata, or with what went wrong, until it ends.

    Args:
        limit: bytes of memory.
        seconds: after which it ends itself, should its owner be gone.
    """
    alarm = getattr(signal, "alarm", lambda seconds: None)  # where the system has one
    with contextlib.suppress(ImportError, OSError, ValueError):  # where the system has no such bound
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
