"""Mosaic GPU kernels in jax's interpreter, which detects races and runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def interpreted(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a function that takes jax's parameters for interpreting kernels; fail if races are detected."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # no public function returns the races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # With fewer TMA threads two copies could look ordered only because one queue held both.
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)  # type: ignore[attr-defined]
    got = jax.block_until_ready(function(*arguments, interpret=params, **options))
    assert not gpu_callbacks.get_races().races_found
    return got
