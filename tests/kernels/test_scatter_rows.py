"""Compare `scatter_rows` with numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import scatter_rows
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

ROWS = np.array([3, 5, 0, 7, 5, 4], np.int32)  # three beyond the last slot, two of them equal


def problem(width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays and new rows for them; in one array the new rows have one entry and the old ones two."""
    rng = np.random.default_rng(width)

    def numbers(*shape: int) -> dict[str, Any]:
        return {
            "one": rng.normal(size=shape[0]).astype(np.float32),
            "flags": rng.random(shape[0]) < 0.5,
            "more": [rng.normal(size=(shape[0], width)).astype(np.float32)],
            "part": rng.integers(-9, 9, (*shape, width)).astype(np.int32),
        }

    return numbers(5, 2), numbers(len(ROWS), 1)


def expected(array: np.ndarray, new: np.ndarray) -> np.ndarray:
    put = array.copy()
    for own, row in zip(new, ROWS, strict=True):
        if row < len(array):
            put.reshape(len(put), -1)[row, : own.size] = own.ravel()
    return put


def check(width: int, implementation: str) -> None:
    arrays, new = problem(width)
    put = scatter_rows(arrays, ROWS, new, implementation=implementation)
    jax.tree.map(
        lambda own, *given: np.testing.assert_array_equal(own, expected(*given), strict=True), put, arrays, new
    )


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("width", [1, 75, 2500])
def test_scatter_rows_function_with_repeated_rows_equals_numpy(width: int, implementation: str) -> None:
    check(width, implementation)


def test_scatter_rows_function_with_reversed_rows_differs_from_numpy() -> None:
    """Negative control of the comparison with numpy."""
    arrays, new = problem(75)
    put = scatter_rows(arrays, ROWS[::-1].copy(), new, implementation="pallas")
    assert not np.array_equal(put["one"], expected(arrays["one"], new["one"]))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 4), "float32"), ((4, 2), "float32"), ((5, 2), "int32"), ((5,), "float32")]
)
def test_scatter_rows_function_with_wrong_shape_or_dtype_raises(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match=r"expected \(5, 3\) float32, or fewer in the second dimension, got"):
        scatter_rows([on_device(np.zeros((6, 3)))], on_device(np.arange(5)), [on_device(np.zeros(shape, dtype))])


def test_scatter_rows_function_with_another_tree_structure_raises() -> None:
    with pytest.raises(ValueError, match="expected a tree"):
        scatter_rows({"a": on_device(np.zeros((6, 3)))}, on_device(np.arange(5)), {"b": on_device(np.zeros((5, 3)))})


def test_scatter_rows_kernel_compiled_for_h200_is_one_launch() -> None:
    def shapes(rows: int) -> list[jax.ShapeDtypeStruct]:
        sizes: Any = [((), jnp.int32), ((), jnp.bool), ((5, 4096), jnp.bfloat16)]
        return [jax.ShapeDtypeStruct((rows, *own), dtype) for own, dtype in sizes]

    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    program = compile_for_h200(lambda *given: scatter_rows(*given), shapes(64), rows, shapes(8), donate_argnums=0)
    assert [launch.name for launch in program.launches] == ["scatter_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 75, 2500])
def test_scatter_rows_kernel_on_gpu_equals_numpy(width: int) -> None:
    check(width, "pallas")
