"""Test that every kernel call states the arguments whose default in jax is wrong or differs by version."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import append, move_rows, paged_attention

FILES = sorted(Path(pallas_kernels.__file__).parent.rglob("*.py"))


def calls(path: Path, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in found if isinstance(call.func, ast.Attribute) and call.func.attr == name]


@pytest.mark.once
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pallas_calls_in_every_file_state_compiler_params(path):
    """No file uses `backend` or `num_programs`."""
    for call in calls(path, "pallas_call"):
        keywords = {keyword.arg for keyword in call.keywords}
        assert "compiler_params" in keywords  # without it the lowering differs by version of jax
        assert "backend" not in keywords  # removed in jax 0.11
    assert not calls(path, "num_programs")  # in jax 0.11 it may be that of another call's grid (jax issue 40847)


def test_search_for_pallas_calls_in_the_package_finds_at_least_three():
    assert sum(len(calls(path, "pallas_call")) for path in FILES) >= 3


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="from jax 0.11 on lowering needs a device: test_h200.py")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_kernels_lowered_for_cuda_without_a_gpu_are_triton_kernels(dtype):
    """The kernels are lowered but not compiled, so no CUDA plugin is needed."""
    shape, ints = jax.ShapeDtypeStruct, jnp.int32
    pool, new = shape((100, 2, 16, 64), dtype), shape((2, 5, 2, 64), dtype)
    table, lengths, rows = shape((2, 20), ints), shape((2,), ints), shape((2, 5), ints)
    valid, bits, q = shape((2, 5), bool), shape((2, 5, 1), jnp.uint32), shape((2, 5, 4, 64), dtype)
    for function, *arrays in (  # arrays, or lists of them
        (paged_attention, q, pool, pool, table, lengths, bits),
        (append, pool, pool, new, new, table, lengths, valid),
        (move_rows, [pool], [pool], table, rows, rows, valid),
    ):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
        assert "xla.gpu.triton" in lowered.as_text()
        assert "xla.gpu.triton" not in jax.jit(function).lower(*arrays).as_text()
