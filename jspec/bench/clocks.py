"""The clock that a GPU runs at under some work, and whether its power limit holds the clock down.

A figure is worth as much as the clock it was taken at: an H200 that streams weights and multiplies at once reaches its
700 W, and lowers its clock by a fifth. `nvidia-smi` tells; where there is none (CPU, TPU), nothing is known.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "clocks_event_reasons.sw_power_cap")
INTERVAL = 20  # milliseconds
SECONDS = 1.5  # of work, behind the first answer


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
        process.stdout.readline()  # it takes a while until it answers
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            work()
        process.terminate()
        lines = process.stdout.read().splitlines()
    return _clock(lines[1:-1])  # nothing from before the work, or broken off


def _clock(lines: list[str]) -> Clock | None:
    rows = [[word.strip() for word in line.split(",")] for line in lines]
    if not rows or any(len(row) != len(FIELDS) or "N/A" in "".join(row) for row in rows):
        return None
    mhz, highest, watts = (statistics.median(float(row[i]) for row in rows) for i in range(3))
    return Clock(mhz, highest, watts, sum(row[3] == "Active" for row in rows) / len(rows))
