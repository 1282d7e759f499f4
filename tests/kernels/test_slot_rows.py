"""Test that rows of slots move as a loop over them says, interpreted and on a GPU."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent import slot_rows
from tests.support.mosaic import interpreted, misaligned_copies

mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
SLOTS, ROWS = 4, 32


def problem(moves: int, nearest: int = 1) -> tuple[Any, ...]:
    """Draw rows of all slots and paths of three sequences, the last without a slot, from row ``nearest`` on."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal((SLOTS, *shape)), dtype)
        for shape, dtype in [((ROWS, 2, 128), "bfloat16"), ((ROWS, 12), "float32"), ((ROWS + 5, 5 * 128), "bfloat16")]
    ]
    slots, first = np.array([2, 0, SLOTS]), np.array([62, 5, 9])
    path = np.stack([np.sort(rng.choice(np.arange(nearest, ROWS), moves, replace=False)) for _ in slots])
    moved = rng.random((3, moves)) < 0.7
    source, target = first[:, None] + path, first[:, None] + np.arange(moves)
    return arrays, *map(jnp.asarray, (slots, source, target, moved))


def in_a_loop(arrays: Any, slots: Any, source: Any, target: Any, moved: Any) -> list[np.ndarray]:
    wanted = [np.array(array, np.float32) for array in arrays]
    for row, slot in enumerate(np.asarray(slots)):
        for move in np.flatnonzero(moved[row]):
            for new, old in zip(wanted, arrays, strict=True):
                if slot < SLOTS:
                    rows = len(new[slot])
                    new[slot, target[row, move] % rows] = np.float32(old[slot, source[row, move] % rows])
    return wanted


def check(got: Any, arguments: Any) -> None:
    for new, old, wanted in zip(got, arguments[0], in_a_loop(*arguments), strict=True):
        np.testing.assert_array_equal(np.float32(new), wanted)
        assert not np.array_equal(np.float32(old), wanted), "nothing moved"


@pytest.mark.parametrize("moves", [1, 5, 11])
def test_rows_move_as_in_a_loop(moves: int) -> None:
    arguments = problem(moves)
    check(slot_rows.move_rows(*arguments), arguments)


@mosaic
@pytest.mark.parametrize("moves", [1, 5, 11])
def test_interpreted_kernel_moves_rows_as_in_a_loop(moves: int) -> None:
    """The interpreter takes a row that is read and then written for a race, so no row is both here."""
    arguments = problem(moves, nearest=moves)
    check(interpreted(slot_rows._move, *arguments), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("moves", [1, 5, 11])
def test_rows_move_as_in_a_loop_on_a_gpu(moves: int) -> None:
    arrays, *rows = problem(moves)
    arguments = [*arrays, arrays[1][..., :3]], *rows  # XLA moves the last one
    check(jax.jit(slot_rows.move_rows)(*arguments), arguments)


def test_a_row_that_no_copy_unit_takes_moves_in_xla() -> None:
    arrays, *rows = problem(3)
    arguments = [arrays[0], arrays[1][..., :3]], *rows
    assert not slot_rows._has_form(arguments[0][1])
    check(slot_rows.move_rows(*arguments), arguments)


@mosaic
def test_kernel_compiled_for_h200_spills_nothing_and_copies_aligned_rows(compile_with_ptxas_output: Any) -> None:
    arguments = jax.eval_shape(lambda: problem(11))
    program, printed = compile_with_ptxas_output(jax.jit(slot_rows.move_rows), *arguments)
    assert program.count("CustomCall") == 1
    assert re.findall(r"\b(\d+) bytes spill stores", printed) == ["0"]
    changed = re.sub(r"(add\.s32\s+%r\d+, %r\d+, )4096;", r"\g<1>4160;", printed)
    assert set(misaligned_copies(changed)) == {4160}
