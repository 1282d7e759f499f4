"""Test that kernel calls state what differs by version of jax, and that fewer and fewer lower through Triton."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import append, move_rows, paged_attention

PACKAGE = Path(pallas_kernels.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Kernel calls that lower through Triton, by file. JAX deprecates that backend, so a number may only fall.
TRITON_CALLS = {
    "attention/context_append.py": 1,
    "attention/head_products.py": 1,
    "attention/interval_attention.py": 3,
    "attention/kv_pages.py": 1,
    "attention/latent.py": 1,
    "attention/paged_attention.py": 3,
    "attention/rope_append.py": 1,
    "attention/rotate_queries.py": 1,
    "layers/dense/deterministic_matmul.py": 1,
    "layers/dense/gated_kernel.py": 1,
    "layers/dense/grouped_matmul.py": 1,
    "layers/dense/low_rank_kernels.py": 2,
    "layers/dense/low_rank_sum.py": 1,
    "layers/dense/split_kernel.py": 1,
    "layers/experts/expert_matmul.py": 1,
    "layers/experts/expert_rows.py": 1,
    "layers/experts/routing.py": 1,
    "layers/norm_columns.py": 1,
    "layers/quantize_rows.py": 1,
    "layers/residual_norm.py": 1,
    "sampling/divided.py": 1,
    "sampling/sample_tokens.py": 2,
    "sampling/threshold.py": 2,
    "sampling/top_log_probs.py": 4,
    "state/gather_rows.py": 1,
}


def calls(path: Path, name: str) -> list[ast.Call]:
    return calls_in(path.read_text(), name)


def calls_in(source: str, name: str) -> list[ast.Call]:
    return [call for call in all_calls(source) if isinstance(call.func, ast.Attribute) and call.func.attr == name]


def all_calls(source: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def triton_calls(source: str) -> int:
    """Count the kernel calls in a source whose parameters are not those of Mosaic GPU (`plgpu`).

    A call has ``compiler_params``, because some files call `pallas_call` by another name; or it is one without them.
    """
    keywords = [{keyword.arg: keyword.value for keyword in call.keywords} for call in all_calls(source)]
    stated = [ast.unparse(given["compiler_params"]) for given in keywords if "compiler_params" in given]
    direct = [{keyword.arg for keyword in call.keywords} for call in calls_in(source, "pallas_call")]
    return sum("plgpu." not in params for params in stated) + sum("compiler_params" not in given for given in direct)


@pytest.mark.once
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pallas_calls_in_every_file_state_compiler_params(path):
    """No file uses `backend` or `num_programs`."""
    for call in calls(path, "pallas_call"):
        keywords = {keyword.arg for keyword in call.keywords}
        assert "compiler_params" in keywords  # without it the lowering differs by version of jax
        assert "backend" not in keywords  # removed in jax 0.11
    assert not calls(path, "num_programs")  # in jax 0.11 it may be that of another call's grid (jax issue 40847)


@pytest.mark.once
def test_calls_that_lower_through_triton_are_no_more_than_before() -> None:
    counts = {path.relative_to(PACKAGE).as_posix(): triton_calls(path.read_text()) for path in FILES}
    counts = {path: count for path, count in counts.items() if count}
    more = {path: count for path, count in counts.items() if count > TRITON_CALLS.get(path, 0)}
    assert not more, "write new kernels in Mosaic GPU (jax.experimental.pallas.mosaic_gpu)"
    assert counts == TRITON_CALLS, "there are fewer: lower the numbers of TRITON_CALLS"


@pytest.mark.once
def test_count_of_triton_calls_leaves_out_those_of_mosaic_gpu_alone() -> None:
    of_triton = "pl.pallas_call(f, compiler_params=pltriton.CompilerParams(num_warps=4), interpret=i)(x)"
    elsewhere = "pl.pallas_call(f, compiler_params=tiles.params)(x)"
    mosaic = "pl.pallas_call(f, compiler_params=plgpu.CompilerParams())(x); plgpu.kernel(f, x)(y)"
    renamed = "call = partial(pl.pallas_call, interpret=i); call(f, compiler_params=pltriton.CompilerParams())(x)"
    partial = "run = partial(pl.pallas_call, f, compiler_params=pltriton.CompilerParams())"
    sources = of_triton, elsewhere, "pl.pallas_call(f)(x)", renamed, partial, mosaic
    assert [triton_calls(source) for source in sources] == [1, 1, 1, 1, 1, 0]
    assert triton_calls("; ".join((of_triton, mosaic, elsewhere))) == 2


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
