"""The scheduler: which request runs next, in which slot, with which pages. Host only, no jax.

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
        count: tokens in the chunk.
        bucket: tokens of the compiled program.
        pages: pages of the request.
        is_last: whether the chunk ends the prefill.
        is_written: whether its rows are written; False: they are in shared pages already.
        root: the token after the chunk, if it was sampled before a preemption.
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
        """Whether its result is the request's first token."""
        return self.is_last and self.root is None


@dataclass(frozen=True)
class RoundPlan:
    """One dispatch of rounds.

    Attributes:
        requests: one per row.
        bucket: rows of the compiled program.
        new_pages: (slot, column of its page table, page) of pages that the device's table lacks.
    """

    requests: list[Request]
    bucket: int
    new_pages: list[tuple[int, int, int]]


Plan = PrefillPlan | RoundPlan


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes and options of a `Scheduler`.

    Attributes:
        slots: requests that may run at once.
        buckets: rows of the round programs, ascending; the last is ``slots``.
        prefill_buckets: tokens of the prefill programs, ascending.
        scratch_rows: rows that a round writes after the committed ones.
        rounds: rounds per dispatch.
        round_tokens: tokens that a round may commit.
        prefix_cache: let requests share the pages of a common prefix.
        pages_ahead: pages that a request gets beyond its need while many are free, so that few rounds bring the device
            new pages; taken back when pages run out.
        prefill_budget: prompt tokens between two rounds while any request may emit; None: the largest prefill bucket.
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
    needs more pages than are free, the running request that is last in order is preempted: it loses slot and pages,
    waits, and recomputes its rows when it is admitted again. If the request that needs pages is itself the last, it
    waits in its slot. No starvation: a request that passed `check` fits the pool by itself, so the first in order can
    always run.

    Attributes:
        waiting, running: both in the order in which they are served.
    """

    def __init__(self, pages: PagePool, limits: SchedulerLimits) -> None:
        self.pages = pages
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._tokens_since_round = 0  # bucket tokens of the chunks since the last round
        self._failed_admission: _FailedAdmission | None = None

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens between two rounds while any request may emit."""
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
        """The next dispatch; None if there is nothing to do until results are read.

        Prompts come first, up to the budget, to run rounds with as many rows as possible. A request is admitted when
        all running ones are prefilled: only then is it known which pages it can share.
        """
        request = next((request for request in self.running if not request.is_prefilled), None) or self._admit()
        if request is None or not self._is_in_budget(request):
            plan = self._plan_round()
            if plan is not None:
                self._tokens_since_round = 0
                return plan
        if request is None or request.state.slot is None:  # preempted while the round was planned
            return None
        return self._plan_prefill(request)

    def on_output_read(self, plan: Plan) -> None:
        """Note that a plan's result was read."""
        for request in plan.requests:
            request.state.steps_in_flight -= 1
            if isinstance(plan, RoundPlan):
                request.state.rounds_in_flight -= self.limits.rounds

    def drop_in_flight(self) -> None:
        """Note that no result in flight will be read and that no page holds valid rows."""
        for request in [*self.running, *self.waiting]:
            request.state.steps_in_flight = request.state.rounds_in_flight = 0
        self.pages.clear()

    def finish(self, request: Request) -> None:
        """Remove a request, running or waiting; its slot and pages are free at once.

        This is safe while steps dispatched with it still run: the device works in order, has itself made an ended row
        inactive, and the next owner of a page writes it in a later step.
        """
        if request in self.running:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def cache_prefix(self, request: Request, rows: int) -> None:
        """Put the full pages of a running request's first rows into the prefix cache.

        The rows must be committed in both the target's and the draft's pool, or dispatched to be: the device works in
        order, so later steps may read them.
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
        """Give the first waiting request a slot and pages, shared ones for its cached prefix; None if not possible."""
        if not self.waiting or not self._free_slots:
            return None
        request = self.waiting[0]
        state = request.state
        if state.steps_in_flight:
            return None  # preempted; a result in flight may still add tokens to it
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
        # The last token always runs: its logits give the next token.
        state.num_prefilled = min(state.num_cached_rows, state.prefill_len - 1)
        if request.metrics.num_prompt_tokens == 0:  # not admitted before
            request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
            request.metrics.num_cached_tokens = state.num_prefilled
        insort(self.running, self.waiting.pop(0), key=_order)
        return request

    def _cached_pages(self, request: Request) -> list[int]:
        """The pages of the prefix cache that hold the beginning of a request's tokens."""
        if not self.limits.prefix_cache or request.scores_prompt:  # cached pages have no logits
            return []
        count = request.state.prefill_len // self.pages.page_size
        self._extend_digests(request, count)
        return self.pages.match(request.state.page_digests[:count])

    def _extend_digests(self, request: Request, count: int) -> None:
        """Compute the digests of a request's first ``count`` pages, as far as they are missing."""
        digests, size = request.state.page_digests, self.pages.page_size
        tokens = request.tokens_between(len(digests) * size, count * size)
        digests += page_digests(tokens, size, digests[-1] if digests else b"")

    def _is_in_budget(self, request: Request) -> bool:
        """Whether a chunk of the request may come before the next round; one chunk always may."""
        since = self._tokens_since_round
        return since == 0 or since + self._prefill_bucket(request) <= self.prefill_budget

    def _prefill_bucket(self, request: Request) -> int:
        """Tokens of the program for the next chunk.

        While other requests could decode it is within the budget, or the smallest program if none is.
        """
        sizes = self.limits.prefill_buckets
        if any(other.is_prefilled and self._may_emit(other) for other in self.running):
            sizes = tuple(size for size in sizes if size <= self.prefill_budget) or sizes[:1]
        left = request.state.prefill_len - request.state.num_prefilled
        return next((size for size in sizes if size >= left), sizes[-1])

    def _plan_prefill(self, request: Request) -> PrefillPlan:
        """The next chunk of a request's prompt."""
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
        """A dispatch of rounds for all requests that may emit and have pages; None if there is no such request."""
        ready: list[Request] = []
        for request in list(self.running):
            state = request.state
            if state.slot is None or not request.is_prefilled or not self._may_emit(request):
                continue  # no slot: preempted in this loop
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
        """(slot, column, page) of a request's pages that the device's table lacks; they count as synced from now on."""
        state, pages = request.state, self.pages.pages_of(request.id)
        assert state.slot is not None
        first, state.num_synced_pages = state.num_synced_pages, len(pages)
        return [(state.slot, column, pages[column]) for column in range(first, len(pages))]

    def _reserve_or_preempt(self, request: Request) -> bool:
        """Reserve the pages for a request's next rounds, preempting requests after it if need be."""
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
        """Pre-allocate pages for all ready requests, at most half of the free ones; not while a request waits."""
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
        """Rows that may be written until the next dispatch of rounds is done."""
        return self._rows_after(request, request.state.rounds_in_flight + self.limits.rounds)

    def _rows_after(self, request: Request, rounds: int) -> int:
        """Rows that a request may have written after so many more rounds, scratch rows included."""
        rows = request.rows_committed + rounds * self.limits.round_tokens
        return min(rows, request.rows_needed) + self.limits.scratch_rows

    def _release(self, request: Request) -> None:
        """Take slot and pages from a running request."""
        assert request.state.slot is not None
        self.running.remove(request)
        self._free_slots.append(request.state.slot)
        self.pages.release(request.id)
        request.state.slot = None

    def _may_emit(self, request: Request) -> bool:
        """Whether tokens are left to emit after the rounds in flight, each of which emits at least one."""
        num_tokens = max(len(request.token_ids), 1)  # the prefill's token may not have been read yet
        return num_tokens + request.state.rounds_in_flight < request.max_new_tokens


@dataclass(frozen=True)
class _FailedAdmission:
    """A request found too few pages; remembered because another try costs time in proportion to its length.

    Attributes:
        num_given_back: pages that the pool had got back by then.
        missing: digest of its first page that was not in the prefix cache; None: all were.
    """

    request: Request
    num_given_back: int
    missing: bytes | None

    def still_holds(self, request: Request, pages: PagePool) -> bool:
        """Whether admission would fail again."""
        is_same = self.request is request and self.num_given_back == pages.num_given_back
        return is_same and (self.missing is None or not pages.is_cached(self.missing))


def _order(request: Request) -> tuple[int, int]:
    return request.order
