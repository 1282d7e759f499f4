"""Functions that make requests and schedulers without an engine."""

from __future__ import annotations

from typing import Any

from jspec.engine.request.request import Request
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.schedule.page_pool import PagePool
from jspec.engine.schedule.scheduler import Scheduler, SchedulerLimits

SCRATCH, ROUND_TOKENS = 3, 2


def make_request(
    number: int, prompt: int, max_new_tokens: int, priority: int = 0, *, token: int = 1, **options: Any
) -> Request:
    """Return a request with a prompt of ``prompt`` equal tokens; options are those of `SamplingParams`."""
    return Request(number, (token,) * prompt, SamplingParams(priority=priority, **options), 0, (), max_new_tokens)


def make_scheduler(
    *, slots: int, pages: int = 100, page_size: int = 4, rounds: int = 1, **options: object
) -> Scheduler:
    """Return a scheduler with buckets of one row and of all rows, and of 4 and 8 prompt tokens.

    Args:
        options: other fields of `SchedulerLimits`.
    """
    sizes = dict(buckets=tuple(sorted({1, slots})), prefill_buckets=(4, 8), round_tokens=ROUND_TOKENS)
    limits = SchedulerLimits(slots=slots, rounds=rounds, scratch_rows=SCRATCH, **(sizes | options))  # type: ignore[arg-type]
    return Scheduler(PagePool(pages, page_size), limits)
