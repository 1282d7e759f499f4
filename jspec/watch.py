"""A drafter of whose tokens hardly any is accepted: noticed while the engine runs, and said once."""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Int

from jspec.draft import Drafter
from jspec.draft.eagle import EagleDrafter
from jspec.draft.medusa import Medusa
from jspec.draft.model import DraftModel
from jspec.metrics import LowAcceptanceWarning
from jspec.records import Report

ROUNDS = 64  # before which nothing is said
LOW = 1.2  # mean acceptance length below which something is

PROMPT = "the prompt template (raw text where a chat is expected, or the reverse)"
CHECK = "run: jspec info --check HEAD TARGET"


class AcceptanceWatch:
    """Counts drafted rounds over an engine's life, with what was accepted before a request's end cut it."""

    def __init__(self, drafter: Drafter) -> None:
        self._advice = advice(drafter)
        self._rounds = 0
        self._accepted = 0

    def count(self, report: Int[np.ndarray, "rounds rows columns"]) -> None:
        """Take the drafted rows of a step into account; warn if it is time to."""
        if self._advice is None:
            return
        fields = Report.read(report)
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
            stacklevel=5,  # the caller of Engine.generate: above it are _read, step and generate
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
