"""Test that `dispatch` compiles the implementation that `describe` names, and that engines log and trace it alone."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Iterable
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
from pallas_kernels.dispatch import describe, dispatch, resolve
from tests.support import tiny

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

    jitted = jax.jit(lambda x: dispatch(implementation, None, kernel, jnp.tanh, x))
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
