"""Shows log lines of slow work on the command line if stderr is not a terminal, which would show a progress bar."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

# Loggers that report loading, compiling and training.
TRAINING = ("data", "regenerate", "material", "loop")
SOURCES = ("jspec.models.load", "jspec.step.executables", *(f"jspec.train.{name}" for name in TRAINING))


@contextlib.contextmanager
def log_lines(out: TextIO | None = None) -> Iterator[None]:
    """Print a line for each model that is loaded and each program that is compiled, while the context is open.

    On a terminal nothing is printed, because `jspec.core.progress` shows bars there.

    Args:
        out: stream to write to; None: the standard error.
    """
    out = sys.stderr if out is None else out
    if out.isatty():
        yield
        return
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("jspec: %(message)s"))
    loggers = [logging.getLogger(name) for name in SOURCES]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the root logger may have a handler, which would print each line again
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
