"""The clock that a GPU runs at under some work, and whether its power limit holds the clock down.

A figure is worth as much as the clock it was taken at: an H200 that streams weights and multiplies at once reaches its
700 W, and lowers its clock by a fifth to a quarter. `nvidia-smi` tells; where there is none (CPU, TPU), nothing is
known.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "clocks_event_reasons.sw_power_cap")
INTERVAL = 20  # milliseconds
SECONDS = 3.0  # of work: it takes half a second to answer, and its watts are the mean of a second


@dataclass(frozen=True)
class Clock:
    """Medians over the samples."""

    mhz: float  # of the multiprocessors
    highest: float  # that they may run at
    watts: float
    capped: float  # share of the samples in which the power limit held the clock down

    def __str__(self) -> str:
        return f"{self.mhz:.0f}/{self.highest:.0f}"


def watch(work: Callable[[], object], *, seconds: float = SECONDS) -> Clock | None:
    """Repeats some work for so long and returns how the GPU ran; None: no NVIDIA GPU, or one that does not tell."""
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
    return _clock(lines[1:-1])  # neither from the work's beginning nor broken off


def _clock(lines: list[str]) -> Clock | None:
    """Of the lines that tell all; a GPU that is asked while it changes its state may miss one."""
    number = r"([\d.]+)"
    found = [re.fullmatch(rf"\s*{number}, {number}, {number}, (Active|Not Active)\s*", line) for line in lines]
    if not (rows := [match.groups() for match in found if match]):
        return None
    mhz, highest, watts = (statistics.median(float(row[i]) for row in rows) for i in range(3))
    return Clock(mhz, highest, watts, sum(row[3] == "Active" for row in rows) / len(rows))
