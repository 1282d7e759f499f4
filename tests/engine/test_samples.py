"""Test `n` completions of a prompt: each equals a single request with its seed, and full prompt pages are shared."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jspec import Chunk, Engine, SamplingParams
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.sampling_params import sample_seed
from tests.support import engines
from tests.support.serving import wait_until

pytestmark = pytest.mark.once

PAGE, N = 16, 5
PROMPT = np.random.default_rng(0).integers(0, engines.VOCAB, 37).tolist()  # fills two pages and a third of another
SAMPLED = SamplingParams(max_tokens=11, temperature=1.0, seed=2**63 + 11, n=N)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine with fewer slots, two, than completions."""
    return engines.eagle3(rounds=1, page_size=PAGE)


@pytest.fixture(autouse=True)
def _nothing_is_held(engine: Engine) -> None:
    engine.scheduler.pages.clear()
    assert engine.pages_in_use == 0


def alone(engine: Engine, prompt: list[int], seed: int, tokens: int) -> list[int]:
    return engine.generate(prompt, SamplingParams(max_tokens=tokens, seed=seed))[0].token_ids


def test_samples_of_a_seeded_request_equal_single_requests_with_derived_seeds(engine: Engine) -> None:
    """Two prompts with several samples run in one batch; a request without `n` has one completion."""
    other = SamplingParams(max_tokens=7, seed=3, n=2)
    done, beside = engine.generate([PROMPT, PROMPT[:5]], [SAMPLED, other])
    assert SAMPLED.seed is not None and other.seed is not None
    for first, prompt, params in ((done, PROMPT, SAMPLED), (beside, PROMPT[:5], other)):
        seeds = [sample_seed(params.seed or 0, index) for index in range(params.n)]
        assert [one.token_ids for one in first.samples] == [alone(engine, prompt, s, params.max_tokens) for s in seeds]
        assert first.samples[0] is first and seeds[0] == params.seed
        assert all(one.prompt_token_ids == prompt and one.samples == [one] for one in first.others)
    assert (
        len({tuple(one.token_ids) for one in done.samples}) == N
    )  # with equal samples all derived seeds could be equal
    assert engine.generate(PROMPT, SamplingParams(max_tokens=11, seed=SAMPLED.seed))[0].samples[1:] == []


def test_samples_after_the_first_find_all_full_prompt_pages_cached(engine: Engine) -> None:
    """Only the rest of the prompt, less than a page, is computed for each completion."""
    before = engine.metrics
    done = engine.generate(PROMPT, SAMPLED)[0]
    assert [one.metrics.num_cached_tokens for one in done.samples] == [0] + [len(PROMPT) // PAGE * PAGE] * (N - 1)
    assert engine.metrics.num_cached_tokens - before.num_cached_tokens == (N - 1) * 2 * PAGE
    assert engine.metrics.num_prompt_tokens - before.num_prompt_tokens == N * len(PROMPT)


def test_samples_of_a_greedy_request_are_equal(engine: Engine) -> None:
    done = engine.generate(PROMPT, SamplingParams(max_tokens=9, temperature=0.0, n=3))[0]
    assert [one.token_ids for one in done.samples] == [done.token_ids] * 3 and len(done.token_ids) == 9


def test_repr_of_samples_says_how_many_there_are(engine: Engine) -> None:
    (done,) = engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, n=3))
    assert repr(done).startswith("Completion(first of 3 samples, 3 tokens, finish_reason='length', ")
    assert repr(done.others[0]).startswith("Completion(3 tokens, ")


def test_samples_of_a_request_without_a_seed_differ(engine: Engine) -> None:
    done = engine.generate(PROMPT, SamplingParams(max_tokens=11, n=3))[0]
    assert len({tuple(one.token_ids) for one in done.samples}) == 3


def by_index(chunks: list[Chunk]) -> list[list[int]]:
    return [[token for chunk in chunks if chunk.index == i for token in chunk.token_ids] for i in range(N)]


def test_stream_chunks_of_samples_contain_the_sample_index(engine: Engine) -> None:
    expected = [one.token_ids for one in engine.generate(PROMPT, SAMPLED)[0].samples]
    chunks = list(engine.stream(PROMPT, SAMPLED))

    async def collect() -> list[Chunk]:
        return [chunk async for chunk in engine.astream(PROMPT, SAMPLED)]

    for got in (chunks, asyncio.run(collect())):
        assert by_index(got) == expected
        ends = [chunk.index for chunk in got if chunk.finish_reason is not None]
        assert sorted(ends) == list(range(N))
    first_end = next(place for place, chunk in enumerate(chunks) if chunk.finish_reason is not None)
    assert {chunk.index for chunk in chunks[:first_end]} >= {0, 1}  # at the same time, not one after the other


def test_request_with_samples_that_is_aborted_ends_every_sample(engine: Engine) -> None:
    """By hand, because an engine in its own thread may end a completion before the abort."""
    with ByHand(engine) as by_hand:
        request = by_hand.submit(PROMPT, SAMPLED)
        while len(request.token_ids) < 3:
            by_hand.step()
        by_hand.abort(request)
        done = by_hand.result(request)
    assert [one.finish_reason for one in done.samples] == ["abort"] * N
    stream = engine.stream(PROMPT, SAMPLED)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: engine.pages_in_use == 0 and not engine.scheduler.has_work)  # closing waits for no turn


def test_result_of_a_request_with_samples_waits_for_all_of_them(engine: Engine) -> None:
    """With two slots the last completions end later than the first two."""
    done = engine.result(engine.submit(PROMPT, SAMPLED))
    assert [one.finish_reason for one in done.samples] == ["length"] * N


def test_sample_seeds_of_all_seeds_and_indices_differ() -> None:
    """They also differ from the seeds of requests without a seed."""
    seeds = [sample_seed(seed, index) for seed in (0, 1, 2**32, 2**64 - 1) for index in range(50)]
    drawn = [int(np.random.SeedSequence([0, number]).generate_state(1, np.uint64)[0]) for number in range(50)]
    assert len({*seeds, *drawn}) == len(seeds) + len(drawn) and all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None, 1025, 10**9])
def test_sampling_params_with_impossible_n_raise(n: object) -> None:
    with pytest.raises(ValueError, match=r"SamplingParams.n: expected an int from 1 to 1024"):
        SamplingParams(n=n)  # type: ignore[arg-type]
