"""Rows of many small arrays in one kernel: what a round knows of its sequences.

Each by itself is a launch, and what the round writes later would be copied first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Int32

from pallas_kernels.dispatch import Implementation, dispatch

BLOCK = 1024  # numbers that are read at once


def _reference(rows, exists, *arrays):
    beyond = exists.shape[0]
    rows = jnp.where(exists.at[rows].get(mode="fill", fill_value=False), rows, beyond)
    return tuple(array.at[rows].get(mode="fill", fill_value=array.dtype.type(0)) for array in arrays)


def _kernel(rows_ref, exists_ref, *refs):
    """One program: one row of every array."""
    place, count = pl.program_id(0), exists_ref.shape[0]
    row = rows_ref[place]
    is_there = (row < count) & exists_ref[jnp.minimum(row, count - 1)]
    inputs, outputs, loaded = refs[: len(refs) // 2], refs[len(refs) // 2 :], []
    for source, target in zip(inputs, outputs, strict=True):  # all is asked for before anything is written
        width = source.shape[1]
        for start in range(0, width, BLOCK):
            column = start + jnp.arange(min(BLOCK, pl.next_power_of_2(width - start)))
            inside = column < width
            value = pltriton.load(source.at[row, column], mask=inside & is_there, other=source.dtype.type(0))
            loaded.append((target.at[place, column], value, inside))
    for at, value, inside in loaded:
        pltriton.store(at, value, mask=inside)


def _pallas(rows, exists, *arrays, interpret):
    flat = [array.reshape(array.shape[0], -1) for array in arrays]
    taken = pl.pallas_call(
        _kernel,
        grid=rows.shape,
        out_shape=[jax.ShapeDtypeStruct((rows.shape[0], array.shape[1]), array.dtype) for array in flat],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gather_rows",
    )(rows, exists, *flat)
    return tuple(own.reshape(-1, *array.shape[1:]) for own, array in zip(taken, arrays, strict=True))


@functools.partial(jax.jit, static_argnames=("implementation",))
def gather_rows(
    arrays: Any, rows: Int32[Array, " batch"], exists: Bool[Array, " slots"], *, implementation: Implementation = "auto"
) -> Any:
    """Returns some rows of every array; zeros for a row that does not exist or lies beyond the last.

    Args:
        arrays: a tree of numbers [slots, ...].
        rows: not negative.
        implementation: as in `paged_attention`.
    """
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, dispatch(implementation, None, _pallas, _reference, rows, exists, *leaves))
