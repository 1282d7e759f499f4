"""Test the engine's loop: batches, chunks, slots and pages change no token."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from jspec import Engine, SamplingParams
from jspec.engine.callers import clients
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.request import Request
from tests.support import engines

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3]]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0),
    SamplingParams(max_tokens=14, seed=1),
    SamplingParams(max_tokens=5, seed=2, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=1, seed=3),
    SamplingParams(max_tokens=20, temperature=0, draft=1),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engines.eagle3(rounds=1, page_size=16)


@pytest.fixture(scope="module")
def engine_of_three() -> Engine:
    """Return an engine with three rounds per dispatch and pages of one row."""
    return engines.eagle3(rounds=3, page_size=1)


@pytest.fixture(params=["engine", "engine_of_three"])
def either(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    """Return the tokens of each request when it runs alone."""
    return [tokens(engine, [prompt], [p])[0] for prompt, p in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(autouse=True)
def _all_comes_back(engine: Engine, engine_of_three: Engine) -> Iterator[None]:
    """Check after each test that no page or slot is held."""
    yield
    for one in (engine, engine_of_three):
        assert one.pages_in_use == 0 and not one.scheduler.has_work
        one.scheduler.pages.check()
        assert sorted(one.scheduler._free_slots) == [0, 1]


def submit(by_hand: ByHand) -> list[Request]:
    """Submit all requests; the test itself makes the steps."""
    return [by_hand.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def tokens(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


@pytest.mark.once
@pytest.mark.parametrize("overlap", [True, False])
def test_engine_with_any_dispatch_options_and_page_size_emits_equal_tokens(
    either: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Five requests share two slots, so requests run together and one after another."""
    monkeypatch.setattr(either.threads, "config", replace(either.config, overlap=overlap))
    done = either.generate(PROMPTS, PARAMS)
    assert [completion.token_ids for completion in done] == expected
    assert [len(completion.token_ids) for completion in done] == [p.max_tokens for p in PARAMS]
    assert all(completion.finish_reason == "length" for completion in done)


