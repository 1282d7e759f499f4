"""The scheduler decides which request runs next, in which slot, with which pages. Runs on the host.

Requests are served by priority; requests of equal priority in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile

from jspec.core.prompt_blocks import block_rows, padded
from jspec.engine.request.request import Request
from jspec.engine.request.too_long import RequestTooLong
from jspec.engine.schedule.page_pool import Digest, PagePool, page_digests
from jspec.engine.schedule.state_pool import StateCopy, StatePool

# Time of a prefill beside that of its rows, in rows: 2.5 ms to read the weights and 0.022 ms a row (8B model, H100).
OVERHEAD = 128


@dataclass(frozen=True)
class Piece:
    """A piece of one request's prompt in a prefill.

    Attributes:
        request: the request.
        start: position of the piece's first token in the prompt.
        count: number of tokens in the piece.
        pages: pages of the request, in the order of their rows.
        is_last: whether the piece ends the prefill.
        is_written: whether to write the piece's cache rows; False: shared pages contain the rows already.
        root: the token after the piece, if it was sampled before a preemption; else None.
    """

    request: Request
    start: int
    count: int
    pages: list[int]
    is_last: bool
    is_written: bool
    root: int | None

    @property
    def emits(self) -> bool:
        """Return whether the piece's result contains the request's first token."""
        return self.is_last and self.root is None


@dataclass(frozen=True)
class PrefillPlan:
    """A plan to dispatch pieces of prompts.

    Attributes:
        pieces: pieces of different requests, whose prefills have the same outputs.
        bucket: number of tokens for which the program was compiled; the pieces are padded to it.
        copies: copies of recurrent states to make before.
    """

    pieces: list[Piece]
    bucket: int
    copies: tuple[StateCopy, ...] = ()

    @property
    def requests(self) -> list[Request]:
        return [piece.request for piece in self.pieces]


@dataclass(frozen=True)
class RoundPlan:
    """A plan to dispatch rounds for a batch of requests.

    Attributes:
        requests: request of each batch row.
        bucket: number of batch rows for which the program was compiled.
        new_pages: (slot, column, page) of each entry to write into the page table, which has a row for each slot.
        copies: copies of recurrent states to make before.
    """

    requests: list[Request]
    bucket: int
    new_pages: list[tuple[int, int, int]]
    copies: tuple[StateCopy, ...] = ()


Plan = PrefillPlan | RoundPlan


def _bucket_of(rows: int, sizes: Sequence[int]) -> int:
    """Choose the compiled size of a prefill: the first of the prefills that take the least time for all rows."""
    return sizes[-1] if rows >= sizes[-1] else _cheapest(rows, tuple(sizes))[1]


@cache
def _cheapest(rows: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the least time for a number of rows, in rows, and the size of the first prefill, which is the largest."""
    enough = [size for size in sizes if size >= rows][:1]
    parts = [(size + OVERHEAD + _cheapest(rows - size, sizes)[0], -size) for size in sizes if size < rows]
    time, size = min([*((size + OVERHEAD, -size) for size in enough), *parts])
    return time, -size


