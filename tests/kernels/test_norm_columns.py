"""Compare `norm_columns` with float64, check its launch on an H200, and each row's bits between numbers of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import norm_columns
from pallas_kernels.layers.partial_sums import Scaled
from tests.kernels.test_residual_norm import EPS, mean_error, normed, rounded
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

SIZES = 96, 32, 40  # columns of queries, keys and values
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def problem(parts: int, dtype: Any, weight_dtype: Any, sizes: tuple[int, ...] = SIZES) -> tuple[Any, list[Any], Any]:
    """Return partial sums [parts, 2, 3, width], the weights of queries and keys, and a bias."""
    rng = np.random.default_rng(parts)
    width = sum(sizes)
    scale = np.repeat([1.0, 5.0, 1.0], sizes)  # queries and keys have different mean squares
    sums = on_device(rng.normal(size=(parts, 2, 3, width)) * scale, dtype if parts == 1 else F32)
    return sums, [on_device(rng.normal(size=size), weight_dtype) for size in sizes[:2]], on_device(scale / 4, dtype)


def wanted(parts: Any, weights: list[Any], bias: Any, dtype: Any, ends: tuple[int, ...] = (96, 128)) -> np.ndarray:
    """Return the result in float64, rounded to the dtype where the module says; each normed range ends at one end."""
    total = np.asarray(parts, np.float64).sum(0)
    total = rounded(total if bias is None else total + np.asarray(bias, np.float64), dtype)
    *pieces, rest = np.split(total, ends, axis=-1)
    own = np.split(np.concatenate(weights), ends[:-1])
    return np.concatenate([*(normed(*pair, dtype) for pair in zip(pieces, own, strict=True)), rest], axis=-1)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize(
    ("parts", "dtype", "weight_dtype", "has_bias"), [(1, F32, F32, True), (4, BF16, F32, False), (2, BF16, BF16, True)]
)
def test_norm_of_column_ranges_matches_float64(
    parts: int, dtype: Any, weight_dtype: Any, has_bias: bool, implementation: str
) -> None:
    sums, weights, bias = problem(parts, dtype, weight_dtype)
    own = bias if has_bias else None
    got = norm_columns(sums, *weights, eps=EPS, dtype=dtype, bias=own, implementation=implementation)
    assert (got.shape, got.dtype) == (sums.shape[1:], dtype)
    most = 1e-6 if dtype == F32 else 2e-3  # a compiler may leave out roundings
    assert mean_error([got], [wanted(sums, weights, own, dtype)]) < most
    assert mean_error([got], [wanted(sums, weights, own, dtype, (48, 128))]) > 0.1, "control: other ranges"
    assert mean_error([got], [wanted(sums, weights, own, dtype, (128,))]) > 0.1, "control: one common norm"
    assert mean_error([got], [wanted(sums, weights, None if has_bias else bias, dtype)]) > 0.02, "control: the bias"


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_norm_of_column_ranges_applies_the_scales_of_rows_and_columns(implementation: str) -> None:
    sums, weights, bias = problem(2, F32, F32)
    row_scale, scale = on_device(np.arange(1.0, 7)).reshape(2, 3), on_device(np.arange(168.0)) / 64
    call = partial(norm_columns, eps=EPS, dtype=F32, bias=bias, implementation=implementation)
    got = call(Scaled(sums, row_scale, scale), *weights)
    np.testing.assert_allclose(got, call(sums * row_scale[..., None] * scale, *weights), rtol=1e-5, atol=1e-5)
    for other in (Scaled(sums, row_scale[::-1], scale), Scaled(sums, row_scale, scale[::-1])):
        assert np.abs(np.asarray(call(other, *weights) - got)).max() > 0.1, "control: other scales"


def test_deterministic_norm_of_column_ranges_keeps_the_bits_of_a_row() -> None:
    """Without `deterministic`, jax 0.12 chooses the order of these sums by the number of rows."""
    sums, weights, bias = problem(1, F32, F32, (2000, 500, 8))
    rows = jnp.concatenate([sums.reshape(1, 6, -1)] * 4, axis=1)
    run = jax.jit(partial(norm_columns, eps=EPS, dtype=F32, bias=bias, deterministic=True))
    everything = np.asarray(run(rows, *weights))
    for count in (1, 3, 9):
        assert np.asarray(run(rows[:, :count], *weights)).tobytes() == everything[:count].tobytes()
    one_more = rows.at[0, 0, 0].add(1e-5)
    assert np.asarray(run(one_more, *weights)).tobytes() != everything.tobytes(), "control of the comparison"


def test_norm_of_too_wide_column_range_raises() -> None:
    with pytest.raises(NotImplementedError, match="16384 columns, got 20000"):
        norm_columns(
            on_device(np.zeros((1, 1, 20008))), on_device(np.zeros(20000)), eps=EPS, dtype=F32, implementation="pallas"
        )


@pytest.mark.parametrize(("rows", "parts"), [(1, 2), (160, 1)])
def test_norm_of_column_ranges_compiled_for_h200_is_one_launch_without_spills(rows: int, parts: int) -> None:
    """The sizes are those of OLMo 2 7B."""
    shape = jax.ShapeDtypeStruct
    sums, weight = shape((parts, rows, 12288), F32 if parts > 1 else BF16), shape((4096,), F32)
    run = partial(norm_columns, eps=1e-6, dtype=BF16)
    program = compile_for_h200(lambda *arrays: run(*arrays), sums, weight, weight, fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["norm_columns"]


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "dtype"), [(1, F32), (2, BF16), (4, BF16)])
def test_norm_of_column_ranges_on_gpu_matches_float64_for_any_number_of_rows(parts: int, dtype: Any) -> None:
    sums, weights, bias = problem(parts, dtype, F32, (5120, 1024, 1024))
    ends = 5120, 6144
    run = jax.jit(partial(norm_columns, eps=EPS, dtype=dtype, bias=bias, implementation="pallas"))
    got = run(sums, *weights)
    assert mean_error([got], [wanted(sums, weights, bias, dtype, ends)]) < (2e-6 if dtype == F32 else 2e-3)
    assert mean_error([got], [wanted(sums, weights, None, dtype, ends)]) > 0.02, "control: without the bias"
    assert np.asarray(run(sums[:, :1, :1], *weights)).tobytes() == np.asarray(got[:1, :1]).tobytes()
