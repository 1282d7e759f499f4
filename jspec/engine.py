"""The loop: plan, dispatch, read one step behind. The one place where host and device meet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from tqdm import tqdm

from jspec import memory, pretrained, verify
from jspec.admission import Admission, Prompt, pack_catch_up, pack_chunk
from jspec.cache import PoolShape
from jspec.config import EngineConfig
from jspec.draft import Drafter, NoDraft
from jspec.metrics import Metrics
from jspec.models.decoder import Model
from jspec.output import OutputText, completion_of, take_report
from jspec.pages import PagePool
from jspec.programs import Programs
from jspec.quantize import check_device, quantize_weights
from jspec.records import StepOutput
from jspec.requests import Chunk, Completion, Request, SamplingParams
from jspec.scheduler import Plan, PrefillPlan, RoundPlan, Scheduler
from jspec.step import Params, Program, init_state
from jspec.tokenizer import Tokenizer, load_tokenizer
from jspec.watch import AcceptanceWatch


class Engine:
    """Decodes requests in rounds of one device program each.

    Args:
        target: the model whose distribution the output has.
        drafter: who proposes; None is plain decoding through the same step.
        tokenizer: a `Tokenizer`, a folder, "bytes", or None for ids in and ids out.
        eos_ids: tokens that end a request.
        options: fields of `EngineConfig`.

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
        **options: Any,
    ) -> None:
        self.config = EngineConfig(**options)
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        drafter = NoDraft() if drafter is None else drafter
        if self.config.quantize is not None:
            target = quantize_weights(target, self.config.quantize)
        verify.check_rule(self.config.accept, drafter.tree)
        self._admission = Admission(tokenizer, target.config.vocab_size, tuple(eos_ids), self.config)
        self._params = Params(target=target, draft=drafter.bind(target))
        self._program = Program(
            drafter=drafter,
            feature_layers=drafter.feature_layers(target),
            accept=self.config.accept,
            implementation=self.config.implementation,
            typical=verify.Typical(self.config.typical_threshold, self.config.typical_alpha),
        )
        self._pool = self._pool_shape(target)
        check_device(self._params, self._pool.dtype, self._pool.draft_dtype)
        memory.check_fits(self._program, self._params, self._pool, self.config.memory_fraction)
        self._state = init_state(self._program, self._params, self._pool)
        self._programs = Programs(self._program, self._params, self._state, self.config)
        assert self.config.buckets is not None and self.config.prefill_buckets is not None
        self.scheduler = Scheduler(
            PagePool(self._pool.pages, self.config.page_size),
            slots=self.config.slots,
            buckets=self.config.buckets,
            prefill_buckets=self.config.prefill_buckets,
            scratch_rows=drafter.tree.scratch_rows,
            rounds=self.config.rounds_per_dispatch,
            round_tokens=drafter.tree.depth + 1,
            prefix_cache=self.config.prefix_cache,
        )
        self._in_flight: deque[tuple[Plan, StepOutput]] = deque()
        self._rows: tuple[int | None, ...] = ()
        self._slots = jax.device_put(np.zeros(0, np.int32))
        self._texts: dict[int, OutputText] = {}
        self._added_at: dict[int, float] = {}
        self._closed = False
        self._watch = AcceptanceWatch(drafter)
        self._metrics = Metrics()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Model,
        *,
        drafter: Drafter | None = None,
        dtype: str | None = None,
        tokenizer: Tokenizer | str | None = None,
        **options: Any,
    ) -> Self:
        """Load a Hugging Face folder, a folder written by ``python -m convert``, or a hub id.

        Args:
            dtype: of the weights; None: float32 on CPU, bfloat16 elsewhere.
            tokenizer: "bytes" for byte-level models; None: the folder's, if it has one.
        """
        if isinstance(path, Model):
            return cls(path, drafter=drafter, tokenizer=tokenizer, **options)
        EngineConfig(**{name: value for name, value in options.items() if name != "eos_ids"})
        checkpoint = pretrained.load(path, dtype=dtype, kind="target", quantize=options.get("quantize"))
        options.setdefault("eos_ids", pretrained.eos_ids(checkpoint.folder))
        return cls(
            Model.from_weights(checkpoint.config, checkpoint.weights),
            drafter=drafter,
            tokenizer=load_tokenizer(checkpoint.folder) if tokenizer is None else tokenizer,
            **options,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        trace: bool = False,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts; the completions come in the prompts' order.

        Args:
            prompts: one string or one list of token ids is one prompt; else a list of prompts.
            params: one for all, or one a prompt.
            trace: keep every round's tree in ``Completion.rounds``.
            progress: show a bar with tokens/s and mean acceptance length.

        Raises:
            ValueError: a prompt or a parameter that cannot be served; nothing is queued then.
        """
        requests = self._requests(prompts, params, trace=trace)
        for request in requests:
            self._queue(request)
        try:
            with tqdm(total=sum(r.limit for r in requests), unit="tok", disable=not progress) as bar:
                for request in requests:
                    while request.finish_reason is None:
                        self.step()
                        if progress:
                            self._show(bar, requests)
            return [completion_of(request, self._texts[request.id]) for request in requests]
        finally:
            for request in requests:
                self._end(request, "abort")
                self._forget(request)

    def _show(self, bar: tqdm, requests: Sequence[Request]) -> None:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        bar.set_postfix(tau=f"{self.metrics.mean_acceptance_length:.2f}", refresh=False)

    def chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]:
        """Complete a conversation laid out by the tokenizer's chat template.

        Raises:
            ValueError: no tokenizer, or one without a chat template.
        """
        if self.tokenizer is None:
            raise ValueError("chat: this engine has no tokenizer; pass tokenizer= or call generate with token ids")
        return self.generate(self.tokenizer.chat(list(messages)), params, **options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk as rounds are read.

        The request is checked here and queued when the first chunk is asked for. Closing the iterator aborts it.

        Raises:
            ValueError: a prompt or a parameter that cannot be served.
        """
        (request,) = self._requests([prompt], params, trace=False)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        self._queue(request)
        sent, output, is_last = 0, self._texts[request.id], False
        try:
            while not is_last:
                # Steps of other streams move this request on too, so there may be news without a step of our own.
                while len(request.token_ids) == sent and request.finish_reason is None:
                    self.step()
                chunk = output.chunk(request, sent)
                sent, is_last = len(request.token_ids), request.finish_reason is not None
                yield chunk
        finally:
            self._end(request, "abort")
            self._forget(request)

    def step(self) -> None:
        """Dispatch what the scheduler plans and read what is due: with overlap, one step behind."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append((plan, self._dispatch(plan)))
        behind = 1 if plan is not None and self.config.overlap else 0
        while len(self._in_flight) > behind:
            self._read(*self._in_flight.popleft())

    def abort(self, request: Request) -> None:
        """End a request; its slot and pages are free at once."""
        self._end(request, "abort")

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._admission.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a request."""
        return self._admission.eos_ids

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds each program took to compile."""
        return dict(self._programs.seconds)

    @property
    def metrics(self) -> Metrics:
        """The sum over all requests that have ended, and what is held now."""
        return replace(self._metrics, pages_in_use=self.pages_in_use)

    @property
    def pages_in_use(self) -> int:
        return self.scheduler.pages.num_used

    def close(self) -> None:
        """Abort what is left and let the device memory go."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(request, "abort")
        self._in_flight.clear()
        self._closed = True
        self._state = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _dispatch(self, plan: Plan) -> StepOutput:
        if isinstance(plan, PrefillPlan):
            executable, packed = self._programs.prefill[plan.bucket], jax.device_put(self._pack(plan))
        else:
            trace = any(request.trace for request in plan.requests)
            executable = self._programs.rounds[plan.bucket, trace]
            self._show_pages(plan.grown)
            packed = self._slots_of(plan)
        self._state, output = executable(self._params, self._state, packed)
        jax.copy_to_host_async(output)
        return output

    def _show_pages(self, requests: Sequence[Request]) -> None:
        """Tell the device which pages running requests have by now; the scheduler's table is the truth."""
        if not requests:
            return
        table = np.zeros(self._state.page_table.shape, np.int32)
        for request in self.scheduler.running:
            pages = self.scheduler.pages.pages_of(request.id)
            table[request.slot, : len(pages)] = pages
        self._state.page_table.delete()  # as the other arrays of a state that a step took
        self._state = replace(self._state, page_table=jax.device_put(table))

    def _slots_of(self, plan: RoundPlan) -> jax.Array:
        """The slot of each row, on the device; kept while the rows stay, for a copy costs a round 20 us."""
        rows = (*(request.slot for request in plan.requests), *[self.config.slots] * (plan.bucket - len(plan.requests)))
        if rows != self._rows:
            self._rows, self._slots = rows, jax.device_put(np.array(rows, np.int32))
        return self._slots

    def _pack(self, plan: PrefillPlan) -> np.ndarray:
        tree = self._program.drafter.tree
        return pack_chunk(plan, width=self._pool.width(tree), depth=tree.depth, vocab_size=self._admission.vocab_size)

    def _read(self, plan: Plan, output: StepOutput) -> None:
        """Take a step's result: the only place that waits for the device."""
        report = np.asarray(output.report)
        self.scheduler.settle(plan)
        if isinstance(plan, PrefillPlan):
            rows = [plan.request] if plan.emits else []
        else:
            rows = plan.requests
        trace = jax.tree.map(np.asarray, output.trace)
        is_round, drafted = isinstance(plan, RoundPlan), []
        for row, request in enumerate(rows):
            if request.finish_reason is not None:
                continue  # it ended in an earlier step; this one was dispatched before that was known
            if is_round and request.params.draft:
                drafted.append(row)
            reason = take_report(request, report[:, row], trace, row, is_round, self.eos_ids)
            self._texts[request.id].push(request)
            self._clock(request)
            if reason is not None:
                self._catch_up(request)
                self._end(request, reason)
            else:
                self._keep(request)
        if drafted:
            self._watch.count(report[:, drafted])

    def _keep(self, request: Request) -> None:
        """Let other requests find the pages that are whole by now."""
        lags = self._program.drafter.lags
        self.scheduler.keep(request, request.whole_rows if lags else request.rows_committed)

    def _catch_up(self, request: Request) -> None:
        """Make the pages of a request that ended whole: no round will write what the draft's cache lags by."""
        lengths, page_size = (request.whole_rows, request.rows_committed), self.config.page_size
        if request.slot is None:
            return  # it was preempted meanwhile
        if self._programs.catch_up is not None and lengths[0] // page_size < lengths[1] // page_size:
            width = self._state.page_table.shape[1]
            packed = pack_catch_up(request, self.scheduler.pages.pages_of(request.id), width=width)
            self._state = self._programs.catch_up(self._params, self._state, jax.device_put(packed))
        self.scheduler.keep(request, request.rows_committed)

    def _clock(self, request: Request) -> None:
        elapsed = time.perf_counter() - self._added_at[request.id]
        if request.metrics.time_to_first_token == 0.0:
            request.metrics.time_to_first_token = elapsed
        request.metrics.decode_seconds = elapsed - request.metrics.time_to_first_token

    def _requests(self, prompts: Prompt | Sequence[Prompt], params: Any, *, trace: bool) -> list[Request]:
        """Check everything before anything is queued."""
        self._check_open()
        requests = self._admission.requests(prompts, params, trace=trace)
        for request in requests:
            self.scheduler.check(request)
        if trace:
            self._programs.ensure_trace(self._state)
        return requests

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")

    def _queue(self, request: Request) -> None:
        self._check_open()
        self._texts[request.id] = OutputText(self.tokenizer, request.prompt_token_ids)
        self._added_at[request.id] = time.perf_counter()
        self.scheduler.add(request)

    def _end(self, request: Request, reason: str) -> None:
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self.scheduler.finish(request)
        self._texts[request.id].finish()
        self._metrics = self._metrics + request.metrics

    def _forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)
        self._added_at.pop(request.id, None)

    def _pool_shape(self, target: Model) -> PoolShape:
        config, dtype = self.config, str(target.embed.dtype)
        shape = PoolShape(
            slots=config.slots,
            pages=config.pages or 2,
            page_size=config.page_size,
            max_len=config.max_len,
            dtype=config.kv_dtype or dtype,
            draft_dtype=config.draft_kv_dtype or dtype,
            prefix_cache=config.prefix_cache,
        )
        if config.pages is None:
            all_slots = config.slots * shape.width(self._program.drafter.tree) + 1
            shape = PoolShape(**{**vars(shape), "pages": all_slots})
        return shape
