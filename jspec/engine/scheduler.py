"""The scheduler decides which request runs next, in which slot, with which pages. Host only, no jax.

Requests are served by priority, then in order of arrival.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from jspec.engine.page_pool import PagePool, page_digests
from jspec.engine.request import Request


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk of one prompt.

    Attributes:
        start: position of the chunk's first token.
        count: number of tokens in the chunk.
        bucket: chunk length of the compiled program in tokens.
        pages: pages of the request.
        is_last: whether the chunk ends the prefill.
        is_written: whether to write the chunk's cache rows; False: the rows are in shared pages already.
        root: the token after the chunk, if the token was sampled before a preemption; else None.
    """

    request: Request
    start: int
    count: int
    bucket: int
    pages: list[int]
    is_last: bool
    is_written: bool
    root: int | None

    @property
    def requests(self) -> list[Request]:
        return [self.request]

    @property
    def emits(self) -> bool:
        """Whether the chunk's result contains the request's first token."""
        return self.is_last and self.root is None


@dataclass(frozen=True)
class RoundPlan:
    """One dispatch of rounds.

    Attributes:
        requests: request of each batch row.
        bucket: batch rows of the compiled program.
        new_pages: (slot, column in the slot's table row, page) of each page missing in the device's page table.
    """

    requests: list[Request]
    bucket: int
    new_pages: list[tuple[int, int, int]]


