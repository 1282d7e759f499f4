"""`split_matmul` against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import split_matmul
from pallas_kernels.split_matmul import add_up, parts_of
from tests.h200 import compile_for_h200

BF16 = jnp.dtype("bfloat16")


def problem(rows: int, out: int, inner: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(1, rows, inner)), dtype)
    return x, jnp.asarray(rng.normal(size=(out, inner)) / np.sqrt(inner), dtype)


def error(parts: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return float(np.abs(np.asarray(add_up(parts, jnp.float32), np.float64) - wanted).max())


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize(("rows", "out", "parts"), [(1, 1024, 4), (5, 2048, 4), (60, 1024, 4), (64, 6144, 2)])
def test_the_parts_add_up_to_the_product(rows: int, out: int, parts: int, implementation: str) -> None:
    x, weight = problem(rows, out, 2048, "bfloat16")
    got = split_matmul(x, weight, implementation=implementation)
    assert got.shape == (parts, 1, rows, out)
    assert got.dtype == jnp.float32
    assert error(got, x, weight) < 1e-5  # float32 sums of 2048 products of exact bfloat16 factors
    assert error(got[1:], x, weight) > 0.1, "a part that is left out must show"


@pytest.mark.parametrize(
    ("rows", "out", "inner", "dtype", "parts"),
    [
        (1, 4096, 4096, BF16, 4),
        (60, 4096, 14336, BF16, 4),
        (60, 6144, 4096, BF16, 2),
        (5, 6144, 4096, BF16, 2),
        (65, 4096, 4096, BF16, 2),  # by XLA
        (257, 4096, 4096, BF16, 1),  # enough rows
        (5, 4096, 11008, BF16, 4),
        (5, 28672, 4096, BF16, 1),  # enough columns
        (5, 4096, 4096, jnp.dtype("float32"), 1),
        (5, 4096, 4100, BF16, 1),  # no equal pieces
        (5, 64, 4096, BF16, 1),  # small
    ],
)
def test_only_a_large_weight_with_few_rows_is_split(
    rows: int, out: int, inner: int, dtype: jnp.dtype, parts: int
) -> None:
    assert parts_of(rows, out, inner, dtype) == parts


def test_what_is_not_split_is_one_part_of_the_same_dtype() -> None:
    x, weight = problem(5, 32, 64, "float32")
    got = split_matmul(x, weight)
    assert (got.shape, got.dtype) == ((1, 1, 5, 32), jnp.float32)
    assert error(got, x, weight) < 1e-5
    assert split_matmul(*problem(5, 32, 64, "bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 5, 20, 60])
@pytest.mark.parametrize(("out", "inner"), [(4096, 4096), (4096, 14336), (6144, 4096), (6144, 8192)])
def test_it_is_one_launch_without_spills(rows: int, out: int, inner: int) -> None:
    x, weight = jax.ShapeDtypeStruct((1, rows, inner), BF16), jax.ShapeDtypeStruct((out, inner), BF16)
    program = compile_for_h200(
        lambda *arrays: split_matmul(*arrays, implementation="pallas"), x, weight, fail_on_spills=True
    )
    assert [launch.name for launch in program.launches] == ["split_matmul"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(1, 4096, 4096), (5, 6144, 4096), (60, 4096, 14336), (60, 6144, 8192)]
)
def test_the_parts_add_up_on_a_gpu(rows: int, out: int, inner: int) -> None:
    x, weight = problem(rows, out, inner, "bfloat16")
    assert error(split_matmul(x, weight, implementation="pallas"), x, weight) < 1e-4
