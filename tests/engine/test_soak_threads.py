"""Threads and asyncio tasks use one engine as servers do, for some seconds, on a real device as long as one asks.

They complete, stream, read slowly, cancel, abort and send wrong requests, while pages are few and steps fail. Each
result is compared with the tokens of its request alone. `pytest -s` prints a table; for ten minutes with each target
run `JSPEC_SOAK_SECONDS=600 pytest -m long -s tests/engine/test_soak_threads.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jspec import Chunk, Completion, Engine, SamplingParams
from jspec.engine.run import errors
from tests.engine import test_soak as soak
from tests.support import engines, paper

pytestmark = pytest.mark.once
compiled = soak.compiled

SECONDS = float(os.environ.get("JSPEC_SOAK_SECONDS", "20"))  # on a real device
THREADS, LOOPS, TASKS = 10, 2, 4  # threads of blocking calls, event loops, tasks of each loop
REQUESTS = 150  # different requests
PATIENCE = 120.0  # seconds for all threads to end
GROWTH = 60  # MB of memory after the first quarter of the time
INJECTED = ("RESOURCE_EXHAUSTED", "lost on its way", "device lost", "no such token")


@dataclass
class Callers:
    """Callers of one engine, who count what they did and collect what went wrong."""

    engine: Engine
    submissions: list[soak.Submission]
    expected: list[list[list[int]]]
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        with self.guard:
            self.done[name] += 1

    def check(self, index: int, sample: int, tokens: list[int], reason: str | None) -> None:
        """Compare tokens with those of the request alone; an unfinished completion has the first ones of them."""
        expected = self.expected[index][sample]
        is_whole = reason in ("eos", "stop", "length")
        if tokens != (expected if is_whole else expected[: len(tokens)]):
            self.faults.append(f"request {index}, completion {sample}, {reason}: {tokens}, expected {expected}")
        self.count(f"ended: {reason}")

    def check_completion(self, index: int, done: Completion) -> None:
        for sample, one in enumerate(done.samples):
            self.check(index, sample, one.token_ids, one.finish_reason)

    # -- what a caller can do

    def complete(self, index: int, rng: random.Random) -> None:
        submission = self.submissions[index]
        self.check_completion(index, self.engine.generate(submission.prompt, submission.params)[0])

    def submit(self, index: int, rng: random.Random) -> None:
        submission = self.submissions[index]
        request = self.engine.submit(submission.prompt, submission.params)
        if rng.random() < 0.5:
            time.sleep(0.01 * rng.random())
            self.engine.abort(request)
        self.check_completion(index, self.engine.result(request))

    def stream(self, index: int, rng: random.Random) -> None:
        """Stream a request; read slowly, or leave after some chunks, in a part of all cases."""
        submission, tokens = self.submissions[index], dict[int, list[int]]()
        pause, last = rng.choice((0, 0, 0.005)), rng.choice((1, 3, 10**6))
        with contextlib.closing(self.engine.stream(submission.prompt, submission.params)) as chunks:  # type: ignore[type-var]
            for number, chunk in enumerate(chunks, 1):
                self.read(index, chunk, tokens)
                time.sleep(pause)
                if number == last:
                    break

    def read(self, index: int, chunk: Chunk, tokens: dict[int, list[int]]) -> None:
        tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.check(index, chunk.index, tokens[chunk.index], chunk.finish_reason)

    def ask_wrongly(self, index: int, rng: random.Random) -> None:
        with pytest.raises((ValueError, TypeError)):
            self.engine.generate(
                rng.choice(([[]], [99], "", [1] * 99)), rng.choice((None, SamplingParams(logprobs=17)))
            )
        _ = self.engine.metrics, self.engine.prometheus()

    async def astream(self, index: int, rng: random.Random) -> None:
        submission, tokens = self.submissions[index], dict[int, list[int]]()
        async for chunk in self.engine.astream(submission.prompt, submission.params):
            self.read(index, chunk, tokens)
            await asyncio.sleep(rng.choice((0, 0, 0.003)))

    async def cancel(self, index: int, rng: random.Random) -> None:
        task = asyncio.create_task(self.astream(index, rng))
        await asyncio.sleep(0.02 * rng.random())
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    # -- threads

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Count a call; injected errors are expected, all others are faults."""
        try:
            yield
            self.count(f"called: {name}")
        except (Exception, pytest.fail.Exception) as error:
            if any(text in str(error) for text in INJECTED):
                self.count("raised an injected error")
            else:
                self.faults.append(f"{name}: {type(error).__name__}: {error!s:.300}")

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        calls = (self.complete, self.submit, self.stream, self.stream, self.ask_wrongly)
        while not self.is_over.is_set():
            call = rng.choice(calls)
            with self.counting(call.__name__):
                call(rng.randrange(len(self.submissions)), rng)

    def run_loop(self, seed: int) -> None:
        async def work(number: int) -> None:
            rng = random.Random(1000 * seed + number)
            while not self.is_over.is_set():
                call = rng.choice((self.astream, self.cancel))
                with self.counting(call.__name__):
                    await call(rng.randrange(len(self.submissions)), rng)

        async def work_all() -> None:
            await asyncio.gather(*(work(number) for number in range(TASKS)))

        asyncio.run(work_all())


