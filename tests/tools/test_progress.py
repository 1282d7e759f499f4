"""The display of an engine's start."""

from __future__ import annotations

import contextlib
import io
import logging
import time

import pytest

from jspec.tools import progress

pytestmark = pytest.mark.once

LOGGER = logging.getLogger(progress.SOURCE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_start_display_without_terminal_prints_a_line_per_log_record() -> None:
    out = io.StringIO()
    with progress.starting("model", out):
        LOGGER.info("compiled %s in %.1f s", "round[1]", 2.0)
        LOGGER.info("compiled %s in %.1f s", "prefill[128]", 3.0, extra={"done": 2, "total": 7})
    LOGGER.info("later")
    assert out.getvalue().splitlines() == [
        "jspec: loading model",
        "jspec: compiled round[1] in 2.0 s",
        "jspec: compiled prefill[128] in 3.0 s (2 of 7)",
    ]


def test_start_display_on_a_terminal_rewrites_one_line_and_erases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK", 0.01)
    out = Terminal()

    def wait_for(text: str) -> None:
        until = time.monotonic() + 30
        while text not in out.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        assert text in out.getvalue()

    with progress.starting("model", out):
        wait_for("model: loading, 0 s")
        LOGGER.info("references on cpu")
        LOGGER.info("compiled round[1] in 2.0 s")
        wait_for("model: compiling: 1 programs done, ")
        LOGGER.info("compiled round[1] in 2.0 s", extra={"done": 3, "total": 7})
        wait_for("model: compiling: 3 of 7 programs, ")
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\033[K")
    before = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == before, "the thread has ended"


def test_start_display_restores_the_logger_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    before = (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers))
    with contextlib.suppress(ValueError), progress.starting("model", io.StringIO()):
        assert LOGGER.getEffectiveLevel() == logging.INFO
        raise ValueError
    assert (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)) == before
