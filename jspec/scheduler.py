"""What runs next: by priority, then first come, first served, into fixed slots. Host only, no jax."""

from __future__ import annotations

from bisect import insort
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
    root: int | None  # the token behind it, where that was sampled before a preemption

    @property
    def emits(self) -> bool:
        """Whether its result is the request's first token."""
        return self.is_last and self.root is None


@dataclass(frozen=True)
class RoundPlan:
    """One dispatch of rounds for these requests."""

    requests: list[Request]
    bucket: int  # rows the program takes
    new_pages: list[tuple[int, int, int]]  # slot, column of its page table, page


Plan = PrefillPlan | RoundPlan


class Scheduler:
    """Admits waiting requests into slots and decides between a prefill chunk and a round.

    A running request has pages for what it has, for the rounds in flight and for the next ones. When a round needs more
    than are left, the request that is to be served last gives back its slot and its pages: it waits, and what it had
    is computed once more when its turn comes. One that nobody can make room for waits in its slot. As whatever passed
    `check` fits into the pool alone, the first in order always moves on, and so everybody's turn comes.

    Args:
        pages: the pool.
        slots: requests that may run at once.
        buckets: rows a round may have, ascending; the last is ``slots``.
        prefill_buckets: tokens a chunk may have, ascending.
        scratch_rows: rows a round writes beyond the committed ones.
        rounds: rounds per dispatch.
        round_tokens: tokens a round may commit.
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
        round_tokens: int,
        prefix_cache: bool = False,
    ) -> None:
        self.pages = pages
        self.waiting: list[Request] = []  # both in the order in which they are served
        self.running: list[Request] = []
        self._free_slots = list(range(slots - 1, -1, -1))
        self._buckets = buckets
        self._prefill_buckets = prefill_buckets
        self._scratch_rows = scratch_rows
        self._rounds = rounds
        self._round_tokens = round_tokens
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
        insort(self.waiting, request, key=_order)

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
        return self._round()

    def settle(self, plan: Plan) -> None:
        """Take note that a plan's result was read."""
        for request in [plan.request] if isinstance(plan, PrefillPlan) else plan.requests:
            request.steps_in_flight -= 1
            if isinstance(plan, RoundPlan):
                request.rounds_in_flight -= self._rounds

    def lose_steps(self) -> None:
        """Take note that nothing will be read of what is in flight, and that no page holds anything."""
        for request in [*self.running, *self.waiting]:
            request.steps_in_flight = request.rounds_in_flight = 0
        self.pages.forget()

    def finish(self, request: Request) -> None:
        """Take a request out, running or waiting; its slot and pages are free at once.

        That is safe while steps dispatched with it still run: the device works in order, has itself made an ended row
        inactive, and whoever gets the pages writes them in a later step.
        """
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def keep(self, request: Request, rows: int) -> None:
        """Let others find the pages of a running request's first rows, which are committed in both pools.

        What follows in the device's order may read them, even before that is known to be done.
        """
        count = rows // self.pages.page_size
        if not self._prefix_cache or request.slot is None or count <= request.kept_pages:
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
        request = self.waiting[0]
        if request.steps_in_flight:
            return None  # it was preempted: what was under way then may still add to it
        request.prefill_len = request.rows_committed
        rows, shared = self._rows(request), self._shared(request)
        if not self.pages.can_reserve(rows, shared):
            return None
        self.pages.reserve(request.id, rows, shared)
        request.slot = self._free_slots.pop()
        request.kept_pages = len(shared)
        request.cached_rows = len(shared) * self.pages.page_size
        # Somebody must give the logits behind the prompt, so its last token runs in any case.
        request.prefilled = min(request.cached_rows, request.prefill_len - 1)
        if request.metrics.num_prompt_tokens == 0:  # else it comes back
            request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
            request.metrics.num_cached_tokens = request.prefilled
        insort(self.running, self.waiting.pop(0), key=_order)
        return request

    def _shared(self, request: Request) -> list[int]:
        if not self._prefix_cache:
            return []
        self._digest(request, request.prefill_len // self.pages.page_size)
        return self.pages.match(request.digests[: request.prefill_len // self.pages.page_size])

    def _digest(self, request: Request, count: int) -> None:
        """Know the digests of a request's first ``count`` pages."""
        known, size = request.digests, self.pages.page_size
        text = request.text(len(known) * size, count * size)
        known += page_digests(text, size, known[-1] if known else b"")

    def _prefill(self, request: Request) -> PrefillPlan:
        start, left = request.prefilled, request.prefill_len - request.prefilled
        bucket = next((size for size in self._prefill_buckets if size >= left), self._prefill_buckets[-1])
        count = min(left, bucket)
        request.prefilled += count
        request.steps_in_flight += 1
        self.keep(request, request.prefilled)
        return PrefillPlan(
            request,
            start,
            count,
            bucket,
            self.pages.pages_of(request.id),
            is_last=request.is_prefilled,
            is_written=start >= request.cached_rows,
            root=request.token_ids[-1] if request.is_prefilled and request.token_ids else None,
        )

    def _round(self) -> RoundPlan | None:
        ready: list[Request] = []
        new_pages: list[tuple[int, int, int]] = []
        for request in list(self.running):
            if request.slot is None or not self._may_emit(request):
                continue
            before = len(self.pages.pages_of(request.id))
            if not self._make_room(request):
                continue
            now = self.pages.pages_of(request.id)
            new_pages += [(request.slot, column, now[column]) for column in range(before, len(now))]
            request.steps_in_flight += 1
            request.rounds_in_flight += self._rounds
            ready.append(request)
        if not ready:
            return None
        return RoundPlan(ready, next(size for size in self._buckets if size >= len(ready)), new_pages)

    def _make_room(self, request: Request) -> bool:
        """Get a request the pages for its next rounds, if need be from those that come after it."""
        while not self.pages.grow(request.id, self._rows(request)):
            last = self.running[-1]
            if last is request:
                return False
            self._leave(last)
            last.metrics.num_preemptions += 1
            insort(self.waiting, last, key=_order)
        return True

    def _rows(self, request: Request) -> int:
        """Rows that may be written until the next rounds are done."""
        ahead = (request.rounds_in_flight + self._rounds) * self._round_tokens
        return min(request.rows_committed + ahead, request.rows_needed) + self._scratch_rows

    def _leave(self, request: Request) -> None:
        """Give a running request's slot and pages back."""
        assert request.slot is not None
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self.pages.release(request.id)
        request.slot = None

    def _may_emit(self, request: Request) -> bool:
        """Whether rounds in flight, each of at least one token, can leave it anything to do."""
        known = max(len(request.token_ids), 1)  # the prefill's token may not have been read yet
        return known + request.rounds_in_flight < request.limit


def _order(request: Request) -> tuple[int, int]:
    return request.order
