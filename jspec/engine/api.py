"""The public engine, which completes prompts for any number of threads and asyncio tasks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, Self, Unpack, final

from tqdm import tqdm

from jspec.core.config import EngineConfig
from jspec.core.engine_options import EngineOptions
from jspec.core.foreign_names import check_names
from jspec.core.shorten import short
from jspec.draft.named import DrafterSource, make_drafter
from jspec.engine import streams
from jspec.engine.build import build_core, engine_config, model_options
from jspec.engine.caller_input import (
    PARAMETERS,
    Params,
    Prompt,
    Prompts,
    read_ids,
)
from jspec.engine.chat_input import (
    TEMPLATE_FIELDS,
    ChatFields,
    Conversation,
    format_conversations,
)
from jspec.engine.input_processor import InputProcessor
from jspec.engine.loop import EngineLoop
from jspec.engine.output_processor import make_completion
from jspec.engine.program_choice import gathering
from jspec.engine.request import Chunk, Completion, Request
from jspec.engine.sampling_fields import SamplingFields
from jspec.engine.tokenizer import Tokenizer, check_size, load_tokenizer
from jspec.models import load
from jspec.models.decoder import Model
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step.compile_cache import keep_compiled
from jspec.step.on_mesh import mesh_for

OPTIONS = tuple(field.name for field in fields(EngineConfig))
ELSEWHERE = {"SamplingParams": PARAMETERS, "Engine.from_pretrained": ("dtype",)}


@final
class Engine(EngineLoop):
    """Serves prompts with speculative decoding.

    There is no background thread: a caller that waits for its request steps the engine, and a step serves all requests.
    All methods may be called from several threads at once.

    Args:
        target: the model whose distribution the output has.
        drafter: proposes tokens: a `Drafter`, "ngram", "suffix", or a path or hub id of a draft head or draft model,
            which then drafts the default tree; None: plain decoding with the same programs.
        tokenizer: a `Tokenizer`, a tokenizer of transformers, a folder with tokenizer files, a hub id, or "bytes";
            None: prompts and output are token ids.
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
        TypeError, ValueError: an argument is unknown or wrong, or options and models do not fit together or into
            memory.
    """

    def __init__(
        self,
        target: Model,
        *,
        drafter: DrafterSource = None,
        tokenizer: Tokenizer | str | None = None,
        eos_ids: Sequence[int] = (),
        logits_processor: LogitsProcessor | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if not isinstance(target, Model):
            raise TypeError(
                f"Engine: target: expected a loaded Model, got {short(target)}; to load a checkpoint call "
                "Engine.from_pretrained(path)"
            )
        check_names("Engine", options, OPTIONS, ELSEWHERE)
        config = engine_config(options, target.config)
        keep_compiled(config.compile_cache)
        tokenizer = load_tokenizer(tokenizer)
        check_size(tokenizer, target.config.vocab_size)
        self.input_processor = InputProcessor(tokenizer, target.config.vocab_size, read_ids("eos_ids", eos_ids), config)
        mesh = mesh_for(config, target)
        if mesh is not None:
            self.input_processor.gathers_logits = gathering(config, edits_all=logits_processor is not None)
        proposes = make_drafter(drafter, mesh=mesh)
        core = build_core(config, target, proposes, logits_processor, has_tokenizer=tokenizer is not None)
        super().__init__(config, core)
        self._async_steps = streams.AsyncSteps()
        sizes = target.config
        self._model = f"{sizes.family} model of {sizes.num_layers} layers and {sizes.vocab_size} tokens"

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str] | Model,
        *,
        drafter: DrafterSource = None,
        dtype: str | None = None,
        tokenizer: Tokenizer | str | None = None,
        eos_ids: Sequence[int] | None = None,
        logits_processor: LogitsProcessor | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Make an engine for a checkpoint; arguments not listed here are those of `Engine`.

        Args:
            path: a Hugging Face folder, a folder written by ``python -m convert``, a hub id, or a loaded model.
            drafter: as for `Engine`.
            dtype: dtype of the weights, also of a drafter that is given by its path; None: float32 on CPU, bfloat16
                elsewhere.
            tokenizer: as for `Engine`; None: the folder's tokenizer, if it has one.
            eos_ids: as for `Engine`; None: the folder's.
        """
        check_names("Engine.from_pretrained", options, OPTIONS, ELSEWHERE)
        config = EngineConfig(**options)
        if isinstance(path, Model):
            if dtype is not None:
                raise ValueError(
                    f"dtype: expected None with a loaded Model, got {short(dtype)}; load the model with it"
                )
            given: dict[str, Any] = {"drafter": drafter, "tokenizer": tokenizer, "eos_ids": eos_ids or ()}
            return cls(path, logits_processor=logits_processor, **given, **options)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"Engine.from_pretrained: path: expected a folder, a hub id (owner/name) or a Model, got {short(path)}"
            )
        keep_compiled(config.compile_cache)
        mesh = mesh_for(config)
        proposes = make_drafter(drafter, dtype=dtype, mesh=mesh)  # first, because it is the smaller checkpoint
        made: dict[str, Any] = {}  # from the folder, checked before weights are read
        checkpoint = load.load(
            os.fspath(path),
            dtype=dtype,
            quantize=config.quantize,
            mesh=mesh,
            check=lambda found, folder: made.update(model_options(found, folder, tokenizer, eos_ids, options)),
        )
        model = Model.from_weights(checkpoint.config, checkpoint.weights, mesh)
        return cls(model, drafter=proposes, logits_processor=logits_processor, **made, **options)

    def generate(
        self,
        prompts: Prompts,
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        progress: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Complete prompts; return the completions in the order of the prompts.

        A request that fails while it runs ends with ``finish_reason="error"`` and its ``error``; other requests go on.

        Args:
            prompts: one prompt or several, in any form that `jspec.engine.caller_input.read_prompts` reads: texts,
                lists or arrays of token ids, dicts with "prompt" or "prompt_token_ids".
            params: a `SamplingParams` or a dict of its fields for all prompts, or one of these per prompt.
            sampling_params: another name of ``params``.
            trace: whether to record every round's draft tree in ``Completion.rounds``.
            progress: whether to show a progress bar with tokens per second and mean acceptance length.
            fields: fields of `SamplingParams` for all prompts, instead of ``params``.

        Raises:
            TypeError, ValueError: a prompt or a parameter cannot be served. No prompt is queued in this case.
        """
        asked = self._make_requests(prompts, params, sampling_params=sampling_params, trace=trace, keywords=fields)
        requests = [sample for request in asked for sample in request.samples]
        try:
            self._queue(requests)
            with tqdm(total=sum(r.max_new_tokens for r in requests), unit="tok", disable=not progress) as bar:
                for request in requests:
                    while request.finish_reason is None:
                        self._advance(requests)
                        if progress:
                            self._update_bar(bar, requests)
            return [make_completion(request) for request in asked]
        finally:
            self._abort(requests)

    async def agenerate(
        self,
        prompts: Prompts,
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Complete prompts as `generate` does, for use in asyncio tasks; cancelling the task aborts the requests."""
        make = partial(self._make_requests, prompts, params, sampling_params=sampling_params, trace=trace)
        asked = await self._async_steps.finish(self, partial(make, keywords=fields))
        return [make_completion(request) for request in asked]

    def prepare(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """Make the request of one prompt, which `jspec.engine.engine_thread.EngineThread.submit` takes.

        The prompt is tokenised, the parameters are checked and a grammar is compiled; nothing is queued. This may take
        seconds, and any thread may do it while others run steps.

        Args:
            trace: whether to record every round's draft tree in ``Chunk.rounds``.

        Raises:
            TypeError, ValueError: the prompt or a parameter cannot be served.
        """
        self._check_open()
        _check_fields(fields)
        request = self.input_processor.request(
            prompt, params, sampling_params=sampling_params, trace=trace, keywords=fields
        )
        self.scheduler.check(request)
        return request

    def submit(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """Queue one prompt; return its request, which `result` and `abort` take.

        Raises:
            TypeError, ValueError: the prompt or a parameter cannot be served.
        """
        request = self.prepare(prompt, params, sampling_params=sampling_params, **fields)
        try:
            self._queue(request.samples)
            self._compile_rounds(request.samples)
        except BaseException:
            self._abort(request.samples)
            raise
        return request

    def result(self, request: Request) -> Completion:
        """Step the engine until a request from `submit` has ended; return its completion, at every call again.

        Raises:
            TypeError, ValueError: this is no request, or it is a request of another engine.
        """
        samples = self._samples_of("result", request)
        while any(sample.finish_reason is None for sample in samples):
            self._advance(samples)
        return make_completion(request)

    def abort(self, request: Request) -> None:
        """End all unfinished completions of a request, and free their slots and cache pages at once.

        Raises:
            TypeError, ValueError: this is no request, or it is a request of another engine.
        """
        self._abort(self._samples_of("abort", request))

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> Iterator[Chunk]:
        """Complete one prompt; yield a chunk of output after each round.

        The prompt is checked at once, and queued when the caller asks for the first chunk. Closing the iterator aborts
        the request. If the request fails, its error is raised after the last chunk. With ``n`` > 1 the chunks of all
        completions are interleaved; each chunk has the index of its completion.

        Args:
            trace: whether to record every round's draft tree in ``Chunk.rounds``.

        Raises:
            TypeError, ValueError: the prompt or a parameter cannot be served.
        """
        request = self.prepare(prompt, params, sampling_params=sampling_params, trace=trace, **fields)
        return streams.stream(self, request)

    def astream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks that `stream` yields, for use in asyncio tasks; cancelling the task aborts the request.

        Errors in the prompt or a parameter are raised with the first chunk.
        """
        make = partial(self.prepare, prompt, params, sampling_params=sampling_params, trace=trace, **fields)
        return self._async_steps.stream(self, make)

    # -- conversations

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        progress: bool = False,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]:
        """Format conversations with the chat template and complete them.

        Args:
            messages: one conversation, a list of messages ``{"role": ..., "content": ...}``; or a list of
                conversations.
            params, sampling_params, trace, progress: arguments of `generate`.
            fields: options of the chat template (`jspec.engine.chat_input.TemplateFields`): ``tools``, ``documents``,
                ``chat_template``, ``add_generation_prompt``, ``continue_final_message``, ``chat_template_kwargs``; and
                fields of `SamplingParams`, instead of ``params``.

        Returns:
            One completion per conversation, in their order.

        Raises:
            TypeError, ValueError: a message or an option is wrong, or there is no tokenizer or no chat template.
        """
        prompts, rest = self._format(messages, fields)
        return self.generate(prompts, params, sampling_params=sampling_params, trace=trace, progress=progress, **rest)

    async def achat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]:
        """Complete conversations as `chat` does, for use in asyncio tasks; cancelling the task aborts the requests."""
        prompts, rest = self._format(messages, fields)
        return await self.agenerate(prompts, params, sampling_params=sampling_params, trace=trace, **rest)

    def chat_stream(
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[ChatFields],
    ) -> Iterator[Chunk]:
        """Format one conversation as `chat` does; yield the chunks of its completion, as `stream` does."""
        prompts, rest = self._format(messages, fields)
        if len(prompts) != 1:
            raise ValueError(f"messages: expected one conversation, got {len(prompts)}; call chat_stream for each")
        return self.stream(prompts[0], params, sampling_params=sampling_params, trace=trace, **rest)

    def _format(self, messages: Any, fields: Mapping[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the token ids of each conversation, and the keyword arguments that are not the chat template's."""
        check_names("chat", fields, (*PARAMETERS, *TEMPLATE_FIELDS), {"Engine": OPTIONS})
        rest = {name: value for name, value in fields.items() if name not in TEMPLATE_FIELDS}
        return format_conversations(self.tokenizer, messages, fields), rest

    # -- requests

    def _make_requests(self, prompts: Any, params: Any, **more: Any) -> list[Request]:
        """Make and check a caller's requests, before any of them is queued; ``more`` goes to the input processor."""
        self._check_open()
        _check_fields(more.get("keywords"))
        requests = self.input_processor.requests(prompts, params, **more)
        for request in requests:
            self.scheduler.check(request)
        return requests

    def _samples_of(self, call: str, request: Any) -> tuple[Request, ...]:
        """Return the completions of a request, and refuse what is no request of this engine."""
        if not isinstance(request, Request):
            raise TypeError(f"{call}: expected a request that submit returned, got {short(request)}")
        if request.owner is not self.input_processor:
            raise ValueError(f"{call}: expected a request of this engine, got request {request.id} of another engine")
        return request.samples

    def _update_bar(self, bar: tqdm, requests: Sequence[Request]) -> None:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        bar.set_postfix(tau=f"{self.metrics.mean_acceptance_length:.2f}", refresh=False)

    # -- the engine as an object

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None: prompts and output are token ids."""
        return self.input_processor.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The token ids that end a request."""
        return self.input_processor.eos_ids

    def close(self) -> None:
        """Abort all requests and free the device memory."""
        with self._lock:
            super().close()
            self.input_processor.close()

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        drafter, config = self.core.runner.program.drafter, self.config
        return f"Engine({state}{self._model}, drafter={drafter!r}, slots={config.slots}, max_len={config.max_len})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Engine: expected an object that can be copied or pickled, got an engine, which holds device memory; make "
            "another engine from its arguments"
        )


def _check_fields(keywords: Mapping[str, Any] | None) -> None:
    check_names("generate", keywords or {}, PARAMETERS, {"Engine": OPTIONS, "Engine.chat": TEMPLATE_FIELDS})
