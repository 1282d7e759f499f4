"""Runs an engine in a thread of its own, which hands over the new output of all requests after each step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from jspec.core.shorten import short
from jspec.engine.callers.api import Engine
from jspec.engine.callers.loop import IDLE
from jspec.engine.callers.watch import Watch
from jspec.engine.request.request import Chunk, Request
from jspec.engine.run.errors import error_of_requests

Key = Hashable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """New output of one completion.

    Attributes:
        key: the key with which the request was submitted.
        chunk: the new output; ``chunk.index`` says of which of the ``n`` completions.
        error: the error with which the completion ended, also if it could not be queued; else None.
        last: whether nothing more comes for this key, because all of its completions have ended.
    """

    key: Key
    chunk: Chunk
    error: BaseException | None
    last: bool


class EngineThread:
    """Steps an engine in one thread, for callers that must not wait: `submit` and `abort` return at once.

    Programs that a request lacks are compiled in a second thread, while the first one steps the other requests. Other
    threads may use the engine too; their requests are not delivered here.

    Args:
        engine: the engine. The caller closes it after `stop`.
        deliver: function that takes the new output of a step. It is called in the engine's thread, and no step runs
            before it returns, so it should only pass the list on. If it raises an error, the thread ends.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Delivery]], None]) -> None:
        self._engine, self._deliver = engine, deliver
        self._thread = threading.Thread(target=self._run, name="jspec-engine", daemon=True)
        self._compiler = ThreadPoolExecutor(1, "jspec-compile")
        self._record_maker = ThreadPoolExecutor(1, "jspec-records")  # because a compilation may take a minute
        self._wake = threading.Condition()  # protects the next four; notified when there is something to do
        self._requests: dict[Key, Request] = {}  # from `submit` until the last delivery
        self._submitted: list[Key] = []
        self._aborted: list[Key] = []
        self._stopped = False
        self._error: BaseException | None = None  # the error that ended the thread
        # Only the engine's thread uses these three.
        self._keys: dict[Request, Key] = {}  # of each completion that has not ended
        self._watch = Watch()  # of these completions
        self._records: dict[Request, Future[object]] = {}  # the making of a prompt's log-probability records

    def start(self) -> None:
        """Start the thread; requests may have been submitted before."""
        self._thread.start()

    def submit(self, key: Key, request: Request) -> None:
        """Hand a request of `Engine.prepare` to the engine's thread, which queues it; errors come as a delivery.

        Args:
            key: names the request in deliveries and for `abort`; it may be used again after its last delivery.

        Raises:
            RuntimeError: the thread has ended.
            TypeError, ValueError: this is no request of the engine, or it was submitted before, or the key is in use.
        """
        self._engine._samples_of("submit", request)
        with self._wake:
            if self._stopped:
                raise RuntimeError("submit: expected a running engine thread, got one that has ended; make a new one")
            self.check_new(key, request)
            self._requests[key] = request
            self._submitted.append(key)
            self._wake.notify()

    def check_new(self, key: Key, request: Request) -> None:
        """Raise a ValueError if a request was submitted before, or if its key is in use."""
        with self._wake:
            if key in self._requests:
                raise ValueError(f"submit: key: expected one that no unfinished request has, got {short(key)}")
            is_used = request.finish_reason is not None or request.output.queued_at is not None
            if is_used or request in self._requests.values():
                raise ValueError(f"submit: expected a request that was not submitted before, got request {request.id}")

    def abort(self, key: Key) -> None:
        """Abort the unfinished completions of a key; their last chunks have ``finish_reason="abort"``.

        A key without an unfinished request is ignored, because the request may just have ended.
        """
        with self._wake:
            if key in self._requests:
                self._aborted.append(key)
                self._wake.notify()

    def stop(self) -> None:
        """Abort all requests, deliver their last chunks and wait for the end of the thread."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.ident is None:
            self._end(None)  # the thread was never started
        elif self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def num_waiting(self) -> int:
        """The number of completions that were submitted and have no slot."""
        return sum(sample.state.slot is None for sample in self._unfinished())

    @property
    def num_running(self) -> int:
        """The number of completions that have a slot."""
        return sum(sample.state.slot is not None for sample in self._unfinished())

    @property
    def num_unfinished(self) -> int:
        """The number of completions that were submitted and have not ended."""
        return len(self._unfinished())

    @property
    def healthy(self) -> bool:
        """Return whether requests can be served: the thread runs, and the engine has its state on the device."""
        return self._engine.healthy and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether the engine has lost its state for good, or an error has ended the thread."""
        return not self._engine.healthy or self._error is not None

    def _unfinished(self) -> list[Request]:
        with self._wake:
            samples = [sample for request in self._requests.values() for sample in request.samples]
        return [sample for sample in samples if sample.finish_reason is None]

    # -- the engine's thread

    def turn(self) -> bool:
        """Carry out the calls since the last turn, run one step and deliver its output; the thread repeats this.

        Returns:
            False if the step had nothing to start or to read.
        """
        self._take_calls()
        has_work = self._engine.step()
        self._deliver_new()
        return has_work

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            has_work = True
            while self._wait(has_work):
                has_work = self.turn()
        except BaseException as caught:
            logger.exception("the engine's thread ends; its requests end with this error")
            error = self._error = caught
        self._end(error)

    def _wait(self, has_work: bool) -> bool:
        """Sleep until there is something to do; return whether the thread goes on.

        Args:
            has_work: whether the last step did anything.
        """
        with self._wake:
            if not (has_work or self._submitted or self._aborted or self._stopped):
                # Requests without work wait for a compilation, perhaps of another caller, who does not notify.
                self._wake.wait(IDLE if self._watch.num_sent else None)
            return not self._stopped

    def _take_calls(self) -> None:
        """Carry out the calls of `submit` and `abort` since the last step."""
        with self._wake:
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
        for key in submitted:
            self._track(key)
            self._queue(self._requests[key])
        for key in aborted:
            if key in self._requests:
                self._engine._abort(self._requests[key].samples)

    def _track(self, key: Key) -> None:
        samples = self._requests[key].samples
        self._keys |= dict.fromkeys(samples, key)
        with self._engine._lock:  # another thread may abort them in this moment
            self._watch.add(samples)

    def _queue(self, request: Request) -> None:
        """Queue a request; what it lacks of compiled programs is compiled in the other thread."""
        queue, compile_rounds = self._engine._queue, self._engine._compile_rounds
        if self._engine._lacks_prefills(request.samples):
            self._compiler.submit(self._call, request, queue, compile_rounds)
            return
        self._call(request, queue)
        if any(sample.state.awaits_rounds for sample in request.samples):
            self._compiler.submit(self._call, request, compile_rounds)

    def _call(self, request: Request, *calls: Callable[[Sequence[Request]], None]) -> None:
        """Call functions with a request's completions, which end with the error that one of them raises."""
        try:
            for call in calls:
                call(request.samples)
        except Exception as error:
            self._engine._fail(request.samples, error)
        self._notify()

    def _notify(self, *_: object) -> None:
        with self._wake:
            self._wake.notify()

    def _deliver_new(self) -> None:
        ready = [sample for sample in self._watch.with_new_output() if self._has_records(sample)]
        if ready:
            self._deliver([self._delivery(sample) for sample in ready])

    def _has_records(self, sample: Request) -> bool:
        """Return whether a completion's next chunk is cheap to make.

        The log-probability records of a prompt of 32,000 tokens take 0.2 s, so another thread makes them.
        """
        scores = sample.output.prompt_logprobs
        if scores is None or sample.index > 0 or self._watch.num_sent[sample] > 0:
            return True
        if sample not in self._records:
            self._records[sample] = self._record_maker.submit(scores.records)
            self._records[sample].add_done_callback(self._notify)
        return self._records[sample].done()

    def _delivery(self, sample: Request) -> Delivery:
        """Return the unsent output of a completion, and forget the completion or the key that ends with it."""
        key, last = self._keys[sample], False
        chunk = self._watch.next_chunk(sample)
        if chunk.finish_reason is not None:
            del self._keys[sample]
            self._records.pop(sample, None)
            last = not any(other in self._watch.num_sent for other in self._requests[key].samples)
        if last:
            with self._wake:
                del self._requests[key]
        return Delivery(key, chunk, sample.error, last)

    def _end(self, error: BaseException | None) -> None:
        """Take no more requests, end all unfinished ones, deliver their last chunks, and end the other threads.

        Args:
            error: the error that ends the thread, and with it the requests; None: they are aborted.
        """
        with self._wake:
            self._stopped = True
            submitted, self._submitted = self._submitted, []
        for pool in (self._compiler, self._record_maker):
            pool.shutdown(wait=False, cancel_futures=True)
        for key in submitted:
            self._track(key)
        samples = list(self._watch.num_sent)
        if error is None:
            self._engine._abort(samples)
        else:
            self._engine._fail(samples, error_of_requests(error))
        if samples:
            self._deliver([self._delivery(sample) for sample in samples])
