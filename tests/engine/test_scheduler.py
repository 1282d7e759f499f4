"""The scheduler, played by a device that emits at random: order, slots, buckets, pages."""

from __future__ import annotations

from bisect import insort
from collections import deque

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

from jspec.engine.page_pool import PagePool
from jspec.engine.request import Request
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler, SchedulerLimits

pytestmark = pytest.mark.once

SCRATCH, ROUND_TOKENS = 3, 2


def request(number: int, prompt: int, limit: int, priority: int = 0) -> Request:
    return Request(number, (1,) * prompt, SamplingParams(priority=priority), 0, (), limit)


def scheduler(*, slots: int, pages: int = 100, page_size: int = 4, rounds: int = 1, **options: object) -> Scheduler:
    sizes = dict(buckets=tuple(sorted({1, slots})), prefill_buckets=(4, 8), round_tokens=ROUND_TOKENS)
    limits = SchedulerLimits(slots=slots, rounds=rounds, scratch_rows=SCRATCH, **(sizes | options))  # type: ignore[arg-type]
    return Scheduler(PagePool(pages, page_size), limits)


class Play(RuleBasedStateMachine):
    """Requests arrive, plans are dispatched and read late, requests end early or are aborted.

    The device is played by the tokens that each row of each page holds: every step writes what it would write, when it
    is dispatched, and finds what it needs.
    """

    @initialize(
        slots=st.integers(1, 4),
        pages=st.integers(6, 14),
        page=st.integers(1, 5),
        rounds=st.integers(1, 3),
        prefix_cache=st.booleans(),
        ahead=st.integers(0, 2),
        budget=st.sampled_from([1, 4, 7, 8, 20]),
    )
    def start(
        self, slots: int, pages: int, page: int, rounds: int, prefix_cache: bool, ahead: int, budget: int
    ) -> None:
        self.slots, self.rounds, self.budget = slots, rounds, budget
        self.scheduler = scheduler(
            slots=slots,
            pages=pages,
            page_size=page,
            rounds=rounds,
            prefix_cache=prefix_cache,
            pages_ahead=ahead,
            prefill_budget=budget,
        )
        self.table: dict[int, dict[int, int]] = {}  # the device's: page by slot and column
        self.since_round = 0  # tokens of chunks
        self.live: list[Request] = []
        self.in_flight: deque[tuple[Plan, dict[Request, list[int]]]] = deque()
        self.count = 0
        self.rows: dict[tuple[int, int], int] = {}  # of each page
        self.written: dict[Request, list[int]] = {}  # all that the device has of a request, unread tokens included

    @rule(prompt=st.integers(1, 20), limit=st.integers(1, 8), priority=st.integers(-1, 1))
    def arrive(self, prompt: int, limit: int, priority: int) -> None:
        self.count += 1
        new = request(self.count, prompt, limit, priority)
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
        plan = self.scheduler.plan()
        if plan is None:
            assert self.in_flight or not self.live, "work is left and nothing runs"
            return
        first = self.scheduler.running[0]
        assert first is (running or [None])[0] or first is waiting[0], "the first one gave way"
        run = self.prefill if isinstance(plan, PrefillPlan) else self.round
        self.in_flight.append((plan, run(plan, tokens)))
        for r in [plan.request] if isinstance(plan, PrefillPlan) else plan.requests:
            if r in waiting:
                assert r is waiting[0], "a request was overtaken"

    def prefill(self, plan: PrefillPlan, tokens: int) -> dict[Request, list[int]]:
        r = plan.request
        text = [*r.prompt_token_ids, *r.token_ids[:-1]]
        assert r.state.slot is not None
        self.table[r.state.slot] = dict(enumerate(plan.pages))
        left = len(text) - plan.start
        others = [o for o in self.scheduler.running if o is not r and o.is_prefilled and self.may_emit(o)]
        assert plan.bucket == (4 if left <= 4 or (others and self.budget < 8) else 8)
        assert plan.count == min(left, plan.bucket)
        is_stuck = others == self.scheduler.running[-1:]  # who gives way to the others, if all need pages
        assert not others or is_stuck or not self.since_round or self.since_round + plan.bucket <= self.budget
        self.since_round += plan.bucket
        assert plan.is_last == (plan.count == left)
        self.check_rows(r, text[: plan.start] if plan.is_written else text)
        if plan.is_written:
            self.write(r, plan.start, text[plan.start :][: plan.count])
        if not plan.is_last:
            return {}
        assert plan.root == (r.token_ids[-1] if r.token_ids else None)
        assert plan.emits == (not r.token_ids)
        self.written[r] = list(r.token_ids) or [self.count % 2]
        return {r: self.written[r]} if plan.emits else {}

    def round(self, plan: RoundPlan, tokens: int) -> dict[Request, list[int]]:
        assert all(r.is_prefilled and r in self.scheduler.running for r in plan.requests)
        assert plan.bucket == (1 if len(plan.requests) == 1 else self.slots)
        is_prompts_turn = self.since_round == 0 and not all(r.is_prefilled for r in self.scheduler.running)
        assert not is_prompts_turn, "a prompt waits while others decode"
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
        """The root and the draft are written, some of it is committed; an ended row does nothing."""
        out = self.written[r]
        if len(out) == r.max_new_tokens:
            return []
        committed = [*r.prompt_token_ids, *out[:-1]]
        self.check_rows(r, committed)
        self.write(r, len(committed), [out[-1]] + [-1] * (SCRATCH - 1))
        new = [self.count % 2] * min(tokens, r.max_new_tokens - len(out))
        self.write(r, len(committed), [out[-1], *new][: len(new)])
        self.written[r] = out + new
        return new

    def place(self, r: Request, row: int) -> tuple[int, int]:
        """Where the device has a row."""
        assert r.state.slot is not None
        size = self.scheduler.pages.page_size
        page = self.table[r.state.slot][row // size]
        assert page in self.scheduler.pages.pages_of(r.id), "a page that was taken back is used"
        return page, row % size

    def write(self, r: Request, first: int, tokens: list[int]) -> None:
        for row, token in enumerate(tokens, first):
            place = self.place(r, row)
            held = self.scheduler.pages._num_owners[place[0]]
            assert held == 1, "a page that others hold is written"
            self.rows[place] = token

    def check_rows(self, r: Request, text: list[int]) -> None:
        assert [self.rows[self.place(r, row)] for row in range(len(text))] == text

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
        assert pool.num_used == len({page for r in running for page in pool.pages_of(r.id)})

    @invariant()
    def everybody_stands_in_order(self) -> None:
        for line in (self.scheduler.running, self.scheduler.waiting):
            assert line == sorted(line, key=lambda r: (r.params.priority, r.id))
        assert {r.id for r in self.live} == {r.id for r in [*self.scheduler.running, *self.scheduler.waiting]}

    def teardown(self) -> None:
        """Nobody starves: without new arrivals all requests end, though they may take each other's pages."""
        if not hasattr(self, "live"):
            return
        most = sum(len(r.prompt_token_ids) + 2 * r.max_new_tokens for r in self.live)
        for _ in range(10 + most * (1 + len(self.live))):
            if not self.live:
                break
            self.dispatch(1)
            while self.in_flight:
                self.read()
        assert not self.live and not self.scheduler.has_work
        assert self.scheduler.pages.num_used == 0


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=150, stateful_step_count=40)


