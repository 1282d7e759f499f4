"""Compare the replacement of rows of slots with numpy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jspec.core.replaced_rows import replaced_rows
from tests.support.arrays import on_device

SLOTS = np.array([3, 4, 0, 7, 5, 5], np.int32)  # three beyond the last slot, 4, two of them equal


def numbers(*shape: int) -> dict[str, Any]:
    rng = np.random.default_rng(shape[0])
    return {
        "one": rng.normal(size=shape[0]).astype(np.float32),
        "flags": rng.random(shape[0]) < 0.5,
        "more": [rng.normal(size=(shape[0], 75)).astype(np.float32)],
        "part": rng.integers(-9, 9, (*shape, 75)).astype(np.int32),
    }


def expected(array: np.ndarray, new: np.ndarray) -> np.ndarray:
    replaced = array.copy()
    for own, slot in zip(new, SLOTS, strict=True):
        if slot < len(array):
            replaced.reshape(len(array), -1)[slot, : own.size] = own.ravel()
    return replaced


def test_rows_of_slots_are_new_and_rows_beyond_the_last_slot_are_dropped() -> None:
    """In one array the new rows have one entry and the old ones two."""
    arrays, new = numbers(5, 2), numbers(len(SLOTS), 1)
    on_devices = (jax.tree.map(on_device, tree) for tree in (arrays, new))
    replaced = replaced_rows(next(on_devices), on_device(SLOTS), next(on_devices))
    jax.tree.map(
        lambda rows, *given: np.testing.assert_array_equal(rows, expected(*given), strict=True), replaced, arrays, new
    )
    others = jax.tree.map(expected, arrays, jax.tree.map(lambda rows: rows[::-1].copy(), new))
    assert not np.array_equal(replaced["one"], others["one"]), "control: reversed rows"


def test_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(AssertionError):
        replaced_rows([on_device(np.zeros((6, 3)))], on_device(SLOTS), [on_device(np.zeros((6, 3), np.int32))])
