"""Compare `gather_rows` with numpy; every row that must not be read holds NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gather_rows
from tests.support.h200 import compile_for_h200

EXISTS = np.array([True, False, True, True, True])
ROWS = np.array([3, 1, 5, 0, 3, 7], np.int32)  # one slot without a sequence, two beyond the last slot


def problem(width: int) -> dict[str, Any]:
    rng = np.random.default_rng(width)
    numbers = rng.normal(size=(5, width)).astype(np.float32)
    numbers[~EXISTS] = np.nan
    return {
        "one": np.where(EXISTS, rng.normal(size=5), np.nan).astype(np.float32),
        "flags": np.array([True, True, False, True, True]),
        "more": [numbers, rng.integers(-9, 9, (5, 2, width)).astype(np.int32)],
        "words": rng.integers(0, 2**32, (5, 2), dtype=np.uint32),
    }


def expected(array: np.ndarray) -> np.ndarray:
    taken = np.zeros((len(ROWS), *array.shape[1:]), array.dtype)
    for place, row in enumerate(ROWS):
        if row < len(array) and EXISTS[row]:
            taken[place] = array[row]
    return taken


def check(width: int, implementation: str) -> None:
    arrays = problem(width)
    taken = gather_rows(arrays, ROWS, EXISTS, implementation=implementation)
    jax.tree.map(lambda own, array: np.testing.assert_array_equal(own, expected(array), strict=True), taken, arrays)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("width", [1, 75, 2500])
def test_gather_rows_function_with_empty_slots_equals_numpy(width: int, implementation: str) -> None:
    check(width, implementation)


def test_gather_rows_function_with_empty_slots_marked_full_differs_from_numpy() -> None:
    """Negative control: the comparison detects rows that are read from an empty slot."""
    arrays = problem(75)
    taken = gather_rows(arrays, ROWS, np.ones(5, bool), implementation="pallas")
    assert np.isnan(taken["one"][1]) and not np.array_equal(taken["words"], expected(arrays["words"]))


def test_gather_rows_kernel_compiled_for_h200_is_one_launch_without_spills() -> None:
    shape = jax.ShapeDtypeStruct
    arrays = [shape((64,), jnp.float32), shape((64,), jnp.bool), shape((64, 2048), jnp.int32)]
    program = compile_for_h200(gather_rows, arrays, shape((8,), jnp.int32), shape((64,), jnp.bool), fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["gather_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 75, 2500])
def test_gather_rows_kernel_on_gpu_equals_numpy(width: int) -> None:
    check(width, "pallas")
