"""Test the calls of an engine in several processes, which are all in this one; its programs only record their calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec.core.config import EngineConfig
from jspec.distributed.job import Job, ProcessLost
from jspec.distributed.signals import SIGNALS, end_at_second
from jspec.draft.base import NoDraft
from jspec.models.weights.tensor_parallel import place
from jspec.step.across_processes import Follow, Lead
from jspec.step.executable_key import ExecutableKey
from jspec.step.program import Params, Program
from jspec.step.same_engine import sample
from pallas_kernels.layers.shard import AXIS
from tests.support import engines
from tests.support.brittle import Fault
from tests.support.jobs import in_all, jobs

pytestmark = pytest.mark.once
KEYS = [ExecutableKey("prefill", 16), ExecutableKey("round", 2)]
SECONDS = 20.0  # after which a call counts as hanging


class Programs:
    """Programs whose digests are their kinds; they are compiled when the event is set."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.may_compile = threading.Event()
        self.may_compile.set()

    def compile(self, keys: Sequence[ExecutableKey], check: Any) -> None:
        assert self.may_compile.wait(SECONDS)
        self.digests |= {key.kind: key.kind for key in keys}
        check([])


class RecordingRunner:
    """What follows the calls of process 0: it records them."""

    def __init__(self) -> None:
        self.programs: Any = Programs()
        self.calls: list[str] = []

    def run_here(self, key: ExecutableKey, *inputs: np.ndarray) -> Any:
        self.calls.append(key.kind)

    def reset_here(self, error: BaseException | None) -> None:
        self.calls.append("reset")

    def _update_memory_plan(self, executables: Sequence[Any]) -> None:
        self.calls.append("compile")


@contextmanager
def following(found: Sequence[Job], runners: Sequence[RecordingRunner]) -> Iterator[tuple[Lead, list[Future[None]]]]:
    """Yield the calls of an engine in process 0, and the ends of the last processes, which follow them."""
    late = threading.Timer(SECONDS, found[0].fail, ["a call hangs"])
    late.start()
    lead = calls_of(found[0])
    lead.open()
    with ThreadPoolExecutor() as pool:
        others = zip(found[-len(runners) :], runners, strict=True)
        yield lead, [pool.submit(calls_of(job).follow, runner) for job, runner in others]
    late.cancel()


def calls_of(job: Job) -> Any:
    return Follow(job) if job.process_id else Lead(job)


def run(lead: Lead, key: ExecutableKey) -> None:
    lead.run(lambda *_: None, key, [])


def test_devices_in_another_order_are_refused_in_all_processes() -> None:
    def check(job: Job, order: Sequence[int]) -> None:
        mesh = Mesh(np.array(jax.devices())[list(order)], (AXIS,))
        program = Program(NoDraft(), (), "coupled", "reference", mesh=mesh)
        calls_of(job).check_same(program, place(Params(target=engines.target(), draft=()), mesh), config)

    config = EngineConfig(slots=2, max_len=16)
    with jobs() as (found, _):
        assert in_all(found, lambda job: check(job, (0, 1))) == [None] * 3
        errors = in_all(found, lambda job: check(job, (1, 0) if job.process_id == 2 else (0, 1)))
    expected = "mesh: [0, 1] in process 0 (a), [1, 0] in process 2 (c)"
    assert all(isinstance(error, ValueError) and expected in str(error) for error in errors), errors


def test_engine_that_is_closed_twice_does_not_end_the_next_one() -> None:
    with jobs() as (found, _):
        for _ in range(2):
            runners = [RecordingRunner(), RecordingRunner()]
            with following(found, runners) as (lead, followed):
                run(lead, KEYS[0])
                lead.close()
                lead.close()
            assert [future.result() for future in followed] == [None] * 2
            assert [runner.calls for runner in runners] == [["prefill"]] * 2
        assert found[0].at_end == [] and not any(job.is_busy for job in found)


