"""Test which kernel of a table `dispatch` compiles, that `describe` names it, and that engines trace it alone."""

from __future__ import annotations

import logging
import re
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jspec import Engine
from jspec.core.config import EngineConfig
from jspec.draft.base import NoDraft
from jspec.step.executables import Executables
from jspec.step.program import Program
from pallas_kernels import dispatch as dispatching
from pallas_kernels.dispatch import (
    HOPPER,
    HOPPER_TRITON,
    TRITON,
    Backend,
    Kernel,
    TracedGPU,
    describe,
    describe_gpu,
    dispatch,
    resolve,
    traced_gpu,
)
from tests.support import tiny
from tests.support.gpus import GPUS, mesh_of

pytestmark = pytest.mark.once

DEVICES = {
    "cuda": SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"),
    "rocm": SimpleNamespace(platform="gpu", device_kind="AMD Instinct", compute_capability="gfx942"),
    "tpu": SimpleNamespace(platform="tpu", device_kind="TPU v5e"),
    "cpu": SimpleNamespace(platform="cpu", device_kind="cpu"),
}


def chosen(implementation: str, platform: str) -> str:
    """Return how `describe` names the implementation that a program compiled for the platform contains."""

    def kernel(x: jax.Array, *, interpret: bool) -> jax.Array:
        return jnp.sin(x) if interpret else jnp.cos(x)

    jitted = jax.jit(lambda x: dispatch(implementation, [Kernel(TRITON, kernel)], jnp.tanh, x))
    text = jitted.trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()
    names = {"cosine": "Pallas kernels on", "sine": "Pallas kernels interpreted on", "tanh": "references on"}
    (found,) = [said for operation, said in names.items() if f"stablehlo.{operation} " in text]
    return found


@pytest.mark.parametrize(
    ("implementation", "platform"),
    [
        *[("auto", platform) for platform in DEVICES],
        *[("reference", platform) for platform in DEVICES],
        ("pallas", "cuda"),
        ("pallas", "cpu"),
    ],
)
def test_implementation_description_on_each_platform_names_what_is_compiled(implementation: str, platform: str) -> None:
    said = describe(implementation, DEVICES[platform])
    assert said.startswith(f"{chosen(implementation, platform)} {DEVICES[platform].device_kind}")
    assert ("compute capability 9.0" in said) == (platform == "cuda")
    assert ("asked for" in said) == (implementation != "auto")
    assert said.startswith(chosen(resolve(implementation, DEVICES[platform]), platform))
    assert (resolve(implementation, DEVICES[platform]) == "reference") == said.startswith("references")


def table(**unsupported: Any) -> list[Kernel]:
    """Return a table of kernels that add one number each to x, or another one if interpreted."""
    backends = {"hopper": HOPPER, "few": HOPPER_TRITON, "triton": TRITON, "amd": Backend("rocm", None, True)}

    def row(name: str, number: int) -> Kernel:
        def run(x: jax.Array, *, interpret: bool) -> jax.Array:
            return x + (number + 50.0 if interpret else number)

        return Kernel(backends[name], run, unsupported.get(name))

    return [row(name, 1 + index) for index, name in enumerate(backends)]


REFERENCE = 9


def added(implementation: str, platform: str, kernels: list[Kernel]) -> float:
    """Return the number that a program for a platform adds to 0, read from the program's text."""
    jitted = jax.jit(lambda x: dispatch(implementation, kernels, lambda x: x + float(REFERENCE), x))  # type: ignore[arg-type]
    text = jitted.trace(0.0).lower(lowering_platforms=(platform,)).as_text()
    (number,) = re.findall(r"stablehlo.constant dense<(\S+)> : tensor<f32>", text)
    return float(number)


