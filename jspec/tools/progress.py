"""Keeps reports of slow work apart from streamed text: log lines, and on a terminal progress bars."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TextIO, TypeVar

from jspec.core.progress import no_bars

T = TypeVar("T")

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


def settled(chunks: Iterable[T]) -> Iterator[T]:
    """Yield the chunks of a stream, the first one when the second is there; from then on no progress bar is drawn.

    The first chunk comes from the prompt and the second from the first round, so all programs are compiled by then.
    """
    rest = iter(chunks)
    first = list(islice(rest, 2))
    with no_bars():
        yield from first
        yield from rest
