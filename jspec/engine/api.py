"""What callers see of an engine: prompts in, completions or chunks out, from any thread or task."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self
from weakref import WeakKeyDictionary

from tqdm import tqdm

from jspec.engine.input_processor import Prompt
from jspec.engine.metrics import Metrics
from jspec.engine.output_processor import OutputState, completion_of
from jspec.engine.request import Chunk, Completion, Request
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.tokenizer import Tokenizer


class Interface(abc.ABC):
    """Whoever waits for a request steps the engine, which serves the others too: there is no thread in the background.

    All methods may be called from several threads at once.
    """

    def __init__(self) -> None:
        self._texts: dict[int, OutputState] = {}
        self._added_at: dict[int, float] = {}
        self._steps: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[None]] = WeakKeyDictionary()

    @property
    @abc.abstractmethod
    def metrics(self) -> Metrics:
        """The sum over all requests, and what is held now."""

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """None: ids in and ids out."""

    @abc.abstractmethod
    def step(self) -> None:
        """Dispatch what the scheduler plans and read what is due: with overlap, one step behind."""

    @abc.abstractmethod
    def close(self) -> None:
        """Abort what is left and let the device memory go."""

    @abc.abstractmethod
    def _requests(self, prompts: Prompt | Sequence[Prompt], params: Any, *, trace: bool) -> list[Request]:
        """Check everything before anything is queued."""

    @abc.abstractmethod
    def _add(self, texts: dict[Request, OutputState], asked_at: float) -> None:
        """Let the scheduler have requests, all in one turn; one that was dropped meanwhile is left out."""

    @abc.abstractmethod
    def _take_back(self, requests: Sequence[Request], *, forget: bool) -> None:
        """End requests, all in one turn; in the middle of a step that is left to the step's end.

        Args:
            forget: keep nothing of them.
        """

    def abort(self, request: Request) -> None:
        """End a request, all its completions; slots and pages are free at once. What has ended stays as it is."""
        self._take_back(request.samples, forget=False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        trace: bool = False,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts; the completions come in the prompts' order.

        A request that fails on its way ends with ``finish_reason="error"`` and its ``error``; the others go on.

        Args:
            prompts: one string or one list of token ids is one prompt; else a list of prompts.
            params: one for all, or one a prompt.
            trace: keep every round's tree in ``Completion.rounds``.
            progress: show a bar with tokens/s and mean acceptance length.

        Raises:
            ValueError: a prompt or a parameter that cannot be served; nothing is queued then.
        """
        asked = self._requests(prompts, params, trace=trace)
        requests = [sample for request in asked for sample in request.samples]
        try:
            self._queue(*requests)
            with tqdm(total=sum(r.limit for r in requests), unit="tok", disable=not progress) as bar:
                for request in requests:
                    while request.finish_reason is None:
                        self.step()
                        if progress:
                            self._show(bar, requests)
            return [self._completion(request) for request in asked]
        finally:
            self._drop(*requests)

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

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue one prompt; `abort` ends it, and `result` waits for it and must be called in any case.

        Raises:
            ValueError: a prompt or a parameter that cannot be served.
        """
        (request,) = self._requests([prompt], params, trace=False)
        self._queue(*request.samples)
        return request

    def result(self, request: Request) -> Completion:
        """Step until a request from `submit` has ended; it is forgotten then."""
        while any(sample.finish_reason is None for sample in request.samples):
            self.step()
        completion = self._completion(request)
        self._drop(*request.samples)
        return completion

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk as rounds are read.

        The request is checked here and queued when the first chunk is asked for. Closing the iterator aborts it. A
        request that fails raises its error behind the last chunk. Of ``n`` completions the chunks come as they are
        ready, each with its completion's index.

        Raises:
            ValueError: a prompt or a parameter that cannot be served.
        """
        (request,) = self._requests([prompt], params, trace=False)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        sent = dict.fromkeys(request.samples, 0)
        try:
            self._queue(*request.samples)
            while sent:
                # Steps of others move this request on too, so there may be news without a step of our own.
                while not (news := self._news(sent)):
                    self.step()
                for sample in news:
                    yield self._chunk(sample, sent)
            _raise_error(request)
        finally:
            self._drop(*request.samples)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """As `stream`, for any number of asyncio tasks at once; cancelling the task aborts the request."""
        (request,) = self._requests([prompt], params, trace=False)
        return self._astream(request)

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        sent = dict.fromkeys(request.samples, 0)
        try:
            await asyncio.to_thread(self._queue, *request.samples)
            while sent:
                while not (news := self._news(sent)):
                    await self._astep()
                for sample in news:
                    yield self._chunk(sample, sent)
            _raise_error(request)
        finally:
            if any(sample.finish_reason is None for sample in request.samples):
                # To end them takes a turn, for which the loop must not wait.
                await asyncio.shield(asyncio.to_thread(self._drop, *request.samples))
            for sample in request.samples:
                self._forget(sample)

    async def _astep(self) -> None:
        """Wait for a step in a thread: the one that another task of this loop waits for, or a new one."""
        loop = asyncio.get_running_loop()
        step = self._steps.get(loop)
        if step is None or step.done():
            step = self._steps[loop] = loop.run_in_executor(None, self.step)
        await asyncio.shield(step)

    def _news(self, sent: dict[Request, int]) -> list[Request]:
        """Those of a stream's completions of which there is more than was sent."""
        return [
            sample
            for sample, count in sent.items()
            if len(self._texts[sample.id].pieces) > count or sample.finish_reason is not None
        ]

    def _chunk(self, sample: Request, sent: dict[Request, int]) -> Chunk:
        """What is new of a completion; one of which all is sent is taken out."""
        chunk = self._texts[sample.id].chunk(sample, sent[sample])
        sent[sample] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            del sent[sample]
        return chunk

    def _completion(self, request: Request) -> Completion:
        first, *others = (completion_of(sample, self._texts[sample.id]) for sample in request.samples)
        return replace(first, others=tuple(others))

    def _show(self, bar: tqdm, requests: Sequence[Request]) -> None:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        bar.set_postfix(tau=f"{self.metrics.mean_acceptance_length:.2f}", refresh=False)

    def _queue(self, *requests: Request) -> None:
        asked_at = time.perf_counter()
        self._add({request: OutputState(self.tokenizer, request) for request in requests}, asked_at)

    def _clock(self, request: Request) -> None:
        elapsed = time.perf_counter() - self._added_at[request.id]
        if request.metrics.time_to_first_token == 0.0:
            request.metrics.time_to_first_token = elapsed
        request.metrics.decode_seconds = elapsed - request.metrics.time_to_first_token

    def _drop(self, *requests: Request) -> None:
        """End requests that nobody waits for any more, and keep nothing of them."""
        self._take_back(requests, forget=True)

    def _forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)
        self._added_at.pop(request.id, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _raise_error(request: Request) -> None:
    """Raise what ended a request, the first of its completions that failed."""
    for sample in request.samples:
        if sample.error is not None:
            raise sample.error
