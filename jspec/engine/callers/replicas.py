"""Runs several equal engines in one process, each on its own devices, with the calls of `Engine`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, final
from weakref import finalize

from jspec.core.config import EngineConfig
from jspec.core.shorten import short
from jspec.engine.callers.adapter_calls import AdapterCalls
from jspec.engine.callers.api import Engine
from jspec.engine.callers.engine_thread import EngineThread
from jspec.engine.callers.replica_threads import ReplicaThreads
from jspec.engine.callers.text_generator import TextGenerator
from jspec.engine.callers.trainer_calls import TrainerCalls
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Request
from jspec.engine.run.prometheus import joined
from jspec.engine.text.tokenizer import Tokenizer
from jspec.models.decoder import Model
from jspec.step.on_mesh import Devices, meshes_of

OWN_OPTIONS = ("mesh", "tensor_parallel")  # options in which replicas may differ
PROBED = 64  # number of token ids whose text must be equal for equal tokenizers


@final
class Replicas(TextGenerator, TrainerCalls, AdapterCalls):
    """Serves prompts with several equal engines, each on devices of its own and in a thread of its own.

        with jspec.Replicas(lambda mesh: jspec.Engine.from_pretrained(path, mesh=mesh), jax.devices()) as replicas:
            completions = replicas.generate(prompts, params)

    A request goes to the engine whose prefix cache has most of its prompt, unless that one is too busy
    (`jspec.engine.callers.replica_threads.choose`). Its tokens do not depend on the engine. All methods may be called
    from several threads and event loops at once. The threads run the requests, also when nobody waits for them, until
    `close`; a request that is aborted, or whose stream is closed, ends soon after.

    If an engine fails for good, its requests end with its error, and new ones go to the others (`failed`).

    Args:
        factory: function that makes an engine on a `jax.sharding.Mesh`, which it passes on as ``mesh=``. It is called
            for one mesh after another and makes engines with equal models and options.
        devices: jax devices; or their number, of which the first are taken; None: all devices.
        tensor_parallel: number of devices of each engine, over which it divides its weights.

    Attributes:
        engines: the engines, in the order of the devices.

    Raises:
        TypeError, ValueError: an argument is wrong, or the factory returns something else than an engine on its mesh,
            or engines that are not equal.
    """

    threads: ReplicaThreads

    def __init__(self, factory: Callable[[Any], Engine], devices: Devices = None, *, tensor_parallel: int = 1) -> None:
        if not callable(factory):
            raise TypeError(f"factory: expected a function that makes an engine on a mesh, got {short(factory)}")
        with contextlib.ExitStack() as made:
            engines: list[Engine] = []
            for mesh in meshes_of(devices, tensor_parallel):
                engine = factory(mesh)
                if isinstance(engine, Engine):
                    made.enter_context(engine)
                check_engine(engine, mesh)
                engines.append(engine)
                check_equal(engines[0], engine, len(engines) - 1)
            made.pop_all()
        self.engines = tuple(engines)
        self.config, self.input_processor = engines[0].config, engines[0].input_processor
        for engine in engines[1:]:
            engine.input_processor.close()
            engine.input_processor = self.input_processor  # so that each engine takes the requests of all
        super().__init__(ReplicaThreads([engine.threads for engine in engines]))
        self._end = finalize(self, self.threads.close)  # also without a call of `close`

    @property
    def _adapted(self) -> tuple[EngineConfig, Model]:
        return self.engines[0]._adapted

    # -- how requests are run

    @property
    def _engines(self) -> tuple[EngineThread, ...]:
        return tuple(engine.threads for engine in self.engines if engine.healthy)

    def _check_open(self) -> None:
        self._check_alive()
        if self.is_sleeping:
            raise RuntimeError("the engines sleep; call wake_up()")

    def _check_alive(self) -> None:
        self.threads.check_process()
        if not self._end.alive:
            raise RuntimeError("these replicas are closed; make new ones")
        self.threads.check()

    def _check(self, request: Request) -> None:
        for engine in self.engines:
            engine.scheduler.check(request)
        self.engines[0].scheduler.cached_pages(request)  # computes the digests of its pages here, not in `submit`

    def warmup(self, **outputs: bool) -> None:
        """Compile the programs of all engines that have not failed, as `Engine.warmup` does."""
        for engine in self.engines:
            if engine.healthy:
                engine.warmup(**outputs)

    # -- state

    @property
    def healthy(self) -> bool:
        """Return whether any engine can serve requests."""
        return self.threads.healthy

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the replicas that have failed for good, with their devices; the log has their errors."""
        return self.threads.failed

    @property
    def metrics(self) -> Metrics:
        return sum((engine.metrics for engine in self.engines), Metrics())

    def prometheus(self, model_name: str = "jspec") -> str:
        return joined(engine.prometheus(model_name, number=number) for number, engine in enumerate(self.engines))

    @property
    def num_slots(self) -> int:
        return sum(engine.num_slots for engine in self.engines)

    @property
    def num_pages(self) -> int:
        return sum(engine.num_pages for engine in self.engines)

    def close(self) -> None:
        """Abort all requests, end the threads and free the device memory."""
        self._end()
        self.input_processor.close()

    def __repr__(self) -> str:
        return f"Replicas({'' if self._end.alive else 'closed, '}{len(self.engines)} x {self.engines[0]!r})"


def check_engine(made: Any, mesh: Any) -> None:
    """Raise an error if the factory has not returned an engine on the mesh that it got."""
    if not isinstance(made, Engine):
        raise TypeError(f"factory: expected a function that returns an Engine, got {short(made)}")
    engine_mesh = made.core.runner.program.mesh
    if engine_mesh != mesh:
        raise ValueError(
            f"factory: expected an engine on {_devices(mesh)}, got one on {_devices(engine_mesh)}; pass the mesh on: "
            "lambda mesh: Engine(..., mesh=mesh)"
        )


def _devices(mesh: Any) -> str:
    return "the default device" if mesh is None else ", ".join(map(str, mesh.devices.flat))


def check_equal(first: Engine, other: Engine, index: int) -> None:
    """Raise a ValueError if two engines might answer a request differently.

    Args:
        first: engine of replica 0.
        other: engine of another replica.
        index: number of that replica.
    """
    first_traits, other_traits = _traits(first), _traits(other)
    for name, value in first_traits.items():
        if other_traits[name] != value:
            raise ValueError(
                f"factory: expected engines with equal {name}, got {short(value)} for replica 0 and "
                f"{short(other_traits[name])} for replica {index}; make all with the same models and options"
            )


def _traits(engine: Engine) -> dict[str, object]:
    """Return what the answers of an engine depend on, its weights excepted, by name."""
    drafter = engine.core.runner.program.drafter
    options = {option.name: getattr(engine.config, option.name) for option in fields(EngineConfig)}
    return {name: value for name, value in options.items() if name not in OWN_OPTIONS} | {
        "target": engine.core.runner.params.main.config,
        "drafter": (type(drafter), drafter.tree),
        "eos_ids": engine.eos_ids,
        "tokenizer": engine.tokenizer and _traits_of_tokenizer(engine.tokenizer),
    }


def _traits_of_tokenizer(tokenizer: Tokenizer) -> tuple[object, ...]:
    ids = range(0, tokenizer.vocab_size, -(-tokenizer.vocab_size // PROBED))
    return type(tokenizer), tokenizer.vocab_size, tokenizer.hidden_ids, tokenizer.decode(list(ids))
