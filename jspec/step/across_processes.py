"""Makes the calls of an engine's devices in all processes whose devices it uses, in one order.

Process 0 sends each call with its inputs to the other processes, before it makes the call itself; they make the same
calls, and read no results. So all processes start the same programs in the same order, which exchanges between devices
need. A `Side` knows nothing of this, except that all of its calls of devices go through `Calls`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jspec import distributed
from jspec.core.config import EngineConfig
from jspec.distributed.frames import Message
from jspec.distributed.job import Job, ProcessLost
from jspec.distributed.signals import end_at_second
from jspec.step.executable_key import ExecutableKey
from jspec.step.executables import Check, Executables
from jspec.step.memory import DeviceMemory
from jspec.step.on_mesh import spans_processes
from jspec.step.program import Params, Program
from jspec.step.program_memory import ProgramMemory
from jspec.step.same_engine import compared, sample

# Time after an error of the devices to notice that another process was lost, in process 0 and in others.
NOTICE_SECONDS = 3.0, 1.0
VALUES = "values of the weights"
UNREAD = 4  # number of calls after which a following process checks that a call has succeeded

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What follows calls: `jspec.step.side.Side`."""

    programs: Executables

    def run_here(self, key: ExecutableKey, *inputs: np.ndarray) -> Any: ...

    def reset_here(self, error: BaseException | None) -> None: ...

    def _update_memory_plan(self, executables: Sequence[Any]) -> None: ...


def calls_on(mesh: Mesh | None) -> Calls:
    """Return what makes an engine's calls on the devices of a mesh; None: on one device.

    Raises:
        RuntimeError: another engine of this process has devices of other processes, or a process is lost.
        ValueError: the mesh has devices of other processes, but not of all.
    """
    if not spans_processes(mesh):
        return Calls()
    job, used = distributed.current(), {device.process_index for device in mesh.devices.flat}  # type: ignore[union-attr]
    if job is None:
        raise RuntimeError("mesh: expected devices of this process, got others'; call jspec.distributed.initialize")
    if len(used) < job.num_processes:
        raise ValueError(f"mesh: expected devices of all {job.num_processes} processes, got those of {sorted(used)}")
    job.check_whole()
    if job.is_busy:
        raise RuntimeError("Engine: expected one engine at a time on the devices of several processes; close the other")
    return Follow(job) if job.process_id else Lead(job)


class Calls:
    """Makes calls in this process alone, which has all devices."""

    is_whole = True

    def open(self) -> None:
        """Note that the engine is made; until it is closed, no other may use devices of several processes."""

    def check_same(self, program: Program, params: Params, config: EngineConfig) -> None:
        """Check that all processes make the same engine."""

    def least(self, memory: DeviceMemory) -> DeviceMemory:
        """Return the memory of the process that has the least."""
        return memory

    def make(self, call: Callable[[], dict[str, str]]) -> None:
        """Make an engine's state and first programs, by a function that returns the digests of these programs."""
        call()

    def run(self, call: Callable[..., T], key: ExecutableKey, inputs: Sequence[np.ndarray]) -> T:
        return call(key, *inputs)

    def wait(self, call: Callable[[], T]) -> T:
        """Return the result of a function that waits for the devices."""
        return call()

    def reset(self, call: Callable[[], None]) -> None:
        call()

    def compile(self, keys: Sequence[ExecutableKey], programs: Executables, check: Check) -> None:
        programs.compile(keys, check)

    def close(self) -> None:
        """Let the other processes return from `follow`."""

    def check_serves(self) -> None:
        """Raise RuntimeError if another process decides what this one runs, or a process is lost."""

    def follow(self, runner: Runner) -> None:
        raise RuntimeError(
            "follow: expected an engine that has devices of other processes, in a process other than 0, got another; "
            "call it where jspec.distributed.process_id() is not 0"
        )


class Shared(Calls):
    """What process 0 and the others have in common."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def open(self) -> None:
        self.job.is_busy = True

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return self.job.is_whole

    def _fail(self, error: Exception, *, wait: float) -> NoReturn:
        """Raise an error of the devices, which ends all processes; if a lost process is its cause, name that."""
        if self.job.is_lost_within(wait):
            try:
                self.job.check_whole()
            except ProcessLost as lost:
                raise lost from error
        self.job.fail_by(error)
        raise error

    def check_same(self, program: Program, params: Params, config: EngineConfig) -> None:
        """Raise ValueError, in all processes, if they have other options, devices, models or drafters."""
        sampled = self.job.weights.hexdigest()[:16]
        self.job.check_same("Engine", {**compared(program, params, config), VALUES: f"{sampled} {sample(params)}"})

    def least(self, memory: DeviceMemory) -> DeviceMemory:
        reports = [DeviceMemory(**values) for values in self.job.exchange("memory", asdict(memory))]
        is_reported = all(report.is_reported for report in reports)
        return DeviceMemory(
            min(report.limit for report in reports), max(report.in_use for report in reports), is_reported
        )

    def make(self, call: Callable[[], dict[str, str]]) -> None:
        """Raise the error of one process in all, so that all may make an engine with other options."""
        try:
            made = {"digests": call()}
        except Exception as error:
            self.job.exchange("state and programs", _failure(error))
            raise
        self._compare(self.job.exchange("state and programs", made))

    def _compare(self, answers: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if a process could not compile or hold its programs, or has others than process 0.

        Args:
            answers: the digests of the programs, or the error, of each process.
        """
        for name, answer in zip(self.job.names, answers, strict=True):
            if "error" in answer:
                raise ValueError(f"{name}: {answer['error']}")
            for program, digest in answers[0]["digests"].items():
                if answer["digests"].get(program) != digest:
                    raise ValueError(
                        f"{program}: expected the same program in all processes, got another in {name} than in "
                        f"{self.job.names[0]}; run the same script with the same files"
                    )


