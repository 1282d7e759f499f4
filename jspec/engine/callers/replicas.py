"""Runs several equal engines in one process, each on its own devices, with the calls of `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import fields
from queue import SimpleQueue
from typing import Any, cast, final
from weakref import WeakKeyDictionary, finalize

from jspec.core.config import EngineConfig
from jspec.core.shorten import short
from jspec.engine.callers.api import Engine
from jspec.engine.callers.engine_thread import Delivery, EngineThread
from jspec.engine.callers.replica_threads import ReplicaThreads
from jspec.engine.callers.streams import raise_error
from jspec.engine.callers.text_generator import TextGenerator
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Chunk, Request
from jspec.engine.run.prometheus import joined
from jspec.engine.text.tokenizer import Tokenizer
from jspec.step.on_mesh import Devices, meshes_of

OWN_OPTIONS = ("mesh", "tensor_parallel")  # options in which replicas may differ
PROBED = 64  # number of token ids whose text must be equal for equal tokenizers


class Receiver:
    """Gets the output of one request, whose key it is in the threads.

    Args:
        put: called with each delivery, in the thread of an engine.
    """

    def __init__(self, put: Callable[[Delivery], object]) -> None:
        self.put = put


class Ending(Receiver):
    """Waits for the end of one request."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        super().__init__(lambda delivery: self._ended.set() if delivery.last else None)
        self.wait = self._ended.wait


@final
class Replicas(TextGenerator):
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
        self._endings: WeakKeyDictionary[Request, Ending] = WeakKeyDictionary()  # of requests from `submit`
        self._threads = ReplicaThreads(engines, deliver)
        self._threads.start()
        self._end = finalize(self, end, self._threads, self.engines)  # also without a call of `close`

    # -- how requests are run

    def _check_open(self) -> None:
        self.engines[0]._lock.check_process()
        if not self._end.alive:
            raise RuntimeError("these replicas are closed; make new ones")
        self._threads.check()

    def _check(self, request: Request) -> None:
        for engine in self.engines:
            engine.scheduler.check(request)
        self.engines[0].scheduler.cached_pages(request)  # computes the digests of its pages here, not in `submit`

    @contextlib.contextmanager
    def _submitted(self, requests: Sequence[Request], put: Callable[[Delivery], object]) -> Iterator[None]:
        """Submit requests; when the context ends, what has not ended is aborted."""
        keys: list[Receiver] = []
        try:
            for request in requests:
                keys.append(Receiver(put))
                self._threads.submit(keys[-1], request)
            yield
        finally:
            for key, request in zip(keys, requests, strict=False):
                if any(sample.finish_reason is None for sample in request.samples):
                    self._threads.abort(key)

    def _complete(self, asked: Sequence[Request]) -> Generator[None]:
        received: SimpleQueue[Delivery] = SimpleQueue()
        with self._submitted(asked, received.put):
            unfinished = len(asked)
            while unfinished:
                unfinished -= received.get().last
                yield

    async def _acomplete(self, make: Callable[[], list[Request]]) -> list[Request]:
        asked = await asyncio.to_thread(make)
        received: asyncio.Queue[Delivery] = asyncio.Queue()
        with self._submitted(asked, put_into(received)):
            unfinished = len(asked)
            while unfinished:
                unfinished -= (await received.get()).last
        return asked

    def _stream(self, request: Request) -> Iterator[Chunk]:
        received: SimpleQueue[Delivery] = SimpleQueue()
        with self._submitted([request], received.put):
            last = False
            while not last:
                delivery = received.get()
                last = delivery.last
                yield delivery.chunk
        raise_error(request)

    async def _astream(self, make: Callable[[], Request]) -> AsyncIterator[Chunk]:
        request = await asyncio.to_thread(make)
        received: asyncio.Queue[Delivery] = asyncio.Queue()
        with self._submitted([request], put_into(received)):
            last = False
            while not last:
                delivery = await received.get()
                last = delivery.last
                yield delivery.chunk
        raise_error(request)

    def _submit(self, request: Request) -> None:
        ending = Ending()
        self._threads.submit(ending, request)
        self._endings[request] = ending

    def _wait(self, request: Request) -> None:
        self._ending_of("result", request).wait()

    def _abort(self, requests: Sequence[Request]) -> None:
        self._threads.abort(self._ending_of("abort", requests[0]))

    def _ending_of(self, call: str, request: Request) -> Ending:
        ending = self._endings.get(request)
        if ending is None:
            raise ValueError(f"{call}: expected a request that submit returned, got request {request.id}")
        return ending

    def warmup(self, **outputs: bool) -> None:
        """Compile the programs of all engines that have not failed, as `Engine.warmup` does."""
        for engine in self.engines:
            if engine.healthy:
                engine.warmup(**outputs)

    # -- state

    @property
    def healthy(self) -> bool:
        """Return whether any engine can serve requests."""
        return self._threads.healthy

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the replicas that have failed for good, with their devices; the log has their errors."""
        return self._threads.failed

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

    def __repr__(self) -> str:
        return f"Replicas({'' if self._end.alive else 'closed, '}{len(self.engines)} x {self.engines[0]!r})"


def end(threads: ReplicaThreads, engines: Sequence[Engine]) -> None:
    """End the threads, and free the device memory of the engines."""
    threads.stop()
    for engine in engines:
        engine.close()


def deliver(deliveries: list[Delivery]) -> None:
    """Pass the new output of a step to the receivers of its requests; called in the engines' threads."""
    for delivery in deliveries:
        cast(Receiver, delivery.key).put(delivery)


