"""Runs equal engines, each in a thread of its own, and chooses the engine of each request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from jspec.engine.callers.api import Engine
from jspec.engine.callers.engine_thread import Delivery, EngineThread, Key
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
    """Steps equal engines in a thread each, with the calls of an `EngineThread`; each request goes to one engine.

    Args:
        engines: the engines, each on a mesh of its own; one input processor makes the requests of all. The caller
            closes them after `stop`.
        deliver: as for `EngineThread`; all threads call it, perhaps at the same time.
    """

    def __init__(self, engines: Sequence[Engine], deliver: Callable[[list[Delivery]], None]) -> None:
        self._engines = tuple(engines)
        self._threads = [EngineThread(engine, deliver) for engine in engines]
        self._lock = threading.Lock()  # a request is placed when all earlier ones count as load
        self._stopped = False
        self._reported: set[int] = set()  # failed replicas that were logged

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, key: Key, request: Request) -> None:
        """Hand a request to one engine's thread; arguments and further errors are those of `EngineThread.submit`.

        Raises:
            RuntimeError: the threads were stopped, or all replicas have failed.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("submit: expected running replicas, got some that were stopped; make new ones")
            for thread in self._threads:
                thread.check_new(key, request)
            while not self._try(key, request):
                pass

    def _try(self, key: Key, request: Request) -> bool:
        """Hand a request to the thread chosen for it; return False if that thread has just failed."""
        able = self._able()
        cached = [len(self._engines[index].scheduler.cached_pages(request)) for index in able]
        loads = [self._threads[index].num_unfinished for index in able]
        thread = self._threads[able[choose(cached, loads, self._engines[0].config.slots)]]
        try:
            thread.submit(key, request)
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

    def stop(self) -> None:
        """Abort all requests, deliver their last chunks and wait for the end of the threads."""
        with self._lock:
            self._stopped = True
        for thread in self._threads:
            thread.stop()

    def _name(self, index: int) -> str:
        mesh = self._engines[index].core.runner.program.mesh
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
    def num_waiting(self) -> int:
        """The number of completions that were submitted and have no slot."""
        return sum(thread.num_waiting for thread in self._threads)

    @property
    def num_running(self) -> int:
        """The number of completions that have a slot."""
        return sum(thread.num_running for thread in self._threads)
