"""Automata built in a separate process: equal to those built in this process, and limited in time and memory."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from jspec import SamplingParams
from jspec.engine.grammar.compiler import GrammarInput
from jspec.engine.grammar.regex_dfa import Builder, TooLarge, build
from tests.support import lettered

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")

EXPLODES = "(a|b)*a(a|b){20}"


def in_order(step: np.ndarray, is_final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Renumber the states in breadth-first order, because the library's numbers are arbitrary."""
    order = [0]
    for state in order:
        order += [new for new in dict.fromkeys(step[state].tolist()) if new >= 0 and new not in order]
    names = {state: number for number, state in enumerate(order)} | {-1: -1}
    renamed = [[names[state] for state in row] for row in step[order].tolist()]
    return np.array(renamed), is_final[order]


def test_automaton_builder_process_returns_the_automaton_of_build() -> None:
    builder = Builder()
    for regex in ("a|é", "(ab){2,5}c*", "(a|b)*a(a|b){4}"):
        for expected, found in zip(in_order(*build(regex)), in_order(*builder(regex)), strict=True):
            np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="Failed to build DFA"):
        builder("(")
    assert builder("a")[0].shape[1] == 256


def test_automaton_builder_over_the_time_limit_raises_and_recovers() -> None:
    builder = Builder(seconds=1.5)
    builder("a")
    start = time.perf_counter()
    with pytest.raises(TooLarge, match=r"takes more than 1.5 seconds or 4 GiB; lower its repetitions"):
        builder(EXPLODES)
    assert time.perf_counter() - start < 10
    assert (in_order(*builder("a+"))[0] == in_order(*build("a+"))[0]).all()


@pytest.mark.skipif(
    not hasattr(signal, "SIGKILL") or os.uname().sysname != "Linux", reason="no memory limit on this system"
)
def test_automaton_builder_over_the_memory_limit_raises_and_recovers() -> None:
    builder = Builder(seconds=60.0, gib=0.4)
    with pytest.raises(TooLarge):
        builder("(a|b)*a(a|b){15}")
    assert (in_order(*builder("a+"))[0] == in_order(*build("a+"))[0]).all()


def test_grammar_input_with_a_huge_automaton_raises_naming_the_field() -> None:
    maker = GrammarInput(lettered.tokenizer(), 16, 400)
    maker._build._seconds = 1.0
    with pytest.raises(ValueError, match=r"^regex='\(a\|b\)\*a\(a\|b\)\{20\}': its automaton takes more than"):
        maker.of(SamplingParams(regex=EXPLODES), (0,), ())
    pattern = {"type": "string", "pattern": f"^{EXPLODES}$"}
    with pytest.raises(ValueError, match=r"json_schema: pattern .*its automaton takes more than"):
        maker.of(SamplingParams(json_schema=pattern), (0,), ())


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach another thread")
def test_automaton_builder_after_an_interrupt_answers_the_next_expression() -> None:
    """The unread answer to the interrupted expression is not returned for the next one."""
    builder, before = Builder(), signal.signal(signal.SIGINT, signal.default_int_handler)
    builder("a")
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])  # the main thread waits for the answer
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            builder(EXPLODES)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (in_order(*builder("a+"))[0] == in_order(*build("a+"))[0]).all()


def test_automaton_builder_with_a_broken_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="builds automata, /bin/false, ended with 1"):
        Builder()("a")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeError, match="cannot start the process that builds automata"):
        Builder()("a")


def test_grammar_input_closed_or_deleted_ends_the_automaton_builder_process() -> None:
    """Deleting the input ends the process at once, without garbage collection."""
    maker = GrammarInput(lettered.tokenizer(), 16, 400)
    maker.of(SamplingParams(regex="a+"), (0,), ())
    (first := maker._build._process).poll()
    maker.close()
    assert first.returncode is not None
    maker.of(SamplingParams(regex="b+"), (0,), ())
    second = maker._build._process
    gc.disable()
    try:
        del maker
        assert second.poll() is not None
    finally:
        gc.enable()


def test_automaton_builder_deleted_ends_the_builder_process() -> None:
    builder = Builder()
    builder("a")
    process = builder._process
    assert process is not None and process.poll() is None
    del builder
    assert process.poll() is not None
