"""Test single decisions of the scheduler: order, preemption, buckets, budgets, pages reserved ahead."""

from __future__ import annotations

import pytest

from jspec.engine.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler
from tests.support.scheduling import ROUND_TOKENS, SCRATCH, make_request, make_scheduler

pytestmark = pytest.mark.once


def test_scheduler_with_waiting_requests_admits_by_priority_then_arrival() -> None:
    one = make_scheduler(slots=1)
    for number, priority in enumerate((0, 5, -2, 0, 5)):
        one.add(make_request(number, 1, 1, priority))
    served = []
    while one.has_work:
        one.plan()
        served.append(one.running[0].id)
        one.finish(one.running[0])
    assert served == [2, 0, 3, 1, 4]


def test_scheduler_without_free_pages_preempts_the_lowest_priority() -> None:
    """Two requests fit into 7 pages of 4 rows until one of them grows."""
    one = make_scheduler(slots=2, pages=8)
    first, second = make_request(1, 4, 12), make_request(2, 4, 12)
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


def test_scheduler_with_a_waiting_large_request_admits_no_later_small_one() -> None:
    """The second request needs all of the 4 pages, the third one only one page."""
    one = make_scheduler(slots=3, pages=5)
    first, large, small = make_request(1, 1, 1), make_request(2, 10, 3), make_request(3, 1, 1)
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
def test_scheduler_with_running_requests_plans_the_smallest_bucket_that_fits(ready: int, bucket: int) -> None:
    one = make_scheduler(slots=5, buckets=(1, 2, 5), prefill_budget=100)
    for number in range(ready):
        one.add(make_request(number, 2, 9))
    plans = [one.plan() for _ in range(ready + 1)]
    assert [type(plan) for plan in plans] == [PrefillPlan] * ready + [RoundPlan]
    assert (plans[-1].bucket, len(plans[-1].requests)) == (bucket, ready)


def test_scheduler_with_enough_rounds_in_flight_plans_no_round() -> None:
    """A round emits at least one token, so the prefill and three rounds suffice for four tokens."""
    one = make_scheduler(slots=1)
    one.add(make_request(1, 2, 4))
    kinds = [type(one.plan()) for _ in range(5)]
    assert kinds == [PrefillPlan, RoundPlan, RoundPlan, RoundPlan, type(None)]


def test_scheduler_told_to_finish_an_ended_or_unknown_request_ignores_it() -> None:
    one, r = make_scheduler(slots=1), make_request(1, 2, 4)
    one.add(r)
    one.plan()
    for _ in range(2):
        one.finish(r)
    one.finish(make_request(2, 1, 1))
    assert one._free_slots == [0] and one.pages.num_used == 0


def decode(one: Scheduler, plan: Plan | None, tokens: int = 1) -> None:
    """Report each plan's output at once; each round commits ``tokens`` tokens."""
    assert plan is not None
    one.on_output_read(plan)
    for r in [plan.request] if isinstance(plan, PrefillPlan) else plan.requests:
        if isinstance(plan, RoundPlan) or plan.emits:
            r.output.token_ids += [7] * min(tokens, r.max_new_tokens - len(r.token_ids))
        if len(r.token_ids) == r.max_new_tokens:
            one.finish(r)


@pytest.mark.parametrize("ahead", [8, 0])
def test_scheduler_that_reserves_pages_ahead_adds_pages_in_few_rounds(ahead: int) -> None:
    """Four requests fill their pages at different times; the pool has exactly the pages they need.

    Negative control: with no page reserved ahead nearly every round needs new pages.
    """
    one = make_scheduler(slots=4, pages=4 * 19 + 1, pages_ahead=ahead, prefill_budget=100)
    for number in range(4):
        one.add(make_request(number, 4 + number, 64))
    rounds = with_pages = 0
    while one.has_work:
        plan = one.plan()
        if isinstance(plan, RoundPlan):
            rounds, with_pages = rounds + 1, with_pages + bool(plan.new_pages)
        decode(one, plan)
    assert rounds == 63 and (0 < with_pages < 9 if ahead else with_pages > 50)
    assert one.pages.num_used == 0


def test_scheduler_without_free_pages_reclaims_pages_ahead_before_preempting() -> None:
    """Eight pages are reserved ahead for the first request, and the second one needs them."""
    one = make_scheduler(slots=3, pages=30, pages_ahead=8)
    first = make_request(1, 4, 60)
    one.add(first)
    while not one.pages.num_used > 8:
        decode(one, one.plan())
    second = make_request(2, (one.pages.num_free + 4) * 4 - SCRATCH - ROUND_TOKENS, 2)
    one.add(second)
    decode(one, one.plan())
    assert len(one.running) == 2
    while one.has_work:
        decode(one, one.plan())
        one.pages.check()
    assert second.metrics.num_preemptions == 0


def test_scheduler_after_a_failed_admission_retries_only_once_pages_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also retries when the request's next page has been cached."""
    one, looked = make_scheduler(slots=2, pages=12, prefix_cache=True), []
    shared = Scheduler._cached_pages
    monkeypatch.setattr(Scheduler, "_cached_pages", lambda self, r: [looked.append(r), shared(self, r)][1])
    first, head = make_request(1, 8, 24), make_request(2, 40, 1)
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
def test_scheduler_with_many_prompts_stays_within_the_prefill_budget(budget: int) -> None:
    """The budget limits the prompt tokens between two rounds; three prompts arrive at every step."""
    one = make_scheduler(slots=6, pages=400, prefill_budget=budget)
    first = make_request(0, 3, 40)
    one.add(first)
    decode(one, one.plan())
    since, most, number = 0, 0, 1
    while first in one.running:
        for _ in range(3):
            one.add(make_request(number, 1 + 5 * number % 17, 1 + number % 3))
            number += 1
        plan = one.plan()
        since = since + plan.bucket if isinstance(plan, PrefillPlan) else 0
        most = max(most, since)
        decode(one, plan)
    assert budget // 2 < most <= budget


def test_scheduler_with_a_lone_prompt_plans_the_largest_chunks() -> None:
    one = make_scheduler(slots=2, prefill_budget=4)
    one.add(make_request(1, 16, 1))
    plans = [one.plan(), one.plan()]
    assert [plan.count for plan in plans if isinstance(plan, PrefillPlan)] == [8, 8]
