"""Test that an engine's thread delivers what `generate` returns, and that no call, failure or stop loses a request."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from jspec import Chunk, Engine, SamplingParams
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.callers.deliveries import Delivery
from jspec.engine.callers.engine_thread import EngineThread
from jspec.engine.request.round_record import BreakOff, Round
from jspec.engine.request.token_logprobs import PromptLogprobs
from jspec.step.executable_key import ExecutableKey
from tests.support import brittle, engines, paper, tiny
from tests.support.brittle import PATIENCE, PROMPTS, Fault
from tests.support.serving import wait_until

pytestmark = pytest.mark.once


class Received:
    """Collects deliveries by key; checks that nothing comes after the last one of a key."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, list[Delivery]] = defaultdict(list)
        self.threads: set[threading.Thread] = set()
        self._changed = threading.Condition()

    def __call__(self, deliveries: list[Delivery]) -> None:
        with self._changed:
            self.threads.add(threading.current_thread())
            for one in deliveries:
                assert not self.is_complete(one.key), f"a delivery after the last one of {one.key}"
                self.by_key[one.key].append(one)
            self._changed.notify_all()

    def is_complete(self, key: Hashable) -> bool:
        return bool(self.by_key[key]) and self.by_key[key][-1].last

    def wait(self, keys: Sequence[Hashable], holds: Callable[[Hashable], bool] | None = None) -> None:
        """Wait until all keys are complete, or until another condition holds for all of them."""
        with self._changed:
            test = holds or self.is_complete
            assert self._changed.wait_for(lambda: all(map(test, keys)), PATIENCE), f"no last delivery: {self.by_key}"

    def chunks(self, key: Hashable, index: int = 0) -> list[Chunk]:
        return [one.chunk for one in self.by_key[key] if one.chunk.index == index]

    def text(self, key: Hashable, index: int = 0) -> str:
        return "".join(chunk.text or "" for chunk in self.chunks(key, index))

    def reasons(self, key: Hashable) -> list[str | None]:
        return [one.chunk.finish_reason for one in self.by_key[key] if one.chunk.finish_reason]


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def thread(engine: Engine, received: Received) -> Iterator[EngineThread]:
    """Yield the thread of the shared engine."""
    yield engine.threads
    for key in list(engine.threads._deliveries._submissions):
        engine.threads.abort(key)
    assert received.threads <= {engine.threads._thread}
    left = engine.threads._deliveries
    wait_until(lambda: not left._submissions)
    assert not (left._keys or left._records or left._watch.num_sent or left._watch.started)


@cache
def byte_engine(*, drafted: bool = True) -> Engine:
    """Return an engine of four slots on a device of paper."""
    return paper.byte_engine() if drafted else paper.make(tiny.model(256, layers=1), **engines.BYTE_OPTIONS)


def params_of(number: int) -> SamplingParams:
    """Return parameters that differ from those of the requests with the next numbers."""
    stop = ("e", "th") if number % 5 == 0 else ()
    return SamplingParams(
        max_tokens=4 + number % 13, temperature=number % 3 / 2, seed=number, stop=stop, n=1 + number % 7 // 6
    )


@pytest.mark.parametrize("drafted", [False, True])
def test_engine_thread_with_64_requests_streams_the_texts_of_generate(drafted: bool, received: Received) -> None:
    engine = byte_engine(drafted=drafted)
    prompts = [bytes([65 + i % 26] * (1 + i % 11)).decode() for i in range(64)]
    params = [params_of(i) for i in range(64)]
    expected, thread = engine.generate(prompts, params), engine.threads
    for i, prompt in enumerate(prompts):
        thread.submit({i: engine.prepare(prompt, params[i])}, received)
    received.wait(range(64))
    for i, completion in enumerate(expected):
        for index, sample in enumerate(completion.samples):
            chunks = received.chunks(i, index)
            assert received.text(i, index) == sample.text
            assert [token for chunk in chunks for token in chunk.token_ids] == sample.token_ids
            assert [flag for chunk in chunks for flag in chunk.from_draft] == sample.from_draft
            last = chunks[-1]
            assert (last.finish_reason, last.stop_reason) == (sample.finish_reason, sample.stop_reason)
            assert last.metrics is not None and last.metrics.num_tokens == len(sample.token_ids)
            assert all(chunk.metrics is None and chunk.stop_reason is None for chunk in chunks[:-1])
    assert max(len(received.chunks(i)) for i in range(64)) > 3, "the output came at once"
    assert any(any(sample.from_draft) for sample in expected) == drafted
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work


