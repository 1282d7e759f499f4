"""The public engine, which completes prompts for any number of threads and asyncio tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final
from weakref import WeakKeyDictionary

from tqdm import tqdm

from convert import hub
from jspec.core.config import EngineConfig
from jspec.core.shorten import short
from jspec.draft.base import Drafter
from jspec.engine.build import build_core
from jspec.engine.core import EngineCore
from jspec.engine.draft_length import Policy
from jspec.engine.errors import RESTART, Recovery
from jspec.engine.fair_lock import FairLock
from jspec.engine.input_processor import InputProcessor, Prompt
from jspec.engine.metrics import Metrics
from jspec.engine.output_processor import make_chunk, make_completion
from jspec.engine.program_choice import Features
from jspec.engine.prometheus import exposition
from jspec.engine.request import Chunk, Completion, Request
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.scheduler import Scheduler
from jspec.engine.stats_logger import LowAcceptanceWarner, StatsLogger
from jspec.engine.tokenizer import Tokenizer, load_tokenizer
from jspec.models import load
from jspec.models.decoder import Model
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step.compile_cache import keep_compiled
from jspec.step.memory import MemoryPlan

AT_ONCE = 256  # requests that are queued or aborted under one lock


@final
class Engine:
    """Serves prompts with speculative decoding.

    There is no background thread: a caller that waits for its request steps the engine, and a step serves all requests.
    All methods may be called from several threads at once.

    Args:
        target: the model whose distribution the output has.
        drafter: proposes tokens; None: plain decoding with the same programs.
        tokenizer: a `Tokenizer`, a folder with tokenizer files, or "bytes"; None: prompts and output are token ids.
        eos_ids: tokens that end a request.
        logits_processor: a pure function that jax can trace. It takes logits ``[batch, nodes, vocab]`` and a
            `jspec.sampling.logits_processor.LogitsContext`, and returns logits. It runs for all requests in every
            round, after penalties and grammar and before temperature. With a processor every round also computes the
            penalties.
        options: fields of `EngineConfig`.

    Attributes:
        config: the checked options.
        core: the engine's loop with its scheduler and its model runner.
        input_processor: makes requests from prompts.

    Raises:
        ValueError: options or models do not fit together or into memory.
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
        self.config = EngineConfig(**options)
        keep_compiled(self.config.compile_cache)
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.input_processor = InputProcessor(tokenizer, target.config.vocab_size, tuple(eos_ids), self.config)
        self.core: EngineCore = build_core(
            self.config, target, drafter, logits_processor, has_tokenizer=tokenizer is not None
        )
        self._recovery = Recovery(self.core)
        self._lock = FairLock()
        self._abort_after_step: list[Request] = []
        self._closed = False
        self._acceptance_warner = LowAcceptanceWarner(self.core.runner.program.drafter)
        self._stats_logger = StatsLogger(self.config.log_interval)
        self._shared_steps: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[None]] = WeakKeyDictionary()

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
        """Make an engine for a checkpoint; arguments not listed here are those of `Engine`.

        Args:
            path: a Hugging Face folder, a folder written by ``python -m convert``, a hub id, or a loaded model.
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            tokenizer: as for `Engine`; None: the folder's tokenizer, if it has one.
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

    # -- completions

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        trace: bool = False,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts; return the completions in the order of the prompts.

        A request that fails while it runs ends with ``finish_reason="error"`` and its ``error``; other requests go on.

        Args:
            prompts: one prompt (a string or a list of token ids) or a list of prompts.
            params: one `SamplingParams` for all prompts, or one per prompt.
            trace: whether to record every round's draft tree in ``Completion.rounds``.
            progress: whether to show a progress bar with tokens per second and mean acceptance length.

        Raises:
            ValueError: a prompt or a parameter cannot be served. No prompt is queued in this case.
        """
        asked = self._make_requests(prompts, params, trace=trace)
        requests = [sample for request in asked for sample in request.samples]
        try:
            self._queue(requests)
            with tqdm(total=sum(r.max_new_tokens for r in requests), unit="tok", disable=not progress) as bar:
                for request in requests:
                    while request.finish_reason is None:
                        self.step()
                        if progress:
                            self._update_bar(bar, requests)
            return [make_completion(request) for request in asked]
        finally:
            self._abort(requests)

    def chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]:
        """Format a conversation with the chat template and complete it; ``options`` are those of `generate`.

        Raises:
            ValueError: there is no tokenizer, or the tokenizer has no chat template.
        """
        if self.tokenizer is None:
            raise ValueError("chat: this engine has no tokenizer; pass tokenizer= or call generate with token ids")
        return self.generate(self.tokenizer.chat(list(messages)), params, **options)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue one prompt; return its request, which `result` and `abort` take.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
        """
        (request,) = self._make_requests([prompt], params, trace=False)
        self._queue(request.samples)
        return request

    def result(self, request: Request) -> Completion:
        """Step the engine until a request from `submit` has ended; return its completion.

        Raises:
            TypeError, ValueError: this is no request, or it is a request of another engine.
        """
        self._check_own(request)
        while any(sample.finish_reason is None for sample in request.samples):
            self.step()
        return make_completion(request)

    def abort(self, request: Request) -> None:
        """End all unfinished completions of a request, and free their slots and cache pages at once.

        Raises:
            TypeError, ValueError: this is no request, or it is a request of another engine.
        """
        self._check_own(request)
        self._abort(request.samples)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt; yield a chunk of output after each round.

        The prompt is checked at once, and queued when the caller asks for the first chunk. Closing the iterator aborts
        the request. If the request fails, its error is raised after the last chunk. With ``n`` > 1 the chunks of all
        completions are interleaved; each chunk has the index of its completion.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
        """
        (request,) = self._make_requests([prompt], params, trace=False)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        num_sent = dict.fromkeys(request.samples, 0)
        try:
            self._queue(request.samples)
            while num_sent:
                # Steps of other callers serve this request too, so new output may come without a step here.
                while not (updated := _with_new_output(num_sent)):
                    self.step()
                for sample in updated:
                    yield _next_chunk(sample, num_sent)
            _raise_error(request)
        finally:
            self._abort(request.samples)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """Yield the chunks that `stream` yields, for use in asyncio tasks; cancelling the task aborts the request."""
        (request,) = self._make_requests([prompt], params, trace=False)
        return self._astream(request)

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        num_sent = dict.fromkeys(request.samples, 0)
        try:
            await asyncio.to_thread(self._queue, request.samples)
            while num_sent:
                while not (updated := _with_new_output(num_sent)):
                    await self._astep()
                for sample in updated:
                    yield _next_chunk(sample, num_sent)
            _raise_error(request)
        finally:
            if any(sample.finish_reason is None for sample in request.samples):
                # An abort waits for the lock; it runs in a thread because the event loop must not wait.
                await asyncio.shield(asyncio.to_thread(self._abort, request.samples))

    async def _astep(self) -> None:
        """Wait for a step in another thread; all tasks of this event loop that wait meanwhile share the step."""
        loop = asyncio.get_running_loop()
        step = self._shared_steps.get(loop)
        if step is None or step.done():
            step = self._shared_steps[loop] = loop.run_in_executor(None, self.step)
        await asyncio.shield(step)

    def _update_bar(self, bar: tqdm, requests: Sequence[Request]) -> None:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        bar.set_postfix(tau=f"{self.metrics.mean_acceptance_length:.2f}", refresh=False)

    def warmup(
        self, *, logprobs: bool = False, prompt_logprobs: bool = False, trace: bool = False, grammar: bool = False
    ) -> None:
        """Compile the programs of all batch sizes and prompt lengths now; other threads keep stepping meanwhile.

        Args:
            logprobs, prompt_logprobs, trace: compile the programs of requests that ask for these outputs too.
            grammar: compile the programs of requests whose grammar the host follows too.

        Raises:
            ValueError: the programs do not fit into the device's memory.
        """
        self._check_open()
        runner = self.core.runner
        features = Features(traced=trace, logprobs=logprobs, masked=grammar)
        runner.compile(runner.choice.all_keys(features, prompt_logprobs=prompt_logprobs))

    # -- the loop, with lock, recovery and log

    def step(self) -> None:
        """Run one step for all requests, which starts a program and reads the results of earlier programs."""
        with self._lock:
            self._recovery.resume()
            with self._recovery:
                self.core.step(overlap=self.config.overlap)
            while self._abort_after_step:
                self.core.finish(self._abort_after_step.pop(), "abort")
            if self._stats_logger.is_due():
                self._stats_logger.write(self.metrics, self.core.gauges())
            for rows in self.core.take_drafted_rows():
                self._acceptance_warner.count(rows)  # last, because a warning filter may turn the warning into an error

    def _make_requests(self, prompts: Prompt | Sequence[Prompt], params: Any, *, trace: bool) -> list[Request]:
        """Make and check a caller's requests, before any of them is queued."""
        self._check_open()
        requests = self.input_processor.requests(prompts, params, trace=trace)
        for request in requests:
            self.scheduler.check(request)
        return requests

    def _queue(self, requests: Sequence[Request]) -> None:
        """Add requests to the schedule, except those that were aborted already, once their programs are compiled.

        Other threads may step between two pieces of a large batch.
        """
        queued_at = time.perf_counter()
        for start in range(0, len(requests), AT_ONCE):
            self._queue_piece(requests[start : start + AT_ONCE], queued_at)

    def _queue_piece(self, requests: Sequence[Request], queued_at: float) -> None:
        while True:
            with self._lock:
                self._check_open()
                new = [request for request in requests if request.finish_reason is None]
                missing = self.core.runner.missing_keys(new, self.core.live)
                if not missing:
                    for request in new:
                        self.core.add(request, queued_at)
                    return
            self.core.runner.compile(missing)  # outside of the lock: other threads keep stepping

    def _abort(self, requests: Sequence[Request]) -> None:
        """Abort the requests that have not ended yet.

        If this thread is inside a step (in a tokenizer's callback, or when the garbage collector closes a stream), the
        requests end when the step ends.
        """
        live = [request for request in requests if request.finish_reason is None]
        if self._lock.is_mine:
            self._abort_after_step += live
            return
        for start in range(0, len(live), AT_ONCE):
            with self._lock:
                for request in live[start : start + AT_ONCE]:
                    self.core.finish(request, "abort")

    def _check_own(self, request: Request) -> None:
        """Refuse what is no request of this engine: its slot and pages would belong to another engine."""
        if not isinstance(request, Request):
            raise TypeError(f"request: expected what submit returned, got {short(request)}")
        if request.owner is not self.input_processor:
            raise ValueError(f"request: expected one of this engine, got request {request.id} of another engine")

    def _check_open(self) -> None:
        self._lock.check_process()
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")
        if not self.healthy:
            raise RuntimeError(RESTART)

    def close(self) -> None:
        """Abort all requests and free the device memory."""
        with self._lock:
            self.core.close()
            self._closed = True
            self.input_processor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- state

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None: prompts and output are token ids."""
        return self.input_processor.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The token ids that end a request."""
        return self.input_processor.eos_ids

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def policy(self) -> Policy:
        """The policy that chooses the draft depth; it may be replaced when all results of steps have been read."""
        return self.core.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.core.policy = policy

    @property
    def healthy(self) -> bool:
        """Whether the engine can serve; False if the device's state could not be recreated after an error."""
        return self._recovery.healthy

    @property
    def memory_plan(self) -> MemoryPlan:
        """The device memory of weights, KV pools and programs, in bytes; ``str(plan)`` is a readable summary."""
        return self.core.runner.memory_plan

    @property
    def compile_seconds(self) -> dict[str, float]:
        """The time to compile each program, in seconds, by the program's name."""
        return dict(self.core.runner.programs.seconds)

    @property
    def lower_seconds(self) -> dict[str, float]:
        """The time to trace and lower each program before compilation, in seconds, by the program's name."""
        return dict(self.core.runner.programs.lower_seconds)

    @property
    def metrics(self) -> Metrics:
        """The counters of all requests, added up, and the number of pages in use now."""
        with self._lock:
            return replace(self.core.metrics(), pages_in_use=self.pages_in_use)

    @property
    def pages_in_use(self) -> int:
        return self.scheduler.pages.num_used

    def prometheus(self, model_name: str = "jspec") -> str:
        """Return counters, gauges and latencies (in seconds) as Prometheus text, under vLLM's metric names."""
        with self._lock:
            return exposition(self.metrics, self.core.latencies, self.core.gauges(), model_name)


def _with_new_output(num_sent: dict[Request, int]) -> list[Request]:
    """Return the completions that have ended or have unsent tokens; ``num_sent`` counts the tokens sent so far."""
    return [
        sample
        for sample, count in num_sent.items()
        if len(sample.output.pieces) > count or sample.finish_reason is not None
    ]


def _next_chunk(sample: Request, num_sent: dict[Request, int]) -> Chunk:
    """Make a chunk of a completion's unsent tokens, and update ``num_sent``; ended completions are removed from it."""
    chunk = make_chunk(sample, num_sent[sample])
    num_sent[sample] += len(chunk.token_ids)
    if chunk.finish_reason is not None:
        del num_sent[sample]
    return chunk


def _raise_error(request: Request) -> None:
    """Raise the error of a request's first failed completion, if any failed."""
    for sample in request.samples:
        if sample.error is not None:
            raise sample.error
