"""Programs compiled for an H200 on a machine without one, with their launches, graphs, copies and memory.

The CUDA plugin compiles against `data/h200_target_config.txtpb`, a description dumped on a real H200; nothing
runs. This works in the test process itself: with JAX_PLATFORMS=cpu (tests/conftest.py sets it) the plugin is
registered but never initialised, ordinary tests keep the CPU, and XLA's dumps are requested by options of
that compilation. There is no autotuning without a device, so structure can be tested but not speed.

    program = compile_for_h200(step, state, weights, donate_argnums=0)
    assert len(program.graphs) == 1 and not program.outside_graphs
    assert program.alias_bytes == cache_bytes and not program.copies(1 << 20)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import describe_gpu

# The plugin looks for CUDA's libraries when cuda is among the platforms; compiling needs none of them.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
TARGET = Path(__file__).parent.parent / "data" / "h200_target_config.txtpb"
PLUGIN = "jax_cuda13_plugin"
GRAPH = "kCommandBuffer"
# XLA's defaults, which tests/conftest.py changes for CPU programs: tests see what users get.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: a kernel, a copy, or a CUDA graph of launches."""

    kind: str
    name: str
    graph: int | None  # index of the graph that holds it; None: launched by itself


@dataclasses.dataclass(frozen=True)
class H200Program:
    """A compiled program, with the properties that are known without running it."""

    compiled: jax.stages.Compiled
    launches: tuple[Launch, ...]  # kernels and copies, without the graphs that hold them
    graphs: tuple[str, ...]  # XLA's command buffers

    @property
    def outside_graphs(self) -> list[Launch]:
        return [launch for launch in self.launches if launch.graph is None]

    @property
    def memory(self) -> Any:
        return self.compiled.memory_analysis()

    @property
    def temp_bytes(self) -> int:
        return self.memory.temp_size_in_bytes

    @property
    def alias_bytes(self) -> int:
        """Return the size in bytes of outputs that use the memory of donated inputs."""
        return self.memory.alias_size_in_bytes

    def count(self, part: str) -> int:
        """Count the launches whose name contains `part`."""
        return sum(part in launch.name for launch in self.launches)

    def copies(self, least_bytes: int = 1) -> list[tuple[int, str]]:
        """Return (bytes, line) of every copy of at least `least_bytes` in the optimised program."""
        found = []
        for line in (self.compiled.as_text() or "").splitlines():
            if match := re.match(r"\s*(?:ROOT )?%\S+ = (\S+) copy(?:-start)?\(", line):
                size = max(_bytes(shape) for shape in re.findall(r"\w+\[[\d,]*\]", match[1]))
                if size >= least_bytes:
                    found.append((size, line.split(", metadata=")[0].strip()))
        return found


def require_plugin() -> None:
    """Skip the test if programs for an H200 cannot be compiled."""
    if importlib.util.find_spec(PLUGIN) is None:
        pytest.skip(f"needs {PLUGIN} to compile for GPUs: see 'Skipped tests' in tests/README.md")


@functools.cache
def h200_mesh(devices: int = 1) -> Mesh:
    """Return a mesh of one axis "x" over H200s that are only described."""
    require_plugin()
    topology = topologies.get_topology_desc("h200", "cuda", target_config=TARGET.read_text(), topology=f"1x1x{devices}")
    describe_gpu(topology.devices[0])
    return Mesh(np.array(topology.devices), ("x",))


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    fail_on_spills: bool = False,
    options: dict[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> H200Program:
    """Compile `fn` for an H200; skip the calling test if the plugin is absent.

    Args:
        fn: a function, or one already jitted (with its own donation and static arguments).
        args: trees of arrays or ShapeDtypeStructs; arrays without a sharding on the mesh are replicated.
        fail_on_spills: raise if a kernel spills registers.
        options: more compiler options.
    """
    mesh = mesh or h200_mesh()
    everywhere = NamedSharding(mesh, PartitionSpec())

    def abstract(leaf: Any) -> Any:
        own = getattr(leaf, "sharding", None)
        sharding = own if isinstance(own, NamedSharding) and own.mesh == mesh else everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=donate_argnums)
    with (
        tempfile.TemporaryDirectory() as dump,
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),  # Pallas-Triton reads the device from this mesh
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        compiled = jitted.lower(*jax.tree.map(abstract, args)).compile(
            compiler_options={
                "xla_dump_to": dump,
                "xla_dump_hlo_as_text": True,
                "xla_gpu_fail_ptx_compilation_on_register_spilling": fail_on_spills,
                **OPTIMISED,
                **(options or {}),
            }
        )
        # XLA writes the second text, after the passes that make graphs, only if these changed the program.
        dumps = {path.name.split(".")[-2]: path.read_text() for path in Path(dump).glob("*.thunk_seq*.txt")}
    launches, graphs = _launches(dumps.get("thunk_sequence_after_thunk_passes", dumps["thunk_sequence"]))
    return H200Program(compiled, launches, graphs)


def _launches(dump: str) -> tuple[tuple[Launch, ...], tuple[str, ...]]:
    """Parse lines "<indent>001: kKind [order] name grid: ..."; a graph's launches are indented below the graph."""
    launches, graphs, open_graph = [], [], -1
    for line in dump.splitlines():
        match = re.match(r"( *)\d+: (\w+)\s+\[[^\]]*\] ?(\S*)", line)
        if not match:
            continue
        indent, kind, name = len(match[1]), match[2], match[3]
        if open_graph >= 0 and indent <= open_graph:
            open_graph = -1
        if kind == GRAPH:
            graphs.append(name)
            open_graph = indent
        else:
            launches.append(Launch(kind, name, len(graphs) - 1 if open_graph >= 0 else None))
    return tuple(launches), tuple(graphs)


def _bytes(shape: str) -> int:
    dtype, dims = shape.rstrip("]").split("[")
    bits = re.search(r"\d+", dtype)
    width = int(bits[0]) if bits else 8
    return math.prod(int(dim) for dim in dims.split(",") if dim) * max(width, 8) // 8
