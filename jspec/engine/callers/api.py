"""The public engine, which completes prompts for any number of threads and asyncio tasks."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any, Self, Unpack, final
from weakref import finalize

from jspec.core.config import EngineConfig
from jspec.core.engine_options import EngineOptions
from jspec.core.foreign_names import check_names
from jspec.core.shorten import short
from jspec.draft.auto import load_drafter
from jspec.draft.choice import choose_drafter
from jspec.draft.named import AUTO, DrafterSource, make_drafter
from jspec.draft.verifier import named_target
from jspec.engine.callers.adapter_calls import AdapterCalls
from jspec.engine.callers.engine_thread import ENDED, EngineThread
from jspec.engine.callers.text_generator import OPTIONS, TextGenerator
from jspec.engine.callers.trainer_calls import TrainerCalls
from jspec.engine.input.caller_input import PARAMETERS, read_ids
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Request
from jspec.engine.run.build import build_core, engine_config, model_options
from jspec.engine.run.errors import RESTART, caused_by
from jspec.engine.run.prometheus import exposition
from jspec.engine.schedule.draft_length import Policy
from jspec.engine.schedule.program_choice import Features, gathering
from jspec.engine.schedule.scheduler import Scheduler
from jspec.engine.text.tokenizer import Tokenizer, check_size, load_tokenizer
from jspec.engine.text.tokenizer_files import eos_ids as known_eos_ids
from jspec.models import load
from jspec.models.decoder import Model
from jspec.models.mlps.shared_expert import join_layers
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step.compile_cache import keep_compiled
from jspec.step.memory import MemoryPlan
from jspec.step.on_mesh import mesh_for

ELSEWHERE = {"SamplingParams": PARAMETERS, "Engine.from_pretrained": ("dtype",)}


@final
class Engine(TextGenerator, TrainerCalls, AdapterCalls):
    """Serves prompts with speculative decoding.

    A thread of the engine's own runs the requests, also when nobody waits for them. All methods may be called from
    several threads and event loops at once.

    Args:
        target: the model whose distribution the output has.
        drafter: proposes tokens: a `Drafter`, "ngram", "suffix", or a path or hub id of a draft head or draft model,
            which then drafts the default tree; None: plain decoding with the same programs.
        tokenizer: a `Tokenizer`, a tokenizer of transformers, a folder with tokenizer files, a hub id, or "bytes";
            None: prompts and output are token ids.
        eos_ids: tokens that end a request; None: the tokenizer's EOS token, if it has one.
        logits_processor: a pure function that jax can trace. It takes logits ``[batch, nodes, vocab]`` and a
            `jspec.sampling.logits_processor.LogitsContext`, and returns logits. It runs for all requests in every
            round, after penalties and grammar and before temperature. With a processor every round also computes the
            penalties.
        options: fields of `EngineConfig`.

    Attributes:
        config: the checked options.
        core: the engine's loop with its scheduler and its model runner, which only the thread uses.
        threads: the thread.
        input_processor: makes requests from prompts.

    Raises:
        TypeError, ValueError: an argument is unknown or wrong, or options and models do not fit together or into
            memory.
    """

    threads: EngineThread

    def __init__(
        self,
        target: Model,
        *,
        drafter: DrafterSource = None,
        tokenizer: Tokenizer | str | None = None,
        eos_ids: Sequence[int] | None = None,
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
        vocab = target.config.vocab_size
        check_size(tokenizer, vocab)
        ends = known_eos_ids(None, tokenizer, vocab) if eos_ids is None else read_ids("eos_ids", eos_ids)
        self.input_processor = InputProcessor(tokenizer, vocab, ends, config)
        mesh = mesh_for(config, target)
        if mesh is not None and mesh.size > 1:
            self.input_processor.gathers_logits = gathering(config, edits_all=logits_processor is not None)
        proposes = make_drafter(drafter, mesh=mesh)
        self.core = build_core(config, target, proposes, logits_processor, has_tokenizer=tokenizer is not None)
        self.config = config
        super().__init__(EngineThread(self.core, config))
        self._end = finalize(self, self.threads.close)  # also without a call of `close`
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
            path: a Hugging Face folder, a folder written by ``jspec convert``, a hub id, or a loaded model. Without
                a drafter it may be a head that names its target (`jspec.draft.verifier`), and stands for both.
            drafter: as for `Engine`; "auto": what the target's folder has (`jspec.draft.choice`).
            dtype: dtype of the weights, also of a drafter that is given by its path; None or "auto": float32 on CPU,
                bfloat16 elsewhere.
            tokenizer: as for `Engine`; None: the folder's tokenizer, if it has one.
            eos_ids: as for `Engine`; None: those of generation_config.json, config.json and the tokenizer.
        """
        check_names("Engine.from_pretrained", options, OPTIONS, ELSEWHERE)
        config = EngineConfig(**options)
        if isinstance(path, Model):
            if dtype is not None:
                raise ValueError(
                    f"dtype: expected None with a loaded Model, got {short(dtype)}; load the model with it"
                )
            arguments: dict[str, Any] = {"drafter": drafter, "tokenizer": tokenizer, "eos_ids": eos_ids}
            return cls(path, logits_processor=logits_processor, **arguments, **options)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"Engine.from_pretrained: path: expected a folder, a hub id (owner/name) or a Model, got {short(path)}"
            )
        keep_compiled(config.compile_cache)
        mesh = mesh_for(config)
        if drafter is None and (named := named_target(path)) is not None:
            drafter, path = load_drafter(path, dtype=dtype, length=named.length, mesh=mesh), named.path
        if isinstance(drafter, str) and drafter == AUTO:
            drafter = choose_drafter(path).load(dtype=dtype)
        proposes = make_drafter(drafter, dtype=dtype, mesh=mesh)  # first, because it is the smaller checkpoint
        made: dict[str, Any] = {}  # from the folder, checked before weights are read
        checkpoint = load.load(
            os.fspath(path),
            dtype=dtype,
            quantize=config.quantize,
            mesh=mesh,
            check=lambda target, folder: made.update(model_options(target, folder, tokenizer, eos_ids, options)),
        )
        if mesh is None:
            join_layers(checkpoint.config.mlps, checkpoint.weights["layers"])
        model = Model.from_weights(checkpoint.config, checkpoint.weights, mesh)
        return cls(model, drafter=proposes, logits_processor=logits_processor, **made, **options)

    @property
    def _adapted(self) -> tuple[EngineConfig, Model]:
        return self.config, self.core.runner.params.main

    # -- how requests are run

    def _check(self, request: Request) -> None:
        self.scheduler.check(request)

    def _check_open(self) -> None:
        self._check_alive()
        if self.core.is_asleep:
            raise RuntimeError("the engine sleeps; call wake_up()")

    def _check_alive(self) -> None:
        self.threads.check_process()
        if self.threads.is_closed:
            raise RuntimeError("this engine is closed; make a new one")
        self.core.runner.calls.check_serves()
        if self.threads.error is not None:
            raise caused_by(self.threads.error, ENDED)
        if not self.healthy:
            raise RuntimeError(RESTART)

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

    def follow(self) -> None:
        """Run what the engine of process 0 runs, and return when that is closed (`jspec.distributed`).

        In the main thread, the first Ctrl-C and the first SIGTERM are only logged, because process 0 may still have
        requests. A second one of the same kind ends all processes.

        Raises:
            RuntimeError: the engine has no devices of other processes, or this is process 0.
            jspec.distributed.ProcessLost: a process was lost.
        """
        self.core.runner.follow()
        self.close()

    def close(self) -> None:
        """Abort all requests, end the thread and free the device memory."""
        self.threads.check_process()
        self._end()
        self.input_processor.close()

    # -- state

    @property
    def _engines(self) -> tuple[EngineThread, ...]:
        return (self.threads,)

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
        return not self.threads.has_failed

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
        return self.threads.do(self.core.metrics)

    @property
    def pages_in_use(self) -> int:
        return self.metrics.pages_in_use

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

        def text() -> str:
            core, of = self.core, self.core.runner.program.drafter
            drafter = {"drafter": type(of).__name__, **of.sources, "tree": str(of.tree)}
            state = (core.metrics(), core.latencies, core.gauges())
            return exposition(*state, model_name, number=number, drafter=drafter)

        return self.threads.do(text)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>{self.memory_plan._repr_html_()}"

    def __repr__(self) -> str:
        state = "closed, " if self.threads.is_closed else ""
        drafter, config = self.core.runner.program.drafter, self.config
        return f"Engine({state}{self._model}, drafter={drafter!r}, slots={config.slots}, max_len={config.max_len})"