def put_into(received: asyncio.Queue[Delivery]) -> Callable[[Delivery], None]:
    """Return a function that other threads may call to put a delivery into a queue of the running event loop."""
    loop = asyncio.get_running_loop()

    def put(delivery: Delivery) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits for output
            loop.call_soon_threadsafe(received.put_nowait, delivery)

    return put


def check_engine(made: Any, mesh: Any) -> None:
    """Raise an error if the factory has not returned an engine on the mesh that it got."""
    if not isinstance(made, Engine):
        raise TypeError(f"factory: expected a function that returns an Engine, got {short(made)}")
    found = made.core.runner.program.mesh
    if found != mesh:
        raise ValueError(
            f"factory: expected an engine on {_devices(mesh)}, got one on {_devices(found)}; pass the mesh on: "
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
    own, found = _traits(first), _traits(other)
    for name, value in own.items():
        if found[name] != value:
            raise ValueError(
                f"factory: expected engines with equal {name}, got {short(value)} for replica 0 and "
                f"{short(found[name])} for replica {index}; make all with the same models and options"
            )


def _traits(engine: Engine) -> dict[str, object]:
    """Return what the answers of an engine depend on, its weights excepted, by name."""
    drafter = engine.core.runner.program.drafter
    options = {one.name: getattr(engine.config, one.name) for one in fields(EngineConfig)}
    return {name: value for name, value in options.items() if name not in OWN_OPTIONS} | {
        "target": engine.core.runner.params.main.config,
        "drafter": (type(drafter), drafter.tree),
        "eos_ids": engine.eos_ids,
        "tokenizer": engine.tokenizer and _traits_of_tokenizer(engine.tokenizer),
    }


def _traits_of_tokenizer(tokenizer: Tokenizer) -> tuple[object, ...]:
    ids = range(0, tokenizer.vocab_size, -(-tokenizer.vocab_size // PROBED))
    return type(tokenizer), tokenizer.vocab_size, tokenizer.hidden_ids, tokenizer.decode(list(ids))


def make_thread(engine: Engine | Replicas, deliver: Callable[[list[Delivery]], None]) -> EngineThread | ReplicaThreads:
    """Return what runs the requests of a server: a thread for an engine, or one for each of several engines."""
    return EngineThread(engine, deliver) if isinstance(engine, Engine) else ReplicaThreads(engine.engines, deliver)
