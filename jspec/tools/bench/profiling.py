"""A GPU's clock and power during some work, times of the kernels in a trace, and runs timed in turns.

A measured time depends on the clock: an H200 that streams weights and multiplies at once reaches its 700 W, and
lowers its clock by a fifth to a quarter.
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
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
from jax.profiler import ProfileData

from jspec.tools.bench.results import Column, table_of

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "clocks_event_reasons.sw_power_cap")
INTERVAL = 20  # milliseconds between two samples
SECONDS = 3.0  # of work: nvidia-smi answers after half a second, and its power is the mean of a second
T = TypeVar("T")


@dataclass(frozen=True)
class GpuClock:
    """The medians of a GPU's clock and power during some work."""

    mhz: Annotated[float, Column("SM MHz", ".0f")]  # clock of the multiprocessors, MHz
    highest: Annotated[float, Column("of MHz", ".0f")]  # highest clock that the multiprocessors support, MHz
    watts: Annotated[float, Column("W", ".0f")]  # power, watts
    capped: Annotated[float, Column("capped", ".0%")]  # share of the samples in which the power limit lowered the clock


def watch_clock(work: Callable[[], object], *, seconds: float = SECONDS) -> GpuClock | None:
    """Repeat ``work`` for ``seconds`` and return the GPU's clock by `nvidia-smi`; None if that reports nothing."""
    if (query := _query(*FIELDS)) is None:
        return None
    with subprocess.Popen([*query, f"--loop-ms={INTERVAL}"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                work()
        finally:
            process.kill()
        lines = process.stdout.read().splitlines()
    return _parse_clock(lines[1:-1])  # the first sample is from before the work, the last one may be cut off


def power_limit() -> float | None:
    """Return the GPU's power limit in watts by `nvidia-smi`; None if that reports none."""
    query = _query("power.limit")
    text = "" if query is None else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return float(text) if re.fullmatch(r"[\d.]+", text) else None


def _query(*fields: str) -> list[str] | None:
    """Return the command that reads fields of the GPU; None without a GPU or `nvidia-smi`."""
    program = shutil.which("nvidia-smi")
    if program is None or jax.devices()[0].platform != "gpu":
        return None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    return [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={gpu}"]


def _parse_clock(lines: list[str]) -> GpuClock | None:
    """Return the medians over the lines of `nvidia-smi` that have all values; None without such a line."""
    number = r"([\d.]+)"
    matches = [re.fullmatch(rf"\s*{number}, {number}, {number}, (Active|Not Active)\s*", line) for line in lines]
    if not (rows := [match.groups() for match in matches if match]):
        return None
    mhz, highest, watts = (statistics.median(float(row[i]) for row in rows) for i in range(3))
    return GpuClock(mhz, highest, watts, sum(row[3] == "Active" for row in rows) / len(rows))


@dataclass(frozen=True)
class KernelTime:
    """The number and time of one kernel's launches in a trace."""

    name: Annotated[str, Column("launch")]
    count: Annotated[float, Column("a step", "g")]  # number of launches a step
    microseconds: Annotated[float | None, Column("median us", ".1f")]  # median time of one launch, microseconds
    milliseconds: Annotated[float, Column("ms a step", ".3f")]  # time of all launches a step, milliseconds
    share: Annotated[float | None, Column("share", ".1%")] = None  # of the time of all kernels; None in the line of all


def gpu_events(folder: Path | str) -> list[Any]:
    """Return the events of all GPU streams in the newest trace that `jax.profiler.trace` wrote to a folder."""
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    return stream_events(ProfileData.from_file(str(newest)).planes)


def stream_events(planes: Iterable[Any]) -> list[Any]:
    """Return the events of the GPU streams in a trace's planes, without the host's events."""
    lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "stream" in line.name.lower()]
    return [event for line in lines for event in line.events]


def launches_by_name(events: Iterable[Any], steps: int) -> list[KernelTime]:
    """Return each kernel's launches a step, the longest first, and their sum last."""
    nanoseconds = defaultdict(list)
    for event in events:
        nanoseconds[event.name].append(event.duration_ns)
    total = sum(map(sum, nanoseconds.values()))
    kernels = [
        KernelTime(name, len(ns) / steps, statistics.median(ns) / 1e3, sum(ns) / steps / 1e6, sum(ns) / total)
        for name, ns in nanoseconds.items()
    ]
    whole = [KernelTime("all", sum(kernel.count for kernel in kernels), None, total / steps / 1e6)] if kernels else []
    return sorted(kernels, key=lambda kernel: -kernel.milliseconds) + whole


def launches_of(folder: Path, steps: int) -> str:
    """Format a table of the kernels' times a step in the newest trace of a folder."""
    launches = launches_by_name(gpu_events(folder), steps)
    return table_of(launches) or "no launches of a GPU in the trace"


def time_in_turns(runs: Sequence[Callable[[], T]], repeats: int, *, warm_up: int = 1) -> list[list[T]]:
    """Call all runs in each repeat, so a slow phase affects all of them; return each run's results.

    Every second repeat calls the runs in the opposite order, so a steady drift favours none of them.
    """
    results: list[list[T]] = [[] for _ in runs]
    for repeat in range(warm_up + repeats):
        order = list(enumerate(runs))
        for index, run in order if repeat % 2 == 0 else reversed(order):
            results[index].append(run())
    return [run_results[warm_up:] for run_results in results]