@pytest.mark.parametrize(
    ("gpu", "unsupported", "numbers"),
    [
        ((9, 0), {}, (1, 4, REFERENCE)),
        ((9, 0), {"hopper": True}, (2, 4, REFERENCE)),
        ((9, 0), {"hopper": True, "few": True}, (3, 4, REFERENCE)),
        ((9, 0), {"hopper": True, "few": True, "triton": "too wide", "amd": True}, (REFERENCE,) * 3),
        ((8, 9), {}, (3, 4, REFERENCE)),
        ((10, 0), {"triton": "too wide"}, (REFERENCE, 4, REFERENCE)),
        (None, {}, (3, 4, REFERENCE)),
    ],
)
def test_first_kernel_of_the_table_that_runs_on_the_gpu_and_supports_the_call_is_compiled(
    gpu: tuple[int, int] | None, unsupported: dict[str, Any], numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table has kernels of two languages and of two vendors; the platforms are those of NVIDIA, AMD and Google."""
    monkeypatch.setattr(dispatching, "traced_gpu", lambda: gpu and TracedGPU(gpu, 132))
    kernels = table(**unsupported)
    if gpu == (9, 0) and jax.__version_info__ < (0, 11):
        numbers = (3 if unsupported.get("triton") is None else REFERENCE, *numbers[1:])
    assert tuple(added("auto", platform, kernels) for platform in ("cuda", "rocm", "tpu")) == numbers
    assert {added("reference", platform, kernels) for platform in ("cuda", "rocm", "tpu", "cpu")} == {REFERENCE}
    assert added("auto", "cpu", kernels) == REFERENCE


def test_pallas_on_a_cpu_interprets_the_first_kernel_that_jax_can_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert added("pallas", "cpu", table()) == 53
    assert added("pallas", "cpu", table()[:1]) == REFERENCE, "the Hopper kernel alone"
    with pytest.raises(NotImplementedError, match='too wide; use implementation="reference" or "auto"'):
        added("pallas", "cpu", table(triton="too wide")[:3])
    monkeypatch.setattr(dispatching, "traced_gpu", lambda: TracedGPU((9, 0), 132))
    if jax.__version_info__ >= (0, 11):
        assert added("pallas", "cpu", table()) == 52, "beside a Hopper GPU"
        assert added("pallas", "cpu", table(triton="too wide")[:1]) == REFERENCE


@pytest.mark.parametrize("name", GPUS)
def test_gpu_of_a_mesh_is_known_by_its_compute_capability_and_not_by_its_name(name: str) -> None:
    gpu = GPUS[name]
    wanted = tuple(map(int, gpu.capability.rstrip("a").split(".")))
    mesh = mesh_of(gpu)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert traced_gpu() == (wanted, gpu.multiprocessors)
        is_hopper = name == "H100" and jax.__version_info__ >= (0, 11)
        assert HOPPER.gpu() == (traced_gpu() if is_hopper else None)
    renamed = replace(gpu, name="NVIDIA X1")
    with jax.sharding.use_abstract_mesh(mesh_of(renamed).abstract_mesh):
        assert traced_gpu() == (wanted, gpu.multiprocessors)


def test_gpu_of_a_mesh_of_an_unknown_kind_raises_and_names_the_remedy() -> None:
    with jax.sharding.use_abstract_mesh(mesh_of(GPUS["A100"]).abstract_mesh), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatching, "_DESCRIBED", {})
        expected = r"a known kind \(none\), got NVIDIA A100-SXM4-80GB; pass the device to .*describe_gpu first"
        with pytest.raises(ValueError, match=expected):
            traced_gpu()


@pytest.mark.parametrize("platform", ["rocm", "tpu", "cpu"])
def test_mesh_of_other_devices_than_those_of_this_process_has_no_nvidia_gpu(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU of a machine with a GPU, and devices that are only described; an AMD GPU must be described too."""
    other, gpu = DEVICES[platform], DEVICES["cuda"]
    described = jax.sharding.AbstractDevice(other.device_kind, None, other.platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(dispatching, "_DESCRIBED", {})
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=described)):
        if platform == "rocm":
            with pytest.raises(ValueError, match=r"a known kind \(NVIDIA H200\), got AMD Instinct"):
                traced_gpu()
            describe_gpu(other)
        assert traced_gpu() is None
    of_gpu = jax.sharding.AbstractDevice(gpu.device_kind, 132, gpu.platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=of_gpu)):
        assert traced_gpu() == ((9, 0), 132), "control"


def test_executables_when_created_log_the_implementation_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state: Any = namedtuple("State", "root page_table target")(jnp.zeros(2), jnp.zeros((2, 3)), [])
    for implementation in ("auto", "reference"):
        program = Program(drafter=NoDraft(), feature_layers=(), accept="coupled", implementation=implementation)
        with caplog.at_level(logging.INFO, "jspec"):
            caplog.clear()
            Executables(program, None, state, EngineConfig())  # type: ignore[arg-type]
        assert [record.getMessage() for record in caplog.records] == [
            f"kernels: {describe(implementation, jax.devices()[0])}"
        ]


def test_engine_with_auto_implementation_on_cpu_traces_no_pallas_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("on a GPU an engine runs kernels")
    traced: list[str] = []

    def counted(*args: Any, name: str, **options: Any) -> Any:
        traced.append(name)
        return pallas_call(*args, name=name, **options)

    def only_traced(self: Executables, keys: Iterable[Any], check: Any = None) -> None:
        assert [self._lower(key) for key in keys]

    pallas_call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", counted)
    monkeypatch.setattr(Executables, "compile", only_traced)
    for implementation, some in (("auto", False), ("pallas", True)):
        traced.clear()
        target = tiny.model(24, layers=1, hidden=64)  # no other test has traced these shapes
        Engine(target, slots=3, max_len=40, buckets=(3,), prefill_buckets=(7,), implementation=implementation).warmup()
        assert bool(traced) == some, traced
