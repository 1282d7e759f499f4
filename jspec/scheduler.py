"""What runs next: first come, first served, into fixed slots. Host only, no jax."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jspec.pages import PagePool
from jspec.requests import Request


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk of one prompt."""

    request: Request
    start: int
    count: int
    bucket: int  # tokens the program takes
    pages: list[int]

    @property
    def is_last(self) -> bool:
        return self.start + self.count == len(self.request.prompt_token_ids)


@dataclass(frozen=True)
class RoundPlan:
    """One dispatch of rounds for these requests."""

    requests: list[Request]
    bucket: int  # rows the program takes


Plan = PrefillPlan | RoundPlan


class Scheduler:
    """Admits waiting requests into slots and decides between a prefill chunk and a round.

    A request reserves all pages it may ever need when it is admitted, so that no running request can run out.

    Args:
        pages: the pool.
        slots: requests that may run at once.
        buckets: rows a round may have, ascending; the last is ``slots``.
        prefill_buckets: tokens a chunk may have, ascending.
        scratch_rows: rows a round writes beyond the committed ones.
        rounds: rounds per dispatch.
    """

    def __init__(
        self,
        pages: PagePool,
        *,
        slots: int,
        buckets: tuple[int, ...],
        prefill_buckets: tuple[int, ...],
        scratch_rows: int,
        rounds: int,
    ) -> None:
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(slots - 1, -1, -1))
        self._page_rows: dict[int, list[int]] = {}
        self._buckets = buckets
        self._prefill_buckets = prefill_buckets
        self._scratch_rows = scratch_rows
        self._rounds = rounds

    def check(self, request: Request) -> None:
        """Refuse what could never be admitted.

        Raises:
            ValueError: the request needs more pages than the pool has.
        """
        rows = request.rows_needed + self._scratch_rows
        needed, total = self.pages.needed(rows), self.pages.pages - 1
        if needed > total:
            raise ValueError(
                f"the request needs {needed} pages ({rows} rows), the pool has {total}; lower max_tokens or raise pages"
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed `check`."""
        self.waiting.append(request)

    def plan(self) -> Plan | None:
        """The next dispatch: prompts first, so that rounds run with as many rows as can be had."""
        self._admit()
        for request in self.running:
            if not request.is_prefilled:
                return self._prefill(request)
        ready = [request for request in self.running if self._may_emit(request)]
        if not ready:
            return None
        for request in ready:
            request.rounds_in_flight += self._rounds
        return RoundPlan(ready, next(size for size in self._buckets if size >= len(ready)))

    def finish(self, request: Request) -> None:
        """Take a request out, running or waiting; its slot and pages are free at once.

        That is safe while steps dispatched with it still run: the device works in order, has itself made an ended row
        inactive, and whoever gets the pages writes them in a later step.
        """
        if request in self.running:
            self.running.remove(request)
            assert request.slot is not None
            self._free_slots.append(request.slot)
            self.pages.release(request.id)
            del self._page_rows[request.id]
        elif request in self.waiting:
            self.waiting.remove(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            rows = request.rows_needed + self._scratch_rows
            if not self.pages.can_reserve(rows):
                return
            self._page_rows[request.id] = self.pages.reserve(request.id, rows)
            request.slot = self._free_slots.pop()
            self.running.append(self.waiting.popleft())

    def _prefill(self, request: Request) -> PrefillPlan:
        start, left = request.prefilled, len(request.prompt_token_ids) - request.prefilled
        bucket = next((size for size in self._prefill_buckets if size >= left), self._prefill_buckets[-1])
        count = min(left, bucket)
        request.prefilled += count
        return PrefillPlan(request, start, count, bucket, self._page_rows[request.id])

    def _may_emit(self, request: Request) -> bool:
        """Whether rounds in flight, each of at least one token, can leave it anything to do."""
        known = max(len(request.token_ids), 1)  # the prefill's token may not have been read yet
        return known + request.rounds_in_flight < request.limit