def keeps_too_much(self: Scheduler, request: Request, rows: int) -> None:
    """Pages are shown to others a page before they are full."""
    CACHE_PREFIX(self, request, rows + self.pages.page_size if request.token_ids else rows)


def oldest_gives_way(self: Scheduler, request: Request) -> bool:
    while not self.pages.grow(request.id, self._rows_to_reserve(request)):
        first = self.running[0]
        self._release(first)
        insort(self.waiting, first, key=lambda r: r.order)
        if first is request:
            return False
    return True


def too_few(self: Scheduler, request: Request) -> int:
    """Pages for the next round only, not for those in flight."""
    return request.rows_committed + SCRATCH


def takes_too_much(self: Scheduler) -> None:
    """Pages are taken back that rounds in flight write."""
    for request in self.running:
        self.pages.shrink(request.id, request.rows_committed)


def shows_once(self: Scheduler, request: Request) -> list[tuple[int, int, int]]:
    """A page that comes where one was taken back is not shown."""
    state = request.state
    state.num_synced_pages = max(getattr(state, "most_synced", 0), state.num_synced_pages)
    new = UPDATES(self, request)
    state.most_synced = state.num_synced_pages  # type: ignore[attr-defined]
    return new


CACHE_PREFIX, UPDATES = Scheduler.cache_prefix, Scheduler._page_table_updates


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("cache_prefix", keeps_too_much),
        ("_reserve_or_preempt", oldest_gives_way),
        ("_rows_to_reserve", too_few),
        ("_reclaim_unused", takes_too_much),
        ("_page_table_updates", shows_once),
        ("_is_in_budget", lambda *_: True),
    ],
)
def test_the_machine_finds_a_broken_scheduler(monkeypatch: pytest.MonkeyPatch, name: str, broken: object) -> None:
    """Negative controls."""
    monkeypatch.setattr(Scheduler, name, broken)
    quick = settings(TestPlay.settings, max_examples=1000, phases=[Phase.generate])
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_state_machine_as_test(Play, settings=quick)


