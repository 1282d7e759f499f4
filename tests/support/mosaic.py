"""Mosaic GPU kernels in jax's interpreter, which detects races and runs without a GPU."""

from __future__ import annotations

import re
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


def misaligned_copies(ptx: str) -> list[int]:
    """Return the constant offsets in shared memory of copies of tensors that are no multiples of 128 bytes.

    Such a copy faults on a GPU; neither the interpreter nor the compiler tells of it.
    """
    return [offset for kernel in ptx.split(".visible .entry") for offset in _copies_of(kernel) if offset % 128]


def _copies_of(kernel: str) -> list[int]:
    """Return the constant offsets in shared memory from and to which a kernel copies tensors."""
    bases = set(re.findall(r"mov\.b64\s+(%rd\d+), __dynamic_shmem__0", kernel))
    offsets = {at: 0 for at, base in re.findall(r"cvt\.u32\.u64\s+(%r\d+), (%rd\d+);", kernel) if base in bases}
    for total, base, more in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (-?\d+);", kernel):
        if base in offsets:
            offsets[total] = offsets[base] + int(more)
    loads = re.findall(r"cp\.async\.bulk\.tensor\S+mbarrier\S+ \[(%r\d+)\]", kernel)
    stores = re.findall(r"cp\.async\.bulk\.tensor\S+bulk_group .*, \[(%r\d+)\];", kernel)
    return [offsets[register] for register in loads + stores if register in offsets]
