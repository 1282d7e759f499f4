"""Times dispatches that the device runs in order while the host is ahead of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_IDLE_SHARE = 0.25  # a timing is discarded if the host spent a larger share of it outside `step`


class Stopwatch:
    """Measures how long each dispatch occupied the device, which runs dispatches in order.

    The time of a dispatch begins when it is dispatched or when the previous dispatch ends, whichever is later. It ends
    when the host has read the result. If the host is slower than the device, this measures the host. If the host was
    outside `step` for long (between two requests, or in the reader of a stream), the time is unknown.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_times: deque[float] = deque()
        self._last_end = 0.0
        self._left_at = 0.0
        self._idle = 0.0  # seconds outside `step` with a dispatch in flight, since the last `stop`

    def start(self) -> None:
        """Record that a dispatch starts now."""
        self._start_times.append(self._clock())

    def stop(self) -> float | None:
        """Record that the oldest dispatch is done; return its time in seconds, or None if unknown."""
        began = max(self._start_times.popleft(), self._last_end)
        self._last_end, idle = self._clock(), self._idle
        seconds, self._idle = self._last_end - began, 0.0
        return seconds if idle <= MAX_IDLE_SHARE * seconds else None

    def leave(self) -> None:
        """Record that the host leaves `EngineCore.step`."""
        self._left_at = self._clock()

    def come_back(self) -> None:
        """Record that the host enters `EngineCore.step` again."""
        if self._start_times:
            self._idle += self._clock() - max(self._left_at, self._start_times[0])

    def reset(self) -> None:
        """Forget all dispatches that have started and not stopped."""
        self._start_times.clear()
        self._idle = 0.0
