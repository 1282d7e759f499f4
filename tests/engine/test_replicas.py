"""Test that replicas answer as one engine does, share the load, use their prefix caches, and fail alone."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import Eagle3, Engine, Replicas, SamplingParams, Tree
from jspec.engine.callers import replica_threads
from jspec.engine.callers.replica_threads import BUSIER, choose
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.metrics import Metrics
from jspec.engine.run.errors import RESTART
from pallas_kernels.layers.shard import AXIS
from tests.support import byte_pair, engines, paper
from tests.support.brittle import PATIENCE, Fault, run_together
from tests.support.serving import held, wait_until

SLOTS = engines.SLOTS
PROMPTS = [bytes([65 + i % 26] * (1 + i % 11)).decode() for i in range(24)]
PARAMS = [SamplingParams(max_tokens=4 + i % 13, temperature=i % 3 / 2, n=1 + i % 7 // 6) for i in range(24)]


def devices() -> list[jax.Device]:
    """Return the devices of two replicas."""
    return jax.devices()[1:3]


@cache
def alone() -> Engine:
    """Return one engine on a device of paper."""
    return paper.byte_engine()


@pytest.fixture(scope="module")
def pair() -> Iterator[Replicas]:
    with Replicas(paper.byte_engine, devices()) as made:
        yield made


@pytest.fixture
def two(pair: Replicas) -> Iterator[Replicas]:
    """Yield the shared replicas with empty prefix caches; after each test check that they hold nothing."""
    for engine in pair.engines:
        engine.scheduler.pages.clear()
    yield pair
    wait_until(lambda: all(not engine.scheduler.has_work for engine in pair.engines))
    assert pair.metrics.pages_in_use == 0 and pair.failed == () and pair.healthy
    for engine in pair.engines:
        engine.scheduler.pages.check()


def texts(served: Engine | Replicas, params: Sequence[SamplingParams] = PARAMS) -> list[list[str | None]]:
    """Return the texts of all completions; the requests have the numbers from 1, so the same seeds each time."""
    served.input_processor.ids = count(1)
    return [[sample.text for sample in done.samples] for done in served.generate(PROMPTS, params)]


@cache
def expected() -> list[list[str | None]]:
    return texts(alone())


def gained(served: Engine | Replicas, before: Metrics, name: str) -> int:
    return getattr(served.metrics, name) - getattr(before, name)


def always(index: int) -> Callable[..., int]:
    return lambda cached, loads, slots: index


# -- the answers of one engine


@pytest.mark.parametrize("make", [paper.byte_engine, engines.byte_engine])
def test_two_replicas_give_the_texts_of_one_engine_and_both_work(make: Callable[..., Engine]) -> None:
    """The requests are greedy, or sampled with seeds of the engine; some have two completions."""
    alone = make(Mesh(np.array(devices()[:1]), (AXIS,)))  # on the device of the first replica, whose programs it runs
    with Replicas(make, devices()) as two:
        assert texts(two) == texts(alone)
        tokens = [engine.metrics.num_tokens for engine in two.engines]
        assert min(tokens) > sum(tokens) / 4


def test_replicas_have_their_state_on_devices_of_their_own() -> None:
    with Replicas(engines.byte_engine, devices()) as two:
        found = [engine.core.runner.state.root.devices() for engine in two.engines]
    assert found == [{device} for device in devices()]


@pytest.mark.parametrize("index", [0, 1])
def test_texts_do_not_depend_on_the_replica(two: Replicas, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setattr(replica_threads, "choose", always(index))
    before = two.engines[1 - index].metrics
    assert texts(two) == expected()
    assert gained(two.engines[1 - index], before, "num_tokens") == 0


def test_streams_submissions_and_tasks_of_many_threads_give_the_texts_of_generate(two: Replicas) -> None:
    """Two threads with an event loop each, one with streams, one with submissions, all at the same time."""
    params = [SamplingParams(max_tokens=12, temperature=0.7, seed=i) for i in range(8)]
    wanted = [done.text for done in alone().generate(PROMPTS[:8], params)]

    async def tasks() -> None:
        async def streamed(i: int) -> str:
            return "".join([chunk.text or "" async for chunk in two.astream(PROMPTS[i], params[i])])

        assert await asyncio.gather(*map(streamed, range(8))) == wanted
        done = await asyncio.gather(*(two.agenerate(PROMPTS[i], params[i]) for i in range(8)))
        assert [each.text for (each,) in done] == wanted

    def streams() -> None:
        for prompt, own, text in zip(PROMPTS, params, wanted, strict=False):
            chunks = list(two.stream(prompt, own))
            assert "".join(chunk.text or "" for chunk in chunks) == text
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]

    def submissions() -> None:
        asked = [two.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False)]
        for _ in range(2):
            assert [two.result(request).text for request in asked] == wanted

    run_together([lambda: asyncio.run(tasks()), lambda: asyncio.run(tasks()), streams, submissions])


# -- the choice of a replica


@pytest.mark.parametrize(
    ("cached", "loads", "chosen"),
    [
        ([0, 0, 0], [0, 0, 0], 0),  # the first among equals
        ([0, 0, 0], [2, 1, 1], 1),  # the least busy
        ([0, 3, 2], [0, 3, 0], 1),  # the longest prefix, although it is busier
        ([0, 3, 3], [0, 3, 2], 2),  # among equal prefixes the least busy
        ([9, 0, 0], [4, 3, 3], 1),  # no free slot, and another replica has one
        ([9, 0, 0], [4, 4, 5], 0),  # none has a free slot
        ([9, 1, 0], [4 + BUSIER, 5, 4], 1),  # too busy: the longest prefix among the others
        ([9, 1, 0], [3 + BUSIER, 5, 4], 0),
    ],
)
def test_choice_follows_prefixes_unless_a_replica_is_too_busy(cached: list[int], loads: list[int], chosen: int) -> None:
    assert choose(cached, loads, SLOTS) == chosen


def test_replica_with_a_long_prefix_never_has_many_more_requests_than_another() -> None:
    """Without the limit all requests would go to the first replica, which the second count shows."""
    loads, without = [0, 0], [0, 0]
    for _ in range(100):
        loads[choose([50, 0], loads, 64)] += 1
        without[max(range(2), key=[50, 0].__getitem__)] += 1
    assert loads[0] - loads[1] <= BUSIER and sum(loads) == 100
    assert without == [100, 0]


@pytest.mark.parametrize("routed", [True, False])
def test_requests_go_where_their_prefix_is_cached(two: Replicas, monkeypatch: pytest.MonkeyPatch, routed: bool) -> None:
    """Three prefixes at once, for both replicas, and then each twice again.

    If the replicas took turns instead, all three would go the second time to the one that does not have them.
    """
    turn = count()
    if not routed:
        monkeypatch.setattr(replica_threads, "choose", lambda cached, loads, slots: next(turn) % 2)
    prefixes, before = [letter * 24 for letter in "abc"], two.metrics
    with held(two.engines[0]), held(two.engines[1]):
        asked = [two.submit(prefix, max_tokens=2) for prefix in prefixes]
    assert [two.result(request).metrics.num_cached_tokens for request in asked] == [0, 0, 0]
    for suffix in "12":
        for prefix in prefixes:
            two.generate(prefix + suffix, max_tokens=2)
    assert gained(two, before, "num_cached_tokens") == 24 * (6 if routed else 3)


def test_cached_prefix_of_a_replica_without_free_slots_does_not_make_requests_wait(two: Replicas) -> None:
    """The first replica has the prefix and four slots; the fifth and sixth request go to the second one."""
    two.generate("p" * 20, max_tokens=1)
    home = next(engine for engine in two.engines if engine.scheduler.pages.match(digests_of(two, "p" * 20)))
    with held(two.engines[0]), held(two.engines[1]):
        asked = [two.submit("p" * 20, max_tokens=3) for _ in range(6)]
        loads = [thread.num_unfinished for thread in two.threads._threads]
        assert loads == ([4, 2] if home is two.engines[0] else [2, 4])
    assert all(two.result(request).finish_reason == "length" for request in asked)


def digests_of(served: Replicas, prompt: str) -> list[bytes]:
    """Return the digests of a prompt's pages."""
    request = served.prepare(prompt)
    return served.engines[0].scheduler._digests_to_match(request)


