"""Test the processes that compile grammars: limits of time and memory, several at once, end with the builder."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from jspec import SamplingParams
from jspec.engine.grammar import regex_dfa
from jspec.engine.grammar.builder import Builder
from jspec.engine.grammar.regex_dfa import TooLarge, build
from jspec.engine.input.grammar_input import GrammarInput
from tests.support import lettered

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")

EXPLODES = "(a|b)*a(a|b){20}"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals are Linux's")


def waits_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_busy(builder: Builder) -> bool:
    """Return whether the builder has a process that runs a task."""
    return bool(builder._busy) and all(process._unsent is None for process in builder._busy)


def test_grammar_builder_returns_the_automaton_that_build_makes() -> None:
    builder = Builder()
    for regex in ("a|é", "(ab){2,5}c*", "(a|b)*a(a|b){4}"):
        step, is_final = builder("build", regex)
        assert step.shape == build(regex)[0].shape and is_final.sum() == build(regex)[1].sum()
    with pytest.raises(ValueError, match="Failed to build DFA"):
        builder("build", "(")
    assert len(builder.processes) == 1


@ON_LINUX
def test_grammar_builder_in_a_large_parent_process_reuses_its_child_process() -> None:
    """A forked child inherits its parent's peak memory, which must not count as the child's."""
    held = np.ones(2**26)
    builder = Builder()
    builder("build", "a")
    (process,) = builder.processes
    builder("build", "b")
    assert builder.processes == [process] and held.nbytes > regex_dfa.MAX_KEPT


@ON_LINUX
def test_grammar_process_holding_too_much_memory_ends_after_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([None, ("build", ("a",), 0), ("build", ("b",), 0)])
    monkeypatch.setattr(regex_dfa.pickle, "load", lambda file: next(asked))
    monkeypatch.setattr(regex_dfa, "limit_memory", lambda limit: None)
    monkeypatch.setattr(regex_dfa, "limit_cpu", lambda seconds: None)
    monkeypatch.setattr(regex_dfa, "held_memory", lambda: regex_dfa.MAX_KEPT + 1)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=None))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=io.BytesIO()))
    regex_dfa.serve(0)
    assert next(asked) == ("build", ("b",), 0)  # this task is left for the next process


@ON_LINUX
def test_grammar_builder_task_over_the_time_limit_raises_and_the_next_succeeds() -> None:
    builder = Builder(seconds=0.5)
    builder("build", "a")
    start = time.perf_counter()
    with pytest.raises(TooLarge, match=r"more than 0.5 seconds of CPU time or 2 GiB to compile; lower its repetitions"):
        builder("build", EXPLODES)
    assert time.perf_counter() - start < 20
    assert builder("build", "a+")[1].any()


@ON_LINUX
def test_grammar_builder_process_stopped_for_longer_than_its_limit_still_answers() -> None:
    """The limit is CPU time, so a process that only waits is not ended."""
    builder = Builder(seconds=0.5)
    builder("build", "a")
    (process,) = builder.processes
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(1.0, process.send_signal, [signal.SIGCONT])
    timer.start()
    assert builder("build", "a+")[1].any()
    assert builder.processes == [process]


@ON_LINUX
def test_grammar_builder_task_over_the_memory_limit_raises_and_the_next_succeeds() -> None:
    builder = Builder(seconds=60.0, gib=0.4)
    with pytest.raises(TooLarge):
        builder("build", "(a|b)*a(a|b){15}")
    assert builder("build", "a+")[1].any()


def test_grammar_input_with_a_huge_automaton_raises_naming_the_field() -> None:
    maker = GrammarInput(lettered.tokenizer(), 16, 400)
    maker._run.seconds = 0.5
    with pytest.raises(ValueError, match=r"^regex='\(a\|b\)\*a\(a\|b\)\{20\}': it takes more than"):
        maker.of(SamplingParams(regex=EXPLODES), (0,), ())


@ON_LINUX
def test_grammar_builder_with_a_slow_task_answers_another_task_at_once() -> None:
    builder, done = Builder(seconds=20.0), threading.Event()

    def slow() -> None:
        with pytest.raises(RuntimeError, match="closed while it compiled"):
            builder("build", EXPLODES)
        done.set()

    builder("build", "a")
    thread = threading.Thread(target=slow)
    thread.start()
    waits_for(lambda: is_busy(builder))
    assert builder("build", "b")[1].any() and not done.is_set()
    builder.close()
    thread.join(10)
    assert done.is_set() and builder("build", "a+")[1].any()


@ON_LINUX
def test_grammar_builder_task_whose_process_is_killed_is_tried_again_once() -> None:
    builder = Builder(seconds=20.0)
    builder("build", "a")
    (first,) = builder.processes
    first.kill()
    first.wait()
    assert builder("build", "a+")[1].any() and builder.processes != [first]
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(RuntimeError) as error:
            builder("build", EXPLODES)
        errors.append(str(error.value))

    thread = threading.Thread(target=ask)
    thread.start()
    ended = []
    for _ in range(2):
        waits_for(lambda: is_busy(builder) and builder.processes[0] not in ended)
        ended.append(builder.processes[0])
        ended[-1].kill()
    thread.join(30)
    assert errors == ["the process that compiles grammars was ended from outside twice (signal 9); try again"]


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach another thread")
def test_grammar_builder_after_an_interrupt_answers_the_next_expression() -> None:
    """The unread answer to the interrupted expression is not returned for the next expression."""
    builder, before = Builder(), signal.signal(signal.SIGINT, signal.default_int_handler)
    builder("build", "a")
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])  # the main thread waits for the answer
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            builder("build", EXPLODES)
    finally:
        signal.signal(signal.SIGINT, before)
    np.testing.assert_array_equal(builder("build", "a+")[1], build("a+")[1])


@ON_LINUX
def test_grammar_builder_in_a_forked_child_starts_a_new_process() -> None:
    builder = Builder()
    builder("build", "a")
    before = builder.processes
    builder._lock.acquire()  # as if another thread held it
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = builder("build", "ab")[0].shape[0]
            own = [process.pid for process in builder.processes]
            builder.close()
            os.write(write, bytes([answer, before[0].pid not in own]))
        finally:
            os._exit(0)
    builder._lock.release()
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    assert found == bytes([build("ab")[0].shape[0], True])
    assert builder("build", "a")[1].any() and builder.processes == before


def test_grammar_builder_with_a_broken_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="compiles grammars, /bin/false, ended with 1"):
        Builder()("build", "a")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeError, match="cannot start the process that compiles grammars"):
        Builder()("build", "a")


def test_grammar_input_closed_or_deleted_ends_the_compiling_process() -> None:
    """Deleting the `GrammarInput` ends the process at once, without garbage collection."""
    maker = GrammarInput(lettered.tokenizer(), 16, 400)
    maker.of(SamplingParams(regex="a+"), (0,), ())
    (first,) = maker._run.processes
    assert first.poll() is None
    maker.close()
    assert first.returncode is not None and maker._run.processes == []
    maker.of(SamplingParams(regex="b+"), (0,), ())
    (second,) = maker._run.processes
    gc.disable()
    try:
        del maker
        assert second.poll() is not None
    finally:
        gc.enable()