def test_engine_thread_with_traced_requests_delivers_their_rounds(received: Received) -> None:
    engine = byte_engine()
    thread = engine.threads
    params = SamplingParams(max_tokens=40, seed=3, logprobs=0, temperature=0.7)
    thread.submit({"traced": engine.prepare("once", params, trace=True)}, received)
    thread.submit({"other": engine.prepare("once", params)}, received)
    received.wait(["traced", "other"])
    (expected,) = engine.generate("once", params, trace=True)
    rounds = [one for chunk in received.chunks("traced") for one in chunk.rounds or []]
    assert expected.rounds and len(rounds) == len(expected.rounds)
    for one, own in zip(rounds, expected.rounds, strict=True):
        assert (one.tokens == own.tokens).all() and (one.path, one.emitted, one.start) == (
            own.path,
            own.emitted,
            own.start,
        )
    for chunk in received.chunks("traced"):
        in_rounds = [token for one in chunk.rounds or [] for token in one.emitted]
        assert in_rounds == chunk.token_ids[len(chunk.token_ids) - len(in_rounds) :]
    assert all(chunk.rounds is None for chunk in received.chunks("other"))


def test_round_that_breaks_off_tells_the_targets_token_and_its_place_in_the_draft() -> None:
    """The formulas are written again here, over the tree's arrays and the completion's log-probabilities."""
    params = SamplingParams(max_tokens=40, seed=3, logprobs=0, temperature=0.7)
    chunks = list(byte_engine().stream("once", params, trace=True))
    scores = [one for chunk in chunks for one in chunk.logprobs or []]
    rounds, breaks = [one for chunk in chunks for one in chunk.rounds or []], []
    for one in rounds:
        found = one.break_off
        if len(one.emitted) == one.accept_len:
            assert found is None and one is rounds[-1]
            continue
        assert found is not None and found.node == one.path[one.accept_len]
        assert found.token == one.emitted[-1] == scores[one.start + one.accept_len].token_id
        assert found.target_probability == pytest.approx(math.exp(scores[one.start + one.accept_len].logprob))
        children = [node for node, parent in enumerate(one.parents) if parent == found.node]
        assert sorted(found.proposed) == children
        assert (found.rank is not None) == (found.token in one.tokens[children])
        breaks.append(found)
    assert any(found.proposed for found in breaks)


def test_break_off_at_a_proposed_token_has_its_rank_and_probability() -> None:
    tree: dict[str, Any] = dict(tokens=np.array([9, 5, 6, 7, 0]), parents=np.array([-1, 0, 0, 0, -1]))
    one = Round(**tree, scores=np.log([1, 0.2, 0.5, 0.1, 1]), path=[0], accept_len=0, emitted=[5])
    assert one.break_off == BreakOff(0, 5, (2, 1, 3), 2, pytest.approx(0.2), None)
    other = replace(one, emitted=[8])
    assert other.break_off == BreakOff(0, 8, (2, 1, 3), None, None, None)
    assert replace(one, emitted=[]).break_off is None
    assert replace(one, path=[0, 2], accept_len=1, emitted=[6, 1]).break_off == BreakOff(2, 1, (), None, None, None)


def test_engine_thread_with_random_aborts_of_500_submissions_leaves_no_request(
    engine: Engine, thread: EngineThread, received: Received
) -> None:
    """The `engine` fixture checks that no page or slot is held."""
    draw = random.Random(0)
    for i in range(500):
        thread.submit({i: engine.prepare(PROMPTS[i % 6], max_tokens=20, seed=i, n=1 + i % 2)}, received)
        if draw.random() < 0.8:
            thread.abort(draw.randrange(i + 1))
        if i % 50 == 49:
            received.wait([i - 40], lambda key: bool(received.by_key[key]))
    for i in range(500):
        thread.abort(i)
    received.wait(range(500))
    assert thread.num_unfinished == thread.num_running == 0
    reasons = [reason for i in range(500) for reason in received.reasons(i)]
    assert len(reasons) == 750 and {"abort", "length"} == set(reasons)


