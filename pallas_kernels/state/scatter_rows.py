"""Rows of many small arrays written in one kernel: what a round leaves behind of its sequences.

Each by itself is a launch, and XLA's scatter of rows of a draft's features takes four times what their bytes do.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.state.gather_rows import BLOCK


def _reference(rows, arrays, replacing):
    def put(array, new):
        place = (rows,) if array.ndim == 1 else (rows, slice(new.shape[1]))
        return array.at[place].set(new, mode="drop")

    return [put(array, new) for array, new in zip(arrays, replacing, strict=True)]


def _kernel(rows_ref, *refs):
    """One program: a part of one row of every array."""
    place, start = pl.program_id(0), pl.program_id(1) * BLOCK
    row, inputs = rows_ref[place], refs[: len(refs) // 3]
    for source, target in zip(inputs, refs[-len(inputs) :], strict=True):
        slots, width = target.shape[0], source.shape[1]
        column = start + jnp.arange(min(BLOCK, pl.next_power_of_2(width)))
        inside = (column < width) & (row < slots)
        value = pltriton.load(source.at[place, column], mask=inside, other=source.dtype.type(0))
        pltriton.store(target.at[row, column], value, mask=inside)


def _pallas(rows, arrays, replacing, *, interpret):
    old, new = ([array.reshape(array.shape[0], -1) for array in flat] for flat in (arrays, replacing))
    put = pl.pallas_call(
        _kernel,
        grid=(rows.shape[0], max(pl.cdiv(array.shape[1], BLOCK) for array in new)),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in old],
        input_output_aliases={1 + len(new) + index: index for index in range(len(old))},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scatter_rows",
    )(rows, *new, *old)
    return [own.reshape(array.shape) for own, array in zip(put, arrays, strict=True)]


@functools.partial(jax.jit, static_argnames=("implementation",))
def scatter_rows(
    arrays: Any, rows: Int32[Array, " batch"], new: Any, *, implementation: Implementation = "auto"
) -> Any:
    """Returns the arrays with some rows replaced, in the memory of the old ones if donated.

    Args:
        arrays: a tree of numbers [slots, ...].
        rows: not negative; those beyond the last are dropped, and none of the others stands there twice.
        new: a tree alike, of numbers [batch, ...] of the same dtypes; or [batch, n, ...]: the first n of a row's.
        implementation: as in `paged_attention`.
    """
    structure: Any = jax.tree.structure(arrays)
    if jax.tree.structure(new) != structure:
        raise ValueError(f"new rows: expected a tree {structure}, got {jax.tree.structure(new)}")
    old, replacing = jax.tree.leaves(arrays), jax.tree.leaves(new)
    for array, own in zip(old, replacing, strict=True):
        most = (*rows.shape, *array.shape[1:])
        is_alike = own.dtype == array.dtype and own.shape[:1] + own.shape[2:] == most[:1] + most[2:]
        if not is_alike or own.shape > most or own.ndim != array.ndim:
            expected = f"{most} {array.dtype}, or fewer in the second dimension"
            raise ValueError(f"new rows: expected {expected}, got {own.shape} {own.dtype}")
    return jax.tree.unflatten(structure, dispatch(implementation, None, _pallas, _reference, rows, old, replacing))
