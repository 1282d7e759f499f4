"""Test single decisions of the scheduler: order, preemption, buckets, budgets, pages reserved ahead."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import pytest

from jspec.engine.schedule.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler
from jspec.engine.schedule.state_pool import StatePool
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
    assert isinstance(back, PrefillPlan) and back.requests == [second]
    piece = back.pieces[0]
    assert (piece.start, piece.count, piece.root, piece.emits) == (0, 4 + len(had) - 1, had[-1], False)


@pytest.mark.parametrize(
    ("prompt", "tokens", "rounds", "start"),
    [
        pytest.param(4, 6, 0, 8, id="9 rows"),
        pytest.param(4, 6, 1, 8, id="9 rows, soon 11 at most"),
        pytest.param(4, 8, 0, 8, id="11 rows"),
        pytest.param(4, 8, 1, 4, id="11 rows, soon 13 at most: only the prompt's state is known"),
        pytest.param(13, 0, 0, 8, id="8 rows of a prompt of 13"),
    ],
)
def test_preempted_request_goes_on_at_its_state_if_no_round_in_flight_may_advance_it(
    prompt: int, tokens: int, rounds: int, start: int
) -> None:
    """States stand at multiples of 4 tokens; a round commits 2 tokens at most."""
    one = make_scheduler(slots=1, prefix_cache=True)
    one.states = StatePool(3, 4, 4)
    request = make_request(1, prompt, 20)
    one.add(request)
    one.on_output_read(one.plan())
    for token in range(tokens):
        request.output.token_ids.append(token)
    one.cache_prefix(request, request.rows_committed if tokens else 8)
    request.state.rounds_in_flight = rounds
    one._preempt(request)
    request.state.rounds_in_flight = 0
    assert request.metrics.num_preemptions == 1 and one.waiting == [request]
    again = one.plan()
    assert isinstance(again, PrefillPlan) and again.pieces[0].start == start
    *_, saved, loaded = again.copies
    assert (loaded.entry, loaded.position, loaded.is_load) == (saved.entry, start, True) and not saved.is_load


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
    emits = plan.requests if isinstance(plan, RoundPlan) else [piece.request for piece in plan.pieces if piece.emits]
    for r in plan.requests:
        if r in emits:
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
    shared = Scheduler.cached_pages
    monkeypatch.setattr(Scheduler, "cached_pages", lambda self, r: [looked.append(r), shared(self, r)][1])
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
    assert [plan.pieces[0].count for plan in plans if isinstance(plan, PrefillPlan)] == [8, 8]


def packing(*lengths: int, sizes: tuple[int, ...], **options: Any) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Return the size of each prefill of prompts of these lengths, and the (request, start, count) of its pieces."""
    one = make_scheduler(**dict(slots=8, pages=400, prefill_buckets=sizes) | options)
    for number, length in enumerate(lengths):
        one.add(make_request(number, length, 1))
    plans = []
    while isinstance(plan := one.plan(), PrefillPlan):
        plans.append((plan.bucket, [(piece.request.id, piece.start, piece.count) for piece in plan.pieces]))
    return plans


def test_scheduler_packs_prompts_in_blocks_and_cuts_the_last_piece() -> None:
    """A block has 16 rows, so a prompt of 17 tokens takes two."""
    pieces = [(0, 0, 17), (1, 0, 1), (2, 0, 16)]
    assert packing(17, 1, 100, sizes=(64,)) == [(64, pieces), (64, [(2, 16, 64)]), (64, [(2, 80, 20)])]


@pytest.mark.parametrize("length", [1, 128, 129, 300, 400, 600, 1024, 1100, 1500, 1800, 2048, 3000])
def test_scheduler_takes_the_prefills_of_the_least_time_and_the_largest_first(length: int) -> None:
    """The time of a prefill is that of its rows and of 128 more; all choices of up to eight prefills are compared."""
    sizes = (128, 512, 1024, 2048)
    got = [size for size, _ in packing(length, sizes=sizes, pages=1000)]
    choices = [own for count in range(1, 9) for own in combinations_with_replacement(sizes, count)]
    times = [sum(own) + 128 * len(own) for own in choices if sum(own) >= length]
    assert sum(got) >= length and sum(got) + 128 * len(got) == min(times)
    assert got == sorted(got, reverse=True)


