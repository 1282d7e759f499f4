"""The public engine: prompts in, completions or chunks out, from any thread or asyncio task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final
from weakref import WeakKeyDictionary

from tqdm import tqdm

from convert import hub
from jspec.core.config import EngineConfig
from jspec.draft.base import Drafter
from jspec.engine.build import build_core
from jspec.engine.core import EngineCore
from jspec.engine.draft_length import Policy
from jspec.engine.errors import RESTART, Recovery
from jspec.engine.fair_lock import FairLock
from jspec.engine.input_processor import InputProcessor, Prompt
from jspec.engine.metrics import Metrics
from jspec.engine.output_processor import make_chunk, make_completion
from jspec.engine.prometheus import exposition
from jspec.engine.request import Chunk, Completion, Request
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.scheduler import Scheduler
from jspec.engine.stats_logger import LowAcceptanceWarner, StatsLogger
from jspec.engine.tokenizer import Tokenizer, load_tokenizer
from jspec.models import load
from jspec.models.decoder import Model
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step.executables import keep_compiled
from jspec.step.memory import MemoryPlan


@final
class Engine:
    """Decodes requests with speculative decoding, in rounds of one device program each.

    There is no background thread: a caller that waits for its request steps the engine, and a step serves all requests.
    All methods may be called from several threads at once.

    Args:
        target: the model whose distribution the output has.
        drafter: proposes tokens; None: plain decoding with the same programs.
        tokenizer: a `Tokenizer`, a folder with tokenizer files, or "bytes"; None: prompts and output are token ids.
        eos_ids: tokens that end a request.
        logits_processor: a pure function of jax arrays, traced into every program: takes logits ``[batch, nodes,
            vocab]`` and a `jspec.sampling.logits_processor.LogitsContext`, and returns logits. It is applied after
            penalties and grammar and before temperature, in every round, for all requests; every round then also
            computes the penalties.
        options: fields of `EngineConfig`.

    Attributes:
        config: the checked options.
        core: the engine's loop with its scheduler and its model runner.
        input_processor: makes requests from prompts.

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
        self.config = EngineConfig(**options)
        keep_compiled(self.config.compile_cache)
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.input_processor = InputProcessor(tokenizer, target.config.vocab_size, tuple(eos_ids), self.config)
        self.core: EngineCore = build_core(
            self.config, target, drafter, logits_processor, has_tokenizer=tokenizer is not None
        )
        self._recovery = Recovery(self.core)
        self._lock = FairLock()
        self._checks = ThreadPoolExecutor(16, "check")  # their own threads: steps must not wait for slow grammars
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
        """Make an engine for a checkpoint; further arguments are those of `Engine`.

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
            trace: record every round's tree in ``Completion.rounds``.
            progress: show a progress bar with tokens/s and mean acceptance length.

        Raises:
            ValueError: a prompt or a parameter cannot be served; nothing is queued then.
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
        """Complete a conversation, which the tokenizer's chat template formats; ``options`` are those of `generate`.

        Raises:
            ValueError: there is no tokenizer, or the tokenizer has no chat template.
        """
        if self.tokenizer is None:
            raise ValueError("chat: this engine has no tokenizer; pass tokenizer= or call generate with token ids")
        return self.generate(self.tokenizer.chat(list(messages)), params, **options)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue one prompt as a request, to be passed to `result` or `abort`.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
        """
        (request,) = self._make_requests([prompt], params, trace=False)
        self._queue(request.samples)
        return request

    def result(self, request: Request) -> Completion:
        """Step the engine until a request from `submit` has ended; return its completion."""
        while any(sample.finish_reason is None for sample in request.samples):
            self.step()
        return make_completion(request)

    def abort(self, request: Request) -> None:
        """End all completions of a request that still run; their slots and pages are free at once."""
        self._abort(request.samples)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt; yield a chunk of output whenever a round's result has been read.

        The request is checked at once and queued when the first chunk is requested. Closing the iterator aborts the
        request. If the request fails, its error is raised after the last chunk. With ``n`` > 1 the chunks of all
        completions are interleaved, each with the index of its completion.

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
                # Steps of other callers serve this request too, so there may be new output without a step here.
                while not (updated := _with_new_output(num_sent)):
                    self.step()
                for sample in updated:
                    yield _next_chunk(sample, num_sent)
            _raise_error(request)
        finally:
            self._abort(request.samples)

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """Do what `stream` does in asyncio, for any number of tasks at once; cancelling a task aborts its request.

        The request is checked in a thread when the first chunk is requested, so its errors are raised there.
        """
        (request,) = await asyncio.wrap_future(self._checks.submit(self._make_requests, [prompt], params, trace=False))
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
                # In a thread, because an abort waits for the lock and the event loop must not wait.
                await asyncio.shield(asyncio.to_thread(self._abort, request.samples))

    async def _astep(self) -> None:
        """Wait for a step in a thread, shared by all tasks of this event loop that wait at the same time."""
        loop = asyncio.get_running_loop()
        step = self._shared_steps.get(loop)
        if step is None or step.done():
            step = self._shared_steps[loop] = loop.run_in_executor(None, self.step)
        await asyncio.shield(step)

    def _update_bar(self, bar: tqdm, requests: Sequence[Request]) -> None:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        bar.set_postfix(tau=f"{self.metrics.mean_acceptance_length:.2f}", refresh=False)

    # -- the loop, with lock, recovery and log

    def step(self) -> None:
        """Dispatch one step and read the results that are due, for all requests."""
        with self._lock:
            self._recovery.resume()
            with self._recovery:
                self.core.step(overlap=self.config.overlap)
            while self._abort_after_step:
                self.core.finish(self._abort_after_step.pop(), "abort")
            if self._stats_logger.is_due():
                self._stats_logger.write(self.metrics, self.core.gauges())
            for rows in self.core.take_drafted_rows():
                self._acceptance_warner.count(rows)  # last: a warning filter may make this raise an error

    def _make_requests(self, prompts: Prompt | Sequence[Prompt], params: Any, *, trace: bool) -> list[Request]:
        """Make and check a caller's requests, and compile missing programs, before any request is queued."""
        self._check_open()
        requests = self.input_processor.requests(prompts, params, trace=trace)
        for request in requests:
            self.scheduler.check(request)
        self.core.runner.ensure(requests)
        return requests

    def _queue(self, requests: Sequence[Request]) -> None:
        """Add requests to the schedule, except those that were aborted already."""
        queued_at = time.perf_counter()
        with self._lock:
            self._check_open()
            for request in requests:
                if request.finish_reason is None:
                    self.core.add(request, queued_at)

    def _abort(self, requests: Sequence[Request]) -> None:
        """Abort those of the requests that have not ended yet.

        If this thread is inside a step (in a tokenizer's callback, or when the garbage collector closes a stream), the
        requests end at the end of the step.
        """
        live = [request for request in requests if request.finish_reason is None]
        if self._lock.is_mine:
            self._abort_after_step += live
        elif live:
            with self._lock:
                for request in live:
                    self.core.finish(request, "abort")

    def _check_open(self) -> None:
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
        """Tokens that end a request."""
        return self.input_processor.eos_ids

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def policy(self) -> Policy:
        """The policy that chooses the draft depth; it may be replaced while no dispatch is in flight."""
        return self.core.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.core.policy = policy

    @property
    def healthy(self) -> bool:
        """Whether the engine can serve; False after an error from which the device's state could not be recreated."""
        return self._recovery.healthy

    @property
    def memory_plan(self) -> MemoryPlan:
        """Device memory of weights, pools and programs; ``str(plan)`` is a readable summary."""
        return self.core.runner.memory_plan

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds that each program took to compile, by name."""
        return dict(self.core.runner.programs.seconds)

    @property
    def lower_seconds(self) -> dict[str, float]:
        """Seconds that each program took to be traced and lowered before it was compiled, by name."""
        return dict(self.core.runner.programs.lower_seconds)

    @property
    def metrics(self) -> Metrics:
        """Counters summed over all requests, and the pages in use now."""
        with self._lock:
            return replace(self.core.metrics(), pages_in_use=self.pages_in_use)

    @property
    def pages_in_use(self) -> int:
        return self.scheduler.pages.num_used

    def prometheus(self, model_name: str = "jspec") -> str:
        """Counters, gauges and latencies in Prometheus' text format, under vLLM's names."""
        with self._lock:
            return exposition(self.metrics, self.core.latencies, self.core.gauges(), model_name)


def _with_new_output(num_sent: dict[Request, int]) -> list[Request]:
    """Completions that have more tokens than were sent (``num_sent``), or have ended."""
    return [
        sample
        for sample, count in num_sent.items()
        if len(sample.output.pieces) > count or sample.finish_reason is not None
    ]


def _next_chunk(sample: Request, num_sent: dict[Request, int]) -> Chunk:
    """Make a chunk of a completion's unsent tokens and update ``num_sent``; a completion that has ended is removed."""
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
