"""The output that an engine's thread hands to those who have submitted requests."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from jspec.core.shorten import short
from jspec.engine.callers.watch import Watch
from jspec.engine.request.request import Chunk, Request

Key = Hashable


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


Outlet = Callable[[list[Delivery]], object]


@dataclass(frozen=True)
class SubmittedRequest:
    """A request that was submitted.

    Attributes:
        request: the request.
        outlet: function that takes the request's output.
        whole: whether each completion is delivered only at its end, in one chunk.
        submitted_at: value of `time.perf_counter` (seconds).
    """

    request: Request
    outlet: Outlet
    whole: bool
    submitted_at: float


class Deliveries:
    """The submissions of an engine's thread until their last output is delivered.

    Args:
        notify: called when output has become ready in another thread.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()  # protects the submissions
        self._submissions: dict[Key, SubmittedRequest] = {}
        self._submitted: set[Request] = set()  # the requests of these
        # Only the engine's thread uses these.
        self._keys: dict[Request, Key] = {}  # of each completion that has not ended
        self._watch = Watch()  # of these completions
        self._records: dict[Request, Future[object]] = {}  # the making of a prompt's log-probability records
        self._record_maker = ThreadPoolExecutor(1, "jspec-records")

    # -- any thread

    def add(self, asked: Mapping[Key, Request], outlet: Outlet, *, whole: bool) -> None:
        """Add requests by keys; raise a ValueError if a request was submitted before, or if a key is in use."""
        now = time.perf_counter()
        with self._lock:
            self._check_new(asked)
            self._submissions |= {key: SubmittedRequest(request, outlet, whole, now) for key, request in asked.items()}
            self._submitted |= set(asked.values())

    def check_new(self, asked: Mapping[Key, Request]) -> None:
        """Raise the errors of `add`."""
        with self._lock:
            self._check_new(asked)

    def _check_new(self, asked: Mapping[Key, Request]) -> None:
        for key, request in asked.items():
            if key in self._submissions:
                raise ValueError(f"submit: key: expected one that no unfinished request has, got {short(key)}")
            is_used = request.finish_reason is not None or request.output.queued_at is not None
            if is_used or request in self._submitted:
                raise ValueError(f"submit: expected a request that was not submitted before, got request {request.id}")

    def unfinished(self) -> list[Request]:
        """Return the completions that have not ended."""
        with self._lock:
            samples = [sample for submission in self._submissions.values() for sample in submission.request.samples]
        return [sample for sample in samples if sample.finish_reason is None]

    # -- the engine's thread

    def track(self, keys: Sequence[Key]) -> list[Request]:
        """Watch the completions of new submissions; return them."""
        owners = {sample: key for key in keys for sample in self._submissions[key].request.samples}
        self._keys |= owners
        self._watch.add(list(owners))
        return list(owners)

    def samples_of(self, key: Key) -> tuple[Request, ...]:
        """Return the completions of a key; none if all of them have been delivered."""
        return self._submissions[key].request.samples if key in self._submissions else ()

    def submitted_at(self, sample: Request) -> float:
        return self._submissions[self._keys[sample]].submitted_at

    def tracked(self) -> list[Request]:
        """Return the completions whose end was not delivered."""
        return list(self._keys)

    def needing_rounds(self) -> list[Request]:
        """Return the running completions that have their first token, but not the programs of their rounds."""
        return self._watch.needing_rounds()

    def deliver_new(self) -> None:
        """Hand over what is new and wanted now."""
        self.deliver([sample for sample in self._watch.with_new_output() if self._is_ready(sample)])

    def deliver(self, samples: Sequence[Request]) -> None:
        """Hand the new output of completions to their outlets; raise the error of one that fails after all others."""
        by_outlet: dict[Outlet, list[Delivery]] = defaultdict(list)
        with ExitStack() as stack:
            for sample in samples:
                outlet = self._submissions[self._keys[sample]].outlet
                if outlet not in by_outlet:
                    stack.callback(outlet, by_outlet[outlet])
                by_outlet[outlet].append(self._delivery(sample))

    def _is_ready(self, sample: Request) -> bool:
        """Return whether a completion's next chunk is wanted now, and cheap to make.

        The log-probability records of a prompt of 32,000 tokens take 0.2 s, so another thread makes them.
        """
        if sample.finish_reason is None and self._submissions[self._keys[sample]].whole:
            return False
        scores = sample.output.prompt_logprobs
        if scores is None or sample.index > 0 or self._watch.num_sent[sample] > 0:
            return True
        if sample not in self._records:
            self._records[sample] = self._record_maker.submit(scores.records)
            self._records[sample].add_done_callback(lambda _: self._notify())
        return self._records[sample].done()

    def _delivery(self, sample: Request) -> Delivery:
        """Return the unsent output of a completion, and forget the completion or the key that ends with it."""
        key, last = self._keys[sample], False
        chunk = self._watch.next_chunk(sample)
        if chunk.finish_reason is not None:
            del self._keys[sample]
            self._records.pop(sample, None)
            last = not any(other in self._keys for other in self._submissions[key].request.samples)
        if last:
            with self._lock:
                self._submitted.discard(self._submissions.pop(key).request)
        return Delivery(key, chunk, sample.error, last)

    def close(self) -> None:
        """Deliver the rest, and let the thread that makes records end."""
        self._record_maker.shutdown(wait=False, cancel_futures=True)
        self.deliver(self.tracked())
