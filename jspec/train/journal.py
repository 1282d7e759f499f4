"""The journal of a training run: a line of JSON for each measurement, kept in step with the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jspec.train.files import write_text
from jspec.train.measured import Figures


class Journal:
    """A file with a line for each measurement.

    Args:
        path: the file.
        step: lines of later steps are removed: a run that goes on from a checkpoint measures them again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]  # a line that was being written is incomplete
        self.entries = [entry for entry in map(json.loads, whole) if entry["step"] <= step]
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def add(self, kind: str, step: int, figures: Figures, **more: Any) -> None:
        """Append a measurement.

        Args:
            kind: "train" or "eval".
            step: number of updates so far.
            figures: what was measured.
            more: further values.
        """
        entry = {"kind": kind, "step": step, **figures.to_json(), **more}
        self.entries.append(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    @property
    def best(self) -> Figures | None:
        """The best evaluation (`Figures.rank`), or else the last measurement; None: there is none."""
        entries = [entry for entry in self.entries if entry["kind"] == "eval"] or self.entries[-1:]
        figures = [Figures(entry["loss"], tuple(entry["hits"]), entry["acceptance"]) for entry in entries]
        return max(figures, key=lambda figure: figure.rank, default=None)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the measurements of a journal."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
