"""GPUs of other generations for which programs can be compiled without such a GPU, as in `tests/support/h200.py`.

A GPU's description is the H200's with other figures. It has no rates by which XLA estimates costs: they do not affect
the structure of programs, and speed cannot be tested without a GPU.

Sources: shared memory and threads of a multiprocessor from the CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability"; the other figures from XLA's xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm,
b200) and, for the L40, which has none there, from NVIDIA's data sheet (the L40S and the RTX 4090 are of its kind).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels.dispatch import describe_gpu
from tests.support.h200 import TARGET, H200Program, compile_for_h200, require_plugin

KIB = 1024


@dataclasses.dataclass(frozen=True)
class GPU:
    """The properties of a GPU that XLA and Triton use."""

    name: str
    capability: str  # as for nvcc: "9.0a" names features that only 9.0 has
    multiprocessors: int
    block_shared_kib: int  # shared memory that one block may use
    shared_kib: int  # of a multiprocessor
    threads: int  # of a multiprocessor
    l2_bytes: int
    memory_bytes: int
    bandwidth: int  # bytes/s
    clock_ghz: float

    @property
    def has_float8(self) -> bool:
        return tuple(map(int, self.capability.rstrip("a").split("."))) >= (8, 9)

    def description(self) -> str:
        """Return the GPU's GpuTargetConfigProto as text."""
        major, minor = self.capability.rstrip("a").split(".")
        features = "ACCELERATED_FEATURES" if self.capability.endswith("a") else "NONE"
        fields = {
            "shared_memory_per_core": self.shared_kib * KIB,
            "threads_per_core_limit": self.threads,
            "core_count": self.multiprocessors,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "shared_memory_per_block_optin": self.block_shared_kib * KIB,
            "name": f'"{self.name}"',
            "device_description_str": f'"{self.name}"',
            "platform_version": f'"Compute Capability {self.capability}"',
            "model_str": f'"sm_{self.capability}"',
        }
        text = re.sub(r"^  (scalar|matrix)_unit_description \{\n.*?^  \}\n", "", TARGET.read_text(), flags=re.M | re.S)
        capability = f"cuda_compute_capability {{\n    major: {major}\n    minor: {minor}\n"
        text = _replaced(r"cuda_compute_capability \{[^}]*", f"{capability}    feature_extension: {features}\n  ", text)
        for field, value in fields.items():
            text = _replaced(rf"^( *){field}: .*$", rf"\g<1>{field}: {value}", text)
        return text


def _replaced(pattern: str, new: str, text: str) -> str:
    text, count = re.subn(pattern, new, text, flags=re.M)
    assert count == 1, f"{pattern}: expected once in {TARGET.name}, found {count} times"
    return text


A100 = GPU("NVIDIA A100-SXM4-80GB", "8.0", 108, 163, 164, 2048, 40 << 20, 85100068864, 2_039_040_000_000, 1.41)
L40 = GPU("NVIDIA L40", "8.9", 142, 99, 100, 1536, 96 << 20, 48 << 30, 864_000_000_000, 2.52)
H100 = GPU("NVIDIA H100 80GB HBM3", "9.0a", 132, 227, 228, 2048, 50 << 20, 84942979072, 3_352_320_000_000, 1.98)
B200 = GPU("NVIDIA B200", "10.0a", 148, 227, 228, 2048, 132644864, 191514411008, 7_672_320_000_000, 1.965)
GPUS = {"A100": A100, "L40": L40, "H100": H100, "B200": B200}


@functools.cache
def mesh_of(gpu: GPU) -> Mesh:
    """Return a mesh of one GPU of this kind, which is only described."""
    require_plugin()
    topology = topologies.get_topology_desc(gpu.name, "cuda", target_config=gpu.description(), topology="1x1x1")
    describe_gpu(topology.devices[0])
    return Mesh(np.array(topology.devices), ("x",))


def compile_for(gpu: GPU, fn: Callable[..., Any], *args: Any, **options: Any) -> H200Program:
    """Compile a function for another GPU as `compile_for_h200` does for an H200."""
    return compile_for_h200(fn, *args, mesh=mesh_of(gpu), **options)
