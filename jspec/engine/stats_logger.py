"""What an engine says of itself while it runs: now and then what it does, and once that its drafts hardly help."""

from __future__ import annotations

import logging
import time
import warnings

import numpy as np
from jaxtyping import Int

from jspec.core.records import StepResult
from jspec.draft.base import Drafter
from jspec.draft.draft_model import DraftModel
from jspec.draft.eagle import EagleDrafter
from jspec.draft.medusa import Medusa
from jspec.engine.metrics import LowAcceptanceWarning, Metrics
from jspec.engine.prometheus import Gauges

logger = logging.getLogger(__name__)

ROUNDS = 64  # before which nothing is said
LOW = 1.2  # mean acceptance length below which something is

PROMPT = "the prompt template (raw text where a chat is expected, or the reverse)"
CHECK = "run: jspec info --check HEAD TARGET"


class LowAcceptanceWarner:
    """Counts drafted rounds over an engine's life, with what was accepted before a request's end cut it."""

    def __init__(self, drafter: Drafter) -> None:
        self._advice = advice(drafter)
        self._rounds = 0
        self._accepted = 0

    def count(self, report: Int[np.ndarray, "rounds rows columns"]) -> None:
        """Take the drafted rows of a step into account; warn if it is time to."""
        if self._advice is None:
            return
        fields = StepResult.read(report)
        is_round = fields.counts > 0  # else the row had ended in an earlier one
        self._rounds += int(is_round.sum())
        self._accepted += int(fields.accept_len[is_round].sum())
        mean = 1 + self._accepted / max(self._rounds, 1)
        if self._rounds < ROUNDS or mean >= LOW:
            return
        said, self._advice = self._advice, None
        warnings.warn(
            f"mean acceptance length {mean:.2f} after {self._rounds} rounds: the drafts hardly help; {said}",
            LowAcceptanceWarning,
            stacklevel=4,  # the caller of Engine.generate: above it are step and generate
        )


def advice(drafter: Drafter) -> str | None:
    """What to check where a drafter's tokens are refused.

    None for drafters that look for repetitions, whose luck lies in the text alone, and for a user's own.
    """
    match drafter:
        case EagleDrafter():
            return f"check {PROMPT}, the head's feature layers, rope theta and vocabulary map, and {CHECK}"
        case Medusa():
            return f"check {PROMPT} and that the heads were trained for this target, and {CHECK}"
        case DraftModel():
            return f"check {PROMPT} and that the draft model has the target's tokenizer, and {CHECK}"
        case _:
            return None


class StatsLogger:
    """One line an interval, through `logging`, while steps are made.

    Args:
        interval: seconds; None: nothing is said.
    """

    def __init__(self, interval: float | None) -> None:
        self._interval = interval
        self._last = time.perf_counter()
        self._before = Metrics()

    def is_due(self) -> bool:
        return self._interval is not None and time.perf_counter() - self._last >= self._interval

    def write(self, metrics: Metrics, gauges: Gauges) -> None:
        """Say what was done since the last line."""
        now, was = time.perf_counter(), self._before
        rounds = metrics.num_drafts - was.num_drafts
        accepted = metrics.num_accepted_tokens - was.num_accepted_tokens
        asked = metrics.num_prompt_tokens - was.num_prompt_tokens
        logger.info(
            "%d running, %d waiting, %.0f %% of the pages held, %.1f tokens/s, mean acceptance length %.2f, "
            "%.0f %% of the prompts' tokens cached, %d preempted",
            gauges.running,
            gauges.waiting,
            100 * gauges.pages_used,
            (metrics.num_tokens - was.num_tokens) / (now - self._last),
            1 + accepted / max(rounds, 1),
            100 * (metrics.num_cached_tokens - was.num_cached_tokens) / max(asked, 1),
            metrics.num_preemptions - was.num_preemptions,
        )
        self._last, self._before = now, metrics
