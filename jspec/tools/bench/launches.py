"""What a GPU launched, by a trace: how often each kernel ran in a round, and how long."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jspec.tools.table import table


@dataclass(frozen=True)
class Launch:
    """All launches of one name."""

    name: str
    count: float  # a round
    microseconds: float  # median of one
    milliseconds: float  # of all, a round


def events(folder: Path | str) -> list[Any]:
    """All that the GPUs of a trace did, each with a name and a duration; nothing where there is none.

    Args:
        folder: that `jax.profiler.trace` wrote; of several traces the newest counts.
    """
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    return on_gpus(ProfileData.from_file(str(newest)).planes)


def on_gpus(planes: Iterable[Any]) -> list[Any]:
    """The events of a trace's planes that a GPU's streams hold."""
    lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "stream" in line.name.lower()]
    return [event for line in lines for event in line.events]


def by_name(events: Iterable[Any], rounds: int) -> list[Launch]:
    """Launches of so many rounds, those that took most of their time first."""
    nanoseconds = defaultdict(list)
    for event in events:
        nanoseconds[event.name].append(event.duration_ns)
    found = [
        Launch(name, len(own) / rounds, statistics.median(own) / 1e3, sum(own) / rounds / 1e6)
        for name, own in nanoseconds.items()
    ]
    return sorted(found, key=lambda launch: -launch.milliseconds)


def text(launches: Sequence[Launch]) -> str:
    """A table, with all of a round in its last line."""
    if not launches:
        return "no launches of a GPU in the trace"
    count, total = (sum(getattr(launch, name) for launch in launches) for name in ("count", "milliseconds"))
    rows = [["launch", "a round", "median us", "ms a round", "share"]]
    for one in launches:
        figures = (
            f"{one.count:g}",
            f"{one.microseconds:.1f}",
            f"{one.milliseconds:.3f}",
            f"{one.milliseconds / total:.1%}",
        )
        rows.append([one.name, *figures])
    return table([*rows, ["all", f"{count:g}", "", f"{total:.3f}", ""]])
