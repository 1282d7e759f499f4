"""Test the log lines that the command line shows while it loads and compiles."""

from __future__ import annotations

import contextlib
import io
import logging

import pytest

from jspec.tools import progress

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
