"""What runs next: by priority, then first come, first served, into fixed slots. Host only, no jax."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from jspec.engine.page_pool import PagePool, page_digests
from jspec.engine.request import Request


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
        pages_ahead: pages more than it needs that a request gets where there are plenty: the device need not be told
            of new pages in every round then. Where they become few the surplus is taken back.
        prefill_budget: tokens of prompts between two rounds while any request may emit.
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
        pages_ahead: int = 8,
        prefill_budget: int | None = None,
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
        self._pages_ahead = pages_ahead
        self._prefill_budget = prefill_buckets[-1] if prefill_budget is None else prefill_budget
        self._since_round = 0  # tokens that the chunks since the last round took
        self._refused: _Refusal | None = None

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
        """The next dispatch: prompts first, up to the budget, so that rounds run with as many rows as can be had.

        A request is admitted when those before it are prefilled: only then is it known which pages it can share.
        """
        request = next((request for request in self.running if not request.is_prefilled), None) or self._admit()
        if request is None or not self._is_in_budget(request):
            plan = self._round()
            if plan is not None:
                self._since_round = 0
                return plan
        if request is None or request.slot is None:
            return None
        return self._prefill(request)

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
        if not self._prefix_cache or request.slot is None or count <= request.num_shared_pages:
            return
        self._digest(request, count)
        self.pages.keep(request.id, request.digests[request.num_shared_pages : count], first=request.num_shared_pages)
        request.num_shared_pages = count

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
        if self._refused is not None and self._refused.stands(request, self.pages):
            return None
        request.prefill_len = request.rows_committed
        rows, shared = self._rows(request), self._shared(request)
        if not self.pages.can_reserve(rows, shared):
            self._take_surplus()
        if not self.pages.can_reserve(rows, shared):
            wanted = request.digests[len(shared)] if len(shared) < len(request.digests) else None
            self._refused = _Refusal(request, self.pages.given_back, wanted)
            return None
        self._refused = None
        self.pages.reserve(request.id, rows, shared)
        request.slot = self._free_slots.pop()
        request.num_shared_pages = len(shared)
        request.cached_rows = len(shared) * self.pages.page_size
        # Somebody must give the logits behind the prompt, so its last token runs in any case.
        request.prefilled = min(request.cached_rows, request.prefill_len - 1)
        if request.metrics.num_prompt_tokens == 0:  # else it comes back
            request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
            request.metrics.num_cached_tokens = request.prefilled
        insort(self.running, self.waiting.pop(0), key=_order)
        return request

    def _shared(self, request: Request) -> list[int]:
        if not self._prefix_cache or request.scores_prompt:  # kept pages have no logits
            return []
        self._digest(request, request.prefill_len // self.pages.page_size)
        return self.pages.match(request.digests[: request.prefill_len // self.pages.page_size])

    def _digest(self, request: Request, count: int) -> None:
        """Know the digests of a request's first ``count`` pages."""
        known, size = request.digests, self.pages.page_size
        text = request.text(len(known) * size, count * size)
        known += page_digests(text, size, known[-1] if known else b"")

    def _is_in_budget(self, request: Request) -> bool:
        """Whether a chunk of it may come before the next round; there is always one between two rounds."""
        return self._since_round == 0 or self._since_round + self._bucket(request) <= self._prefill_budget

    def _bucket(self, request: Request) -> int:
        """The tokens its next chunk takes of a program: within the budget, if any program is and others would wait."""
        sizes = self._prefill_buckets
        if any(other.is_prefilled and self._may_emit(other) for other in self.running):
            sizes = tuple(size for size in sizes if size <= self._prefill_budget) or sizes[:1]
        left = request.prefill_len - request.prefilled
        return next((size for size in sizes if size >= left), sizes[-1])

    def _prefill(self, request: Request) -> PrefillPlan:
        start, left, bucket = request.prefilled, request.prefill_len - request.prefilled, self._bucket(request)
        count = min(left, bucket)
        self._since_round += bucket
        request.prefilled += count
        request.steps_in_flight += 1
        self.keep(request, request.prefilled)
        request.num_synced_pages = len(self.pages.pages_of(request.id))
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
        for request in list(self.running):
            if request.slot is None or not request.is_prefilled or not self._may_emit(request):
                continue
            if self._make_room(request):
                request.steps_in_flight += 1
                request.rounds_in_flight += self._rounds
                ready.append(request)
        if not ready:
            return None
        if any(len(self.pages.pages_of(request.id)) > request.num_synced_pages for request in ready):
            self._get_ahead(ready)
        new_pages = [page for request in ready for page in self._show(request)]
        return RoundPlan(ready, next(size for size in self._buckets if size >= len(ready)), new_pages)

    def _show(self, request: Request) -> list[tuple[int, int, int]]:
        """What the device's table lacks of a request's pages."""
        assert request.slot is not None
        pages, first = self.pages.pages_of(request.id), request.num_synced_pages
        request.num_synced_pages = len(pages)
        return [(request.slot, column, pages[column]) for column in range(first, len(pages))]

    def _make_room(self, request: Request) -> bool:
        """Get a request the pages for its next rounds, if need be from those that come after it."""
        if self.pages.grow(request.id, self._rows(request)):
            return True
        self._take_surplus()
        while not self.pages.grow(request.id, self._rows(request)):
            last = self.running[-1]
            if last is request:
                return False
            self._leave(last)
            last.metrics.num_preemptions += 1
            insort(self.waiting, last, key=_order)
        return True

    def _get_ahead(self, ready: list[Request]) -> None:
        """All at once, up to half of what is free; not while somebody waits for pages."""
        if self.waiting and self._free_slots:
            return
        extra = min(self._pages_ahead, self.pages.num_free // (2 * len(ready)))
        for request in ready:
            most = request.rows_needed + self._scratch_rows
            ahead = len(self.pages.pages_of(request.id)) + extra
            self.pages.grow(request.id, min(most, ahead * self.pages.page_size))

    def _take_surplus(self) -> None:
        """Take back the pages that no round in flight can come to."""
        for request in self.running:
            ahead = request.rounds_in_flight * self._round_tokens
            rows = min(request.rows_committed + ahead, request.rows_needed) + self._scratch_rows
            self.pages.shrink(request.id, rows)
            request.num_synced_pages = min(request.num_synced_pages, len(self.pages.pages_of(request.id)))

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


@dataclass(frozen=True)
class _Refusal:
    """That a request found too few pages: to look for them again takes time in proportion to its text."""

    request: Request
    given_back: int  # pages the pool had got back by then
    wanted: bytes | None  # the digest of the first page that it could not share

    def stands(self, request: Request, pages: PagePool) -> bool:
        """Whether it would be refused again."""
        is_same = self.request is request and self.given_back == pages.given_back
        return is_same and (self.wanted is None or not pages.is_kept(self.wanted))


def _order(request: Request) -> tuple[int, int]:
    return request.order
