"""Gathers rows of many small arrays in one kernel, to read the state of the sequences in a decoding step.

Separate gathers would take one launch per array, and XLA would copy arrays that the decoding step writes later.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Int32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch

BLOCK = 1024  # values that a Pallas program loads at once


def _reference(rows, exists, *arrays):
    inside = exists.at[rows].get(mode="fill", fill_value=False)
    nearest = jnp.minimum(rows, exists.shape[0] - 1)

    def gather(array):
        values = array.at[nearest].get(mode="promise_in_bounds")
        return jnp.where(jnp.expand_dims(inside, tuple(range(1, array.ndim))), values, array.dtype.type(0))

    return tuple(map(gather, arrays))


def _kernel(
    # inputs
    rows_ref,  # [batch] int32
    exists_ref,  # [slots] bool
    *refs,  # the arrays [slots, width]; outputs: the gathered rows of each array [batch, width]
):
    """Gathers one row of every array, in one Pallas program."""
    index, slots = pl.program_id(0), exists_ref.shape[0]
    row = rows_ref[index]
    exists = (row < slots) & exists_ref[jnp.minimum(row, slots - 1)]
    inputs, outputs, loaded = refs[: len(refs) // 2], refs[len(refs) // 2 :], []
    # Issue all loads before the first store.
    for source, target in zip(inputs, outputs, strict=True):
        width = source.shape[1]
        for start in range(0, width, BLOCK):
            column = start + jnp.arange(min(BLOCK, pl.next_power_of_2(width - start)))
            inside = column < width
            value = pltriton.load(source.at[row, column], mask=inside & exists, other=source.dtype.type(0))
            loaded.append((target.at[index, column], value, inside))
    for at, value, inside in loaded:
        pltriton.store(at, value, mask=inside)


def _pallas(rows, exists, *arrays, interpret):
    flat = [array.reshape(array.shape[0], -1) for array in arrays]
    gathered = pl.pallas_call(
        _kernel,
        grid=rows.shape,
        out_shape=[jax.ShapeDtypeStruct((rows.shape[0], array.shape[1]), array.dtype) for array in flat],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gather_rows",
    )(rows, exists, *flat)
    return tuple(rows.reshape(-1, *array.shape[1:]) for rows, array in zip(gathered, arrays, strict=True))


@functools.partial(jax.jit, static_argnames=("implementation",))
def gather_rows(
    arrays: Any, rows: Int32[Array, " batch"], exists: Bool[Array, " slots"], *, implementation: Implementation = "auto"
) -> Any:
    """Returns the given rows of every array; zeros for rows that do not exist or are beyond the last slot.

    Args:
        arrays: tree of arrays [slots, ...].
        rows: row numbers [batch], not negative.
        exists: whether each slot holds a sequence [slots].
        implementation: as in `paged_attention`.

    Returns:
        Tree of the same structure, of arrays [batch, ...].
    """
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(
        structure, dispatch(implementation, [Kernel(TRITON, _pallas)], _reference, rows, exists, *leaves)
    )