def test_engine_thread_counts_completions_that_wait_and_that_run(
    engine: Engine, thread: EngineThread, received: Received
) -> None:
    for key in "ab":
        thread.submit({key: engine.prepare(PROMPTS[0], max_tokens=60, n=3)}, received)
    assert thread.num_unfinished == 6
    received.wait("a", lambda key: len(received.by_key[key]) > 8)
    assert thread.num_running == brittle.SLOTS
    assert thread.healthy


def test_engine_thread_without_requests_sleeps(
    engine: Engine, thread: EngineThread, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    turn = thread.turn

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return turn()

    monkeypatch.setattr(thread, "turn", counted)
    thread.submit({"a": engine.prepare(PROMPTS[0], max_tokens=3)}, received)
    received.wait("a")
    time.sleep(0.05)
    before = steps
    time.sleep(0.2)
    assert steps == before > 0


@pytest.mark.parametrize("lacks", ["prefill", "round"])
def test_engine_thread_that_compiles_for_one_request_serves_the_others(received: Received, lacks: str) -> None:
    """The compilation for the request with log-probabilities ends only after the other request has ended."""
    others_ended, engine = threading.Event(), brittle.engine.__wrapped__()
    thread, device = engine.threads, engine.core.runner.target_side
    engine.generate(PROMPTS[0], max_tokens=3)
    compile_now = device.compile

    def slow_compile(keys: Sequence[ExecutableKey]) -> None:
        if any(key.kind == lacks and key.logprobs for key in device.missing(keys)):
            assert others_ended.wait(PATIENCE)
        compile_now(keys)

    device.compile = slow_compile
    thread.submit({"slow": engine.prepare(PROMPTS[0], max_tokens=9, logprobs=0)}, received)
    thread.submit({"quick": engine.prepare(PROMPTS[0], max_tokens=9)}, received)
    received.wait(["quick"])
    assert not received.is_complete("slow")
    others_ended.set()
    received.wait(["slow"])
    assert received.reasons("slow") == ["length"]


def test_engine_thread_with_a_request_that_cannot_be_compiled_delivers_its_error(
    engine: Engine, thread: EngineThread, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(keys: Sequence[Any]) -> None:
        raise ValueError("does not fit into memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "compile", fails)
        patch.setattr(engine.core.runner, "missing", list)
        thread.submit({"a": engine.prepare(PROMPTS[0])}, received)
        received.wait("a")
    (last,) = received.by_key["a"]
    assert last.chunk.finish_reason == "error" and "does not fit" in str(last.error)
    assert not engine.scheduler.has_work


def test_engine_thread_with_a_failed_step_delivers_errors_and_serves_on(
    engine: Engine, thread: EngineThread, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "dispatch", Fault(engine.core.runner.dispatch, 5, OSError("device lost")))
        for i in range(6):
            thread.submit({i: engine.prepare(PROMPTS[i], brittle.PARAMS[i])}, received)
        received.wait(range(6))
    failed = [i for i in range(6) if received.reasons(i) == ["error"]]
    assert 0 < len(failed) < 6 and all("device lost" in str(received.by_key[i][-1].error) for i in failed)
    for i in set(range(6)) - set(failed):
        tokens = [token for chunk in received.chunks(i) for token in chunk.token_ids]
        assert tokens == brittle.expected()[i] and received.by_key[i][-1].error is None
    assert thread.healthy


def test_engine_thread_of_an_engine_that_lost_its_device_delivers_errors_for_all_keys(received: Received) -> None:
    engine = paper.byte_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core.runner, "dispatch", Fault(engine.core.runner.dispatch, 3, OSError("device lost")))
        patch.setattr(engine.core.runner, "reset_state", Fault(lambda error: None, 1, OSError("no memory")))
        engine.threads.submit({i: engine.prepare([1, 2], max_tokens=8) for i in range(20)}, received)
        received.wait(range(20))
    assert all(received.reasons(i) == ["error"] for i in range(20))
    assert not engine.threads.healthy
    engine.close()


def test_engine_thread_closed_during_submissions_ends_every_accepted_request(received: Received) -> None:
    """Three callers submit until they are refused, each with at most eight unfinished requests."""
    engine = brittle.engine.__wrapped__()
    thread, accepted, refused = engine.threads, list[int](), list[str]()
    late = engine.prepare(PROMPTS[0])

    def submits(first: int) -> None:
        for key in itertools.count(first, 3):
            try:
                thread.submit({key: engine.prepare(PROMPTS[0], max_tokens=5)}, received)
            except RuntimeError as error:
                refused.append(str(error))
                return
            accepted.append(key)
            received.wait([key - 3 * 8] if key >= 3 * 8 else [])

    callers = [threading.Thread(target=submits, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    received.wait([3, 4, 5])  # the second request of each caller
    engine.close()
    for caller in callers:
        caller.join(PATIENCE)
    assert len(refused) == 3 and all("has ended" in error or "is closed" in error for error in refused)
    assert len(accepted) > 3 and all(map(received.is_complete, accepted))
    with pytest.raises(RuntimeError, match="has ended"):
        thread.submit({"late": late}, received)
    assert not thread.healthy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_thread_whose_outlet_fails_ends_its_requests() -> None:
    def fails(deliveries: list[Delivery]) -> None:
        raise KeyError("the receiver is gone")

    engine = brittle.engine.__wrapped__()
    request, other = engine.prepare(PROMPTS[0], max_tokens=50), engine.prepare(PROMPTS[0])
    engine.threads.submit({"a": request}, fails)
    engine.threads._thread.join(PATIENCE)
    assert request.finish_reason == "error" and not engine.healthy
    with pytest.raises(RuntimeError, match="has ended"):
        engine.threads.submit({"b": other}, fails)
    with pytest.raises(RuntimeError, match="ended by an error; make a new engine"):
        engine.generate(PROMPTS[0])
    engine.close()
    assert engine.core.runner.state is None


def test_engine_thread_aborts_a_request_of_several_completions(
    engine: Engine, thread: EngineThread, received: Received
) -> None:
    thread.abort("unknown")
    thread.submit({"a": engine.prepare(PROMPTS[0], max_tokens=60, n=5)}, received)
    received.wait("a", lambda key: len(received.by_key[key]) > 4)
    thread.abort("a")
    received.wait("a")
    assert received.reasons("a") == ["abort"] * 5 and [one.last for one in received.by_key["a"][-2:]] == [False, True]


@pytest.mark.parametrize("whole", [True, False])
def test_engine_thread_asked_for_whole_completions_delivers_each_in_one_chunk(
    engine: Engine, thread: EngineThread, received: Received, whole: bool
) -> None:
    thread.submit({"a": engine.prepare(PROMPTS[0], max_tokens=60, n=2)}, received, whole=whole)
    received.wait("a")
    assert received.reasons("a") == ["length"] * 2
    assert (len(received.by_key["a"]) == 2) == whole


def test_engine_thread_given_a_wrong_request_or_key_raises(
    engine: Engine, thread: EngineThread, received: Received
) -> None:
    request = engine.prepare(PROMPTS[0], max_tokens=60)
    thread.submit({"a": request}, received)
    with pytest.raises(ValueError, match=r"submit: key: expected one that no unfinished request has, got 'a'"):
        thread.submit({"a": engine.prepare(PROMPTS[0])}, received)
    with pytest.raises(ValueError, match="submit: expected a request that was not submitted before"):
        thread.submit({"b": request}, received)
    thread.abort("a")
    received.wait("a")


def test_engine_thread_makes_prompt_logprobs_in_another_thread(
    engine: Engine, thread: EngineThread, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, seed=1)
    (expected,) = engine.generate(PROMPTS[2], params)
    makers: list[threading.Thread] = []
    records = PromptLogprobs.records

    def watched(self: PromptLogprobs) -> Any:
        if self._pieces:
            makers.append(threading.current_thread())
        return records(self)

    monkeypatch.setattr(PromptLogprobs, "records", watched)
    thread.submit({"a": engine.prepare(PROMPTS[2], params)}, received)
    received.wait("a")
    assert received.chunks("a")[0].prompt_logprobs == expected.prompt_logprobs
    assert len(makers) == 1 and makers[0] not in (thread._thread, threading.main_thread())


def test_request_aborted_before_the_engine_thread_takes_it_is_delivered(engine: Engine, received: Received) -> None:
    request = engine.prepare(PROMPTS[0], max_tokens=5, n=2)
    with ByHand(engine) as by_hand:
        engine.threads.submit({"aborted": request}, received)
        engine.threads.abort("aborted")
        by_hand.step()
    received.wait(["aborted"])
    assert received.reasons("aborted") == ["abort"] * 2 and not received.by_key["aborted"][0].chunk.token_ids


def test_calls_that_fail_while_the_engine_thread_ends_lose_no_request() -> None:
    """The first error ends the thread, while another call that fails and a request are in the queue."""
    engine, gate = paper.byte_engine(), threading.Event()

    def fail() -> None:
        raise ValueError("a call that fails")

    engine.generate("a", SamplingParams(max_tokens=1))  # starts the thread
    engine.threads.call(gate.wait)
    engine.threads.call(fail)
    engine.threads.call(fail)
    request = engine.submit("b", SamplingParams(max_tokens=1))
    gate.set()
    engine.result(request)
    assert request.finish_reason == "error" and isinstance(request.error, RuntimeError)
    with pytest.raises(RuntimeError, match="thread has ended by an error; make a new engine") as caught:
        engine.generate("c", SamplingParams(max_tokens=1))
    assert "a call that fails" in str(caught.value.__cause__)


def test_function_for_an_engine_thread_that_ends_is_called_by_the_one_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has carried out its last calls, and still frees the device."""
    engine, found = paper.byte_engine(), list[int]()
    engine.generate("a", SamplingParams(max_tokens=1))  # starts the thread
    thread, close = engine.threads, engine.core.close

    def close_last() -> None:
        if thread.is_current:
            asks = threading.Thread(target=lambda: found.append(thread.do(lambda: 7)), daemon=True)
            asks.start()
            asks.join(PATIENCE)
        close()

    monkeypatch.setattr(engine.core, "close", close_last)
    engine.close()
    assert found == [7]


def test_turn_makes_its_step_before_it_has_carried_out_all_of_many_slow_calls() -> None:
    engine, handled = paper.byte_engine(), list[None]()
    with ByHand(engine) as hand:
        for _ in range(100):
            engine.threads.call(lambda: handled.append(time.sleep(0.002)))
        hand.step()
        assert len(handled) < 100


def test_compilation_that_cannot_start_a_thread_is_the_error_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    engine = paper.byte_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.threads._programs._compiler, "submit", submit)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            engine.generate("a", SamplingParams(max_tokens=1))
    (done,) = engine.generate("a", SamplingParams(max_tokens=1))
    assert done.finish_reason == "length"


def test_thread_that_makes_the_turns_is_refused_as_a_caller_that_waits() -> None:
    engine = paper.byte_engine()
    with ByHand(engine) as hand:
        for wait in (lambda: engine.generate("a"), lambda: next(engine.stream("a"))):
            with pytest.raises(RuntimeError, match="thread that may wait for the engine"):
                wait()
        assert engine.metrics.num_prompt_tokens == 0, "what does not wait for the thread works"
        request = hand.submit("a", SamplingParams(max_tokens=2))
        assert hand.result(request).finish_reason == "length"
    assert len(engine.generate("a", SamplingParams(max_tokens=2))[0].token_ids) == 2
    engine.close()
    with pytest.raises(RuntimeError, match="expected a running engine thread"), ByHand(engine):
        pass