def test_requests_are_admitted_by_priority_then_in_the_order_they_came() -> None:
    one = scheduler(slots=1)
    for number, priority in enumerate((0, 5, -2, 0, 5)):
        one.add(request(number, 1, 1, priority))
    served = []
    while one.has_work:
        one.plan()
        served.append(one.running[0].id)
        one.finish(one.running[0])
    assert served == [2, 0, 3, 1, 4]


def test_the_last_in_order_gives_its_pages_to_the_first_and_comes_back() -> None:
    """7 pages of 4 rows: two requests fit until one of them grows."""
    one = scheduler(slots=2, pages=8)
    first, second = request(1, 4, 12), request(2, 4, 12)
    plans = []
    for r in (first, second):
        one.add(r)
        plans.append(one.plan())
        r.token_ids.append(7)
    assert [r.state.slot for r in (first, second)] == [0, 1]
    while second.state.slot is not None:
        plans.append(one.plan())
        for r in plans[-1].requests:
            r.output.token_ids += [8, 9]
        one.on_output_read(plans[-1])
    assert one.running == [first] and one.waiting == [second] and second.metrics.num_preemptions == 1
    assert plans[-1].requests == [first]
    had = list(second.token_ids)
    assert isinstance(one.plan(), RoundPlan), "its last step must be read first, and its pages are not free"
    one.finish(first)
    one.on_output_read(plans[1])
    back = one.plan()
    assert isinstance(back, PrefillPlan) and back.request is second
    assert (back.start, back.count, back.root, back.emits) == (0, 4 + len(had) - 1, had[-1], False)


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    """4 pages of 4 rows are there; the second request needs all, the third but one."""
    one = scheduler(slots=3, pages=5)
    first, large, small = request(1, 1, 1), request(2, 10, 3), request(3, 1, 1)
    for r in (first, large, small):
        one.add(r)
    one.plan()
    assert one.running == [first] and one.waiting == [large, small]
    one.finish(first)
    one.plan()
    assert one.running == [large]
    one.finish(large)
    one.plan()
    assert one.running == [small]


@pytest.mark.parametrize(("ready", "bucket"), [(1, 1), (2, 2), (3, 5), (5, 5)])
def test_rounds_take_the_smallest_bucket_that_holds_them(ready: int, bucket: int) -> None:
    one = scheduler(slots=5, buckets=(1, 2, 5), prefill_budget=100)
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


