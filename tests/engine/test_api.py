"""An engine shared by threads and tasks, what it says of itself, and what happens when something in it fails."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Engine, Metrics, SamplingParams
from jspec.engine.errors import RESTART
from jspec.engine.fair_lock import FairLock
from jspec.engine.metrics import LowAcceptanceWarning
from jspec.engine.prometheus import Gauges, Histogram, Latencies, exposition
from jspec.engine.request import Request
from jspec.engine.stats_logger import StatsLogger
from jspec.engine.tokenizer import ByteTokenizer
from jspec.step.decode import init_state
from tests.support import tiny

pytestmark = pytest.mark.once

VOCAB = 256
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3], [7, 7, 7, 7]]
PARAMS = [SamplingParams(max_tokens=6 + 3 * seed, seed=seed, temperature=0.9) for seed in range(len(PROMPTS))]


class Brittle(ByteTokenizer):
    """Fails when it meets some token, or whatever else is asked of it."""

    def __init__(self) -> None:
        self.fails: Callable[[Sequence[int]], bool] = lambda ids: False

    def decode(self, ids: Sequence[int]) -> str:
        if self.fails(ids):
            raise KeyError("no such token")
        return super().decode(ids)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        tiny.model(VOCAB, layers=1),
        tokenizer=Brittle(),
        slots=3,
        max_len=64,
        page_size=4,
        buckets=(3,),
        prefill_buckets=(16,),
        log_interval=None,
    )


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    return [engine.generate(prompt, p)[0].token_ids for prompt, p in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(autouse=True)
def _all_comes_back(engine: Engine, expected: list[list[int]]) -> Iterator[None]:
    """After every test: no page, slot or text is kept, and the engine works."""
    yield
    engine.tokenizer.fails = lambda ids: False  # type: ignore[union-attr]
    engine.scheduler.pages.check()
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    assert sorted(engine.scheduler._free_slots) == [0, 1, 2]
    assert not engine._abort_after_step and not engine._lock._queue
    assert [done.token_ids for done in engine.generate(PROMPTS[:2], PARAMS[:2])] == expected[:2]


PATIENCE = 60.0  # seconds after which something hangs


def _events(count: int) -> list[threading.Event]:
    return [threading.Event() for _ in range(count)]


def together(works: Sequence[Callable[[], None]]) -> None:
    """Run all at once, each in a thread; the first error comes here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


# -- threads and tasks


def test_threads_share_an_engine(engine: Engine, expected: list[list[int]]) -> None:
    """Each generates, streams or submits, over and over, beside the others."""

    def generates(i: int) -> None:
        assert engine.generate(PROMPTS[i], PARAMS[i])[0].token_ids == expected[i]

    def streams(i: int) -> None:
        chunks = list(engine.stream(PROMPTS[i], PARAMS[i]))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[i]
        text = "".join(chunk.text or "" for chunk in chunks)
        assert text == engine.generate(PROMPTS[i], PARAMS[i])[0].text and chunks[-1].finish_reason == "length"

    def submits(i: int) -> None:
        request = engine.submit(PROMPTS[i], PARAMS[i])
        assert engine.result(request).token_ids == expected[i]

    together([lambda i=i, use=use: use(i) for i in range(len(PROMPTS)) for use in (generates, streams, submits)])


