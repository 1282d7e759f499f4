"""Writes rows of many small arrays in one kernel, to store the state of the sequences after a decoding step.

Separate scatters would take one launch per array. XLA's scatter of a draft's feature rows takes four times as long as
writing their bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.state.gather_rows import BLOCK


def _reference(rows, arrays, replacing):
    def scatter(array, new):
        index = (rows,) if array.ndim == 1 else (rows, slice(new.shape[1]))
        return array.at[index].set(new, mode="drop")

    return [scatter(array, new) for array, new in zip(arrays, replacing, strict=True)]


def _kernel(
    # inputs
    rows_ref,  # [batch] int32
    *refs,  # new rows [batch, n], the arrays [slots, width], n <= width; outputs: the arrays, which alias the inputs
):
    """Writes one block of `BLOCK` values of one row of every array, in one Pallas program."""
    index, start = pl.program_id(0), pl.program_id(1) * BLOCK
    row, inputs = rows_ref[index], refs[: len(refs) // 3]
    for source, target in zip(inputs, refs[-len(inputs) :], strict=True):
        slots, width = target.shape[0], source.shape[1]
        column = start + jnp.arange(min(BLOCK, pl.next_power_of_2(width)))
        inside = (column < width) & (row < slots)
        value = pltriton.load(source.at[index, column], mask=inside, other=source.dtype.type(0))
        pltriton.store(target.at[row, column], value, mask=inside)


def _pallas(rows, arrays, replacing, *, interpret):
    old, new = ([array.reshape(array.shape[0], -1) for array in flat] for flat in (arrays, replacing))
    written = pl.pallas_call(
        _kernel,
        grid=(rows.shape[0], max(pl.cdiv(array.shape[1], BLOCK) for array in new)),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in old],
        input_output_aliases={1 + len(new) + index: index for index in range(len(old))},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scatter_rows",
    )(rows, *new, *old)
    return [new.reshape(array.shape) for new, array in zip(written, arrays, strict=True)]


@functools.partial(jax.jit, static_argnames=("implementation",))
def scatter_rows(
    arrays: Any, rows: Int32[Array, " batch"], new: Any, *, implementation: Implementation = "auto"
) -> Any:
    """Replaces rows of every array by new rows, in the memory of the old arrays if the old arrays are donated.

    Args:
        arrays: tree of arrays [slots, ...].
        rows: numbers of the rows to replace [batch], not negative. Row numbers beyond the last slot are dropped; all
            other row numbers must be distinct.
        new: tree with the structure and dtypes of `arrays`, of new rows [batch, ...]; or [batch, n, ...], to replace
            only the first n entries of each row.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: `new` does not fit `arrays` in structure, shapes or dtypes.
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
    return jax.tree.unflatten(
        structure, dispatch(implementation, [Kernel(TRITON, _pallas)], _reference, rows, old, replacing)
    )
