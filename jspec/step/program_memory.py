"""Reads how much memory a compiled program needs."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple


class ProgramMemory(NamedTuple):
    """Memory of a compiled program on each device beside weights and state, in bytes.

    Attributes:
        workspace: temporary memory, which it needs while it runs; None: unknown.
        exchanges: buffers of its exchanges with other devices, which exist as long as the program.
    """

    workspace: int | None
    exchanges: int


def program_memory(program: Any, devices: int) -> ProgramMemory:
    """Read the memory of a compiled program that runs on a number of devices; this takes tens of milliseconds."""
    analysis = program.memory_analysis()
    if analysis is None:
        return ProgramMemory(None, 0)
    workspace = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return ProgramMemory(workspace, exchange_bytes(program.as_text(), devices) if devices > 1 else 0)


def exchange_bytes(text: str, devices: int) -> int:
    """Return the bytes that the exchanges of a program keep on each device as long as the program exists.

    A kernel that exchanges arrays has two buffers of its own for what the device sends. `memory_analysis` of the
    compiled program does not count them.

    Args:
        text: the compiled program.
        devices: number of devices.
    """
    sent = 0
    for shapes, kind in re.findall(r"= (.*) all-(gather|reduce)\(.*\"KERNEL_STRATEGY_TRITON", text):
        arrays = re.findall(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", shapes)
        received = sum(
            int(bits or 8) // 8 * math.prod(map(int, filter(None, sizes.split(",")))) for _, bits, sizes in arrays
        )
        sent += received // devices if kind == "gather" else received
    return 2 * sent