def decode(one: Scheduler, plan: Plan | None, tokens: int = 1) -> None:
    """Read a plan at once; every round commits as many tokens."""
    assert plan is not None
    one.on_output_read(plan)
    for r in [plan.request] if isinstance(plan, PrefillPlan) else plan.requests:
        if isinstance(plan, RoundPlan) or plan.emits:
            r.output.token_ids += [7] * min(tokens, r.max_new_tokens - len(r.token_ids))
        if len(r.token_ids) == r.max_new_tokens:
            one.finish(r)


@pytest.mark.parametrize("ahead", [8, 0])
def test_most_rounds_bring_no_new_pages(ahead: int) -> None:
    """Four requests that fill a page at different times, in a pool that holds just all of them.

    With no page ahead, nearly every round brings some.
    """
    one = scheduler(slots=4, pages=4 * 19 + 1, pages_ahead=ahead, prefill_budget=100)
    for number in range(4):
        one.add(request(number, 4 + number, 64))
    rounds = with_pages = 0
    while one.has_work:
        plan = one.plan()
        if isinstance(plan, RoundPlan):
            rounds, with_pages = rounds + 1, with_pages + bool(plan.new_pages)
        decode(one, plan)
    assert rounds == 63 and (0 < with_pages < 9 if ahead else with_pages > 50)
    assert one.pages.num_used == 0


def test_pages_ahead_are_taken_back_before_anybody_gives_way() -> None:
    """The first gets eight pages more than it needs; the second cannot do without them."""
    one = scheduler(slots=3, pages=30, pages_ahead=8)
    first = request(1, 4, 60)
    one.add(first)
    while not one.pages.num_used > 8:
        decode(one, one.plan())
    second = request(2, (one.pages.num_free + 4) * 4 - SCRATCH - ROUND_TOKENS, 2)
    one.add(second)
    decode(one, one.plan())
    assert len(one.running) == 2
    while one.has_work:
        decode(one, one.plan())
        one.pages.check()
    assert second.metrics.num_preemptions == 0


def test_a_head_that_waits_for_pages_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until pages are given back, or the next one that it could share is kept."""
    one, looked = scheduler(slots=2, pages=12, prefix_cache=True), []
    shared = Scheduler._cached_pages
    monkeypatch.setattr(Scheduler, "_cached_pages", lambda self, r: [looked.append(r), shared(self, r)][1])
    first, head = request(1, 8, 24), request(2, 40, 1)
    for r in (first, head):
        one.add(r)
    while not one.waiting or first.state.slot is None or len(first.token_ids) < 3:
        decode(one, one.plan())
    looked.clear()
    for _ in range(8):
        decode(one, one.plan())
    assert looked == [] and one.waiting == [head]
    while first in one.running:
        decode(one, one.plan())
    decode(one, one.plan())
    assert head in one.running and looked == [head]


@pytest.mark.parametrize("budget", [4, 8, 20])
def test_running_requests_never_starve(budget: int) -> None:
    """However many prompts come: between two rounds there are no more tokens of them than the budget says."""
    one = scheduler(slots=6, pages=400, prefill_budget=budget)
    first = request(0, 3, 40)
    one.add(first)
    decode(one, one.plan())
    since, most, number = 0, 0, 1
    while first in one.running:
        for _ in range(3):
            one.add(request(number, 1 + 5 * number % 17, 1 + number % 3))
            number += 1
        plan = one.plan()
        since = since + plan.bucket if isinstance(plan, PrefillPlan) else 0
        most = max(most, since)
        decode(one, plan)
    assert budget // 2 < most <= budget


def test_without_others_that_wait_a_prompt_takes_the_largest_chunks() -> None:
    one = scheduler(slots=2, prefill_budget=4)
    one.add(request(1, 16, 1))
    plans = [one.plan(), one.plan()]
    assert [plan.count for plan in plans if isinstance(plan, PrefillPlan)] == [8, 8]
