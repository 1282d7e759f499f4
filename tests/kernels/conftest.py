"""Fixture for kernel tests that compiles a Mosaic GPU kernel and returns the output of ptxas."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.h200 import H200Program

UNIQUE = itertools.count()  # numbers for kernel names


@pytest.fixture
def compile_with_ptxas_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., tuple[H200Program, str]]:
    """Return a function that compiles `function(*arrays)` for an H200 and returns the program and the output of ptxas.

    It checks that copies begin at multiples of 128 bytes in shared memory. Its further arguments are keyword arguments
    of `function`.

    XLA compiles equal Mosaic GPU kernels once per process, and runs no ptxas the second time. So each kernel gets a
    name that no other test used, which makes it distinct, and the function is traced again instead of taken from
    jax's cache.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from tests.support.h200 import compile_for_h200  # imports pallas_kernels: after --typecheck
    from tests.support.mosaic import misaligned_copies

    kernel = plgpu.kernel

    def renamed(*arguments: Any, kernel_name: str, **options: Any) -> Any:
        return kernel(*arguments, kernel_name=f"{kernel_name}_{next(UNIQUE)}", **options)

    def compile_one(function: Any, *arrays: Any, **options: Any) -> tuple[H200Program, str]:
        for output in ("PTXAS", "PTX"):
            monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{output}", "1")
        monkeypatch.setattr(plgpu, "kernel", renamed)
        capfd.readouterr()
        program = compile_for_h200(lambda *given: function.__wrapped__(*given, **options), *arrays)
        printed = "".join(capfd.readouterr())
        assert not misaligned_copies(printed)
        return program, printed

    return compile_one
