"""Test what the command line shows while it loads and compiles: log lines, and bars that erase no text."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jspec import SamplingParams
from jspec.core.progress import progress_bar
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Chunk
from jspec.tools import chat, demo, generate, progress
from jspec.tools.command_line import make_parser

pytestmark = pytest.mark.once

LOADING, COMPILING, *_ = map(logging.getLogger, progress.SOURCES)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_lines() -> None:
    LOADING.info("loading %s", "a model")
    COMPILING.info("compiled %s in %.1f s", "round[1]", 2.0)
    logging.getLogger("jspec.engine").info("not about progress")


def test_log_lines_without_terminal_are_printed_while_the_context_is_open() -> None:
    out = io.StringIO()
    with progress.log_lines(out):
        write_lines()
    write_lines()
    assert out.getvalue().splitlines() == ["jspec: loading a model", "jspec: compiled round[1] in 2.0 s"]


def test_log_lines_on_a_terminal_are_not_printed() -> None:
    out = Terminal()
    with progress.log_lines(out):
        write_lines()
    assert out.getvalue() == ""


def test_log_lines_after_an_error_restore_the_loggers() -> None:
    before = [(one.level, one.propagate, list(one.handlers)) for one in (LOADING, COMPILING)]
    with contextlib.suppress(ValueError), progress.log_lines(io.StringIO()):
        assert COMPILING.getEffectiveLevel() == logging.INFO
        raise ValueError
    assert [(one.level, one.propagate, list(one.handlers)) for one in (LOADING, COMPILING)] == before


TEXT = "sys.argv[1:]\n    return argv, prog\n    and more"


def compile_programs() -> None:
    """Draw a bar in another thread, as an engine does."""

    def draw() -> None:
        with progress_bar(2, "compiling", "programs") as bar:
            for _ in range(2):
                bar.refresh()
                bar.update()

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()


def compiling_stream(prompt: object, params: object) -> Iterator[Chunk]:
    """Yield a text, with compilations before the first, second and fourth chunk."""
    for number, piece in enumerate(re.findall(r"\S+|\s+", TEXT)):
        if number in (0, 1, 3):
            compile_programs()
        yield Chunk(piece, [number], [number % 2 == 0], pieces=[piece])


TOKENIZER = SimpleNamespace(chat=lambda messages: [1], hidden_ids=frozenset(), decode=lambda ids: "")
ENGINE: Any = SimpleNamespace(stream=compiling_stream, metrics=Metrics(), tokenizer=TOKENIZER)


def shown(raw: str) -> str:
    """Return what a terminal shows after it got characters, without colours."""
    lines, column = [""], 0
    for part in re.findall(r"\033\[[\d;]*[A-Za-z]|.", raw, re.S):
        line = lines[-1]
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\033[K":
            lines[-1] = line[:column]
        elif not part.startswith("\033"):
            lines[-1], column = line[:column].ljust(column) + part + line[column + 1 :], column + 1
        else:
            assert part.endswith("m"), part
    return "\n".join(line.rstrip() for line in lines)


def demonstrate() -> None:
    demo._print_completion(ENGINE, SamplingParams(), sys.stdout)


def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "prepare", lambda arguments: None)
    monkeypatch.setattr(generate, "make_engine", lambda *arguments: contextlib.nullcontext(ENGINE))
    arguments = make_parser().parse_args(["generate", "--target", "a", "prompt"])
    assert arguments.run(arguments) == 0


def answer() -> None:
    chat.ChatSession(ENGINE, SamplingParams(), None).answer("question")


@pytest.mark.parametrize("command", [demonstrate, complete, answer])
def test_progress_bars_on_the_terminal_of_the_text_erase_none_of_it(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(master, 2**12):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        command(*[monkeypatch] * (command is complete))
    monkeypatch.undo()
    reader.join()
    os.close(master)
    raw = b"".join(parts).decode()
    start = demo.PROMPT if command is demonstrate else ""
    assert raw.count("compiling") >= 2, "negative control: bars were drawn"
    assert f"\n{start}{TEXT}" in f"\n{shown(raw)}"
