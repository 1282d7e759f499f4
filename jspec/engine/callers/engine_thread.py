"""The one thread that runs an engine: callers put calls into its queue, and it hands over output after each step."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from jspec.core.config import EngineConfig
from jspec.engine.callers.deliveries import Deliveries, Key, Outlet
from jspec.engine.callers.late_programs import AT_ONCE, LatePrograms
from jspec.engine.request.request import Request
from jspec.engine.run.core import EngineCore
from jspec.engine.run.errors import Recovery, caused_by
from jspec.engine.run.stats_logger import LowAcceptanceWarner, StatsLogger
from jspec.engine.run.weight_update import settle

TURN_SECONDS = 0.01  # of calls before a step, if they are short
ENDED = "the engine's thread has ended by an error; make a new engine"

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs the steps of an engine in one thread, which alone uses the engine's loop.

    Programs that a request lacks are compiled in a second thread (`LatePrograms`), while the first one steps the other
    requests. The thread begins with the first request. Ctrl-C never reaches it, so no step is interrupted.

    Args:
        core: the engine's loop.
        config: the engine's options.
    """

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self.core, self.config, self._process = core, config, os.getpid()
        self.recovery = Recovery(core)
        self.acceptance_warner = LowAcceptanceWarner(core.runner.program.drafter)
        self.warn = self.acceptance_warner.warn  # for the threads of callers
        self._stats_logger = StatsLogger(config.log_interval)
        self._thread = threading.Thread(target=self._run, name="jspec-engine", daemon=True)
        # Functions to call between two steps. A garbage collection may put one at any moment, so no lock may be needed.
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._deliveries = Deliveries(lambda: self.call(_nothing))
        self._programs = LatePrograms(core, self._deliveries, self.call)
        self._lock = threading.Lock()  # protects the next one
        self._stopped = False
        self._ended = False  # whether the thread takes no more calls
        self.updating = threading.Lock()  # held by a thread that replaces weights or frees memory
        self._error: BaseException | None = None  # the error that ended the thread
        self.turned_by: threading.Thread | None = None  # thread that makes the turns by hand, while this one waits

    # -- calls of any thread

    def start(self) -> None:
        """Start the thread, if it is not running yet."""
        with self._lock:
            if self._thread.ident is None and not self._stopped:
                self._thread.start()

    def submit(self, asked: Mapping[Key, Request], outlet: Outlet, *, whole: bool = False) -> None:
        """Hand requests of `Engine.prepare` to the thread, which queues them in one step; errors come as deliveries.

        Args:
            asked: the requests by keys, which name them in deliveries and for `abort`.
            outlet: function that takes the new output of a step. The engine's thread calls it and steps on when it
                returns, so it should only pass the list on. If it raises an error, the thread ends.
            whole: whether to deliver each completion only at its end, in one chunk.

        Raises:
            RuntimeError: the thread has ended.
            ValueError: a request was submitted before, or a key is in use.
        """
        with self._lock:
            self.check_open()
            self._deliveries.add(asked, outlet, whole=whole)
            self.call(lambda: self._programs.queue(self._deliveries.track(list(asked))))
        self.start()

    def check_open(self) -> None:
        """Raise a RuntimeError if the thread has ended."""
        if self._stopped:
            raise RuntimeError("submit: expected a running engine thread, got one that has ended; make a new one")

    def check_new(self, asked: Mapping[Key, Request]) -> None:
        """Raise a ValueError if a request was submitted before, or if its key is in use."""
        self._deliveries.check_new(asked)

    def abort(self, key: Key) -> None:
        """Abort the unfinished completions of a key; a key that has none is ignored, as they may just have ended."""
        self.call(partial(self._abort, key))

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call a function between two steps."""
        self._calls.put(function)

    def do(self, function: Callable[[], T]) -> T:
        """Return the result of a function that uses the engine's loop; a running thread calls it between two steps.

        The thread itself may call this within a step.
        """
        self.check_process()
        with self._lock:
            is_running = self._thread.is_alive() and not self._ended and not self.is_current
            result = self._put(function, self.call) if is_running else function
        return result()

    def between_steps(self, function: Callable[[], T]) -> T:
        """Return the result of a function that the thread calls between two steps; the thread begins if need be.

        Raises:
            RuntimeError: the thread has ended, or calls this itself within a step.
        """
        return self._later(function, self.call)

    def settled(self, requests: str, function: Callable[[], T]) -> tuple[dict[str, int], T]:
        """Return the numbers of treated requests and the result of a function that is called after their treatment.

        Args:
            requests: how to treat the requests (`jspec.engine.run.weight_update.settle`); "wait": until they have
                ended, while requests that are submitted later wait for the function.
            function: function to call with no step in flight.

        Raises:
            RuntimeError: as `between_steps`.
        """

        def call() -> tuple[dict[str, int], T]:
            if self._stopped:
                raise RuntimeError("this engine was closed meanwhile; make a new one")
            with self.recovery:
                self.core.read_all()
            return settle(self.core, requests, self._deliveries.unfinished()), function()

        if requests != "wait":
            return self.between_steps(call)
        return self._later(
            call, lambda made: self.call(lambda: self.core.call_after(set(self._deliveries.unfinished()), made))
        )

    def check_other_thread(self) -> None:
        """Raise a RuntimeError in the engine's own thread, which is within a step."""
        if self._thread is threading.current_thread():
            raise RuntimeError("expected another thread than the engine's own, got this one, as in a callback")

    def _later(self, function: Callable[[], T], put: Callable[[Callable[[], object]], None]) -> T:
        """Return the result of a function after another one has let the thread call it."""
        self.check_other_thread()
        self.start()
        with self._lock:
            if not self.is_current:  # else the caller makes the turns by hand
                self.check_open()
                function = self._put(function, put)
        return function()

    def _put(self, function: Callable[[], T], put: Callable[[Callable[[], object]], None]) -> Callable[[], T]:
        """Let the thread call a function; return a function that waits for its result."""
        done: Future[T] = Future()
        put(partial(_set_result, done, function))

        def result() -> T:
            try:
                return done.result()
            except BaseException:
                done.cancel()  # after Ctrl-C of the caller the function is not called any more
                raise

        return result

    def close(self) -> None:
        """Abort all requests, deliver their last chunks, wait for the end of the thread and free the device memory."""
        if os.getpid() != self._process:
            return  # a forked child, in which the thread does not run
        with self._lock:
            self._stopped = True
            self.call(_nothing)
        if self._thread.ident is None:
            self._end(None)
        elif not self.is_current:
            self._thread.join()
        if not self.is_current:
            self.core.close()

    def check_process(self) -> None:
        """Raise a RuntimeError in a forked child of the process that made the engine."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"expected the process that made the engine ({self._process}), got its forked child ({os.getpid()}), "
                'where jax would hang; make an engine in the child, which multiprocessing must start with "spawn"'
            )

    @property
    def is_closed(self) -> bool:
        """Return whether the thread takes no more requests, although no error has ended it."""
        return self._stopped and self._error is None

    @property
    def is_current(self) -> bool:
        """Return whether the calling thread makes the turns."""
        return (self.turned_by or self._thread) is threading.current_thread()

    @property
    def num_running(self) -> int:
        """The number of completions that have a slot."""
        return sum(sample.state.slot is not None for sample in self._deliveries.unfinished())

    @property
    def num_unfinished(self) -> int:
        """The number of completions that were submitted and have not ended."""
        return len(self._deliveries.unfinished())

    @property
    def healthy(self) -> bool:
        """Return whether requests can be served: the engine has its state on the device, and the thread takes calls."""
        return not self.has_failed and not self._stopped

    @property
    def error(self) -> BaseException | None:
        """The error that ended the thread; None: it runs, or was closed."""
        return self._error

    @property
    def has_failed(self) -> bool:
        """Return whether the engine has lost its state or a process for good, or an error has ended the thread."""
        return not self.recovery.healthy or not self.core.runner.calls.is_whole or self._error is not None

    # -- the engine's thread

    def turn(self) -> bool:
        """Carry out the calls since the last turn, run one step and deliver its output; the thread repeats this.

        Returns:
            False if the step had nothing to start or to read.
        """
        self._take_calls(TURN_SECONDS)
        has_work = True
        with self.recovery:
            has_work = self.core.step(overlap=self.config.overlap)
        self._deliveries.deliver_new()
        self._programs.compile_rounds()
        if self._stats_logger.is_due():
            self._stats_logger.write(self.core.metrics(), self.core.gauges())
        for rows in self.core.take_drafted_rows():
            self.acceptance_warner.count(rows)
        return has_work

    def wait(self) -> None:
        """Wait for a call and carry it out."""
        self._calls.get()()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopped:
                if not self.turn():
                    self.wait()
        except BaseException as caught:
            logger.exception("the engine's thread ends; its requests end with this error")
            error = self._error = caught
        self._end(error)
        if error is None:
            self.core.close()

    def _take_calls(self, seconds: float = math.inf) -> None:
        """Carry out the calls in the queue, until there are no more or some time has passed."""
        end = time.perf_counter() + seconds
        with contextlib.suppress(Empty):
            while time.perf_counter() < end:
                self._calls.get_nowait()()

    def _take_last_calls(self) -> None:
        """Carry out the calls still in the queue; log the error of one, so that the next ones run too."""
        with contextlib.suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                try:
                    call()
                except Exception:
                    logger.exception("a call failed while the engine's thread ended")

    def _abort(self, key: Key) -> None:
        live = [sample for sample in self._deliveries.samples_of(key) if sample.finish_reason is None]
        self._abort_all(live[:AT_ONCE])
        if live[AT_ONCE:]:
            self.abort(key)

    def _abort_all(self, samples: Sequence[Request]) -> None:
        for sample in samples:
            self.core.finish(sample, "abort")

    def _end(self, error: BaseException | None) -> None:
        """Take no more requests, end all unfinished ones, deliver their last chunks, and end the other threads.

        Args:
            error: the error that ends the thread, and with it the requests; None: they are aborted.
        """
        with self._lock:
            self._stopped = self._ended = True
        self._take_last_calls()
        self._programs.stop()
        unfinished = [sample for sample in self._deliveries.tracked() if sample.finish_reason is None]
        try:
            if error is None:
                self._abort_all(unfinished)
            else:
                self.core.fail(unfinished, caused_by(error, ENDED))
            self.core.end_calls()
        finally:
            self._deliveries.close()


def _nothing() -> None: ...  # wakes the thread


def _set_result(done: Future[T], function: Callable[[], T]) -> None:
    """Set a future to the result of a function, or to its error; do nothing if the future was cancelled."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(function())
    except Exception as error:
        done.set_exception(error)
