"""What runs next: first come, first served, into fixed slots. Host only, no jax."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jspec.pages import PagePool, page_digests
from jspec.requests import Request


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk of one prompt."""

    request: Request
    start: int
    count: int
    bucket: int  # tokens the program takes
    pages: list[int]
    is_last: bool
    is_written: bool  # False: its rows are in shared pages already


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
        prefix_cache: let requests share the pages of what they have in common.
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
        prefix_cache: bool = False,
    ) -> None:
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(slots - 1, -1, -1))
        self._buckets = buckets
        self._prefill_buckets = prefill_buckets
        self._scratch_rows = scratch_rows
        self._rounds = rounds
        self._prefix_cache = prefix_cache

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
        """The next dispatch: prompts first, so that rounds run with as many rows as can be had.

        A request is admitted when those before it are prefilled: only then is it known which pages it can share.
        """
        for request in self.running:
            if not request.is_prefilled:
                return self._prefill(request)
        admitted = self._admit()
        if admitted is not None:
            return self._prefill(admitted)
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
        elif request in self.waiting:
            self.waiting.remove(request)

    def keep(self, request: Request, rows: int) -> None:
        """Let others find the pages of a running request's first rows, which are committed in both pools.

        What follows in the device's order may read them, even before that is known to be done.
        """
        count = rows // self.pages.page_size
        if not self._prefix_cache or count <= request.kept_pages:
            return
        self._digest(request, count)
        self.pages.keep(request.id, request.digests[request.kept_pages : count], first=request.kept_pages)
        request.kept_pages = count

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def _admit(self) -> Request | None:
        """Give the first of those that wait a slot and pages, as far as possible such as hold its beginning."""
        if not self.waiting or not self._free_slots:
            return None
        request, rows = self.waiting[0], self.waiting[0].rows_needed + self._scratch_rows
        shared = self._shared(request)
        if not self.pages.can_reserve(rows, shared):
            return None
        self.pages.reserve(request.id, rows, shared)
        request.slot = self._free_slots.pop()
        request.kept_pages = len(shared)
        request.cached_rows = len(shared) * self.pages.page_size
        # Somebody must give the logits behind the prompt, so its last token runs in any case.
        request.prefilled = min(request.cached_rows, len(request.prompt_token_ids) - 1)
        request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
        request.metrics.num_cached_tokens = request.prefilled
        self.running.append(self.waiting.popleft())
        return request

    def _shared(self, request: Request) -> list[int]:
        if not self._prefix_cache:
            return []
        self._digest(request, len(request.prompt_token_ids) // self.pages.page_size)
        return self.pages.match(request.digests)

    def _digest(self, request: Request, count: int) -> None:
        """Know the digests of a request's first ``count`` pages."""
        known, size = request.digests, self.pages.page_size
        text = request.text(len(known) * size, count * size)
        known += page_digests(text, size, known[-1] if known else b"")

    def _prefill(self, request: Request) -> PrefillPlan:
        start, left = request.prefilled, len(request.prompt_token_ids) - request.prefilled
        bucket = next((size for size in self._prefill_buckets if size >= left), self._prefill_buckets[-1])
        count = min(left, bucket)
        request.prefilled += count
        self.keep(request, request.prefilled)
        return PrefillPlan(
            request,
            start,
            count,
            bucket,
            self.pages.pages_of(request.id),
            is_last=request.is_prefilled,
            is_written=start >= request.cached_rows,
        )

    def _may_emit(self, request: Request) -> bool:
        """Whether rounds in flight, each of at least one token, can leave it anything to do."""
        known = max(len(request.token_ids), 1)  # the prefill's token may not have been read yet
        return known + request.rounds_in_flight < request.limit