# -- ends


@pytest.mark.parametrize("index", [0, 1])
def test_aborted_requests_and_closed_streams_free_their_pages(
    two: Replicas, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """The fixture checks that no page is held."""
    monkeypatch.setattr(replica_threads, "choose", always(index))
    request = two.submit("abc", max_tokens=60, n=2)
    two.abort(request)
    assert {sample.finish_reason for sample in two.result(request).samples} == {"abort"}
    two.abort(request)
    stream = two.stream("abc", max_tokens=60)
    assert next(stream).text is not None
    stream.close()

    async def leave() -> None:
        with held(two.engines[index]):
            task = asyncio.create_task(two.agenerate(["abc", "abd"], max_tokens=60))
            while two.threads._threads[index].num_unfinished < 2:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        chunks = two.astream("abc", max_tokens=60)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert two.generate("abc", max_tokens=2)[0].finish_reason == "length"


def test_event_loop_that_ends_before_its_request_does_no_harm(two: Replicas) -> None:
    """The engine delivers the end of the request to a loop that is closed."""

    async def leave() -> None:
        task = asyncio.create_task(two.agenerate("abc", max_tokens=3))
        while not two.threads._threads[0].num_unfinished:
            await asyncio.sleep(0.005)
        assert not task.done()

    with held(two.engines[0]), held(two.engines[1]):
        asyncio.run(leave())
    wait_until(lambda: two.threads._threads[0].num_unfinished == 0)
    assert two.generate("abc", max_tokens=2)[0].finish_reason == "length"


def test_random_aborts_of_200_submissions_leave_no_request(two: Replicas) -> None:
    """The fixture checks that no page or slot is held."""
    draw, asked = random.Random(0), []
    for i in range(200):
        asked.append(two.submit(PROMPTS[i % 24], max_tokens=20, seed=i, n=1 + i % 2))
        if draw.random() < 0.8:
            two.abort(asked[draw.randrange(i + 1)])
    reasons = [sample.finish_reason for request in asked for sample in two.result(request).samples]
    assert len(reasons) == 300 and set(reasons) == {"abort", "length"}


# -- failures


def lose(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int = 1) -> None:
    """Let an engine fail for good: a dispatch fails, and then the state cannot be made anew."""
    runner = engine.core.runner
    monkeypatch.setattr(runner, "dispatch", Fault(runner.dispatch, at, OSError("device lost")))
    monkeypatch.setattr(runner, "reset_state", Fault(lambda error: None, 1, OSError("no memory")))


def test_failed_replica_loses_only_its_own_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.7, seed=i) for i in range(8)]
    wanted = [done.text for done in alone().generate(PROMPTS[:8], params)]
    with Replicas(paper.byte_engine, devices()) as two:
        lose(two.engines[0], monkeypatch, at=3)
        with held(two.engines[0]), held(two.engines[1]):
            asked = [two.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False)]
            own = {id(request) for request in two.threads._threads[0]._deliveries.unfinished()}
        done = [two.result(request) for request in asked]
        lost = [index for index, request in enumerate(asked) if id(request) in own]
        assert len(lost) == 4 and [i for i in range(8) if done[i].finish_reason == "error"] == lost
        errors = [done[index].error for index in lost]
        assert any("device lost" in str(error) for error in errors)
        for error in errors:  # those that the engine had not begun are told to start anew
            assert error is not None and ("device lost" in f"{error} {error.__cause__}" or RESTART in str(error))
        assert all(done[i].text == wanted[i] for i in set(range(8)) - set(lost))
        with caplog.at_level(logging.ERROR):
            assert [each.text for each in two.generate(PROMPTS[:8], params)] == wanted
        name = f"replica 0 ({devices()[0]})"
        assert two.failed == (name,) and two.healthy
        assert [r.message for r in caplog.records if "serve on" in r.message] == [f"{name} has failed; 1 of 2 serve on"]
        lose(two.engines[1], monkeypatch)
        assert two.generate("a")[0].finish_reason == "error"
        with pytest.raises(RuntimeError, match=re.escape(f"all replicas have failed: {name}, replica 1 (")):
            two.generate("a")
        with pytest.raises(RuntimeError, match="all replicas have failed"):
            next(two.stream("a"))
        assert not two.healthy


