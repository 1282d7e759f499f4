"""The scheduler, played by a device that emits at random: order, slots, buckets, pages."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jspec.pages import PagePool
from jspec.requests import Request, SamplingParams
from jspec.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler

SCRATCH = 3


def request(number: int, prompt: int, limit: int) -> Request:
    return Request(number, (1,) * prompt, SamplingParams(), 0, (), limit)


def scheduler(*, slots: int, pages: int = 100, page_size: int = 4, rounds: int = 1, **options: object) -> Scheduler:
    defaults = dict(buckets=tuple(sorted({1, slots})), prefill_buckets=(4, 8), scratch_rows=SCRATCH)
    return Scheduler(PagePool(pages, page_size), slots=slots, rounds=rounds, **(defaults | options))


class Play(RuleBasedStateMachine):
    """Requests arrive, plans are dispatched and read late, requests end early or are aborted."""

    @initialize(slots=st.integers(1, 4), pages=st.integers(8, 20), page=st.integers(2, 5), rounds=st.integers(1, 3))
    def start(self, slots: int, pages: int, page: int, rounds: int) -> None:
        self.slots, self.rounds = slots, rounds
        self.scheduler = scheduler(slots=slots, pages=pages, page_size=page, rounds=rounds)
        self.live: list[Request] = []
        self.admitted: list[int] = []
        self.in_flight: deque[Plan] = deque()
        self.count = 0

    @rule(prompt=st.integers(1, 20), limit=st.integers(1, 6))
    def arrive(self, prompt: int, limit: int) -> None:
        self.count += 1
        new = request(self.count, prompt, limit)
        pool = self.scheduler.pages
        if pool.needed(prompt + limit + SCRATCH) > pool.pages - 1:
            with pytest.raises(ValueError, match=r"needs \d+ pages .*lower max_tokens or raise pages"):
                self.scheduler.check(new)
            return
        self.scheduler.check(new)
        self.scheduler.add(new)
        self.live.append(new)

    @rule()
    def dispatch(self) -> None:
        plan = self.scheduler.plan()
        self.admitted += [r.id for r in self.scheduler.running if r.id not in self.admitted]
        if plan is None:
            assert self.in_flight or not self.live, "work is left and nothing runs"
            return
        self.in_flight.append(plan)
        self.check_prefill(plan) if isinstance(plan, PrefillPlan) else self.check_rounds(plan)

    def check_prefill(self, plan: PrefillPlan) -> None:
        left = len(plan.request.prompt_token_ids) - plan.start
        assert plan.count == min(left, 8)
        assert plan.bucket == (4 if left <= 4 else 8)
        assert plan.is_last == (plan.count == left)
        rows = plan.request.rows_needed + SCRATCH
        assert len(plan.pages) == self.scheduler.pages.needed(rows)

    def check_rounds(self, plan: RoundPlan) -> None:
        assert all(r.is_prefilled and r in self.scheduler.running for r in plan.requests)
        assert plan.bucket == (1 if len(plan.requests) == 1 else self.slots)
        assert all(r.is_prefilled for r in self.scheduler.running), "a prompt waits while others decode"
        left_out = [r for r in self.scheduler.running if r not in plan.requests]
        for r in left_out:
            assert max(len(r.token_ids), 1) + r.rounds_in_flight >= r.limit, "a request is kept waiting"

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        plan = self.in_flight.popleft()
        if isinstance(plan, PrefillPlan):
            self.emit(plan.request, 1 if plan.is_last else 0)
            return
        for r in plan.requests:
            r.rounds_in_flight -= self.rounds
            self.emit(r, data.draw(st.integers(self.rounds, 3 * self.rounds)))

    def emit(self, r: Request, tokens: int) -> None:
        if r not in self.live:
            return
        r.token_ids += [0] * min(tokens, r.limit - len(r.token_ids))
        if len(r.token_ids) == r.limit:
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
        used = [r.slot for r in running]
        assert len(set(used)) == len(used) <= self.slots
        assert all(slot is not None and 0 <= slot < self.slots for slot in used)
        assert pool.num_used == sum(pool.needed(r.rows_needed + SCRATCH) for r in running)

    @invariant()
    def first_come_is_first_served(self) -> None:
        assert self.admitted == sorted(self.admitted)
        assert [r.id for r in self.live] == [r.id for r in [*self.scheduler.running, *self.scheduler.waiting]]

    def teardown(self) -> None:
        """Nobody starves: without new arrivals all requests end, each plan moving something on."""
        if not hasattr(self, "live"):
            return
        bound = 10 + sum(len(r.prompt_token_ids) + 2 * r.limit for r in self.live)
        for _ in range(bound):
            if not self.live:
                break
            self.dispatch()
            while self.in_flight:
                plan = self.in_flight.popleft()
                for r in plan.requests if isinstance(plan, RoundPlan) else [plan.request]:
                    if isinstance(plan, RoundPlan):
                        r.rounds_in_flight -= self.rounds
                    self.emit(r, 1 if isinstance(plan, RoundPlan) or plan.is_last else 0)
        assert not self.live and not self.scheduler.has_work
        assert self.scheduler.pages.num_used == 0


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    """4 pages of 4 rows are there; the second request needs all, the third but one."""
    one = scheduler(slots=3, pages=5)
    first, large, small = request(1, 1, 1), request(2, 9, 4), request(3, 1, 1)
    for r in (first, large, small):
        one.add(r)
    one.plan()
    assert one.running == [first] and list(one.waiting) == [large, small]
    one.finish(first)
    one.plan()
    assert one.running == [large]
    one.finish(large)
    one.plan()
    assert one.running == [small]


@pytest.mark.parametrize(("ready", "bucket"), [(1, 1), (2, 2), (3, 5), (5, 5)])
def test_rounds_take_the_smallest_bucket_that_holds_them(ready: int, bucket: int) -> None:
    one = scheduler(slots=5, buckets=(1, 2, 5))
    for number in range(ready):
        one.add(request(number, 2, 9))
    plans = [one.plan() for _ in range(ready + 1)]
    assert [type(plan) for plan in plans] == [PrefillPlan] * ready + [RoundPlan]
    assert (plans[-1].bucket, len(plans[-1].requests)) == (bucket, ready)


def test_no_round_is_planned_that_could_emit_nothing() -> None:
    """Rounds in flight emit at least a token each, so the fourth token of four is under way after three rounds."""
    one = scheduler(slots=1)
    one.add(request(1, 2, 4))
    kinds = [type(one.plan()) for _ in range(5)]
    assert kinds == [PrefillPlan, RoundPlan, RoundPlan, RoundPlan, type(None)]


def test_finishing_twice_or_unknown_is_harmless() -> None:
    one, r = scheduler(slots=1), request(1, 2, 4)
    one.add(r)
    one.plan()
    for _ in range(2):
        one.finish(r)
    one.finish(request(2, 1, 1))
    assert one._free_slots == [0] and one.pages.num_used == 0