def test_a_thread_may_abort_what_another_waits_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever step; here every one waits for the abort once there are tokens."""
    request, has_tokens, is_aborted = engine.submit([1, 2], SamplingParams(max_tokens=50)), *_events(2)
    done: list[Any] = []
    step = engine.step

    def steps() -> None:
        step()
        if request.token_ids:
            has_tokens.set()
            assert is_aborted.wait(PATIENCE)

    def abort() -> None:
        assert has_tokens.wait(PATIENCE)
        engine.abort(request)
        is_aborted.set()

    monkeypatch.setattr(engine, "step", steps)
    together([abort, lambda: done.append(engine.result(request))])
    assert done[0].finish_reason == "abort" and 0 < len(done[0].token_ids) < 50


def test_many_requests_take_one_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To queue them; to drop those that ended takes none, and to drop the others one."""
    taken: list[str] = []
    enter, step = FairLock.__enter__, Engine.step

    def counted(self: FairLock) -> None:
        taken.append("turn")
        enter(self)

    def steps(self: Engine) -> None:
        step(self)
        taken.pop()

    monkeypatch.setattr(FairLock, "__enter__", counted)
    monkeypatch.setattr(Engine, "step", steps)
    engine.generate(PROMPTS, PARAMS)
    assert len(taken) == 1
    requests = [engine.submit(prompt) for prompt in PROMPTS]
    engine._abort(requests)
    assert len(taken) == 1 + len(PROMPTS) + 1
    engine.abort(requests[0])
    assert len(taken) == 1 + len(PROMPTS) + 1 and engine.metrics.finished["abort"] >= len(PROMPTS)


def test_a_loop_does_not_wait_for_a_turn(engine: Engine) -> None:
    """Someone has the turn until the loop has gone on, beside a stream that is closed meanwhile."""
    is_held, gone_on = _events(2)

    def holds() -> None:
        with engine._lock:
            is_held.set()
            assert gone_on.wait(PATIENCE), "the loop waits"

    async def main() -> None:
        stream = engine.astream(PROMPTS[0], SamplingParams(max_tokens=40))
        await anext(stream)
        holder = asyncio.ensure_future(asyncio.to_thread(holds))
        await asyncio.to_thread(is_held.wait, PATIENCE)
        closing = asyncio.ensure_future(stream.aclose())  # type: ignore[attr-defined]
        for _ in range(3):
            await asyncio.sleep(0)
        gone_on.set()
        await holder
        await closing

    asyncio.run(main())


def test_a_task_cancelled_while_it_is_queued_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that queues its request goes on, and comes too late."""
    is_queueing, go_on = _events(2)
    queue = Engine._queue

    def slow(self: Engine, requests: Sequence[Request]) -> None:
        is_queueing.set()
        assert go_on.wait(PATIENCE)
        queue(self, requests)

    async def reads() -> None:
        async for _ in engine.astream([1, 2, 3], SamplingParams(max_tokens=5)):
            pass

    async def main() -> None:
        task = asyncio.create_task(reads())
        await asyncio.to_thread(is_queueing.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_queue", slow)
        asyncio.run(main())  # waits for its threads
    assert not engine.scheduler.has_work


def test_what_was_never_queued_is_not_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.metrics.finished
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_check_open", Fault(engine._check_open, 2, RuntimeError("closed meanwhile")))
        with pytest.raises(RuntimeError, match="closed meanwhile"):
            engine.generate(PROMPTS, PARAMS)
    assert engine.metrics.finished == before


def test_many_tasks_stream_at_once(engine: Engine, expected: list[list[int]]) -> None:
    """Four times as many as there are slots; some leave early, and the loop stays free."""
    ticks = 0

    async def one(i: int) -> list[int]:
        got: list[int] = []
        async for chunk in engine.astream(PROMPTS[i], PARAMS[i]):
            got += chunk.token_ids
        return got

    async def leaves(i: int) -> list[int]:
        got: list[int] = []
        stream = engine.astream(PROMPTS[i], PARAMS[i])
        async for chunk in stream:
            got += chunk.token_ids
            if len(got) >= 2:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return got

    async def ticking() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> list[Any]:
        ticker = asyncio.create_task(ticking())
        cancelled = asyncio.create_task(one(5))
        tasks = [one(i) for i in range(6)] + [leaves(i) for i in range(6)]
        asyncio.get_running_loop().call_later(0.02, cancelled.cancel)
        results = await asyncio.gather(*tasks, cancelled, return_exceptions=True)
        ticker.cancel()
        return results

    results = asyncio.run(main())
    assert results[:6] == expected
    assert [got == expected[i][: len(got)] and len(got) >= 2 for i, got in enumerate(results[6:12])] == [True] * 6
    assert isinstance(results[12], asyncio.CancelledError) or results[12] == expected[5]
    assert ticks > 20


def test_a_bad_prompt_is_refused_before_anything_is_awaited(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.astream([])


@pytest.mark.parametrize("is_later", [False, True])
def test_a_stream_thrown_away_in_the_middle_of_a_step_is_aborted(
    engine: Engine, expected: list[list[int]], is_later: bool
) -> None:
    """A garbage collector may run anywhere, also where the engine holds its own lock and before the stream's row."""
    first = engine.submit(PROMPTS[1], PARAMS[1]) if is_later else None
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=40))
    next(stream)
    other = engine.submit(PROMPTS[2], PARAMS[2])

    def closes(ids: Sequence[int]) -> bool:
        stream.close()
        return False

    engine.tokenizer.fails = closes  # type: ignore[union-attr]
    for request, number in ((first, 1), (other, 2)):
        if request is not None:
            done = engine.result(request)
            assert (done.error, done.token_ids) == (None, expected[number])