def inject(engine: Engine, callers: Callers, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make a step or the tokenizer fail now and then; return a function that returns the number of failures so far."""
    faults = soak.Faults(engine, np.random.default_rng(0), patch)
    rng, stages = random.Random(0), ("dispatch", "block", "read")

    def run() -> None:
        while not callers.is_over.wait(0.2 + 0.5 * rng.random()):
            faults.due = faults.due or stages[faults.count % len(stages)]
            if rng.random() < 0.3:
                engine.tokenizer.fails = True  # type: ignore[union-attr]

    threading.Thread(target=run, daemon=True).start()
    return lambda: faults.count


def memory() -> float:
    """The process's memory in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.parametrize(
    ("make", "kind", "seconds"),
    [
        pytest.param(paper.make, engines.ATTENTION, 3.0, id="paper"),
        pytest.param(engines.make, engines.ATTENTION, SECONDS, id="attention", marks=pytest.mark.long),
        pytest.param(engines.make, engines.HYBRID, SECONDS, id="hybrid", marks=pytest.mark.long),
    ],
)
def test_engine_under_threads_tasks_and_faults_returns_right_tokens_and_releases_all(
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[str],
    make: Callable[..., Engine],
    kind: engines.TargetKind,
    seconds: float,
) -> None:
    engine = soak.engine_with("eagle3", 1, make, kind)
    rng = np.random.default_rng(REQUESTS)
    submissions = list(soak.make_submissions(REQUESTS, rng))
    header = rng.integers(0, engines.VOCAB, kind.header).tolist()
    submissions = [replace(one, prompt=header + one.prompt) for one in submissions]
    callers = Callers(engine, submissions, soak.alone(submissions, make, kind))
    for index in range(REQUESTS):  # compiles every program
        callers.complete(index, random.Random(0))
    engine.generate([submission.prompt for submission in submissions], [one.params for one in submissions])
    compiled.clear()
    monkeypatch.setattr(errors.logger, "disabled", True)  # each failed step logs a traceback
    num_injected = inject(engine, callers, monkeypatch)
    works: list[Any] = [(callers.run, seed) for seed in range(THREADS)]
    works += [(callers.run_loop, seed) for seed in range(LOOPS)]
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for work, seed in works]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    sizes = []
    for _ in range(8):
        callers.is_over.wait(seconds / 8)
        sizes.append(memory())
    callers.is_over.set()
    for thread in threads:
        thread.join(PATIENCE)
    metrics = engine.metrics
    print(f"\n{time.monotonic() - start:.0f} s, {len(threads)} threads, {num_injected()} failed steps")
    for name, count in sorted(callers.done.items()):
        print(f"  {count:8} {name}")
    print(f"  {metrics.num_preemptions:8} preemptions, {metrics.num_tokens} tokens")
    print(f"  {metrics.num_state_hits:8} requests began at a kept state, {metrics.num_states_evicted} states evicted")
    print(f"  memory {' '.join(f'{size:.0f}' for size in sizes)} MB")
    assert not callers.faults, "\n".join(callers.faults[:10])
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not any("backend_compile" in event for event in compiled), "something was compiled after the first requests"
    engine.tokenizer.fails = False  # type: ignore[union-attr]
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work
    engine.scheduler.pages.check()
    assert sizes[-1] - sizes[1] < GROWTH
    assert (metrics.num_state_hits > 0) == bool(kind.header)
    assert num_injected() > 3 and metrics.num_preemptions > 0
    names = {"complete", "submit", "stream", "ask_wrongly", "astream", "cancel"}
    assert {f"called: {name}" for name in names} <= callers.done.keys()
    assert all(callers.done[f"ended: {reason}"] for reason in ("length", "stop", "abort", "error"))