@pytest.mark.parametrize("budget", [1, 16, 64])
def test_engine_with_any_prefill_budget_emits_equal_tokens(
    either: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """A long answer is decoded between prompt chunks of 6 or 16 tokens, or after all prompts are prefilled."""
    limits = replace(either.scheduler.limits, prefill_budget=budget)
    monkeypatch.setattr(either.scheduler, "limits", limits)
    order = [4, 2, 1, 0, 3]
    got = tokens(either, [PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert got == [expected[i] for i in order]


def test_engine_with_one_or_three_rounds_per_dispatch_has_equal_acceptance(
    engine: Engine, engine_of_three: Engine
) -> None:
    one, three = (e.generate(PROMPTS, PARAMS) for e in (engine, engine_of_three))
    for a, b in zip(one, three, strict=True):
        assert a.from_draft == b.from_draft
        assert a.metrics.num_accepted_per_position == b.metrics.num_accepted_per_position
        assert a.metrics.num_draft_tokens == b.metrics.num_draft_tokens


def test_engine_given_requests_in_another_order_emits_equal_tokens(engine: Engine, expected: list[list[int]]) -> None:
    order = [4, 2, 0, 3, 1]
    assert tokens(engine, [PROMPTS[i] for i in order], [PARAMS[i] for i in order]) == [expected[i] for i in order]


def test_engine_with_prompts_in_chunks_emits_tokens_of_plain_decoding(either: Engine) -> None:
    """Chunks of 16 and 6 tokens end at page ends and inside pages; the last chunk has 1 to 16 tokens."""
    lengths = [1, 15, 16, 17, 31, 32, 33, 37]
    prompts = [np.random.default_rng(n).integers(0, engines.VOCAB, n).tolist() for n in lengths]
    greedy = SamplingParams(max_tokens=10, temperature=0)
    expected = engines.plain().generate(prompts, greedy)
    for prompt, one in zip(prompts, expected, strict=True):
        assert tokens(either, [prompt], [greedy]) == [one.token_ids]
    assert tokens(either, prompts, [greedy] * len(prompts)) == [one.token_ids for one in expected]


def test_page_pool_after_every_step_is_consistent_with_running_requests(either: Engine) -> None:
    most, pages, running = 0, either.scheduler.pages, either.scheduler.running
    with ByHand(either) as by_hand:
        submit(by_hand)
        while by_hand.step():
            pages.check()
            held = {page for r in running for page in pages.pages_of(r.id)}
            assert pages.num_used == len(held)
            for r in running:
                least, enough = r.rows_committed, r.rows_needed + engines.LENGTH + 1
                assert pages.needed(least) <= len(pages.pages_of(r.id)) <= pages.needed(enough)
            most = max(most, len(running))
    assert most == 2


def test_request_aborted_at_any_step_leaves_other_requests_unchanged(either: Engine, expected: list[list[int]]) -> None:
    for steps in range(9):
        with ByHand(either) as by_hand:
            requests = submit(by_hand)
            for _ in range(steps):
                by_hand.step()
            reason, so_far = requests[1].finish_reason or "abort", list(requests[1].token_ids)
            by_hand.abort(requests[1])
            by_hand.abort(requests[1])
            while by_hand.step():
                assert requests[1].finish_reason == reason
                assert requests[1] not in [*either.scheduler.running, *either.scheduler.waiting]
                either.scheduler.pages.check()
        assert requests[1].token_ids == so_far == expected[1][: len(so_far)]
        for i in (0, 2, 3, 4):
            assert requests[i].token_ids == expected[i]


def test_request_with_too_few_free_pages_waits(engine_of_three: Engine, expected: list[list[int]]) -> None:
    """Two slots are free, but there are not always enough free pages for two requests."""
    engine, pages = engine_of_three, engine_of_three.scheduler.pages
    longest = max(len(prompt) + p.max_tokens for prompt, p in zip(PROMPTS, PARAMS, strict=True)) + engines.LENGTH + 1
    pages.reserve(-1, pages.num_free - longest)
    waited = False
    with ByHand(engine) as by_hand:
        requests = submit(by_hand)
        while by_hand.step():
            waited |= bool(engine.scheduler.waiting and engine.scheduler._free_slots)
    assert waited, "no request waited for pages while a slot was free"
    assert [request.token_ids for request in requests] == expected
    pages.release(-1)


def test_engine_after_requests_ended_does_not_retain_them(either: Engine) -> None:
    with ByHand(either) as by_hand:
        requests = submit(by_hand)
        while by_hand.step():
            pass
    references = [weakref.ref(request) for request in requests]
    del requests, by_hand
    gc.collect()
    assert all(reference() is None for reference in references)


def test_caller_interrupted_while_generating_releases_slots_and_pages(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is interrupted while it waits for the engine's thread."""

    class InterruptedQueue(SimpleQueue[Any]):
        def get(self, *arguments: Any, **options: Any) -> Any:
            while not engine.scheduler.running:
                time.sleep(0.001)
            raise KeyboardInterrupt

    aborted = engine.metrics.finished.get("abort", 0)
    with monkeypatch.context() as patch:
        patch.setattr(clients, "SimpleQueue", InterruptedQueue)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, [replace(params, max_tokens=20) for params in PARAMS])
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    assert engine.metrics.finished["abort"] == aborted + len(PROMPTS)
    assert tokens(engine, PROMPTS, PARAMS) == expected


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
def test_stream_closed_early_releases_all_pages(engine: Engine, expected: list[list[int]], chunks: int) -> None:
    stream = engine.stream(PROMPTS[4], PARAMS[4])
    got = [token for _ in range(chunks) for token in next(stream).token_ids]
    stream.close()
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    assert got == expected[4][: len(got)]
    assert tokens(engine, PROMPTS, PARAMS) == expected


def test_stream_read_between_other_requests_loses_no_token(engine: Engine, expected: list[list[int]]) -> None:
    """The stream's request also advances while another caller waits."""
    streams = {i: engine.stream(PROMPTS[i], PARAMS[i]) for i in (0, 4)}
    got: dict[int, list[int]] = {i: list(next(stream).token_ids) for i, stream in streams.items()}
    got[0] += next(streams[0]).token_ids
    got[1] = tokens(engine, [PROMPTS[1]], [PARAMS[1]])[0]
    for i, stream in streams.items():
        chunks = list(stream)
        assert chunks[-1].finish_reason == "length"
        got[i] += [token for chunk in chunks for token in chunk.token_ids]
    assert got == {i: expected[i] for i in (0, 4, 1)}