def test_an_abort_in_the_middle_of_a_step_leaves_the_result(engine: Engine) -> None:
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=40))

    def aborts(ids: Sequence[int]) -> bool:
        engine.abort(request)
        return False

    engine.tokenizer.fails = aborts  # type: ignore[union-attr]
    assert engine.result(request).finish_reason == "abort"


# -- turns


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def test_a_lock_is_handed_on_in_order() -> None:
    """Whoever had it comes behind those that asked meanwhile."""
    turns, order = FairLock(), []

    def asks(number: int) -> None:
        with turns, turns:  # also from within
            order.append(number)

    def first() -> None:
        with turns:
            for number in range(1, 4):
                threads.append(threading.Thread(target=asks, args=(number,), daemon=True))
                threads[-1].start()
                wait_until(lambda count=number + 1: len(turns._queue) == count)
            order.append(0)
        asks(4)

    threads: list[threading.Thread] = []
    together([first])
    for thread in threads:
        thread.join(PATIENCE)
    assert order == [0, 1, 2, 3, 4] and not turns._queue


class Interrupts:
    """A lock that an interrupt comes into once, in the thread that made it."""

    def __init__(self, original: Any, *, behind: bool) -> None:
        self.original, self.behind, self.thread = original, behind, threading.get_ident()

    def __enter__(self) -> None:
        if not self.behind:
            self.interrupt()
        self.original.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.original.__exit__(*exc)
        self.interrupt()

    def interrupt(self) -> None:
        if self.thread == threading.get_ident():
            self.thread = 0
            raise KeyboardInterrupt


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_while_it_is_given_back_wakes_the_next(behind: bool) -> None:
    turns, served = FairLock(), []

    def waits() -> None:
        with turns:
            served.append(1)

    thread = threading.Thread(target=waits, daemon=True)
    turns.__enter__()
    thread.start()
    wait_until(lambda: len(turns._queue) == 2)
    turns._guard = Interrupts(turns._guard, behind=behind)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        turns.__exit__()
    thread.join(PATIENCE)
    assert served and not turns._queue and not turns.is_mine


