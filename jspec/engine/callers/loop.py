"""Runs the steps of an engine under a lock, recovers from failed steps, and keeps logs and statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from jspec.core.config import EngineConfig
from jspec.engine.callers.fair_lock import FairLock
from jspec.engine.callers.watch import Watch
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Request
from jspec.engine.run.core import EngineCore
from jspec.engine.run.errors import RESTART, Recovery
from jspec.engine.run.prometheus import exposition
from jspec.engine.run.stats_logger import LowAcceptanceWarner, StatsLogger
from jspec.engine.schedule.draft_length import Policy
from jspec.engine.schedule.program_choice import Features
from jspec.engine.schedule.scheduler import Scheduler
from jspec.step.memory import MemoryPlan

AT_ONCE = 256  # number of requests that are queued or aborted before the lock is released for other threads
IDLE = 0.005  # seconds to wait after a step without work


class EngineLoop:
    """The base class of `jspec.engine.callers.api.Engine`, whose methods several threads may call at once.

    Attributes:
        config: the engine's options.
        core: the scheduler and the model runner with the step that drives them; it has no lock of its own.
    """

    def __init__(self, config: EngineConfig, core: EngineCore) -> None:
        self.config = config
        self.core = core
        self._recovery = Recovery(core)
        self._lock = FairLock()
        self._abort_after_step: list[Request] = []
        self._closed = False
        self._acceptance_warner = LowAcceptanceWarner(core.runner.program.drafter)
        self._stats_logger = StatsLogger(config.log_interval)

    def step(self) -> bool:
        """Run one step for all requests: start a program, and read the results of earlier programs.

        Returns:
            False if there was nothing to start or to read.
        """
        has_work = True
        with self._lock:
            self._recovery.resume()
            with self._recovery:
                has_work = self.core.step(overlap=self.config.overlap)
            while self._abort_after_step:
                self.core.finish(self._abort_after_step.pop(), "abort")
            if self._stats_logger.is_due():
                self._stats_logger.write(self.metrics, self.core.gauges())
            for rows in self.core.take_drafted_rows():
                self._acceptance_warner.count(rows)  # last, because a warning filter may turn the warning into an error
        return has_work

    def _queue(self, requests: Sequence[Request]) -> None:
        """Compile the prefills of requests, then schedule the requests that are not aborted yet.

        A request whose round programs are missing waits for `_compile_rounds` after its first token.
        """
        queued_at, runner = time.perf_counter(), self.core.runner
        self._check_open()
        runner.compile(runner.choice.prefill_keys(requests))
        for start in range(0, len(requests), AT_ONCE):
            with self._lock:
                self._check_open()
                new = [request for request in requests[start : start + AT_ONCE] if request.finish_reason is None]
                awaits_rounds = bool(runner.missing(runner.choice.round_keys(new, self.core.live)))
                for request in new:
                    request.state.awaits_rounds = awaits_rounds
                    self.core.add(request, queued_at)

    def _lacks_prefills(self, requests: Sequence[Request]) -> bool:
        """Return whether `_queue` would have to compile programs."""
        runner = self.core.runner
        return bool(runner.missing(runner.choice.prefill_keys(requests)))

    def _advance(self, watch: Watch | None = None) -> None:
        """Run one step; if one of the watched requests waits for programs of its rounds, compile them instead."""
        if watch is not None and watch.needs_rounds():
            self._compile_rounds(list(watch.num_sent))
        elif not self.step():
            time.sleep(IDLE)  # another thread is compiling the programs for all running requests

    def _compile_rounds(self, requests: Sequence[Request]) -> None:
        """Compile the programs of the requests' rounds; the scheduler plans no round before that.

        The lock is released during the compilation, so that other threads can run steps.
        """
        runner = self.core.runner
        while any(request.state.awaits_rounds and request.finish_reason is None for request in requests):
            with self._lock:
                waiting = [request for request in requests if request.finish_reason is None]
                missing = runner.missing(runner.choice.round_keys(waiting, self.core.live))
                if not missing:
                    for request in waiting:
                        request.state.awaits_rounds = False
            runner.compile(missing)

    def _abort(self, requests: Sequence[Request]) -> None:
        """Abort the requests that have not ended yet.

        This thread may itself be inside a step, in a tokenizer's callback or when the garbage collector closes a
        stream. Then the requests end when the step ends.
        """
        live = [request for request in requests if request.finish_reason is None]
        if self._lock.is_mine:
            self._abort_after_step += live
            return
        for start in range(0, len(live), AT_ONCE):
            with self._lock:
                for request in live[start : start + AT_ONCE]:
                    self.core.finish(request, "abort")

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End the requests that have not ended yet with ``finish_reason="error"`` and the given error."""
        with self._lock:
            self.core.fail([request for request in requests if request.finish_reason is None], error)

    def _check_open(self) -> None:
        self._lock.check_process()
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")
        self.core.runner.calls.check_serves()
        if not self.healthy:
            raise RuntimeError(RESTART)

    def follow(self) -> None:
        """Run what the engine of process 0 runs, and return when that is closed (`jspec.distributed`).

        In the main thread, the first Ctrl-C and the first SIGTERM are only logged, because process 0 may still have
        requests. A second one of the same kind ends all processes.

        Raises:
            RuntimeError: the engine has no devices of other processes, or this is process 0.
            jspec.distributed.ProcessLost: a process was lost.
        """
        self.core.runner.follow()
        self._closed = True

    def close(self) -> None:
        """Abort all requests and free the device memory."""
        with self._lock:
            self.core.close()
            self._closed = True

    def warmup(
        self, *, logprobs: bool = False, prompt_logprobs: bool = False, trace: bool = False, grammar: bool = False
    ) -> None:
        """Compile the programs of all batch sizes and prompt lengths; other threads can run steps meanwhile.

        Args:
            logprobs, prompt_logprobs, trace: also compile the programs for requests with these outputs.
            grammar: also compile the programs for requests whose grammar is a parser on the host.

        Raises:
            ValueError: the programs do not fit into the device's memory.
        """
        self._check_open()
        runner = self.core.runner
        features = Features(traced=trace, logprobs=logprobs, masked=grammar)
        runner.compile(runner.choice.all_keys(features, prompt_logprobs=prompt_logprobs))

    # -- state

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def policy(self) -> Policy:
        """Return the policy that chooses the draft depth; it can be replaced while no result of a step is unread."""
        return self.core.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.core.policy = policy

    @property
    def healthy(self) -> bool:
        """Return whether the engine can serve.

        It cannot if it could not recreate the device's state after an error, or if a process with devices is lost.
        """
        return self._recovery.healthy and self.core.runner.calls.is_whole

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the bytes of device memory of weights, KV pools and programs; ``str(plan)`` is a readable summary."""
        return self.core.runner.memory_plans[0]

    @property
    def draft_memory_plan(self) -> MemoryPlan | None:
        """Return the memory plan of the draft model's devices; None: they are the target's."""
        _, *others = self.core.runner.memory_plans
        return others[0] if others else None

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Return the seconds that compiling each program took, by the program's name."""
        return self.core.runner.seconds("seconds")

    @property
    def lower_seconds(self) -> dict[str, float]:
        """Return the seconds that tracing and lowering each program took before compilation, by the program's name."""
        return self.core.runner.seconds("lower_seconds")

    @property
    def metrics(self) -> Metrics:
        """Return the sums of all requests' counters, and the number of pages in use now."""
        with self._lock:
            return replace(self.core.metrics(), pages_in_use=self.pages_in_use)

    @property
    def pages_in_use(self) -> int:
        return self.scheduler.pages.num_used

    @property
    def num_slots(self) -> int:
        """The number of requests that may run at once."""
        return self.config.slots

    @property
    def num_pages(self) -> int:
        """The number of pages that requests can hold, which is all but the null page."""
        return self.scheduler.pages.pages - 1

    def prometheus(self, model_name: str = "jspec", *, number: int = 0) -> str:
        """Return counters, gauges and latencies (in seconds) as Prometheus text, under vLLM's metric names.

        Args:
            model_name: value of the label "model_name".
            number: value of the label "engine".
        """
        with self._lock:
            return exposition(self.metrics, self.core.latencies, self.core.gauges(), model_name, number=number)
