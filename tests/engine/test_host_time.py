"""Test that the host's time of a step does not grow with the length of the texts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jspec import Engine
from jspec.engine.request.request import Request
from jspec.engine.schedule.scheduler import Scheduler
from tests.support.host_time import STEPS, WARM_UP, cpu_seconds, ready_engine

pytestmark = pytest.mark.once

CONTEXTS, FULL = (64, 16384), (1024, 32768)
ROWS, DEPTH = 4, 1


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [ready_engine(ROWS, CONTEXTS[-1], DEPTH) for _ in CONTEXTS]


def read_all(self: Scheduler, request: Request, rows: int, keep: Callable[..., None] = Scheduler.cache_prefix) -> None:
    """Read a request's whole text 16 times, then do what `keep` does: the negative control of a slow host."""
    for _ in range(16):
        request.tokens_between(0, rows)
    keep(self, request, rows)


def ratio(engines: list[Engine], contexts: tuple[int, ...], depth: int, blocks: int) -> float:
    """Return the time of a step with the longest texts over that with the shortest, the median over blocks."""
    seconds = cpu_seconds(engines, contexts, depth, blocks)
    return float(np.median(seconds[-1] / seconds[0]))


def test_host_time_measurement_decodes_every_row_in_every_step(engines: list[Engine]) -> None:
    """All rows have the context's length, and each step accepts one draft token of each row."""
    before = [engine.metrics for engine in engines]
    assert (cpu_seconds(engines, CONTEXTS, DEPTH, 1) > 0).all()
    for engine, was, context in zip(engines, before, CONTEXTS, strict=True):
        metrics = engine.metrics
        assert metrics.num_prompt_tokens - was.num_prompt_tokens == ROWS * context
        steps = metrics.num_drafts - was.num_drafts
        assert steps >= ROWS * (STEPS + WARM_UP - 1)
        assert metrics.num_accepted_tokens - was.num_accepted_tokens == steps
        assert engine.pages_in_use == 0


def test_host_time_of_a_step_that_reads_the_whole_text_grows_with_context(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ratio(engines, CONTEXTS, DEPTH, 5) < 2
    monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
    assert ratio(engines, CONTEXTS, DEPTH, 5) > 2


@pytest.mark.timing
def test_host_time_of_a_step_is_below_a_millisecond_at_any_context(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [ready_engine(64, FULL[-1], 4) for _ in FULL]
    seconds = cpu_seconds(full, FULL, 4, 5)
    assert np.median(seconds, axis=1).max() < 1e-3
    assert abs(np.median(seconds[1] / seconds[0]) - 1) < 0.1
    monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
    assert ratio(full, FULL, 4, 1) > 1.1
