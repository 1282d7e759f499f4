"""Test the scheduler with a simulated device that emits random tokens: order, slots, buckets, pages."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jspec.core import prompt_blocks
from jspec.engine.request.request import Request
from jspec.engine.schedule.scheduler import Piece, Plan, PrefillPlan, RoundPlan, Scheduler
from tests.support.scheduling import ROUND_TOKENS, SCRATCH, make_request, make_scheduler

pytestmark = pytest.mark.once

SIZES = (4, 8)  # compiled numbers of tokens of a prefill


class SchedulerMachine(RuleBasedStateMachine):
    """A state machine: requests arrive, end early or are aborted; plans are dispatched, and their results read late.

    The simulated device stores a token in each row of each page. A step writes its rows when it is dispatched, and
    checks that the rows it reads were written.
    """

    @initialize(
        slots=st.integers(1, 4),
        pages=st.integers(6, 14),
        page=st.integers(1, 5),
        rounds=st.integers(1, 3),
        prefix_cache=st.booleans(),
        ahead=st.integers(0, 2),
        budget=st.sampled_from([1, 4, 7, 8, 20]),
        window=st.sampled_from([None, 1, 5, 9]),
        block=st.sampled_from([1, 2, 3, 16]),
    )
    def start(
        self,
        slots: int,
        pages: int,
        page: int,
        rounds: int,
        prefix_cache: bool,
        ahead: int,
        budget: int,
        window: int | None,
        block: int,
    ) -> None:
        self.block, self.patch = block, pytest.MonkeyPatch()
        self.patch.setattr(prompt_blocks, "BLOCK", block)
        self.slots, self.rounds, self.budget = slots, rounds, budget
        self.scheduler = make_scheduler(
            slots=slots,
            pages=pages,
            page_size=page,
            rounds=rounds,
            prefix_cache=prefix_cache,
            pages_ahead=ahead,
            prefill_budget=budget,
            window=window,
            prefill_buckets=SIZES,
        )
        self.window = window
        self.table: dict[int, dict[int, int]] = {}  # the device's page table: the page of each slot and column
        self.since_round = 0  # sum of the prefills' buckets since the last round
        self.live: list[Request] = []
        self.in_flight: deque[tuple[Plan, dict[Request, list[int]]]] = deque()
        self.count = 0
        self.rows: dict[tuple[int, int], int] = {}  # the token in each page and row
        self.written: dict[Request, list[int]] = {}  # a request's tokens on the device, unread ones included

    @rule(
        prompt=st.integers(1, 20),
        limit=st.integers(1, 8),
        priority=st.integers(-1, 1),
        token=st.integers(1, 2),
        logprobs=st.sampled_from([None, None, 1]),
    )
    def arrive(self, prompt: int, limit: int, priority: int, token: int, logprobs: int | None) -> None:
        self.count += 1
        new = make_request(self.count, prompt, limit, priority, token=token, logprobs=logprobs)
        pool = self.scheduler.pages
        if pool.needed(prompt + limit + SCRATCH) > pool.pages - 1:
            with pytest.raises(ValueError, match=r"needs \d+ pages .*lower max_tokens or raise pages"):
                self.scheduler.check(new)
            return
        self.scheduler.check(new)
        self.scheduler.add(new)
        self.live.append(new)

    @rule(tokens=st.integers(1, ROUND_TOKENS))
    def dispatch(self, tokens: int) -> None:
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        unprefilled = [r for r in running if not r.is_prefilled]
        plan = self.scheduler.plan()
        if plan is None:
            assert self.in_flight or not self.live, "work is left and nothing runs"
            return
        first = self.scheduler.running[0]
        assert first is (running or [None])[0] or first is waiting[0], "the first one gave way"
        admitted = [r for r in waiting if r in self.scheduler.running]
        assert admitted == waiting[: len(admitted)], "a request was overtaken"
        self.admitted = {r.id for r in admitted}
        if isinstance(plan, PrefillPlan):
            assert plan.requests == [*unprefilled, *admitted][: len(plan.pieces)], "a request was overtaken"
        self.in_flight.append((plan, self.prefill(plan) if isinstance(plan, PrefillPlan) else self.round(plan, tokens)))

    def prefill(self, plan: PrefillPlan) -> dict[Request, list[int]]:
        """Run the pieces as the device does: all pieces write their rows, then all read."""
        self.check_bucket(plan)
        for piece in plan.pieces:
            assert piece.request.state.slot is not None
            self.table[piece.request.state.slot] = dict(enumerate(piece.pages))
        texts = [[*r.prompt_token_ids, *r.token_ids[:-1]] for r in plan.requests]
        for place, (piece, text) in enumerate(zip(plan.pieces, texts, strict=True)):
            if piece.is_written:
                later = self.admitted - {r.id for r in plan.requests[:place]}  # these may share the new pages
                self.write(piece.request, piece.start, text[piece.start :][: piece.count], later)
        return dict(pair for pair in map(self.read_piece, plan.pieces, texts) if pair is not None)

    def check_bucket(self, plan: PrefillPlan) -> None:
        """Check that the pieces fit and leave no room for another one, and that the budget holds."""
        others = [o for o in self.scheduler.running if o not in plan.requests and o.is_prefilled and self.may_emit(o)]
        sizes = [size for size in SIZES if not others or size <= self.budget - self.since_round] or SIZES[:1]
        assert plan.bucket in sizes
        is_stuck = others == self.scheduler.running[-1:]  # the request that is preempted first if all need pages
        assert not others or is_stuck or not self.since_round or self.since_round + plan.bucket <= self.budget
        self.since_round += plan.bucket
        rows = min(self.block, plan.bucket)
        blocks = -(-plan.bucket // rows) - sum(-(-piece.count // rows) for piece in plan.pieces)
        left = plan.bucket - sum(piece.count for piece in plan.pieces)
        assert blocks >= 0 and left >= 0, "the pieces do not fit"
        assert all(piece.is_last for piece in plan.pieces[:-1]), "a piece that is not the last one was cut"
        assert len({r.prefill_outputs for r in plan.requests}) == 1
        if blocks and left:
            assert plan.pieces[-1].is_last, "a piece was cut although there is room"
            next_one = next((r for r in self.scheduler.running if not r.is_prefilled), None) or self.scheduler._admit()
            assert next_one is None or next_one.prefill_outputs != plan.requests[0].prefill_outputs, "there is room"
        if not self.scheduler.limits.prefix_cache and plan.bucket != sizes[0]:  # with it, hits may take fewer rows
            used = sum(-(-piece.count // rows) * rows for piece in plan.pieces[:-1]) + plan.pieces[-1].count
            assert all(used > size for size in sizes if size < plan.bucket), "a smaller size would have done"

    def read_piece(self, piece: Piece, text: list[int]) -> tuple[Request, list[int]] | None:
        """Check the rows that a piece reads; return the request and its token if the piece emits it."""
        r, end = piece.request, piece.start + piece.count
        assert piece.is_last == (end == len(text))
        self.check_rows(r, text[:end], piece.start)
        if not piece.is_last:
            return None
        assert piece.root == (r.token_ids[-1] if r.token_ids else None)
        assert piece.emits == (not r.token_ids)
        self.written[r] = list(r.token_ids) or [self.count % 2]
        return (r, self.written[r]) if piece.emits else None

    def round(self, plan: RoundPlan, tokens: int) -> dict[Request, list[int]]:
        assert all(r.is_prefilled and r in self.scheduler.running for r in plan.requests)
        assert plan.bucket == (1 if len(plan.requests) == 1 else self.slots)
        is_prefill_due = self.since_round == 0 and not all(r.is_prefilled for r in self.scheduler.running)
        assert not is_prefill_due, "a prompt waits while others decode"
        self.since_round = 0
        for slot, column, page in plan.new_pages:
            self.table[slot][column] = page
        left_out = [r for r in self.scheduler.running if r not in plan.requests and r.is_prefilled]
        for r in left_out:
            assert not self.may_emit(r) or not self.scheduler.pages.num_free or r is not self.scheduler.running[0]
        return {r: [token for _ in range(self.rounds) for token in self.one_round(r, tokens)] for r in plan.requests}

    def may_emit(self, r: Request) -> bool:
        return max(len(r.token_ids), 1) + r.state.rounds_in_flight < r.max_new_tokens

    def one_round(self, r: Request, tokens: int) -> list[int]:
        """Write a request's newest token and its draft, and commit some of the draft; skip an ended request."""
        out = self.written[r]
        if len(out) == r.max_new_tokens:
            return []
        committed = [*r.prompt_token_ids, *out[:-1]]
        self.check_rows(r, committed, len(committed))
        self.write(r, len(committed), [out[-1]] + [-1] * (SCRATCH - 1))
        new = [self.count % 2] * min(tokens, r.max_new_tokens - len(out))
        self.write(r, len(committed), [out[-1], *new][: len(new)])
        self.written[r] = out + new
        return new

    def place(self, r: Request, row: int) -> tuple[int, int]:
        """Return the page and the row in this page of a request's row."""
        assert r.state.slot is not None
        size = self.scheduler.pages.page_size
        page = self.table[r.state.slot][row // size]
        assert page in self.scheduler.pages.pages_of(r.id), "a page that was taken back is used"
        return page, row % size

    def write(self, r: Request, first: int, tokens: list[int], sharing: Collection[int] = ()) -> None:
        """Write a request's rows; besides it, only the requests with the ids ``sharing`` may hold the pages."""
        for row, token in enumerate(tokens, first):
            place = self.place(r, row)
            holders = {owner for owner, pages in self.scheduler.pages._owned.items() if place[0] in pages}
            assert holders <= {r.id, *sharing}, "a page that others hold is written"
            self.rows[place] = token

    def check_rows(self, r: Request, text: list[int], end: int) -> None:
        """Check the rows that hold this text, from the first one that a token after row ``end`` reads."""
        first = 0 if self.window is None else max(end - self.window, 0)
        assert [self.rows[self.place(r, row)] for row in range(first, len(text))] == text[first:]

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self) -> None:
        plan, emitted = self.in_flight.popleft()
        self.scheduler.on_output_read(plan)
        for r, tokens in emitted.items():
            if r not in self.live:
                continue
            r.output.token_ids += tokens
            self.scheduler.cache_prefix(r, r.rows_committed)
            if len(r.token_ids) == r.max_new_tokens:
                self.end(r)

    def end(self, r: Request) -> None:
        self.live.remove(r)
        self.scheduler.finish(r)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.live)))

    @invariant()
    def slots_and_pages_are_owned_once(self) -> None:
        pool = self.scheduler.pages
        pool.check()
        running = self.scheduler.running
        used = [r.state.slot for r in running]
        assert len(set(used)) == len(used) <= self.slots
        assert all(slot is not None and 0 <= slot < self.slots for slot in used)
        assert set(pool._owned) == {r.id for r in running}
        assert pool.num_used == len({page for r in running for page in pool.pages_of(r.id) if page})

    @invariant()
    def requests_are_in_order(self) -> None:
        for line in (self.scheduler.running, self.scheduler.waiting):
            assert line == sorted(line, key=lambda r: (r.params.priority, r.id))
        assert {r.id for r in self.live} == {r.id for r in [*self.scheduler.running, *self.scheduler.waiting]}

    def teardown(self) -> None:
        """Check that without new arrivals all requests end, though they may preempt each other."""
        if not hasattr(self, "live"):
            return
        try:
            self.run_to_the_end()
        finally:
            self.patch.undo()

    def run_to_the_end(self) -> None:
        most = sum(len(r.prompt_token_ids) + 2 * r.max_new_tokens for r in self.live)
        for _ in range(10 + most * (1 + len(self.live))):
            if not self.live:
                break
            self.dispatch(1)
            while self.in_flight:
                self.read()
        assert not self.live and not self.scheduler.has_work
        assert self.scheduler.pages.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)


