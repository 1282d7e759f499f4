"""Move rows that layers keep for each slot, in one kernel for Hopper GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from pallas_kernels.dispatch import HOPPER, Implementation, Kernel, dispatch
from pallas_kernels.recurrent.warpgroup import launch, lowered_once

ROWS = 8  # rows that a CTA has in shared memory at a time
BYTES = 4096  # of a row that a CTA moves at most
WIDTH = 128  # elements in a line of such a piece


def move_rows(
    arrays: Sequence[Array],
    slots: Int[Array, "batch"],
    source: Int[Array, "batch moves"],
    target: Int[Array, "batch moves"],
    moved: Bool[Array, "batch moves"],
    *,
    implementation: Implementation = "auto",
) -> list[Array]:
    """Copy what position ``source[b, m]`` of slot ``slots[b]`` has to ``target[b, m]``, where ``moved[b, m]``.

    Args:
        arrays: rows of all slots [slots, rows, ...], overwritten in place if donated. A position's row is
            ``position % rows``.
        slots: distinct slots; rows of one that does not exist are not moved.
        source: positions to read. No row is the target of an earlier move.
        target: positions to write, whose rows are distinct in each slot.
        moved: whether a row is copied.
        implementation: as in `dispatch`.
    """

    def reference(arrays: list[Array], *rows: Array) -> list[Array]:
        return [_moved(array, *rows) for array in arrays]

    rows, have_form = (slots, source, target, moved), [_has_form(array) for array in arrays]
    some = [array for array, has_form in zip(arrays, have_form, strict=True) if has_form]
    by_kernel = iter(dispatch(implementation, [Kernel(HOPPER, _move, not some)], reference, some, *rows))
    return [
        next(by_kernel) if has_form else _moved(array, *rows) for array, has_form in zip(arrays, have_form, strict=True)
    ]


def _moved(rows: Array, slots: Array, source: Array, target: Array, moved: Array) -> Array:
    size = rows.shape[1]
    values = rows.at[slots[:, None], source % size].get(mode="fill", fill_value=0)
    return rows.at[jnp.where(moved, slots[:, None], len(rows)), target % size].set(values, mode="drop")


def _has_form(rows: Array) -> bool:
    """Return whether the bytes of a row can be copied by the unit for tensors in memory."""
    elements = math.prod(rows.shape[2:])
    return elements * rows.dtype.itemsize % 16 == 0 and (elements % WIDTH == 0 or elements <= 2 * WIDTH)


def _pieces(rows: Array) -> Array:
    """Return rows as [slots, rows, pieces, lines, elements]."""
    elements = math.prod(rows.shape[2:])
    width = WIDTH if elements % WIDTH == 0 else elements
    lines = math.gcd(elements // width, BYTES // (WIDTH * rows.dtype.itemsize))
    return rows.reshape(*rows.shape[:2], -1, lines, width)


@lowered_once()
def _move(arrays: list[Array], slots: Array, source: Array, target: Array, moved: Array, *, interpret: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    pieces = [_pieces(array) for array in arrays]
    places = [(index, piece) for index, of in enumerate(pieces) for piece in range(of.shape[2])]
    refs = [jax.new_ref(of) for of in pieces]
    batch, moves = source.shape
    forms = list(dict.fromkeys((of.shape[3:], of.dtype) for of in pieces))

    def run(refs, *memory):
        (*rows, slots, source, target, moved), (*buffers, arrived) = refs, memory
        sequence = jax.lax.axis_index("sequence")
        slot, path = slots[sequence], tuple(of.at[sequence] for of in (source, target, moved))
        for number, (index, piece) in enumerate(places):
            form = forms.index((pieces[index].shape[3:], pieces[index].dtype))
            stages = buffers[form * ROWS : (form + 1) * ROWS]
            copy = partial(_copy_rows, plgpu, rows[index].at[slot, :, piece], path, stages, arrived)
            pl.when((jax.lax.axis_index("piece") == number) & (slot < rows[0].shape[0]))(copy)

    # A buffer of its own for each row, which therefore begins at a multiple of 128 bytes, as the copies need.
    memory = [plgpu.SMEM((1, *shape), dtype) for shape, dtype in forms for _ in range(ROWS)] + [
        plgpu.Barrier(num_arrivals=ROWS, num_barriers=-(-moves // ROWS))
    ]
    grid = {"piece": len(places), "sequence": batch}
    integers = (of.astype(jnp.int32) for of in (slots, source, target, moved))
    launch(plgpu, run, "move_slot_rows", grid, (), memory, (*refs, *integers), interpret)
    return [jax.freeze(ref).reshape(array.shape) for ref, array in zip(refs, arrays, strict=True)]


def _copy_rows(plgpu, rows, path, stages, arrived):
    """Copies rows [rows, ...] of a slot along a path: positions to read and to write, and whether a row is copied."""
    source, target, moved = path
    size, moves = rows.shape[0], source.shape[0]
    for part, first in enumerate(range(0, moves, ROWS)):
        for index, stage in enumerate(stages):  # past the last move the last row is read again
            row = jax.lax.rem(source[min(first + index, moves - 1)], size)
            plgpu.copy_gmem_to_smem(rows.at[pl.ds(row, 1)], stage, arrived.at[part])
        plgpu.barrier_wait(arrived.at[part])
        for move, stage in zip(range(first, moves), stages, strict=False):

            @pl.when(moved[move] == 1)
            def _(move=move, stage=stage):
                row = jax.lax.rem(target[move], size)
                plgpu.copy_smem_to_gmem(stage, rows.at[pl.ds(row, 1)])

        plgpu.wait_smem_to_gmem(0)
