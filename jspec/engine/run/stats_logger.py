"""Messages of a running engine: log lines with statistics, and a warning about low acceptance."""

from __future__ import annotations

import logging
import sys
import time
import warnings

import numpy as np
from jaxtyping import Int

from jspec.core.records import StepResult
from jspec.draft.base import Drafter
from jspec.engine.request.metrics import LowAcceptanceWarning, Metrics
from jspec.engine.run.prometheus import Gauges

logger = logging.getLogger(__name__)

MIN_ROUNDS = 64  # least number of rounds with a draft before a warning
LOW = 1.2  # mean acceptance length in tokens per round below which the warning is given


class LowAcceptanceWarner:
    """Counts the draft tokens that rounds accept, and warns callers once if their number is low.

    Draft tokens accepted after the end of a request are counted too. A drafter without `Drafter.advice` causes no
    warning.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._num_updates = 0  # of the target since the drafter's weights were given
        self._begin(drafter)

    def _begin(self, drafter: Drafter) -> None:
        self._advice = drafter.advice
        self._num_rounds = 0
        self._num_accepted = 0

    def on_update(self, drafter: Drafter, *, is_new: bool) -> None:
        """Begin anew after an update of the target's weights.

        Args:
            drafter: the drafter from now on.
            is_new: whether its weights came with the update.
        """
        self._num_updates = 0 if is_new else self._num_updates + 1
        self._begin(drafter)

    def count(self, report: Int[np.ndarray, "rounds rows columns"]) -> None:
        """Count the rounds of a step.

        Args:
            report: the rows of `StepOutput.report` that had a draft.
        """
        if self._advice is None:
            return
        fields = StepResult.read(report)
        is_round = fields.counts > 0  # False if the request had ended in an earlier round
        self._num_rounds += int(is_round.sum())
        self._num_accepted += int(fields.accept_len[is_round].sum())

    def warn(self) -> None:
        """Warn if acceptance is low after `MIN_ROUNDS` rounds; called in a thread of a caller."""
        mean = 1 + self._num_accepted / max(self._num_rounds, 1)
        if self._advice is None or self._num_rounds < MIN_ROUNDS or mean >= LOW:
            return
        advice, self._advice = self._advice, None
        if self._num_updates:
            updates = f"{self._num_updates} update{'s' * (self._num_updates > 1)}"
            advice = f"its weights were given {updates} of the target ago; {advice}"
        warnings.warn(
            f"mean acceptance length {mean:.2f} after {self._num_rounds} rounds: the drafts hardly help; {advice}",
            LowAcceptanceWarning,
            stacklevel=_level_of_caller(),
        )


def _level_of_caller() -> int:
    """Return the first stack level outside of jspec, counted as `warnings.warn` in this function's caller counts.

    A context manager of jspec has a frame of `contextlib` between its own and that of the function that uses it.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_inner(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_inner(module: str) -> bool:
    return module.startswith("jspec.") or module == "contextlib"


def _parts(metrics: Metrics, last: Metrics, num_rounds: int) -> str:
    """Return the accepted tokens a round of each of two sources as text; no text if there is one source."""
    now, before = metrics.num_accepted_tokens_per_source, last.num_accepted_tokens_per_source
    parts = {source: (count - before.get(source, 0)) / max(num_rounds, 1) for source, count in now.items()}
    return f" (1{''.join(f' + {length:.2f} by {source}' for source, length in parts.items())})" if parts else ""


class StatsLogger:
    """Logs one line of statistics per interval while the engine is stepped.

    Args:
        interval: seconds between lines; None: no lines.
    """

    def __init__(self, interval: float | None) -> None:
        self._interval = interval
        self._last_time = time.perf_counter()
        self._last_metrics = Metrics()

    def is_due(self) -> bool:
        return self._interval is not None and time.perf_counter() - self._last_time >= self._interval

    def write(self, metrics: Metrics, gauges: Gauges) -> None:
        """Log the current load, and how much the counters have changed since the last line."""
        now, last = time.perf_counter(), self._last_metrics
        num_rounds = metrics.num_drafts - last.num_drafts
        num_accepted = metrics.num_accepted_tokens - last.num_accepted_tokens
        num_prompt_tokens = metrics.num_prompt_tokens - last.num_prompt_tokens
        logger.info(
            "%d running, %d waiting, %.0f %% of the pages held, %.1f tokens/s, mean acceptance length %.2f%s, "
            "%.0f %% of the prompts' tokens cached, %d preempted",
            gauges.running,
            gauges.waiting,
            100 * gauges.pages_used,
            (metrics.num_tokens - last.num_tokens) / (now - self._last_time),
            1 + num_accepted / max(num_rounds, 1),
            _parts(metrics, last, num_rounds),
            100 * (metrics.num_cached_tokens - last.num_cached_tokens) / max(num_prompt_tokens, 1),
            metrics.num_preemptions - last.num_preemptions,
        )
        self._last_time, self._last_metrics = now, metrics