@pytest.mark.parametrize("moment", ["before it is sent", "after it is sent"])
def test_close_that_is_interrupted_is_made_once_by_the_next_close(moment: str) -> None:
    def interrupted(call: Any) -> None:
        if moment == "after it is sent":
            do(call)
        raise KeyboardInterrupt

    with jobs() as (found, _), pytest.MonkeyPatch.context() as patch:
        do = found[0].do
        for _ in range(2):  # a second message to close the first engine would end the second one
            runners = [RecordingRunner(), RecordingRunner()]
            with following(found, runners) as (lead, followed):
                run(lead, KEYS[0])
                patch.setattr(found[0], "do", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    lead.close()
                patch.undo()
                lead.close()
            assert [future.result() for future in followed] == [None] * 2
            assert [runner.calls for runner in runners] == [["prefill"]] * 2
        assert found[0].at_end == [] and not any(job.is_busy for job in found)


def test_follower_that_is_interrupted_while_it_compiles_tells_the_others_and_does_not_wait() -> None:
    with jobs() as (found, _), pytest.MonkeyPatch.context() as patch:
        runners = [RecordingRunner(), RecordingRunner()]
        runners[1].programs.may_compile.clear()
        patch.setattr(found[2], "take", Fault(found[2].take, 2, KeyboardInterrupt()))
        with following(found, runners) as (lead, followed):
            with pytest.raises(ProcessLost, match=r"process 2 \(c\) ended with KeyboardInterrupt"):
                lead.compile(KEYS[:1], Programs(), lambda _: None)
            errors = [future.exception(SECONDS / 4) for future in followed]
            runners[1].programs.may_compile.set()
        assert [type(error) for error in errors] == [ProcessLost, KeyboardInterrupt]


def test_digest_of_weights_shows_a_change_of_a_weight_without_axes() -> None:
    digests = [sample(Params(target=engines.target(), draft=jnp.float32(value))) for value in (1.0, 1.0, 2.0)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("moment", ["when it is sent", "between two answers"])
def test_answers_to_an_interrupted_compilation_are_not_taken_for_those_to_the_next(moment: str, closes: bool) -> None:
    """The last process answers to the first compilation after the interrupt; the next may be of another engine."""

    def check(lead: Lead, key: ExecutableKey) -> None:
        lead.compile([key], programs, lambda _: None)
        assert [runner.programs.digests.get(key.kind) for runner in runners] == [key.kind] * 2

    with jobs() as (found, _), pytest.MonkeyPatch.context() as patch:
        programs, runners = RecordingRunner().programs, [RecordingRunner(), RecordingRunner()]
        runners[1].programs.may_compile.clear()
        with following(found, runners) as (lead, _):
            do, take = found[0].do, found[0].take
            if moment == "when it is sent":
                patch.setattr(found[0], "do", lambda call: [do(call), Fault(None, 1, KeyboardInterrupt())()])  # type: ignore[arg-type]
            else:
                patch.setattr(found[0], "take", Fault(take, 2, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                lead.compile(KEYS[:1], programs, lambda _: None)
            patch.undo()
            runners[1].programs.may_compile.set()
            if not closes:
                check(lead, KEYS[1])
            lead.close()
        if closes:
            with following(found, runners) as (lead, _):
                check(lead, KEYS[1])
                lead.close()


@pytest.mark.parametrize("failure", [MemoryError("out of memory"), MemoryError()])
def test_engine_that_one_process_cannot_make_is_refused_in_all_which_may_then_make_another(failure: Exception) -> None:
    def make(job: Job, error: Exception | None = None, kind: str = "prefill") -> None:
        def start() -> dict[str, str]:
            calls.compile(KEYS, programs, lambda _: None)
            if error is not None:
                raise error
            return {kind: programs.digests["prefill"]}

        calls, programs = calls_of(job), Programs()
        calls.make(start)

    with jobs() as (found, _):
        for wrong in range(3):
            errors = in_all(found, lambda job, wrong=wrong: make(job, failure if job.process_id == wrong else None))
            assert errors.pop(wrong) is failure
            for error in errors:
                assert isinstance(error, ValueError)
                assert str(error) == f"{found[0].names[wrong]}: MemoryError: {failure}"
        errors = in_all(found, lambda job: make(job, kind="prefill" if job.process_id < 2 else "round"))
        assert all("prefill: expected the same program in all processes" in str(error) for error in errors)
        assert all("another in process 2 (c) than in process 0 (a)" in str(error) for error in errors)
        assert in_all(found, make) == [None] * 3


def test_handler_that_is_set_while_following_is_kept() -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError

    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with end_at_second("process 1 (b)"):
            signal.signal(signal.SIGTERM, own)
        assert [signal.getsignal(number) for number in SIGNALS] == [before[0], own]
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_follower_goes_on_after_one_signal_of_each_kind_and_ends_at_a_second(
    second: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    def send() -> None:
        """Send two signals to this process, whose main thread follows, and then make a call and close the engine."""
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler and found[0].is_whole:
            time.sleep(0.01)
        for count, number in enumerate((signal.SIGINT, second)):
            os.kill(os.getpid(), number)
            again = time.monotonic() + 10
            while number not in interrupts and caplog.text.count(expected) <= count and found[0].is_whole:
                time.sleep(0.01)
                if count and number == signal.SIGINT and time.monotonic() > again:  # Python ignored it in a callback
                    os.kill(os.getpid(), number)
                    again += 10
        run(lead, KEYS[0])
        lead.close()

    expected, interrupts, runner = "process 1 (b) ends when process 0 closes its engine", list[int](), RecordingRunner()
    before = [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)]
    try:
        with (
            jobs() as (found, _),
            following(found, [RecordingRunner()]) as (lead, (other,)),
            ThreadPoolExecutor() as pool,
        ):
            sent = pool.submit(send)
            try:
                Follow(found[1]).follow(runner)
            except KeyboardInterrupt:
                interrupts.append(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            errors = [sent.exception(), other.exception()]
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    if second == signal.SIGTERM:
        assert not interrupts and runner.calls == ["prefill"] and caplog.text.count(expected) == 2
        assert errors == [None, None]
    else:
        assert interrupts and caplog.text.count(f"{expected}; a second SIGINT ends all processes") == 1
        assert all(str(error).startswith("process 1 (b) ended with KeyboardInterrupt") for error in errors)