def test_scheduler_packs_only_requests_whose_prefills_have_the_same_outputs() -> None:
    one = make_scheduler(slots=4, prefill_buckets=(64,))
    for number, logprobs in enumerate([None, 1, 1, None]):
        one.add(make_request(number, 5, 1, logprobs=logprobs))
    plans = [one.plan() for _ in range(3)]
    assert [[r.id for r in plan.requests] for plan in plans if plan is not None] == [[0], [1, 2], [3]]


def test_scheduler_shares_pages_between_the_prompts_of_one_prefill_and_sizes_it_for_that() -> None:
    """Four equal prompts of 32 tokens: the first one writes their pages, and the others compute only the last token."""
    shared = [(64, [(0, 0, 32), (1, 31, 1), (2, 31, 1)]), (64, [(3, 31, 1)])]
    assert packing(32, 32, 32, 32, sizes=(64,), prefix_cache=True) == shared
    small = [(64, [(0, 0, 32), (1, 31, 1), (2, 31, 1)]), (16, [(3, 31, 1)])]
    assert packing(32, 32, 32, 32, sizes=(16, 64, 256), prefix_cache=True) == small
    assert [size for size, _ in packing(32, 32, 32, 32, sizes=(16, 64, 256))] == [256]


def test_scheduler_shares_pages_between_requests_of_one_salt_only() -> None:
    """Equal prompts: the second request has the first one's salt, the third and fourth have others."""
    one = make_scheduler(slots=4, pages=400, prefill_buckets=(256,), prefix_cache=True)
    for number, salt in enumerate((b"a", b"a", b"", b"b")):
        one.add(replace(make_request(number, 32, 1), cache_salt=salt))
    plan = one.plan()
    assert isinstance(plan, PrefillPlan)
    assert [(piece.request.id, piece.start) for piece in plan.pieces] == [(0, 0), (1, 31), (2, 0), (3, 0)]


def test_scheduler_sizes_a_prefill_for_the_requests_that_find_pages() -> None:
    """Eight prompts wait, and the pool has pages for one of them."""
    assert packing(*[20] * 8, sizes=(32, 256), pages=8) == [(32, [(0, 0, 20)])]


@pytest.mark.parametrize(("compiled", "sizes"), [((), [64] * 4), ((1024,), [1024])])
def test_scheduler_plans_only_the_compiled_sizes_of_the_first_request(
    compiled: tuple[int, ...], sizes: list[int]
) -> None:
    """With all sizes compiled, four prefills of 64 tokens take less time than one of 1024."""
    one, first = make_scheduler(slots=1, prefill_buckets=(64, 1024)), make_request(0, 200, 1)
    first.state.prefill_sizes = compiled
    one.add(first)
    plans = []
    while isinstance(plan := one.plan(), PrefillPlan):
        plans.append(plan.bucket)
    assert plans == sizes


@pytest.mark.parametrize(("budget", "most"), [(8, 16), (40, 32), (64, 64), (100, 96)])
def test_scheduler_that_packs_prompts_stays_within_the_prefill_budget(budget: int, most: int) -> None:
    """Short prompts arrive while a request decodes; a budget below every size allows one prefill of the smallest."""
    one = make_scheduler(slots=8, pages=400, prefill_budget=budget, prefill_buckets=(16, 32, 64))
    first = make_request(0, 3, 40)
    one.add(first)
    decode(one, one.plan())
    since, seen, packed, number = 0, [0], [0], 1
    while first in one.running:
        for _ in range(3):
            one.add(make_request(number, 1 + 5 * number % 17, 1))
            number += 1
        plan = one.plan()
        since = since + plan.bucket if isinstance(plan, PrefillPlan) else 0
        seen.append(since)
        packed += [len(plan.pieces)] if isinstance(plan, PrefillPlan) else []
        decode(one, plan)
    assert max(seen) == most and (max(packed) >= 2) == (most > 16)