def caches_too_much(self: Scheduler, request: Request, rows: int) -> None:
    """Cache each page before it is full."""
    CACHE_PREFIX(self, request, rows + self.pages.page_size if request.token_ids else rows)


def preempts_the_first(self: Scheduler, request: Request) -> bool:
    while not self.pages.grow(request.id, self._rows_to_reserve(request)):
        first = self.running[0]
        self._release(first)
        insort(self.waiting, first, key=lambda r: r.order)
        if first is request:
            return False
    return True


def reserves_too_little(self: Scheduler, request: Request) -> int:
    """Reserve pages for the next round only, not for the rounds in flight."""
    return request.rows_committed + SCRATCH


def reclaims_too_much(self: Scheduler) -> None:
    """Free pages that rounds in flight still write."""
    for request in self.running:
        self.pages.shrink(request.id, request.rows_committed)


def drops_too_much(self: Scheduler, request: Request, committed: int) -> None:
    """Give back one page that the window still covers."""
    if self.limits.window is not None:
        self.pages.drop(request.id, max(committed + self.pages.page_size - self.limits.window, 0))


def updates_once(self: Scheduler, request: Request) -> list[tuple[int, int, int]]:
    """Omit a page that replaces a freed one from the updates."""
    state = request.state
    state.num_synced_pages = max(getattr(state, "most_synced", 0), state.num_synced_pages)
    new = UPDATES(self, request)
    state.most_synced = state.num_synced_pages  # type: ignore[attr-defined]
    return new


CACHE_PREFIX, UPDATES = Scheduler.cache_prefix, Scheduler._page_table_updates


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("cache_prefix", caches_too_much),
        ("_reserve_or_preempt", preempts_the_first),
        ("_rows_to_reserve", reserves_too_little),
        ("_reclaim_unused", reclaims_too_much),
        ("_page_table_updates", updates_once),
        ("_drop_hidden", drops_too_much),
        ("_is_in_budget", lambda *_: True),
        ("_rows_to_prefill", lambda *_: 8),
    ],
)
def test_scheduler_state_machine_with_a_broken_scheduler_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    """Negative controls: one method of the scheduler is wrong."""
    monkeypatch.setattr(Scheduler, name, broken)
    quick = settings(TestSchedulerMachine.settings, max_examples=1000, phases=[Phase.generate])
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_state_machine_as_test(SchedulerMachine, settings=quick)