class Lead(Shared):
    """Makes calls in process 0, and sends them to the others.

    A thread of its own (`Job.do`) sends a call and makes it, so that an interrupt of the caller never comes between.
    """

    _compilations = itertools.count()  # numbers of the compilations of all engines

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._count, self._compiling, self._is_open = 0, threading.Lock(), False

    def open(self) -> None:
        super().open()
        self._is_open = True
        self.job.at_end.insert(0, self.close)

    def run(self, call: Callable[..., T], key: ExecutableKey, inputs: Sequence[np.ndarray]) -> T:
        if not self._is_open:  # all processes run the same programs when they make the engine (`make`)
            return call(key, *inputs)
        return self._everywhere("run", lambda: call(key, *inputs), inputs, key=asdict(key))

    def reset(self, call: Callable[[], None]) -> None:
        self._everywhere("reset", call)

    def check_serves(self) -> None:
        self.job.check_whole()

    def wait(self, call: Callable[[], T]) -> T:
        return self.job.do(lambda: self._unless_failed(call))

    def _everywhere(self, name: str, call: Callable[[], T], arrays: Sequence[np.ndarray] = (), **more: Any) -> T:
        """Make a call in all processes."""

        def both() -> T:
            self.job.send(Message("call", {"call": name, "number": self._count, **more}, arrays))
            self._count += 1
            return self._unless_failed(call)

        return self.job.do(both)

    def _unless_failed(self, call: Callable[[], T]) -> T:
        """Make a call; an error ends the job, because the other processes' devices may wait for this one's."""
        try:
            return call()
        except Exception as error:
            self._fail(error, wait=NOTICE_SECONDS[0])

    def compile(self, keys: Sequence[ExecutableKey], programs: Executables, check: Check) -> None:
        """Compile programs in all processes; store them if all have compiled the same ones, and they fit everywhere.

        Raises:
            ValueError: another process cannot compile or hold a program, or has another one.
        """
        if not self._is_open:  # all processes compile the first programs when they make the engine (`make`)
            super().compile(keys, programs, check)
            return
        with self._compiling:
            number = next(self._compilations)
            self._everywhere("compile", lambda: None, keys=[asdict(key) for key in keys], compilation=number)

            def check_all(memory: Sequence[ProgramMemory]) -> None:
                answers = [self._answer(other, number) for other in self.job.links]
                check(memory)
                self._compare([{"digests": programs.digests}, *answers])

            programs.compile(keys, check_all)

    def _answer(self, other: int, number: int) -> dict[str, Any]:
        """Return what a process answers to a compilation; answers to earlier ones, which were interrupted, are lost."""
        while True:
            answer = self.job.take("compiled", other).fields
            if answer["compilation"] == number:
                return answer

    def close(self) -> None:
        """Let the other processes return from `follow`.

        If this is interrupted before they are told, the next call tells them.
        """

        def tell() -> None:
            if self._is_open:
                self._is_open = self.job.is_busy = False
                self.job.at_end.remove(self.close)
                self.job.send(Message("call", {"call": "close", "number": self._count}))

        if self._is_open:
            with suppress(ProcessLost):  # then there is nobody to tell
                self.job.do(tell)


class Follow(Shared):
    """Makes the calls of process 0 in another process."""

    def check_serves(self) -> NoReturn:
        raise RuntimeError(
            f"expected a call in {self.job.names[0]}, got one in {self.job.names[self.job.process_id]}, whose engine "
            "follows it; call engine.follow()"
        )

    def follow(self, runner: Runner) -> None:
        """Make the calls of process 0 until it closes its engine; a signal ends it only if it comes twice.

        Raises:
            ProcessLost: a process was lost.
        """
        compiler = ThreadPoolExecutor(1, "jspec-compile")
        try:
            with end_at_second(self.job.names[self.job.process_id]):
                self._follow(runner, compiler)
                compiler.shutdown()
        except ProcessLost:
            raise
        except Exception as error:
            self._fail(error, wait=NOTICE_SECONDS[1])
        except BaseException as error:  # of a second signal
            self.job.fail_by(error)
            raise
        finally:
            compiler.shutdown(wait=False, cancel_futures=True)
            self.job.is_busy = False

    def _follow(self, runner: Runner, compiler: ThreadPoolExecutor) -> None:
        outputs = deque[Any]()
        for count in itertools.count():
            message = self.job.take("call")
            fields = message.fields
            if fields["number"] != count:
                raise RuntimeError(f"expected call {count} of {self.job.names[0]}, got call {fields['number']}")
            match fields["call"]:
                case "close":
                    return
                case "compile":
                    keys = [ExecutableKey(**key) for key in fields["keys"]]
                    compiler.submit(self._compile, runner, keys, fields["compilation"])
                case "reset":
                    outputs.clear()
                    self.job.do(partial(runner.reset_here, None))
                case "run":
                    key = ExecutableKey(**fields["key"])
                    outputs.append(self.job.do(partial(runner.run_here, key, *message.arrays)))
            if len(outputs) > UNREAD:
                self.job.do(partial(jax.block_until_ready, outputs.popleft()))

    def _compile(self, runner: Runner, keys: Sequence[ExecutableKey], number: int) -> None:
        """Compile programs while other calls go on, and tell process 0 which ones they are."""
        try:
            runner.programs.compile(keys, runner._update_memory_plan)
            answer: dict[str, Any] = {"digests": runner.programs.digests}
        except Exception as error:
            answer = _failure(error)
        with suppress(ProcessLost):  # then nobody waits for the answer
            self.job.send(Message("compiled", {**answer, "compilation": number}))


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error!s:.1000}"}