def test_an_interrupt_as_it_is_taken_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = FairLock()
    with monkeypatch.context() as patch:
        patch.setattr("jspec.engine.fair_lock.threading.get_ident", Fault(threading.get_ident, 2, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
    assert not turns._queue and not turns.is_mine


def test_an_interrupted_wait_leaves_no_place_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = FairLock()

    class Interrupted:
        def __init__(self) -> None:
            self.calls = 0

        def acquire(self) -> None:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    def wait() -> None:
        monkeypatch.setattr("jspec.engine.fair_lock.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
        monkeypatch.undo()

    with turns:
        together([wait])
        assert len(turns._queue) == 1
    together([lambda: turns.__enter__() or turns.__exit__()])
    assert not turns._queue


# -- what it says


def samples(text: str) -> dict[str, float]:
    """By name and labels, the model's left out; every family must be announced."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            match = re.fullmatch(r'(vllm:\w+)\{model_name="m\\"1",?(.*)\} (\S+)', line)
            assert match, line
            name, labels, value = match.groups()
            family = next(f for f in (name, re.sub("_(bucket|sum|count)$", "", name)) if f in kinds)
            assert kinds[family] != "counter" or family.endswith("_total")
            found[f"{name.removeprefix('vllm:')} {labels}".strip()] = float(value)
    return found


def test_the_text_for_prometheus_says_what_the_metrics_say(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=40))
    next(stream)
    found, metrics = samples(engine.prometheus('m"1')), engine.metrics
    assert found["num_requests_running"] == 1 and found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_perc"] == engine.pages_in_use / (engine.scheduler.pages.pages - 1) > 0
    for name, value in (
        ("generation_tokens_total", metrics.num_tokens),
        ("prompt_tokens_total", metrics.num_prompt_tokens),
        ("prefix_cache_queries_total", metrics.num_prompt_tokens),
        ("prefix_cache_hits_total", metrics.num_cached_tokens),
        ("num_preemptions_total", metrics.num_preemptions),
        ("spec_decode_num_drafts_total", metrics.num_drafts),
    ):
        assert found[name] == value
    assert metrics.num_tokens > 0 and metrics.pages_in_use == engine.pages_in_use
    assert found['request_success_total finished_reason="length"'] == metrics.finished["length"] > 0
    count = found["time_to_first_token_seconds_count"]
    assert count == found['time_to_first_token_seconds_bucket le="+Inf"'] == metrics.finished["length"]
    stream.close()
    assert samples(engine.prometheus('m"1'))['request_success_total finished_reason="abort"'] >= 1


def test_samples_by_position_and_reason_and_a_histogram_by_hand() -> None:
    metrics = Metrics(num_accepted_per_position=[5, 2], finished={"eos": 2, "stop": 1, "error": 1})
    latencies = Latencies(first_token=Histogram((1.0, 2.0)))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        latencies.first_token.observe(seconds)
    found = samples(exposition(metrics, latencies, Gauges(0, 0, 0.0), 'm"1'))
    per_position = "spec_decode_num_accepted_tokens_per_pos_total position="
    assert (found[per_position + '"0"'], found[per_position + '"1"']) == (5, 2)
    assert found['request_success_total finished_reason="stop"'] == 3
    buckets = [found[f'time_to_first_token_seconds_bucket le="{bound}"'] for bound in ("1.0", "2.0", "+Inf")]
    assert buckets == [2, 3, 4] and found["time_to_first_token_seconds_sum"] == 12.0


def test_a_line_is_logged_once_an_interval(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="jspec.engine.stats_logger")
    engine.generate(PROMPTS[0], PARAMS[0])
    assert not caplog.records, "no interval was given"
    monkeypatch.setattr(engine, "_stats_logger", StatsLogger(3600.0))
    engine.generate(PROMPTS[0], PARAMS[0])
    assert not caplog.records
    monkeypatch.setattr(engine, "_stats_logger", StatsLogger(0.0))
    request = engine.submit(PROMPTS[0], PARAMS[0])
    for _ in range(3):
        engine.step()
    assert len(caplog.records) == 3
    assert re.match(r"1 running, 0 waiting, \d+ % of the pages held, \d+\.\d tokens/s, mean", caplog.messages[-1])
    engine.result(request)


# -- failures


def test_a_tokenizer_that_fails_ends_its_request_alone(engine: Engine, expected: list[list[int]]) -> None:
    bad = next(i for i in (3, 4, 5) if len(set(expected[i][3:])) > 1)
    token = next(t for t in expected[bad][3:] if all(t not in expected[i] + PROMPTS[i] for i in range(6) if i != bad))
    engine.tokenizer.fails = lambda ids: token in ids  # type: ignore[union-attr]
    done = engine.generate(PROMPTS, PARAMS)
    for i, one in enumerate(done):
        if i == bad:
            assert one.finish_reason == "error" and isinstance(one.error, KeyError)
            assert one.token_ids == expected[i][: len(one.token_ids)]
        else:
            assert (one.finish_reason, one.error, one.token_ids) == ("length", None, expected[i])
    with pytest.raises(KeyError, match="no such token"):
        list(engine.stream(PROMPTS[bad], PARAMS[bad]))

    async def main() -> None:
        async for _ in engine.astream(PROMPTS[bad], PARAMS[bad]):
            pass

    with pytest.raises(KeyError, match="no such token"):
        asyncio.run(main())


def test_a_tokenizer_that_fails_at_the_very_end_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: Any) -> None:
        raise KeyError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr("jspec.engine.request.OutputState.finish_text", finish)
        (done,) = engine.generate(PROMPTS[0], PARAMS[0])
    assert done.finish_reason == "error" and isinstance(done.error, KeyError)


def test_one_that_fails_before_anything_is_queued_leaves_nothing(engine: Engine) -> None:
    engine.tokenizer.fails = lambda ids: 9 in ids  # type: ignore[union-attr]
    with pytest.raises(KeyError, match="no such token"):
        engine.generate(PROMPTS, PARAMS)


class Fault:
    """A program or a method that fails once, at its n-th call."""

    def __init__(self, original: Callable[..., Any], at: int, error: BaseException) -> None:
        self.original, self.left, self.error = original, at, error

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.original(*args)


@pytest.mark.parametrize("where", ["round", "prefill", "read"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_lost_step_ends_who_was_in_it_and_the_engine_goes_on(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    """Those that wait are served by a state made anew, whose pages hold nothing of what was kept before."""
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    programs = engine.core.runner.programs
    with monkeypatch.context() as patch:
        if where == "read":
            patch.setattr(engine.core, "_read", Fault(engine.core._read, at, error))
        elif where == "round":
            key = (3, 0, False)
            patch.setitem(programs.rounds, key, Fault(programs.rounds[key], at, error))
        else:
            patch.setitem(programs.prefill, 16, Fault(programs.prefill[16], at, error))
        done = engine.generate(PROMPTS, PARAMS)
    failed = [one for one in done if one.finish_reason == "error"]
    assert 1 <= len(failed) <= 3 and all(one.error is error for one in failed)
    for one, all_ in zip(done, expected, strict=True):
        assert one.token_ids == (all_[: len(one.token_ids)] if one.error else all_)
    assert engine.healthy
    assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected


def test_a_warning_turned_into_an_error_is_the_callers(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, warning = engine.submit(PROMPTS[0], PARAMS[0]), LowAcceptanceWarning("the drafts hardly help")
    with monkeypatch.context() as patch:
        patch.setattr(engine._acceptance_warner, "count", Fault(engine._acceptance_warner.count, 2, warning))
        with pytest.raises(LowAcceptanceWarning):
            engine.generate(PROMPTS[1], PARAMS[1])
    assert engine.result(request).token_ids == expected[0]


def test_an_interrupt_while_a_step_is_dispatched_goes_to_the_caller(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.stream(PROMPTS[3], PARAMS[3])
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "_dispatch", Fault(engine.core._dispatch, 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, PARAMS)
    with pytest.raises(RuntimeError, match="interrupted") as caught:  # its step was lost too: an error, and no gap
        list(stream)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_an_interrupt_while_a_request_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends all the same; the next answer is right."""
    request = engine.submit(PROMPTS[0], PARAMS[0])
    with monkeypatch.context() as patch:
        patch.setattr("jspec.engine.request.OutputState.finish_text", Fault(lambda *_: None, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.result(request)
        assert request.finish_reason == "error"
    assert isinstance(engine.result(request).error, RuntimeError)


def test_a_second_interrupt_while_the_state_is_made_anew(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is ended and forgotten by then; whoever steps next makes the state, and no zeroed page is found."""
    prompt, params = PROMPTS[2] + PROMPTS[3], SamplingParams(max_tokens=12, temperature=0.0)
    expected = engine.generate(prompt, params)[0].token_ids
    running = engine.submit(PROMPTS[3], PARAMS[3])
    for _ in range(3):
        engine.step()
    for where in ("init_state", "jax.block_until_ready"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.core, "_dispatch", Fault(engine.core._dispatch, 1, KeyboardInterrupt()))
            patch.setattr(f"jspec.engine.model_runner.{where}", Fault(np.zeros, 1, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS[3], PARAMS[3])
        assert engine._recovery.lost is not None and not engine.scheduler.pages._page_of
        assert engine.result(running).finish_reason == "error"
        (again,) = engine.generate(prompt, params)
        assert (again.token_ids, again.metrics.num_cached_tokens) == (expected, 0) and engine.healthy
        running = engine.submit(PROMPTS[3], PARAMS[3])
        engine.step()
    engine.result(running)


def test_a_step_whose_result_cannot_be_read_holds_nobody_back(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not one that was preempted while it was under way, which waits and comes back."""
    pages = engine.scheduler.pages
    pages.clear()
    pages.reserve(-1, (pages.num_free - 11) * pages.page_size)
    params = SamplingParams(max_tokens=30, seed=1)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    read, failed = engine.core._read, []

    def fails(plan: Any, output: Any) -> Any:
        if not failed and requests[1].state.slot is None and requests[1].state.steps_in_flight:
            failed.append(plan)
            raise RuntimeError("lost on its way")
        return read(plan, output)

    monkeypatch.setattr(engine.core, "_read", fails)
    for _ in range(300):
        engine.step()
    pages.release(-1)
    assert failed and [r.finish_reason for r in requests] == ["error", "length"]
    done = [engine.result(request) for request in requests]
    assert done[1].metrics.num_preemptions == 1
    assert done[1].token_ids == engine.generate(prompts[1], params)[0].token_ids


def test_the_old_pools_are_gone_before_the_new_ones_are_made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program that failed did not consume them, and its error's frames refer to them."""
    old, programs, is_gone = jax.tree.leaves(engine.core.runner.state), engine.core.runner.programs, []

    def refuses(params: Any, state: Any, packed: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def init(*args: Any) -> Any:
        is_gone.extend(leaf.is_deleted() for leaf in old)
        return init_state(*args)

    with monkeypatch.context() as patch:
        patch.setattr("jspec.engine.model_runner.init_state", init)
        patch.setitem(programs.prefill, 16, refuses)
        (done,) = engine.generate(PROMPTS[0], PARAMS[0])
    assert done.finish_reason == "error" and is_gone and all(is_gone)
    frames = [frame for frame, _ in traceback.walk_tb(done.error.__traceback__) if frame.f_code.co_name == "refuses"]
    assert frames and "state" not in frames[0].f_locals


def test_an_interrupt_while_it_waits_loses_nothing(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class StepResult:
        def block_until_ready(self) -> None:
            raise KeyboardInterrupt

    stream = engine.stream(PROMPTS[3], PARAMS[3])
    got = list(next(stream).token_ids)
    plan, output = engine.core.in_flight[0]
    engine.core.in_flight[0] = plan, replace(output, report=StepResult())  # type: ignore[type-var]
    request = engine.submit(PROMPTS[0], PARAMS[0])
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.core.in_flight[0] = plan, output
    got += [token for chunk in stream for token in chunk.token_ids]
    assert got == expected[3] and engine.result(request).token_ids == expected[0]


def test_a_device_that_cannot_be_used_any_more(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Engine(tiny.model(VOCAB, layers=1), slots=1, max_len=64, buckets=(1,), prefill_buckets=(16,))
    gone = RuntimeError("device lost")
    monkeypatch.setattr("jspec.engine.model_runner.init_state", Fault(np.zeros, 1, gone))
    monkeypatch.setattr(one.core, "_read", Fault(one.core._read, 2, gone))
    done = one.generate(PROMPTS, PARAMS)
    assert [turn.finish_reason for turn in done] == ["error"] * len(PROMPTS)
    assert not one.healthy
    assert done[0].error is gone and done[0].error.__notes__ == [RESTART]
    for turn in done[1:]:
        assert str(turn.error) == RESTART and turn.error.__cause__ is gone
    for use in (lambda: one.generate([1]), lambda: one.submit([1])):
        with pytest.raises(RuntimeError, match="restart the process"):
            use()
    one.close()
