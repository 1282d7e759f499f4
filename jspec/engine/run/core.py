"""The engine's loop: it plans a step, dispatches the step and reads the result of an earlier step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jspec.core.prompt_blocks import block_rows, padded
from jspec.core.records import StepOutput, StepResult
from jspec.engine.input.grammar_input import follow
from jspec.engine.input.input_processor import draft_cap
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Request
from jspec.engine.run.model_runner import ModelRunner
from jspec.engine.run.output_processor import process_step_output
from jspec.engine.run.prometheus import Gauges, Latencies
from jspec.engine.run.stopwatch import Stopwatch
from jspec.engine.schedule.draft_length import DispatchResult, Policy
from jspec.engine.schedule.program_choice import LiveRequests, round_size, wants_newest
from jspec.engine.schedule.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler
from jspec.engine.schedule.sizes import RoundSize

COMPLETE = ("eos", "stop", "length")  # finish reasons other than an abort or an error


class EngineCore:
    """Runs queued requests step by step. It has no lock: only one thread may call it at a time.

    Attributes:
        policy: chooses the size of rounds; may be replaced while no step is in flight.
        in_flight: (plan, size of its rounds, output) of each step that was dispatched and whose result was not read,
            oldest first.
        drafted_rows: result rows of requests with drafts; the warning about low acceptance reads them.
        ended_metrics: sum of the counters of ended requests.
        latencies: histograms of times and sizes, mostly of the requests that ended with a reason in `COMPLETE`.
        live: the queued requests that have not ended.
        weight_version: version of the weights (`jspec.engine.run.weight_update`).
        is_asleep: whether there is no state on the device, so that all requests wait.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, policy: Policy) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.policy = policy
        self.stopwatch = Stopwatch()
        self.in_flight: deque[tuple[Plan, RoundSize, StepOutput]] = deque()
        self.drafted_rows: list[np.ndarray] = []
        zeros = dict.fromkeys(runner.program.drafter.sources, 0)  # so that reports name both sources from the start
        self.ended_metrics = Metrics(num_draft_tokens_per_source=zeros, num_accepted_tokens_per_source=zeros)
        self.latencies = Latencies()
        self.live = LiveRequests()
        self.weight_version = 0
        self.is_asleep = False
        self._held: list[Request] = []  # requests that wait for a call of `call_after`
        self._calls: deque[tuple[Collection[Request], Callable[[], object]]] = deque()

    # -- the loop

    def step(self, *, overlap: bool) -> bool:
        """Plan and dispatch one step, then read the results of dispatched steps.

        Args:
            overlap: whether to leave the result of the newest step unread, so that the host works while it runs.
        """
        self._make_calls()
        if self.is_asleep:
            return False
        self.stopwatch.come_back()
        if self._needs_newest_tokens():
            self._read_down_to(0)
        plan = self._plan_and_dispatch()
        is_ahead = plan is not None and overlap and not self._needs_newest_tokens()
        has_work = plan is not None or bool(self.in_flight)
        self._read_down_to(1 if is_ahead else 0)
        self.stopwatch.leave()
        return has_work

    def read_all(self) -> None:
        """Read the results of all dispatched steps."""
        self._read_down_to(0)

    def call_after(self, requests: Collection[Request], call: Callable[[], object]) -> None:
        """Call a function once some requests have ended; others that are queued meanwhile wait for it.

        Calls are made in order. An error of the function is not caught.
        """
        self._calls.append((requests, call))

    def _make_calls(self) -> None:
        """Make the calls of `call_after` whose requests have ended, and queue the requests that waited for them."""
        while self._calls and all(request.finish_reason is not None for request in self._calls[0][0]):
            self._calls.popleft()[1]()
            held, self._held = self._held, []
            for request in held:
                if request.finish_reason is None:
                    self._queue_or_hold(request)

    def end_calls(self) -> None:
        """Make all calls of `call_after`, whether their requests have ended or not."""
        while self._calls:
            self._calls.popleft()[1]()

    def _needs_newest_tokens(self) -> bool:
        """Return whether the next dispatch needs grammar masks that the host computes from the newest tokens."""
        return wants_newest(self.scheduler.running)

    def _plan_and_dispatch(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._record_queue_times(plan)
            self.stopwatch.start()
            self.in_flight.append((plan, *self._dispatch(plan)))
        return plan

    def _dispatch(self, plan: Plan) -> tuple[RoundSize, StepOutput]:
        """Dispatch a plan; return the size of its rounds, which is depth 0 for a prefill, and the step's output."""
        size = RoundSize(0)
        if isinstance(plan, RoundPlan):
            size = round_size(plan, self.policy.choose(plan.bucket, self._caps(plan)))
        return size, self.runner.dispatch(plan, size, self.scheduler.running)

    def _read_down_to(self, count: int) -> None:
        """Read results, the oldest first, until only ``count`` dispatched steps are unread."""
        while len(self.in_flight) > count:
            self.runner.wait(self.in_flight[0][-1])
            self._read(*self.in_flight.popleft())

    def _read(self, plan: Plan, size: RoundSize, output: StepOutput) -> None:
        """Copy the result of one step to the host and process it."""
        output, seconds = self.runner.to_host(output), self.stopwatch.stop()
        self.scheduler.on_output_read(plan)
        if isinstance(plan, PrefillPlan):
            self._read_prefill(plan, output)
        else:
            self._read_rounds(plan, size, output, seconds)

    def _read_prefill(self, plan: PrefillPlan, output: StepOutput) -> None:
        rows, first = block_rows(plan.bucket)[1], 0  # rows of a block; the piece's first row among all blocks
        for index, piece in enumerate(plan.pieces):
            request = piece.request
            if request.finish_reason is None:
                if request.scores_prompt:
                    assert output.prompt is not None and request.output.prompt_logprobs is not None
                    logprobs = output.prompt.part(first, first + piece.count)
                    request.output.prompt_logprobs.add(piece.start, piece.count, logprobs)
                if piece.emits:
                    self._read_row(request, output, index, is_round=False)
            first += padded(piece.count, rows)

    def _read_rounds(self, plan: RoundPlan, size: RoundSize, output: StepOutput, seconds: float | None) -> None:
        report = np.asarray(output.report)
        fields, is_plain = output.result, output.trace is None and output.logprobs is None
        self._update_policy(plan, size, fields, seconds if is_plain else None)
        # Other rows belong to requests that ended before this step; the host read this after the dispatch.
        live = [(row, request) for row, request in enumerate(plan.requests) if request.finish_reason is None]
        for row, request in live:
            self._read_row(request, output, row, is_round=True)
        # Rows with edited logits are left out: the drafter does not see the edits, so rejections are not its fault.
        is_drafted = size.depth > 0
        rows = [row for row, r in live if is_drafted and r.params.draft and not self.runner.edits(r)]
        self.drafted_rows.append(report[:, rows])

    def _read_row(self, request: Request, step: StepOutput, row: int, *, is_round: bool) -> None:
        """Process the row of a step's result that belongs to a request; end the request if it is finished."""
        if request.finish_reason is not None:
            return  # a tokenizer's callback has closed the engine at an earlier row
        request.tell()
        try:
            reason = process_step_output(request, step, row, is_round=is_round)
            follow(request)
        except Exception as error:  # an error of a tokenizer, for instance, ends only this request
            request.output.error, reason = error, "error"
        self._record_times(request)
        # After a stop string the device may have committed tokens beyond the text, so its pending rows differ.
        if reason is None or request.output.stop_string is not None:
            self._cache_prefix(request)
        elif request.error is None:
            self._write_pending_rows(request)
        if reason is not None:
            self.finish(request, reason)

    # -- requests

    def add(self, request: Request, queued_at: float) -> None:
        """Queue a request that the scheduler has checked.

        Args:
            queued_at: value of `time.perf_counter` (seconds) from which the request's latencies are measured.
        """
        request.output.queued_at = queued_at
        request.state.prefill_sizes = self.runner.choice.prefill_sizes(request)
        self._queue_or_hold(request)

    def _queue_or_hold(self, request: Request) -> None:
        if self._calls and request not in self._calls[0][0]:
            self._held.append(request)
            return
        request.output.weight_versions = [(0, self.weight_version)]
        self.live.add(request)
        self.scheduler.add(request)

    @property
    def waiting(self) -> list[Request]:
        """The queued requests that do not run."""
        return [*self.scheduler.waiting, *self._held]

    def use_version(self, version: int) -> None:
        """Let tokens from now on be those of other weights."""
        self.weight_version = version
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            start, versions = len(request.token_ids), request.output.weight_versions
            if versions[-1][0] == start:
                versions.pop()
            versions.append((start, version))

    def finish(self, request: Request, reason: str) -> None:
        """End a request and free its slot and pages at once; do nothing if it has ended already."""
        output = request.output
        if output.finish_reason is not None:
            return
        request.tell()
        if output.queued_at is None:  # a request that was never queued is not counted
            output.finish_reason = reason
            return
        try:
            output.finish_text()
        except Exception as error:
            output.error, reason = output.error or error, "error"
        if output.stop_string is not None and reason in COMPLETE:  # the stop string comes before any other end
            reason, output.stop_reason = "stop", output.stop_string
        output.metrics.finished = {reason: 1}
        self.ended_metrics = self.ended_metrics + output.metrics
        if reason in COMPLETE:
            self.latencies.observe(output.metrics)
        self.live.discard(request)
        self.scheduler.finish(request)
        output.finish_reason = reason  # last: threads that see it may read all other fields

    def fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End requests with ``finish_reason="error"`` and the given error."""
        for request in list(requests):
            request.output.error = error
            self.finish(request, "error")

    def drop_in_flight(self) -> None:
        """Discard all steps whose results were not read, and treat all rows in the KV pools as lost."""
        self.in_flight.clear()
        self.stopwatch.reset()
        self.scheduler.drop_in_flight()
        self.runner.clear()

    def sleep(self, weights: str) -> None:
        """Free the device memory of the state, and forget the prefix cache; no request runs.

        Args:
            weights: as for `ModelRunner.release`.
        """
        if not self.is_asleep:
            self.runner.drop_state()
            self.scheduler.drop_in_flight()
            self.scheduler.reset_prefix_cache()
            self.is_asleep = True
        self.runner.release(weights)

    def wake(self) -> None:
        """Allocate the state again, if there is none; requests go on."""
        if self.is_asleep:
            self.runner.wake()
            self.is_asleep = False

    def close(self) -> None:
        """Abort all requests and free the device memory."""
        for request in [*self.scheduler.running, *self.waiting]:
            self.finish(request, "abort")
        self.in_flight.clear()
        self.stopwatch.reset()
        self.runner.close()

    # -- statistics

    def take_drafted_rows(self) -> list[np.ndarray]:
        """Return the contents of ``drafted_rows``, and clear it."""
        rows, self.drafted_rows = self.drafted_rows, []
        return rows

    def metrics(self) -> Metrics:
        """Add up the counters of all requests, both ended and live; count the pages in use now."""
        scheduler = self.scheduler
        ran = (request for request in scheduler.waiting if request.metrics.num_prompt_tokens)  # and will run again
        live = (request.metrics for request in [*scheduler.running, *ran])
        total = sum(live, self.ended_metrics)  # counters of requests that never ran are zero
        counts: dict[str, Any] = scheduler.states.counts() if scheduler.states is not None else {}
        return replace(total, pages_in_use=scheduler.pages.num_used, **counts)

    def gauges(self) -> Gauges:
        pages = self.scheduler.pages
        return Gauges(
            len(self.scheduler.running),
            len(self.waiting),
            pages.num_used / (pages.pages - 1),
            self.weight_version,
            self.is_asleep,
        )

    def _record_queue_times(self, plan: Plan) -> None:
        """Record for the requests whose first prefill is dispatched now how long they waited."""
        for request in plan.requests if isinstance(plan, PrefillPlan) else ():
            if request.metrics.queue_seconds == 0.0 and request.output.queued_at is not None:
                request.metrics.queue_seconds = time.perf_counter() - request.output.queued_at

    def _record_times(self, request: Request) -> None:
        output = request.output
        assert output.queued_at is not None
        elapsed, metrics = time.perf_counter() - output.queued_at, output.metrics
        if metrics.time_to_first_token == 0.0:
            metrics.time_to_first_token = elapsed
        else:
            self.latencies.inter_token.observe(elapsed - metrics.time_to_first_token - metrics.decode_seconds)
        metrics.decode_seconds = elapsed - metrics.time_to_first_token

    # -- size of rounds

    def _caps(self, plan: RoundPlan) -> list[int]:
        """Return, for each request of a plan, the largest number of draft tokens that it accepts per round."""
        depth = self.runner.program.drafter.tree.depth
        return [draft_cap(request.params, depth) for request in plan.requests]

    def _update_policy(self, plan: RoundPlan, size: RoundSize, result: StepResult, seconds: float | None) -> None:
        """Report a dispatch to the policy, unless all its requests had ended before."""
        if all(request.finish_reason is not None for request in plan.requests):
            return
        accepted = np.where(result.counts > 0, result.accept_len, -1)[:, : len(plan.requests)]
        self.policy.learn(DispatchResult(plan.bucket, size, self._caps(plan), accepted, seconds))

    # -- prefix cache

    def _cache_prefix(self, request: Request) -> None:
        """Put a request's pages into the prefix cache, except pages with rows that are not committed."""
        has_pending_rows = self.runner.program.drafter.has_pending_rows
        rows = request.state.num_draft_cached_tokens if has_pending_rows else request.rows_committed
        self.scheduler.cache_prefix(request, rows)

    def _write_pending_rows(self, request: Request) -> None:
        """Write the missing draft cache rows of an ended request, and put its full pages into the prefix cache.

        The rows are missing because the next round would have written them.
        """
        if request.state.slot is None:
            return  # the request was preempted after the step was dispatched
        self.runner.write_pending_rows(request, self.scheduler.pages.pages_of(request.id))
        self.scheduler.cache_prefix(request, request.rows_committed)
        self.scheduler.keep_state(request, request.rows_committed)
