"""The threads of equal engines, and the choice of the engine of each request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from jspec.engine.callers.deliveries import Key, Outlet
from jspec.engine.callers.engine_thread import EngineThread
from jspec.engine.request.request import Request

BUSIER = 8  # completions that a replica must have more than the least busy one to get no request for its cached pages

logger = logging.getLogger(__name__)


def choose(cached: Sequence[int], loads: Sequence[int], slots: int) -> int:
    """Choose the replica of a request; return its index.

    It is the one with the most cached pages of the request's prompt; among equals the least busy one; among equals the
    first. Two kinds of replicas are left out, so that none gets all requests: those without a free slot, while another
    has one; and those with `BUSIER` completions more than the least busy one.

    Args:
        cached: pages of the prompt in each replica's prefix cache.
        loads: unfinished completions of each replica.
        slots: number of completions that a replica runs at once.
    """
    free = [index for index, load in enumerate(loads) if load < slots] or range(len(loads))
    least = min(loads[index] for index in free)
    able = [index for index in free if loads[index] < least + BUSIER]
    return max(able, key=lambda index: (cached[index], -loads[index], -index))


class ReplicaThreads:
    """The threads of equal engines, with the calls of an `EngineThread`; each request goes to one engine.

    Args:
        threads: the engines' threads; one input processor makes the requests of all.
    """

    def __init__(self, threads: Sequence[EngineThread]) -> None:
        self._threads = tuple(threads)
        self._lock = threading.Lock()  # a request is placed when all earlier ones count as load
        self._stopped = False
        self._reported: set[int] = set()  # failed replicas that were logged

    def submit(self, asked: Mapping[Key, Request], outlet: Outlet, *, whole: bool = False) -> None:
        """Hand each request to one engine's thread; arguments and further errors are those of `EngineThread.submit`.

        Raises:
            RuntimeError: the threads were stopped, or all replicas have failed.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("submit: expected running replicas, got some that were stopped; make new ones")
            for thread in self._threads:
                thread.check_new(asked)
            for key, request in asked.items():
                while not self._try(key, request, outlet, whole=whole):
                    pass

    def _try(self, key: Key, request: Request, outlet: Outlet, *, whole: bool) -> bool:
        """Hand a request to the thread chosen for it; return False if that thread has just failed."""
        able = self._able()
        cached = [len(self._threads[index].core.scheduler.cached_pages(request)) for index in able]
        loads = [self._threads[index].num_unfinished for index in able]
        thread = self._threads[able[choose(cached, loads, self._threads[0].core.scheduler.limits.slots)]]
        try:
            thread.submit({key: request}, outlet, whole=whole)
        except RuntimeError:
            if not thread.has_failed:
                raise
            return False
        return True

    def _able(self) -> list[int]:
        """Return the indices of the replicas that have not failed, at least one; log each failure once."""
        able = [index for index, thread in enumerate(self._threads) if not thread.has_failed]
        for index in set(range(len(self._threads))) - {*able, *self._reported}:
            self._reported.add(index)
            logger.error("%s has failed; %d of %d serve on", self._name(index), len(able), len(self._threads))
        self.check()
        return able

    def check(self) -> None:
        """Raise a RuntimeError if all replicas have failed."""
        if all(thread.has_failed for thread in self._threads):
            raise RuntimeError(
                f"all replicas have failed: {', '.join(self.failed)}; the log has their errors; restart the process"
            )

    def abort(self, key: Key) -> None:
        """Abort the unfinished completions of a key, as `EngineThread.abort` does."""
        for thread in self._threads:
            thread.abort(key)

    def close(self) -> None:
        """Abort all requests, deliver their last chunks, end the threads and free the device memory."""
        with self._lock:
            self._stopped = True
        for thread in self._threads:
            thread.close()

    def warn(self) -> None:
        """Warn once about each engine whose drafts hardly help."""
        for thread in self._threads:
            thread.warn()

    def check_process(self) -> None:
        """Raise a RuntimeError in a forked child of the process that made the engines."""
        self._threads[0].check_process()

    @property
    def is_current(self) -> bool:
        """Return whether the calling thread is one of these."""
        return any(thread.is_current for thread in self._threads)

    def _name(self, index: int) -> str:
        mesh = self._threads[index].core.runner.program.mesh
        assert mesh is not None
        return f"replica {index} ({', '.join(map(str, mesh.devices.flat))})"

    @property
    def num_replicas(self) -> int:
        """The number of replicas, the failed ones included."""
        return len(self._threads)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the replicas that have failed, with their devices."""
        return tuple(self._name(index) for index, thread in enumerate(self._threads) if thread.has_failed)

    @property
    def healthy(self) -> bool:
        """Return whether any replica can serve requests."""
        return any(thread.healthy for thread in self._threads)

    @property
    def num_unfinished(self) -> int:
        """The number of completions that were submitted and have not ended."""
        return sum(thread.num_unfinished for thread in self._threads)

    @property
    def num_running(self) -> int:
        """The number of completions that have a slot."""
        return sum(thread.num_running for thread in self._threads)
