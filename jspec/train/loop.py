"""The loop of a training run: updates, evaluations, checkpoints, and the best head so far."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jspec.core.progress import progress_bar
from jspec.distributed.signals import at_first
from jspec.train.checkpoints import Checkpoints
from jspec.train.config import TrainConfig
from jspec.train.journal import Journal
from jspec.train.material import Material, rows_of
from jspec.train.measured import Figures, Measured
from jspec.train.pack import Order
from jspec.train.program import TrainingProgram, TrainState, UpdateReport

logger = logging.getLogger(__name__)

RECORDS = 20  # measurements of the training rows between two evaluations
LINE_SECONDS = 10.0  # least time between two lines of progress
SHOWN = 8  # most lines of the data that an error names


class LossError(ValueError):
    """The loss or its gradient is not a finite number."""


def loss_error(step: int, what: str, numbers: Sequence[int]) -> LossError:
    """Return the error of an update.

    Args:
        step: its number, from 0.
        what: what the numbers count.
        numbers: numbers of the documents that the update read.
    """
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return LossError(
        f"train: update {step + 1}: expected a finite loss and gradient, got others on {what} "
        f"{', '.join(map(str, numbers[:SHOWN]))}{more}; the weights were left as they were: lower the learning rate, "
        "or look at these"
    )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the run, whose state was written after its running update."""


@dataclass
class Meter:
    """What was measured since the last record, and how fast."""

    total: Measured | None = None
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, measured: Measured, tokens: int) -> None:
        """Add the measurement of an update, which waits for the update."""
        values = jax.tree.map(np.asarray, measured)
        self.total = values if self.total is None else jax.tree.map(np.add, self.total, values)
        self.tokens += tokens

    @property
    def speed(self) -> float:
        """Tokens per second, padding left out."""
        return self.tokens / max(time.monotonic() - self.began, 1e-9)


class Loop:
    """The loop of a run.

    Args:
        config: options of the run.
        material: what the run reads.
        program: the compiled programs.
        steps: number of updates of the whole run.
    """

    def __init__(self, config: TrainConfig, material: Material, program: TrainingProgram, steps: int) -> None:
        self.config, self.material, self.program, self.steps = config, material, program, steps
        self._order = Order(len(material.train), config.seed)
        self._shown = -LINE_SECONDS
        self._signals: list[int] = []

    def run(
        self,
        state: TrainState,
        meter: Meter,
        checkpoints: Checkpoints,
        journal: Journal,
        export: Callable[[Any], None],
    ) -> Figures:
        """Make all updates that are left.

        Args:
            state: the state to begin with.
            meter: what was measured since the last record.
            checkpoints: receives the state after each evaluation, and if a signal ends the run.
            journal: receives the measurements.
            export: function that writes a head; called at each evaluation that is the best so far.

        Returns:
            What was measured at the best evaluation; without held-out rows, at the last updates.

        Raises:
            LossError: the loss is not finite.
            OSError: a file cannot be written.
            Interrupted: Ctrl-C or SIGTERM.
        """
        first = int(state.step)
        best: Figures | None = journal.best
        pending: tuple[int, UpdateReport, int] | None = None
        record = max(1, self.config.eval_every // RECORDS)
        with progress_bar(self.steps, "training", "updates") as bar, at_first(self._note):
            bar.update(first)
            for step in range(first, self.steps):
                state, report, tokens = self._update(state, step)
                self._settle(pending, meter)
                pending = (step, report, tokens)
                bar.update()
                is_eval = (step + 1) % self.config.eval_every == 0 or step + 1 == self.steps
                is_record = is_eval or not (step + 1) % record
                if not is_record and not self._signals:
                    continue
                self._settle(pending, meter)
                pending = None
                if is_record:
                    figures, meter = self._record(meter, step + 1, journal, bar), Meter()
                if is_eval:
                    best = self._evaluate(state, step + 1, figures, best, journal, export)
                if is_eval or self._signals:
                    checkpoints.save(state, meter.total)
                if self._signals:
                    done = f"interrupted after update {step + 1} of {self.steps}"
                    raise Interrupted(f"{done}, whose state is in {checkpoints.folder}: go on with --resume")
        assert best is not None
        return best

    def _note(self, number: int) -> None:
        """Note a signal, which ends the run when its state is written."""
        self._signals.append(number)
        name = signal.Signals(number).name
        logger.warning("the run ends after this update, when its state is written; a second %s ends it at once", name)

    def _update(self, state: TrainState, step: int) -> tuple[TrainState, UpdateReport, int]:
        """Begin an update; return its state, its report, and its number of tokens."""
        chosen = self._order.batch(step, self.config.batch)
        state, report = self.program.update(state, rows_of(self.material.train, chosen, self.config.batch))
        return state, report, int((self.material.train.segments[chosen] > 0).sum())

    def _settle(self, pending: tuple[int, UpdateReport, int] | None, meter: Meter) -> None:
        """Wait for an update, and add what it measured."""
        if pending is None:
            return
        step, report, tokens = pending
        if not bool(report.is_finite):
            lines = self.material.train.lines_of(self._order.batch(step, self.config.batch))
            raise loss_error(step, "the documents of lines", lines)
        meter.add(report.measured, tokens)

    def _record(self, meter: Meter, step: int, journal: Journal, bar: Any) -> Figures:
        """Enter the updates since the last record into the journal, and show them."""
        assert meter.total is not None
        figures, speed = meter.total.figures(), meter.speed
        journal.add("train", step, figures, tokens_per_second=round(speed, 1))
        bar.set_postfix_str(f"{figures}, {speed:,.0f} tokens/s")
        if time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            logger.info("update %d of %d: %s, %s tokens/s", step, self.steps, figures, f"{speed:,.0f}")
        return figures

    def _evaluate(
        self,
        state: TrainState,
        step: int,
        figures: Figures,
        best: Figures | None,
        journal: Journal,
        export: Callable[[Any], None],
    ) -> Figures:
        """Evaluate the weights, and write the head if it is the best so far; return what the best one measured."""
        if self.material.held_out is not None:
            figures = self.measure(state)
            journal.add("eval", step, figures)
            logger.info("update %d of %d, held-out rows: %s", step, self.steps, figures)
            if best is not None and best.rank >= figures.rank:
                return best
        export(self.program.head(state))
        return figures

    def measure(self, state: TrainState) -> Figures:
        """Measure the weights on the held-out rows."""
        assert self.material.held_out is not None
        rows, size, meter = self.material.held_out, self.config.batch, Meter()
        count = min(len(rows), self.config.eval_rows)
        for at in range(0, count, size):
            chosen = np.arange(at, min(at + size, count))
            meter.add(self.program.measure(state, rows_of(rows, chosen, size)), 0)
        assert meter.total is not None
        return meter.total.figures()
