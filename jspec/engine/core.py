"""The loop: plan, dispatch, read one step behind. The one place where host and device meet."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from convert import hub
from jspec import verify
from jspec.core.config import EngineConfig
from jspec.core.records import StepOutput, StepResult
from jspec.draft.base import Drafter, NoDraft
from jspec.engine.api import Interface
from jspec.engine.draft_length import Adaptive, Fixed, Policy, Reading, Stopwatch, halvings
from jspec.engine.errors import RESTART, caused_by, error_of_requests
from jspec.engine.fair_lock import FairLock
from jspec.engine.grammar.compiler import follow
from jspec.engine.input_processor import InputProcessor, Prompt, draft_cap
from jspec.engine.metrics import Metrics
from jspec.engine.model_runner import ModelRunner, check_deterministic, wants_newest
from jspec.engine.output_processor import OutputState, process_prompt_logprobs, process_step_output
from jspec.engine.page_pool import PagePool
from jspec.engine.prometheus import Gauges, Latencies, exposition
from jspec.engine.request import Request
from jspec.engine.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler
from jspec.engine.stats_logger import LowAcceptanceWarner, StatsLogger
from jspec.engine.tokenizer import Tokenizer, load_tokenizer
from jspec.models import load
from jspec.models.decoder import Model
from jspec.models.quantize import quantize_weights
from jspec.sampling import logits_processor as processors
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step import memory
from jspec.step.executables import keep_compiled
from jspec.step.program import Params, Program

logger = logging.getLogger(__name__)


@final
class Engine(Interface):
    """Decodes requests in rounds of one device program each.

    Args:
        target: the model whose distribution the output has.
        drafter: who proposes; None is plain decoding through the same step.
        tokenizer: a `Tokenizer`, a folder, "bytes", or None for ids in and ids out.
        eos_ids: tokens that end a request.
        logits_processor: a pure function of jax arrays, traced into every program: takes logits ``[batch, nodes,
            vocab]`` and a `jspec.sampling.logits_processor.LogitsContext`, and returns logits. It comes behind
            controls and grammar
            and before temperature, in every round, for all requests; the controls' code runs in every round then.
        options: fields of `EngineConfig`.

    Attributes:
        memory_plan: what weights, pools and programs take of the device's memory; `str` says it in words.
        healthy: whether it can serve.

    Raises:
        ValueError: options or models that do not fit together or into memory.
    """

    def __init__(
        self,
        target: Model,
        *,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | str | None = None,
        eos_ids: Sequence[int] = (),
        logits_processor: LogitsProcessor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = EngineConfig(**options)
        keep_compiled(self.config.compile_cache)
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        drafter = NoDraft() if drafter is None else drafter
        if self.config.draft_window is not None:
            drafter = drafter.with_window(self.config.draft_window)
        if self.config.quantize is not None:
            target = quantize_weights(target, self.config.quantize)
        if self.config.deterministic:
            check_deterministic(target, self.config.implementation)
        rule = verify.resolve(self.config.accept, **self.config.accept_options)
        rule.check(drafter.tree)
        depths = _depths(self.config, drafter)
        processors.check(logits_processor, self.config, drafter.tree, target.config.vocab_size)
        self._admission = InputProcessor(tokenizer, target.config.vocab_size, tuple(eos_ids), self.config)
        program = Program(
            drafter=drafter,
            feature_layers=drafter.feature_layers(target),
            accept=rule,
            implementation=self.config.implementation,
            controls=self.config.controls,
            deterministic=self.config.deterministic,
            grammar_cells=self.config.grammar_cells if self.config.controls and tokenizer is not None else 0,
            processor=logits_processor,
            processor_args=self.config.processor_args,
        )
        self._device = ModelRunner(program, Params(target=target, draft=drafter.bind(target)), self.config, depths)
        is_static = drafter.tree.paths is not None
        # Another one may be put in its place while nothing is under way.
        self.policy: Policy = Adaptive(depths, shares=is_static) if self.config.adaptive else Fixed(depths[-1])
        self._stopwatch = Stopwatch()
        assert self.config.buckets is not None and self.config.prefill_buckets is not None
        self.scheduler = Scheduler(
            PagePool(self._device.pool.pages, self.config.page_size),
            slots=self.config.slots,
            buckets=self.config.buckets,
            prefill_buckets=self.config.prefill_buckets,
            scratch_rows=drafter.tree.scratch_rows,
            rounds=self.config.rounds_per_dispatch,
            round_tokens=drafter.tree.depth + 1,
            prefix_cache=self.config.prefix_cache,
            prefill_budget=self.config.prefill_budget,
        )
        self._in_flight: deque[tuple[Plan, StepOutput]] = deque()
        self._turns = FairLock()
        self._orphans: list[tuple[Request, bool]] = []  # to be ended when the step is over; whether to be forgotten too
        self._closed = False
        self._lost: BaseException | None = None  # the error of a step after which the state is still to be made anew
        self.healthy = True
        self._watch = LowAcceptanceWarner(drafter)
        self._log = StatsLogger(self.config.log_interval)
        self._metrics = Metrics()
        self._latencies = Latencies()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Model,
        *,
        drafter: Drafter | None = None,
        dtype: str | None = None,
        tokenizer: Tokenizer | str | None = None,
        logits_processor: LogitsProcessor | None = None,
        **options: Any,
    ) -> Self:
        """Load a Hugging Face folder, a folder written by ``python -m convert``, or a hub id.

        Args:
            dtype: of the weights; None: float32 on CPU, bfloat16 elsewhere.
            tokenizer: "bytes" for byte-level models; None: the folder's, if it has one.
        """
        if isinstance(path, Model):
            return cls(path, drafter=drafter, tokenizer=tokenizer, logits_processor=logits_processor, **options)
        config = EngineConfig(**{name: value for name, value in options.items() if name != "eos_ids"})
        keep_compiled(config.compile_cache)
        checkpoint = load.load(path, dtype=dtype, quantize=options.get("quantize"))
        options.setdefault("eos_ids", hub.eos_ids(checkpoint.folder))
        return cls(
            Model.from_weights(checkpoint.config, checkpoint.weights),
            drafter=drafter,
            tokenizer=load_tokenizer(checkpoint.folder) if tokenizer is None else tokenizer,
            logits_processor=logits_processor,
            **options,
        )

    def step(self) -> None:
        with self._turns:
            self._stopwatch.come_back()
            self._go_on_recovering()
            plan: Plan | None = None
            drafted = self._read_down_to(0) if wants_newest(self.scheduler.running) else []  # what an interrupt left
            with self._recovery():
                plan = self.scheduler.plan()
                if plan is not None:
                    self._stopwatch.start()
                    self._in_flight.append((plan, self._dispatch(plan)))
            overlaps = plan is not None and self.config.overlap and not wants_newest(self.scheduler.running)
            drafted += self._read_down_to(1 if overlaps else 0)
            while self._orphans:
                request, forget = self._orphans.pop()
                self._end(request, "abort")
                if forget:
                    self._forget(request)
            if self._log.is_due():
                self._log.write(self.metrics, self._gauges())
            self._stopwatch.leave()
            for report in drafted:
                self._watch.count(report)  # last: its warning may be turned into an error, which is the caller's

    def _read_down_to(self, count: int) -> list[np.ndarray]:
        """Read the oldest of the steps under way, up to the last so many; gives back the rows that were drafted for."""
        drafted: list[np.ndarray] = []
        while len(self._in_flight) > count:
            try:
                self._in_flight[0][1].report.block_until_ready()  # an interrupt here loses nothing
            except Exception as error:
                self._recover(error)
                break
            with self._recovery():
                drafted.append(self._read(*self._in_flight.popleft()))
        return drafted

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._admission.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a request."""
        return self._admission.eos_ids

    @property
    def memory_plan(self) -> memory.MemoryPlan:
        return self._device.memory_plan

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds each program took to compile."""
        return dict(self._device.programs.seconds)

    @property
    def lower_seconds(self) -> dict[str, float]:
        """Seconds each program took to be traced and lowered, before it was compiled."""
        return dict(self._device.programs.lower_seconds)

    @property
    def metrics(self) -> Metrics:
        with self._turns:
            live = (request.metrics for request in [*self.scheduler.running, *self.scheduler.waiting])
            return replace(sum(live, self._metrics), pages_in_use=self.pages_in_use)

    @property
    def pages_in_use(self) -> int:
        return self.scheduler.pages.num_used

    def prometheus(self, model_name: str = "jspec") -> str:
        """Counters, gauges and latencies as text for Prometheus, under vLLM's names."""
        with self._turns:
            return exposition(self.metrics, self._latencies, self._gauges(), model_name)

    def close(self) -> None:
        with self._turns:
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._end(request, "abort")
            self._in_flight.clear()
            self._stopwatch.reset()
            self._closed = True
            self._device.close()
            self._admission.close()

    def _dispatch(self, plan: Plan) -> StepOutput:
        depth = self.policy.choose(plan.bucket, self._caps(plan)) if isinstance(plan, RoundPlan) else 0
        return self._device.dispatch(plan, depth, self.scheduler.running)

    def _caps(self, plan: RoundPlan) -> list[int]:
        """Draft tokens that each request allows."""
        depth = self._device.program.drafter.tree.depth
        return [draft_cap(request.params, depth) for request in plan.requests]

    def _read(self, plan: Plan, output: StepOutput) -> np.ndarray:
        """Take a step's result; gives back the rows of it that were drafted for."""
        output, seconds = self._device.to_host(output), self._stopwatch.stop()
        report = np.asarray(output.report)
        self.scheduler.settle(plan)
        if isinstance(plan, PrefillPlan):
            self._read_chunk(plan, output)
            return report[:, :0]
        fields, is_usual = StepResult.read(report), output.trace is None and output.logprobs is None
        self._learn(plan, fields, seconds if is_usual else None)
        # Others ended in an earlier step; this one was dispatched before that was known.
        live = [(row, request) for row, request in enumerate(plan.requests) if request.finish_reason is None]
        for row, request in live:
            self._take(request, output, row, is_round=True)
        if fields.depth == 0:
            return report[:, :0]
        edits = self._device.edits  # of which the draft knows nothing
        return report[:, [row for row, request in live if request.params.draft and not edits(request)]]

    def _read_chunk(self, plan: PrefillPlan, output: StepOutput) -> None:
        """Take what a chunk of a prompt came to."""
        request = plan.request
        if request.finish_reason is not None:
            return
        if request.scores_prompt:
            assert output.prompt is not None
            process_prompt_logprobs(request, output.prompt, plan.start, plan.count)
        if plan.emits:
            self._take(request, output, 0, is_round=False)

    def _take(self, request: Request, output: StepOutput, row: int, *, is_round: bool) -> None:
        """Take one row of a step's result, which may be the end of its request."""
        text = self._texts[request.id]
        try:
            reason = process_step_output(request, text, output, row, is_round, self._admission.eos_ids)
            follow(request)
        except Exception as error:  # of a tokenizer, for instance: nobody else's affair
            request.error, reason = error, "error"
        self._clock(request)
        if reason is None or text.stop is not None:  # behind a cut the device is further, and so is what the draft lags
            self._keep(request)
        elif request.error is None:
            self._write_pending_rows(request)
        if reason is not None:
            self._end(request, reason)

    def _learn(self, plan: RoundPlan, report: StepResult, seconds: float | None) -> None:
        """Tell the policy what its choice came to, if any of the requests was still there."""
        if all(request.finish_reason is not None for request in plan.requests):
            return
        accepted = np.where(report.counts > 0, report.accept_len, -1)[:, : len(plan.requests)]
        self.policy.learn(Reading(plan.bucket, report.depth, self._caps(plan), accepted, seconds))

    def _keep(self, request: Request) -> None:
        """Let other requests find the pages that are whole by now."""
        has_pending_rows = self._device.program.drafter.has_pending_rows
        self.scheduler.keep(request, request.num_draft_cached_tokens if has_pending_rows else request.rows_committed)

    def _write_pending_rows(self, request: Request) -> None:
        """Make the pages of a request that ended whole: no round will write what the draft's cache lags by."""
        if request.slot is None:
            return  # it was preempted meanwhile
        self._device.write_pending_rows(request, self.scheduler.pages.pages_of(request.id))
        self.scheduler.keep(request, request.rows_committed)

    def _requests(self, prompts: Prompt | Sequence[Prompt], params: Any, *, trace: bool) -> list[Request]:
        self._check_open()
        requests = self._admission.requests(prompts, params, trace=trace)
        for request in requests:
            self.scheduler.check(request)
        self._device.ensure(requests)
        return requests

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")
        if not self.healthy:
            raise RuntimeError(RESTART)

    def _add(self, texts: dict[Request, OutputState], asked_at: float) -> None:
        with self._turns:
            self._check_open()
            for request, text in texts.items():
                if request.finish_reason is None:  # else its task was cancelled meanwhile
                    self._texts[request.id], self._added_at[request.id] = text, asked_at
                    self.scheduler.add(request)

    def _take_back(self, requests: Sequence[Request], *, forget: bool) -> None:
        live = [request for request in requests if request.finish_reason is None]
        if self._turns.is_mine:
            self._orphans += [(request, forget) for request in live]  # a stream thrown away in the middle of a step
        elif live:
            with self._turns:
                for request in live:
                    self._end(request, "abort")
        if forget:
            for request in requests:
                if request.finish_reason is not None:
                    self._forget(request)

    def _end(self, request: Request, reason: str) -> None:
        if request.finish_reason is not None:
            return
        text = self._texts.get(request.id)
        if text is None:  # it was never queued, and will not be
            request.finish_reason = reason
            return
        try:
            text.finish()
        except Exception as error:
            request.error, reason = request.error or error, "error"
        if text.stop is not None and reason in ("eos", "stop", "length"):
            reason, request.stop_reason = "stop", text.stop  # what comes behind a stop string does not count
        request.metrics.finished = {reason: 1}
        self._metrics = self._metrics + request.metrics
        if reason in ("eos", "stop", "length"):
            self._latencies.observe(request.metrics)
        self.scheduler.finish(request)  # not before: an interrupt up to here finds it running, and it ends after all
        request.finish_reason = reason  # last: other threads take it that all is there

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        """What fails in here has lost a step; an interrupt goes on to the caller."""
        try:
            yield
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise

    def _recover(self, error: BaseException) -> None:
        """End those that run with the error, make the state anew and go on with those that wait.

        The books are put in order before the device is asked for anything: an interrupt finds them right.
        """
        self._lost = error
        logger.error("a step failed; the requests under way end with its error", exc_info=error)
        self._in_flight.clear()
        self._stopwatch.reset()
        self.scheduler.lose_steps()
        self._device.clear()
        theirs = error_of_requests(error)
        self._fail(self.scheduler.running, theirs)
        try:
            self._device.reset_state(error)
        except Exception:
            self.healthy = False
            theirs.add_note(RESTART)
            self._fail(self.scheduler.waiting, caused_by(error, RESTART))
            logger.exception("the state could not be made anew: restart the process")
        self._lost = None

    def _go_on_recovering(self) -> None:
        """Make the state anew where an interrupt came before that was done."""
        if self._lost is not None:
            self._recover(self._lost)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        for request in list(requests):
            request.error = error
            self._end(request, "error")

    def _gauges(self) -> Gauges:
        pages = self.scheduler.pages
        return Gauges(len(self.scheduler.running), len(self.scheduler.waiting), pages.num_used / (pages.pages - 1))


def _depths(config: EngineConfig, drafter: Drafter) -> tuple[int, ...]:
    """The depths that rounds are compiled for, ascending; the last is that of the drafter's tree.

    Raises:
        ValueError: nothing to choose from, or depths that do not end there.
    """
    depth = drafter.tree.depth
    if not config.adaptive:
        return (depth,)
    if depth == 0:
        raise ValueError("adaptive: expected a drafter, got none; name one or set adaptive=False")
    depths = halvings(depth) if config.draft_depths is None else config.draft_depths
    if depths[-1] != depth:
        raise ValueError(f"draft_depths: the last must be that of {drafter.tree}, {depth}, got {depths}")
    return depths
