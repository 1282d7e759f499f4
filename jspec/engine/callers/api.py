"""The public engine, which completes prompts for any number of threads and asyncio tasks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Self, Unpack, final

from jspec.core.config import EngineConfig
from jspec.core.engine_options import EngineOptions
from jspec.core.foreign_names import check_names
from jspec.core.shorten import short
from jspec.draft.named import DrafterSource, make_drafter
from jspec.engine.callers import streams
from jspec.engine.callers.loop import EngineLoop
from jspec.engine.callers.text_generator import OPTIONS, TextGenerator
from jspec.engine.callers.watch import Watch
from jspec.engine.input.caller_input import PARAMETERS, read_ids
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.request import Chunk, Request
from jspec.engine.run.build import build_core, engine_config, model_options
from jspec.engine.schedule.program_choice import gathering
from jspec.engine.text.tokenizer import Tokenizer, check_size, load_tokenizer
from jspec.models import load
from jspec.models.decoder import Model
from jspec.models.shared_expert import join_layers
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step.compile_cache import keep_compiled
from jspec.step.on_mesh import mesh_for

ELSEWHERE = {"SamplingParams": PARAMETERS, "Engine.from_pretrained": ("dtype",)}


@final
class Engine(EngineLoop, TextGenerator):
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
        if mesh is not None and mesh.size > 1:
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
        if mesh is None:
            join_layers(checkpoint.config.mlps, checkpoint.weights["layers"])
        model = Model.from_weights(checkpoint.config, checkpoint.weights, mesh)
        return cls(model, drafter=proposes, logits_processor=logits_processor, **made, **options)

    # -- how requests are run

    def _check(self, request: Request) -> None:
        self.scheduler.check(request)

    def _complete(self, asked: Sequence[Request]) -> Generator[None]:
        requests = [sample for request in asked for sample in request.samples]
        watch = Watch(requests)
        try:
            self._queue(requests)
            while watch.has_unended():
                self._advance(watch)
                yield
        finally:
            self._abort(requests)
            watch.close()

    async def _acomplete(self, make: Callable[[], list[Request]]) -> list[Request]:
        return await self._async_steps.finish(self, make)

    def _submit(self, request: Request) -> None:
        try:
            self._queue(request.samples)
            self._compile_rounds(request.samples)
        except BaseException:
            self._abort(request.samples)
            raise

    def _wait(self, request: Request) -> None:
        for sample in request.samples:
            while sample.finish_reason is None:
                self._advance()

    def _stream(self, request: Request) -> Iterator[Chunk]:
        return streams.stream(self, request)

    def _astream(self, make: Callable[[], Request]) -> AsyncIterator[Chunk]:
        return self._async_steps.stream(self, make)

    # -- the engine as an object

    def close(self) -> None:
        """Abort all requests and free the device memory."""
        with self._lock:
            super().close()
            self.input_processor.close()
            self._async_steps.close()

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        drafter, config = self.core.runner.program.drafter, self.config
        return f"Engine({state}{self._model}, drafter={drafter!r}, slots={config.slots}, max_len={config.max_len})"
