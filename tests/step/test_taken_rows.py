"""Compare the rows that a step takes of the slot state with numpy; every row that must not be read holds NaN."""

from __future__ import annotations

import jax
import numpy as np

from jspec.step.program import taken_rows
from tests.support.arrays import on_device

ACTIVE = np.array([True, False, True, True, False])
SLOTS = np.array([3, 1, 5, 0, 3, 7], np.int32)  # one slot without a sequence, two beyond the last slot


def expected(array: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(SLOTS), *array.shape[1:]), array.dtype)
    for place, slot in enumerate(SLOTS):
        if slot < len(array) and ACTIVE[slot]:
            rows[place] = array[slot]
    return rows


def test_taken_rows_of_ended_slots_and_beyond_the_last_are_zeros() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(5, 75)).astype(np.float32)
    numbers[~ACTIVE] = np.nan
    arrays = {
        "one": np.where(ACTIVE, rng.normal(size=5), np.nan).astype(np.float32),
        "flags": np.array([True, True, False, True, True]),
        "more": [numbers, rng.integers(-9, 9, (5, 2, 75)).astype(np.int32)],
        "words": rng.integers(0, 2**32, (5, 2), dtype=np.uint32),
    }
    taken = taken_rows(jax.tree.map(on_device, arrays), on_device(SLOTS), on_device(ACTIVE))
    jax.tree.map(lambda rows, array: np.testing.assert_array_equal(rows, expected(array), strict=True), taken, arrays)
    others = taken_rows(jax.tree.map(on_device, arrays), on_device(SLOTS), on_device(np.ones(5, bool)))
    assert np.isnan(others["one"][1]) and not np.array_equal(others["words"], expected(arrays["words"])), "control"