def test_request_that_is_placed_as_a_thread_ends_goes_to_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica's thread has ended, which is noticed only when the request is handed to it."""
    two = Replicas(paper.byte_engine, devices())
    threads = two.threads
    first, second = threads._threads
    request, late = two.prepare("a", max_tokens=60), two.prepare("a")

    def submit(*arguments: Any, **options: Any) -> None:
        first._error = OSError("a broken thread")
        raise RuntimeError("this thread has ended")

    monkeypatch.setattr(first, "submit", submit)
    with held(two.engines[1]):
        threads.submit({"key": request}, print)
        assert list(second._deliveries._submissions) == ["key"] and threads.failed == (f"replica 0 ({devices()[0]})",)
        threads.abort("key")
    two.close()
    with pytest.raises(RuntimeError, match="expected running replicas"):
        threads.submit({"late": late}, print)
    assert request.finish_reason == "abort"


def test_key_or_request_that_a_replica_has_is_refused_by_all(two: Replicas) -> None:
    threads, request = two.threads, two.prepare("a", max_tokens=1)
    with held(two.engines[0]), held(two.engines[1]):
        threads.submit({"key": request}, lambda deliveries: None)
        with pytest.raises(ValueError, match="key: expected one that no unfinished request has"):
            threads.submit({"key": two.prepare("a")}, print)
        with pytest.raises(ValueError, match="was not submitted before"):
            threads.submit({"other": request}, print)


# -- the replicas as an object