Plan = PrefillPlan | RoundPlan


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes and options of a `Scheduler`.

    Attributes:
        slots: number of requests that may run at once.
        buckets: batch rows of the round programs, ascending; the last is ``slots``.
        prefill_buckets: chunk lengths of the prefill programs in tokens, ascending.
        scratch_rows: number of cache rows that a round writes after the committed rows.
        rounds: number of rounds per dispatch.
        round_tokens: largest number of tokens that a round may commit.
        prefix_cache: whether requests share the pages of a common prefix.
        pages_ahead: number of pages that a request gets beyond its need while many are free, to update the device's
            page table in few rounds; taken back when pages run out.
        prefill_budget: most prompt tokens to prefill between two rounds while any request may emit; None: the largest
            prefill bucket.
    """

    slots: int
    buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    scratch_rows: int
    rounds: int
    round_tokens: int
    prefix_cache: bool = False
    pages_ahead: int = 8
    prefill_budget: int | None = None


class Scheduler:
    """Admits waiting requests into slots and decides between a prefill chunk and a round.

    A running request has pages for its committed rows, for the rounds in flight and for the next rounds. When a round
    needs more pages than are free, the running request that is last in order is preempted: it loses its slot and pages,
    waits, and recomputes its rows when it is admitted again. If the request that needs pages is itself the last in
    order, it waits in its slot. No starvation: a request that passed `check` fits the pool by itself, so the first in
    order can always run.

    Attributes:
        waiting: waiting requests, in the order in which they are served.
        running: running requests, in the order in which they are served.
    """

    def __init__(self, pages: PagePool, limits: SchedulerLimits) -> None:
        self.pages = pages
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._tokens_since_round = 0  # sum of the chunk lengths since the last round
        self._failed_admission: _FailedAdmission | None = None

    @property
    def prefill_budget(self) -> int:
        """The most prompt tokens to prefill between two rounds while any request may emit."""
        budget = self.limits.prefill_budget
        return self.limits.prefill_buckets[-1] if budget is None else budget

    def check(self, request: Request) -> None:
        """Refuse a request that could never be admitted.

        Raises:
            ValueError: the request needs more pages than the pool has.
        """
        rows = request.rows_needed + self.limits.scratch_rows
        needed, total = self.pages.needed(rows), self.pages.pages - 1
        if needed > total:
            raise ValueError(
                f"the request needs {needed} pages ({rows} rows), the pool has {total}; lower max_tokens or raise pages"
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed `check`."""
        insort(self.waiting, request, key=_order)

    def plan(self) -> Plan | None:
        """Plan the next dispatch; None if nothing can be dispatched until results are read.

        Prefills come first, up to the budget, to run rounds with as many rows as possible. A request is admitted when
        all running requests are prefilled, because only then it is known which pages the new request can share.
        """
        request = next((request for request in self.running if not request.is_prefilled), None) or self._admit()
        if request is None or not self._is_in_budget(request):
            plan = self._plan_round()
            if plan is not None:
                self._tokens_since_round = 0
                return plan
        if request is None or request.state.slot is None:  # the request was preempted while the round was planned
            return None
        return self._plan_prefill(request)

    def on_output_read(self, plan: Plan) -> None:
        """Update the in-flight counts of a plan's requests after its result was read."""
        for request in plan.requests:
            request.state.steps_in_flight -= 1
            if isinstance(plan, RoundPlan):
                request.state.rounds_in_flight -= self.limits.rounds

    def drop_in_flight(self) -> None:
        """Reset the schedule after steps in flight were discarded and the rows in all pages lost."""
        for request in [*self.running, *self.waiting]:
            request.state.steps_in_flight = request.state.rounds_in_flight = 0
        self.pages.clear()

    def finish(self, request: Request) -> None:
        """Remove a running or waiting request; its slot and pages are free at once.

        This is safe while steps with this request still run: the device runs steps in order and makes an ended row
        inactive itself, and the next owner of a page writes the page in a later step.
        """
        if request in self.running:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def cache_prefix(self, request: Request, rows: int) -> None:
        """Put the full pages of a running request's first rows into the prefix cache.

        The rows must be committed in both the target's and the draft's pool, or a dispatched step must commit them: the
        device runs steps in order, so later steps may read the rows.

        Args:
            rows: number of such rows.
        """
        state, count = request.state, rows // self.pages.page_size
        if not self.limits.prefix_cache or state.slot is None or count <= state.num_shared_pages:
            return
        self._extend_digests(request, count)
        digests = state.page_digests[state.num_shared_pages : count]
        self.pages.cache(request.id, digests, first=state.num_shared_pages)
        state.num_shared_pages = count

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def _admit(self) -> Request | None:
        """Give the first waiting request a slot and pages, shared pages for its cached prefix; None if impossible."""
        if not self.waiting or not self._free_slots:
            return None
        request = self.waiting[0]
        state = request.state
        if state.steps_in_flight:
            return None  # the request was preempted, and a result in flight may still add tokens
        if self._failed_admission is not None and self._failed_admission.still_holds(request, self.pages):
            return None
        state.prefill_len = request.rows_committed
        rows, shared = self._rows_to_reserve(request), self._cached_pages(request)
        if not self.pages.can_reserve(rows, shared):
            self._reclaim_unused()
        if not self.pages.can_reserve(rows, shared):
            missing = state.page_digests[len(shared)] if len(shared) < len(state.page_digests) else None
            self._failed_admission = _FailedAdmission(request, self.pages.num_given_back, missing)
            return None
        self._failed_admission = None
        self.pages.reserve(request.id, rows, shared)
        state.slot = self._free_slots.pop()
        state.num_shared_pages = len(shared)
        state.num_cached_rows = len(shared) * self.pages.page_size
        # The last token is always computed, because its logits give the next token.
        state.num_prefilled = min(state.num_cached_rows, state.prefill_len - 1)
        if request.metrics.num_prompt_tokens == 0:  # the request was not admitted before
            request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
            request.metrics.num_cached_tokens = state.num_prefilled
        insort(self.running, self.waiting.pop(0), key=_order)
        return request

    def _cached_pages(self, request: Request) -> list[int]:
        """Pages in the prefix cache that contain the rows of a request's first tokens."""
        if not self.limits.prefix_cache or request.scores_prompt:  # cached pages have no logits
            return []
        count = request.state.prefill_len // self.pages.page_size
        self._extend_digests(request, count)
        return self.pages.match(request.state.page_digests[:count])

    def _extend_digests(self, request: Request, count: int) -> None:
        """Compute the missing digests among those of a request's first ``count`` pages."""
        digests, size = request.state.page_digests, self.pages.page_size
        tokens = request.tokens_between(len(digests) * size, count * size)
        digests += page_digests(tokens, size, digests[-1] if digests else b"")

    def _is_in_budget(self, request: Request) -> bool:
        """Whether the budget allows a chunk of the request before the next round; it always allows one chunk."""
        since = self._tokens_since_round
        return since == 0 or since + self._prefill_bucket(request) <= self.prefill_budget

    def _prefill_bucket(self, request: Request) -> int:
        """Chunk length of the program for a request's next chunk.

        While other requests could decode, only lengths within the budget are used, or the smallest if none is.
        """
        most = request.state.max_chunk or self.limits.prefill_buckets[-1]
        sizes = tuple(size for size in self.limits.prefill_buckets if size <= most)
        if any(other.is_prefilled and self._may_emit(other) for other in self.running):
            sizes = tuple(size for size in sizes if size <= self.prefill_budget) or sizes[:1]
        left = request.state.prefill_len - request.state.num_prefilled
        return next((size for size in sizes if size >= left), sizes[-1])

    def _plan_prefill(self, request: Request) -> PrefillPlan:
        """Plan the next chunk of a request's prefill."""
        state, bucket = request.state, self._prefill_bucket(request)
        start = state.num_prefilled
        count = min(state.prefill_len - start, bucket)
        self._tokens_since_round += bucket
        state.num_prefilled += count
        state.steps_in_flight += 1
        self.cache_prefix(request, state.num_prefilled)
        pages = self.pages.pages_of(request.id)
        state.num_synced_pages = len(pages)
        return PrefillPlan(
            request,
            start,
            count,
            bucket,
            pages,
            is_last=request.is_prefilled,
            is_written=start >= state.num_cached_rows,
            root=request.token_ids[-1] if request.is_prefilled and request.token_ids else None,
        )

    def _plan_round(self) -> RoundPlan | None:
        """Plan a dispatch of rounds for all requests that may emit and have pages; None if there is no such request."""
        ready: list[Request] = []
        for request in list(self.running):
            state = request.state
            if state.slot is None or not request.is_prefilled or not self._may_emit(request):
                continue  # no slot: the request was preempted in this loop
            if self._reserve_or_preempt(request):
                state.steps_in_flight += 1
                state.rounds_in_flight += self.limits.rounds
                ready.append(request)
        if not ready:
            return None
        if any(len(self.pages.pages_of(request.id)) > request.state.num_synced_pages for request in ready):
            self._reserve_ahead(ready)
        new_pages = [page for request in ready for page in self._page_table_updates(request)]
        bucket = next(size for size in self.limits.buckets if size >= len(ready))
        return RoundPlan(ready, bucket, new_pages)

    def _page_table_updates(self, request: Request) -> list[tuple[int, int, int]]:
        """(slot, column, page) of a request's pages missing in the device's page table; marks these pages as synced."""
        state, pages = request.state, self.pages.pages_of(request.id)
        assert state.slot is not None
        first, state.num_synced_pages = state.num_synced_pages, len(pages)
        return [(state.slot, column, pages[column]) for column in range(first, len(pages))]

    def _reserve_or_preempt(self, request: Request) -> bool:
        """Reserve pages for a request's next rounds, preempting later requests if needed; False if impossible."""
        if self.pages.grow(request.id, self._rows_to_reserve(request)):
            return True
        self._reclaim_unused()
        while not self.pages.grow(request.id, self._rows_to_reserve(request)):
            last = self.running[-1]
            if last is request:
                return False
            self._release(last)
            last.metrics.num_preemptions += 1
            insort(self.waiting, last, key=_order)
        return True

    def _reserve_ahead(self, ready: list[Request]) -> None:
        """Pre-allocate up to half of the free pages for all ready requests, unless a request waits for pages."""
        if self.waiting and self._free_slots:
            return
        extra = min(self.limits.pages_ahead, self.pages.num_free // (2 * len(ready)))
        for request in ready:
            max_rows = request.rows_needed + self.limits.scratch_rows
            num_pages = len(self.pages.pages_of(request.id)) + extra
            self.pages.grow(request.id, min(max_rows, num_pages * self.pages.page_size))

    def _reclaim_unused(self) -> None:
        """Free the pages that no round in flight can write."""
        for request in self.running:
            self.pages.shrink(request.id, self._rows_after(request, request.state.rounds_in_flight))
            num_pages = len(self.pages.pages_of(request.id))
            request.state.num_synced_pages = min(request.state.num_synced_pages, num_pages)

    def _rows_to_reserve(self, request: Request) -> int:
        """Number of cache rows that a request may have written after the rounds in flight and the next dispatch."""
        return self._rows_after(request, request.state.rounds_in_flight + self.limits.rounds)

    def _rows_after(self, request: Request, rounds: int) -> int:
        """Number of cache rows that a request may have written after ``rounds`` more rounds, scratch rows included."""
        rows = request.rows_committed + rounds * self.limits.round_tokens
        return min(rows, request.rows_needed) + self.limits.scratch_rows

    def _release(self, request: Request) -> None:
        """Remove a request from the running requests and free its slot and pages."""
        assert request.state.slot is not None
        self.running.remove(request)
        self._free_slots.append(request.state.slot)
        self.pages.release(request.id)
        request.state.slot = None

    def _may_emit(self, request: Request) -> bool:
        """Whether a request may emit more tokens after the rounds in flight, each of which emits at least one."""
        num_tokens = max(len(request.token_ids), 1)  # the prefill's token may not have been read yet
        return num_tokens + request.state.rounds_in_flight < request.max_new_tokens


@dataclass(frozen=True)
class _FailedAdmission:
    """A failed admission for lack of pages, remembered because another try takes time in proportion to the prompt.

    Attributes:
        request: the request that was not admitted.
        num_given_back: ``PagePool.num_given_back`` at that time.
        missing: digest of the request's first page that was not in the prefix cache; None: all pages were.
    """

    request: Request
    num_given_back: int
    missing: bytes | None

    def still_holds(self, request: Request, pages: PagePool) -> bool:
        """Whether the admission of this request would fail again."""
        is_same = self.request is request and self.num_given_back == pages.num_given_back
        return is_same and (self.missing is None or not pages.is_cached(self.missing))


def _order(request: Request) -> tuple[int, int]:
    return request.order
