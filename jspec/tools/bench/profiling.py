"""What a GPU did: its clock and power during some work, and the kernels that a trace lists; and runs timed in turns.

A figure depends on the clock: an H200 that streams weights and multiplies at once reaches its 700 W, and lowers its
clock by a fifth to a quarter.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.profiler import ProfileData

from jspec.tools.bench.report import Column, columns, table_of

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "clocks_event_reasons.sw_power_cap")
INTERVAL = 20  # milliseconds between two samples
SECONDS = 3.0  # of work: nvidia-smi answers after half a second, and its power is the mean of a second
T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Medians over the samples."""

    mhz: float  # clock of the multiprocessors
    highest: float  # their highest clock, MHz
    watts: float
    capped: float  # share of the samples in which the power limit lowered the clock


def clock_columns(path: str = "clock") -> list[Column]:
    """Table columns of a result's clock; empty, and so left out, where no result has one."""
    formats = (("SM MHz", "{0.mhz:.0f}/{0.highest:.0f}"), ("W", "{0.watts:.0f}"), ("capped", "{0.capped:.0%}"))
    return [Column(path, heading, partial(_shown, text)) for heading, text in formats]


def _shown(text: str, clock: Clock | None) -> str:
    return text.format(clock) if clock else ""


def watch_clock(work: Callable[[], object], *, seconds: float = SECONDS) -> Clock | None:
    """Repeat some work for some seconds and return how the GPU ran, as `nvidia-smi` tells; None: it does not."""
    program = shutil.which("nvidia-smi")
    if program is None or jax.devices()[0].platform != "gpu":
        return None
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--id={own}", f"--loop-ms={INTERVAL}"]
    with subprocess.Popen([program, *query], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                work()
        finally:
            process.kill()
        lines = process.stdout.read().splitlines()
    return _parse_clock(lines[1:-1])  # the first sample is from before the work, the last one may be cut off


def _parse_clock(lines: list[str]) -> Clock | None:
    """The clock from the complete lines; a GPU that changes its state may leave out a value."""
    number = r"([\d.]+)"
    found = [re.fullmatch(rf"\s*{number}, {number}, {number}, (Active|Not Active)\s*", line) for line in lines]
    if not (rows := [match.groups() for match in found if match]):
        return None
    mhz, highest, watts = (statistics.median(float(row[i]) for row in rows) for i in range(3))
    return Clock(mhz, highest, watts, sum(row[3] == "Active" for row in rows) / len(rows))


@dataclass(frozen=True)
class Launch:
    """All launches of one kernel."""

    name: str
    count: float  # launches a step
    microseconds: float | None  # median time of one launch
    milliseconds: float  # time of all launches, a step
    share: float | None = None  # share of the step's time


LAUNCH_COLUMNS = (
    *columns(name="launch"),
    *columns("g", count="a step"),
    *columns(".1f", microseconds="median us"),
    *columns(".3f", milliseconds="ms a step"),
    *columns(".1%", share="share"),
)


def gpu_events(folder: Path | str) -> list[Any]:
    """Events of all GPU streams, with name and duration, of the newest trace in a folder of `jax.profiler.trace`."""
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    return stream_events(ProfileData.from_file(str(newest)).planes)


def stream_events(planes: Iterable[Any]) -> list[Any]:
    """Events that the GPU streams among a trace's planes hold."""
    lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "stream" in line.name.lower()]
    return [event for line in lines for event in line.events]


def launches_by_name(events: Iterable[Any], steps: int) -> list[Launch]:
    """Launches of a number of steps, longest first, and their sum last; empty without events."""
    nanoseconds = defaultdict(list)
    for event in events:
        nanoseconds[event.name].append(event.duration_ns)
    total = sum(map(sum, nanoseconds.values()))
    found = [
        Launch(name, len(own) / steps, statistics.median(own) / 1e3, sum(own) / steps / 1e6, sum(own) / total)
        for name, own in nanoseconds.items()
    ]
    whole = [Launch("all", sum(one.count for one in found), None, total / steps / 1e6)] if found else []
    return sorted(found, key=lambda launch: -launch.milliseconds) + whole


def launches_of(folder: Path, steps: int) -> str:
    """A table of a trace's launches."""
    launches = launches_by_name(gpu_events(folder), steps)
    return table_of(LAUNCH_COLUMNS, launches) or "no launches of a GPU in the trace"


def time_in_turns(runs: Sequence[Callable[[], T]], repeats: int, *, warm_up: int = 1) -> list[list[T]]:
    """Results of each run, of as many repeats; all runs take part in each repeat, so a slow phase affects them all.

    Every second repeat goes in the opposite order, so a steady drift favours none.
    """
    found: list[list[T]] = [[] for _ in runs]
    for repeat in range(warm_up + repeats):
        order = list(enumerate(runs))
        for index, run in order if repeat % 2 == 0 else reversed(order):
            found[index].append(run())
    return [own[warm_up:] for own in found]