def test_close_ends_open_requests_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = list[InputProcessor](), InputProcessor.close
    monkeypatch.setattr(InputProcessor, "close", lambda self: (closed.append(self), close(self)))
    with Replicas(paper.byte_engine, devices()) as two:
        with held(two.engines[0]), held(two.engines[1]):
            asked = [two.submit("abc", max_tokens=60) for _ in range(12)]
            closing = threading.Thread(target=two.close)
            closing.start()
            time.sleep(0.05)
        closing.join(PATIENCE)
        assert {two.result(request).finish_reason for request in asked} <= {"abort", "length"}
        assert two.result(asked[-1]).finish_reason == "abort"
        with pytest.raises(RuntimeError, match="these replicas are closed"):
            two.generate("abc")
        assert repr(two).startswith("Replicas(closed, 2 x Engine(closed, llama model")
        with pytest.raises(TypeError, match="Replicas: expected an object that can be copied or pickled"):
            pickle.dumps(two)
    assert all(engine.core.runner.state is None for engine in two.engines)
    assert two.input_processor in closed, "it has processes that compile grammars"


def test_replicas_that_nobody_holds_end_their_threads_and_free_their_memory() -> None:
    two = Replicas(paper.byte_engine, devices())
    made, threads = two.engines, two.threads._threads
    assert all(thread.healthy for thread in threads)
    del two
    assert [engine.core.runner.state for engine in made] == [None, None]
    assert not any(thread._thread.is_alive() for thread in threads)


@pytest.mark.long
def test_replicas_of_two_devices_each_give_the_texts_of_one_engine() -> None:
    with Replicas(engines.byte_engine, tensor_parallel=2) as two:
        assert [engine.core.runner.program.mesh.size for engine in two.engines] == [2, 2]  # type: ignore[union-attr]
        assert texts(two) == texts(engines.byte_engine())


def test_metrics_are_sums_and_the_prometheus_text_has_each_engine(two: Replicas) -> None:
    texts(two)
    assert two.metrics.num_tokens == sum(engine.metrics.num_tokens for engine in two.engines)
    assert (two.num_slots, two.num_pages) == (2 * SLOTS, sum(engine.num_pages for engine in two.engines))
    lines = two.prometheus("m").splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == len(set(heads))
    found = dict(re.findall(r'vllm:generation_tokens_total\{model_name="m",engine="(\d)"\} (\S+)', "\n".join(lines)))
    assert found == {str(i): f"{engine.metrics.num_tokens:.1f}" for i, engine in enumerate(two.engines)}
    single = [engine.prometheus("m", number=i).splitlines() for i, engine in enumerate(two.engines)]
    assert set(lines) == {line for text in single for line in text}


def test_chat_warmup_and_requests_of_other_engines_are_those_of_an_engine(two: Replicas) -> None:
    with pytest.raises(ValueError, match="byte tokenizer has no chat template"):
        two.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="of another engine"):
        two.result(alone().prepare("a"))
    with pytest.raises(ValueError, match="result: expected a request that submit returned, got request"):
        two.result(two.prepare("a"))
    with pytest.raises(TypeError, match="generate: expected max_tokens=, got max_new_tokens="):
        two.generate("a", max_new_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="prompt: expected fewer tokens than max_len=64"):
        two.submit("a" * 64)


# -- speed


@pytest.mark.timing
def test_two_replicas_of_the_byte_pair_emit_more_tokens_a_second_than_one_engine() -> None:
    """On two cores, which one engine's matrix products use too, an engine with the slots of both is about as fast."""
    options: dict[str, Any] = dict(tokenizer="bytes", prefill_buckets=(128,), max_len=256)

    def make(mesh: Any, slots: int = SLOTS) -> Engine:
        drafter = Eagle3.from_pretrained(byte_pair.HEAD, tree=Tree.chain(4))
        own = dict(slots=slots, buckets=(slots,))
        return Engine.from_pretrained(byte_pair.TARGET, drafter=drafter, mesh=mesh, **options, **own)

    prompts, params = [f"def f{i}(" for i in range(32)], SamplingParams(max_tokens=128, temperature=0.0)

    def speed(served: Engine | Replicas) -> float:
        start = time.perf_counter()
        tokens = sum(len(done.token_ids) for done in served.generate(prompts, params))
        return tokens / (time.perf_counter() - start)

    with make(None) as one, make(None, 2 * SLOTS) as wide, Replicas(make, 2) as two:
        served = {"one": one, "one with twice the slots": wide, "two": two}
        for each in served.values():
            each.warmup()
        found = [{name: speed(each) for name, each in served.items()} for _ in range(5)]
    median = {name: statistics.median(times[name] for times in found) for name in served}
    print("tokens a second:", {name: round(value) for name, value in median.items()}, os.getloadavg())
    assert median["two"] > 1.1 * median["one"]