@dataclass(frozen=True)
class SchedulerLimits:
    """The sizes and options of a `Scheduler`.

    Attributes:
        slots: number of requests that may run at once.
        buckets: numbers of batch rows for which rounds are compiled, ascending; the last is ``slots``.
        prefill_buckets: numbers of tokens for which prefills are compiled, ascending.
        scratch_rows: number of cache rows that a round writes after the committed rows.
        rounds: number of rounds per dispatch.
        round_tokens: largest number of tokens that a round may commit.
        prefix_cache: whether requests share the pages of a common prefix.
        pages_ahead: number of pages that a request gets beyond its need while many are free, so that the device's page
            table changes rarely. They are taken back when pages run out.
        prefill_budget: largest number of prompt tokens to prefill between two rounds while any request can decode;
            None: the largest prefill bucket.
        window: number of a request's newest cache rows that a step reads; older pages are given back. None: all rows.
        adapters: largest number of different adapters that running requests may have.
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
    window: int | None = None
    adapters: int = 0


class Scheduler:
    """Admits waiting requests into slots and decides between a prefill and a round.

    A running request has pages for its committed rows, for the rounds in flight and for the next rounds. When a round
    needs more pages than are free, the running request that is last in order is preempted: it loses its slot and pages,
    waits, and recomputes its rows when it is admitted again, except those whose pages and state are still kept. If the
    last request itself needs pages, it waits in its slot. No request starves: a request that passed `check` fits into
    the pool alone, so the first one can always run.

    Attributes:
        pages: the pages of all requests.
        states: the copies of recurrent states; None: the target has no such states.
        waiting: waiting requests, in the order in which they are served.
        running: running requests, in the order in which they are served.
    """

    def __init__(self, pages: PagePool, limits: SchedulerLimits, states: StatePool | None = None) -> None:
        self.pages = pages
        self.states = states
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._tokens_since_round = 0  # sum of the buckets of the prefills since the last round
        self._num_resets, self._salt = 0, b""  # requests share pages that were computed under the same salt
        self._failed_admission: _FailedAdmission | None = None

    @property
    def prefill_budget(self) -> int:
        """The largest number of prompt tokens to prefill between two rounds while any request can decode."""
        budget = self.limits.prefill_budget
        return self.limits.prefill_buckets[-1] if budget is None else budget

    def check(self, request: Request) -> None:
        """Raise an error for a request that could never be admitted.

        Raises:
            RequestTooLong: the request needs more pages than the pool has.
        """
        scratch, total = self.limits.scratch_rows, self.pages.pages - 1
        if self.pages.needed(request.rows_needed + scratch) > total:
            raise RequestTooLong(
                len(request.prompt_token_ids),
                request.max_new_tokens,
                scratch=scratch,
                pages=total,
                page_size=self.pages.page_size,
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed `check`."""
        insort(self.waiting, request, key=_order)

    def plan(self) -> Plan | None:
        """Plan the next dispatch; None if nothing can be dispatched until results are read.

        Prefills come first, up to the budget, so that rounds have many rows. A request is admitted when the
        prefills of all running requests are planned, because only then it is known which pages it can share.
        """
        request = self._next_to_prefill()
        if request is None or not self._is_in_budget(request):
            plan = self._plan_round()
            if plan is not None:
                self._tokens_since_round = 0
                return plan
        if request is None or request.state.slot is None:  # the request was preempted while the round was planned
            return None
        return self._plan_prefill(request)

    def _next_to_prefill(self) -> Request | None:
        """Return the next request with tokens to prefill, admitting one if no running one has any."""
        unprefilled = (request for request in self.running if not request.is_prefilled)
        return next(unprefilled, None) or self._admit()

    def on_output_read(self, plan: Plan) -> None:
        """Reduce the in-flight counts of a plan's requests after the plan's result was read."""
        for request in plan.requests:
            request.state.steps_in_flight -= 1
            if isinstance(plan, RoundPlan):
                request.state.rounds_in_flight -= self.limits.rounds

    def drop_in_flight(self) -> None:
        """Reset the schedule after the steps in flight and the contents of all pages were lost."""
        for request in [*self.running, *self.waiting]:
            request.state.steps_in_flight = request.state.rounds_in_flight = 0
        self.pages.clear()
        if self.states is not None:
            self.states.clear()

    def finish(self, request: Request) -> None:
        """Remove a running or waiting request; its slot and pages are free at once.

        Steps with this request may still run. The device runs steps in order, so the next owner of a page writes the
        page after these steps.
        """
        if request in self.running:
            self._release(request)
            return
        index = bisect_left(self.waiting, request.order, key=_order)  # thousands of requests may wait
        if index < len(self.waiting) and self.waiting[index] is request:
            del self.waiting[index]

    def cache_prefix(self, request: Request, rows: int) -> None:
        """Put the full pages of a running request's first ``rows`` cache rows into the prefix cache.

        These rows must be committed in the target's and the draft's pool, or a dispatched step must commit them. The
        device runs steps in order, so later steps may read the rows.
        """
        state, count = request.state, rows // self.pages.page_size
        if not self.limits.prefix_cache or state.slot is None or count <= state.num_shared_pages:
            return
        self._extend_digests(request, count)
        digests = state.page_digests[state.num_shared_pages : count]
        self.pages.cache(request.id, digests, first=state.num_shared_pages)
        state.num_shared_pages = count

    def reset_prefix_cache(self) -> int:
        """Let no later request share pages or states that were computed until now; return the number of idle pages.

        Running requests keep their pages. What they put into the prefix cache from now on, they alone can find there:
        its rows depend on their earlier rows.
        """
        self._num_resets += 1
        self._salt = b"%d:" % self._num_resets
        self._failed_admission = None
        if self.states is not None:
            self.states.forget()
        return self.pages.forget_idle()

    def retract(self) -> int:
        """Let all running requests wait until they compute their rows anew; return their number. No step is in flight.

        Unlike a preemption this is followed by `reset_prefix_cache`, so nothing of a request is kept but its tokens.
        """
        requests = list(self.running)
        for request in requests:
            self._release(request)
            insort(self.waiting, request, key=_order)
        return len(requests)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def _admit(self) -> Request | None:
        """Admit the first waiting request that may start, and return it; None: there is none, or no slot or pages."""
        if not self.waiting or not self._free_slots:
            return None
        request = next(self._admissible(), None)
        if request is None:
            return None
        state = request.state
        if state.steps_in_flight:
            return None  # the request was preempted, and a result in flight may still add tokens
        if self._failed_admission is not None and self._failed_admission.still_holds(request, self.pages):
            return None
        state.prefill_len = request.rows_committed
        rows, shared = self._rows_to_reserve(request), self._pages_to_share(request)
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
        state.num_prefilled = self._start(request, len(shared))
        if self.states is not None and state.num_prefilled:
            self.states.load(state.slot, state.page_digests, state.num_prefilled)
        if request.metrics.num_prompt_tokens == 0:  # the request was not admitted before
            request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
            request.metrics.num_cached_tokens = state.num_prefilled
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        insort(self.running, request, key=_order)
        return request

    def _admissible(self) -> Iterator[Request]:
        """Return the waiting requests for which a table has their adapter, or is free, in order.

        Requests without an adapter overtake one that waits for a table; others do not, so it gets the next.
        """
        taken = {request.adapter.digest for request in self.running if request.adapter is not None}
        waits = False
        for request in self.waiting:
            if request.adapter is not None:
                waits = waits or len(taken | {request.adapter.digest}) > self.limits.adapters
                if waits:
                    continue
            yield request

    def _pages_to_share(self, request: Request) -> list[int]:
        """Return the cached pages that a request takes: with recurrent states those up to where one can be kept."""
        pages = self.cached_pages(request)
        if self.states is None:
            return pages
        most = min(len(pages) * self.pages.page_size, request.rows_committed - 1)
        return pages[: self.states.copy_position(most) // self.pages.page_size]

    def _start(self, request: Request, shared: int) -> int:
        """Return the position from which a request is computed if its first pages are shared.

        The last token is always computed, because its logits give the next token.
        """
        most = min(shared * self.pages.page_size, request.rows_committed - 1)
        return most if self.states is None else self.states.match(request.state.page_digests[:shared], most)

    def cached_pages(self, request: Request) -> list[int]:
        """Return the pages in the prefix cache that contain the rows of a request's first tokens.

        Any thread may ask this for a request that is not queued yet. It takes no lock, so pages may come and go
        meanwhile.
        """
        return self.pages.match(self._digests_to_match(request))

    def _digests_to_match(self, request: Request) -> list[Digest]:
        """Return the digests of the full pages of a request's first tokens; none if the request may share no page."""
        if request.state.slot is None and request.state.salt != self._salt:  # its rows are computed from now on
            request.state.salt, request.state.page_digests = self._salt, []
        if not self.limits.prefix_cache or request.scores_prompt:  # cached pages do not contain logits
            return []
        count = request.rows_committed // self.pages.page_size
        self._extend_digests(request, count)
        return request.state.page_digests[:count]

    def _extend_digests(self, request: Request, count: int) -> None:
        """Compute the missing ones of the digests of a request's first ``count`` pages."""
        digests, size = request.state.page_digests, self.pages.page_size
        tokens = request.tokens_between(len(digests) * size, count * size)
        digests += page_digests(tokens, size, digests[-1] if digests else request.state.salt + request.cache_salt)

    def _is_in_budget(self, request: Request) -> bool:
        """Return whether the budget allows a prefill for the request before the next round; it always allows one."""
        since = self._tokens_since_round
        return since == 0 or since + self._prefill_sizes(request)[0] <= self.prefill_budget

    def _prefill_sizes(self, first: Request) -> tuple[int, ...]:
        """Return the compiled numbers of tokens that a prefill may have, ascending.

        While other requests can decode, the numbers are within the budget; if no number is, it is the smallest.

        Args:
            first: first request of the prefill.
        """
        sizes = first.state.prefill_sizes or self.limits.prefill_buckets
        if any(other.is_prefilled and self._may_emit(other) for other in self.running):
            left = self.prefill_budget - self._tokens_since_round
            sizes = tuple(size for size in sizes if size <= left) or sizes[:1]
        return sizes

    def _plan_prefill(self, first: Request) -> PrefillPlan:
        """Plan a prefill of as many requests as fit, in order; the last piece is cut to fit.

        A piece's full pages are in the prefix cache as soon as it is planned, so a later piece may share them: in every
        layer, all pieces write their cache rows before any of them reads.
        """
        sizes = self._prefill_sizes(first)
        rows = self._rows_to_prefill(first, sizes[-1])
        if self._rows_until_cut(first) < first.state.prefill_len - first.state.num_prefilled:
            rows = self._rows_until_cut(first)  # the plan ends there
        bucket = tokens = _bucket_of(rows, sizes)
        self._tokens_since_round += bucket
        blocks, rows = block_rows(bucket)
        room, pieces = blocks * rows, list[Piece]()
        request: Request | None = first
        while request is not None and request.prefill_outputs == first.prefill_outputs:
            count = min(self._rows_until_cut(request), room, tokens)
            pieces.append(self._plan_piece(request, count))
            room, tokens = room - padded(count, rows), tokens - count
            request = self._next_to_prefill() if room and tokens and request.is_prefilled else None
        copies = self._take_copies()
        for piece in pieces:
            if piece.is_last or piece.start + piece.count == piece.request.state.num_cached_rows:
                self.keep_state(piece.request, piece.start + piece.count)
        return PrefillPlan(pieces, bucket, copies)

    def _take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies of states to make before the next step."""
        return () if self.states is None else self.states.take_copies()

    def _rows_until_cut(self, request: Request) -> int:
        """Return the number of rows of a request's next piece, which ends where the shared pages end at the latest."""
        state = request.state
        end = state.num_cached_rows if state.num_prefilled < state.num_cached_rows else state.prefill_len
        return end - state.num_prefilled

    def keep_state(self, request: Request, rows: int) -> None:
        """Keep a copy of the recurrent state of a running request for later ones that begin with the same tokens.

        Args:
            request: the request, whose state does not change before the next step.
            rows: number of its committed cache rows.
        """
        if self.states is None or request.state.slot is None or not self.limits.prefix_cache:
            return
        position = self.states.copy_position(rows)
        if position and position == self.states.state_position(rows):
            self._extend_digests(request, position // self.pages.page_size)
            self.states.save(request.state.slot, request.state.page_digests, position)

    def _rows_to_prefill(self, first: Request, size: int) -> int:
        """Return the number of rows of the pieces that a prefill of ``size`` tokens could take, without the last cut.

        Args:
            first: first request of the prefill, which is running.
        """
        rows, filled, pages, soon = 0, 0, self.pages.num_free, set[Digest]()
        block = block_rows(size)[1]
        running = [request for request in self.running if not request.is_prefilled]
        for request in [*running, *islice(self._admissible(), len(self._free_slots))]:
            if filled >= size or request.prefill_outputs != first.prefill_outputs:
                break
            state, digests, start = request.state, self._digests_to_match(request), request.state.num_prefilled
            if state.slot is None:
                shared = len([*takewhile(lambda digest: digest in soon or self.pages.is_cached(digest), digests)])
                pages -= self.pages.needed(self._rows_to_reserve(request)) - shared
                if pages < 0 or state.steps_in_flight:
                    break
                start = self._start(request, shared)
            soon.update(digests)  # cached once the request's piece is planned
            rows = filled + request.rows_committed - start
            filled += padded(request.rows_committed - start, block)
        return rows

    def _plan_piece(self, request: Request, count: int) -> Piece:
        """Plan the next piece of a request's prefill."""
        state = request.state
        start = state.num_prefilled
        self._drop_hidden(request, start)
        state.num_prefilled += count
        state.steps_in_flight += 1
        self.cache_prefix(request, state.num_prefilled)
        pages = self.pages.pages_of(request.id)
        state.num_synced_pages = len(pages)
        return Piece(
            request,
            start,
            count,
            pages,
            is_last=request.is_prefilled,
            is_written=start >= state.num_cached_rows,
            root=request.token_ids[-1] if request.is_prefilled and request.token_ids else None,
        )

    def _plan_round(self) -> RoundPlan | None:
        """Plan rounds for all requests that may emit tokens and get enough pages; None if no request does."""
        ready: list[Request] = []
        for request in list(self.running):
            state = request.state
            if state.slot is None or not request.is_prefilled or not self._may_emit(request):
                continue  # without a slot the request was preempted in this loop
            self._drop_hidden(request, request.rows_committed)
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
        return RoundPlan(ready, bucket, new_pages, self._take_copies())

    def _drop_hidden(self, request: Request, committed: int) -> None:
        """Give back a request's pages that neither a step in flight nor a later one reads.

        Pages that will be put into the prefix cache are kept until then.

        Args:
            request: a running request.
            committed: lower bound of the request's committed rows in all these steps.
        """
        if self.limits.window is None:
            return
        rows = committed - self.limits.window
        if self.limits.prefix_cache:
            rows = min(rows, request.state.num_shared_pages * self.pages.page_size)
        self.pages.drop(request.id, max(rows, 0))

    def _page_table_updates(self, request: Request) -> list[tuple[int, int, int]]:
        """Return (slot, column, page) of a request's pages that the device's page table lacks; mark them as synced."""
        state, pages = request.state, self.pages.pages_of(request.id)
        assert state.slot is not None
        first, state.num_synced_pages = state.num_synced_pages, len(pages)
        return [(state.slot, column, pages[column]) for column in range(first, len(pages))]

    def _reserve_or_preempt(self, request: Request) -> bool:
        """Reserve pages for a request's next rounds, if needed by preempting later requests; False if impossible."""
        if self.pages.grow(request.id, self._rows_to_reserve(request)):
            return True
        self._reclaim_unused()
        while not self.pages.grow(request.id, self._rows_to_reserve(request)):
            last = self.running[-1]
            if last is request:
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        """Let a running request wait; keep its recurrent state if the rounds in flight cannot advance it."""
        state = request.state
        rows = request.rows_committed if request.is_prefilled else state.num_prefilled
        most = rows + state.rounds_in_flight * self.limits.round_tokens
        if self.states is not None and self.states.state_position(most) == self.states.state_position(rows):
            self.keep_state(request, rows)
        self._release(request)
        request.metrics.num_preemptions += 1
        insort(self.waiting, request, key=_order)

    def _reserve_ahead(self, ready: list[Request]) -> None:
        """Give all ready requests extra pages, up to half of the free pages, unless a request waits for pages."""
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
        """Return how many cache rows a request may need after the rounds in flight and the next dispatch."""
        return self._rows_after(request, request.state.rounds_in_flight + self.limits.rounds)

    def _rows_after(self, request: Request, rounds: int) -> int:
        """Return how many cache rows a request may need after ``rounds`` more rounds, scratch rows included."""
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
        """Return whether a request may emit tokens after the rounds in flight, if each round emits one token."""
        if request.state.awaits_rounds:
            return False
        num_tokens = max(len(request.token_ids), 1)  # the prefill's token may not have been read yet
        return num_tokens + request.state.rounds_in_flight < request.max_new_tokens


@dataclass(frozen=True)
class _FailedAdmission:
    """A record of an admission that failed for lack of pages, kept because another try would cost time.

    Attributes:
        request: the request that was not admitted.
        num_given_back: ``PagePool.num_given_back`` when the admission failed.
        missing: digest of the request's first page that was not in the prefix cache; None: all pages were.
    """

    request: Request
    num_given_back: int
    missing: bytes | None

    def still_holds(self, request: Request, pages: PagePool) -> bool:
        """Return whether the admission of this request would fail again."""
        is_same = self.request is request and self.num_given_back == pages.num_given_back
        return is_same and (self.missing is None or not pages.is_cached(self.missing))


def _order(request: Request) -> tuple[int, int]:
    return request.order
