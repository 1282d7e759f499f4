"""Replaces rows of the arrays in which the device keeps the state of slots."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Int


def replaced_rows(arrays: Any, slots: Int[Array, "batch"], new: Any) -> Any:
    """Return a tree of arrays ``[slots, ...]`` in which the rows of slots are new.

    Args:
        arrays: the tree of arrays.
        slots: slots whose rows are replaced. Slots beyond the last are dropped; all others must be distinct.
        new: tree of the same structure and dtypes, of new rows ``[batch, ...]``; or ``[batch, n, ...]``, to replace
            only the first n entries of each row.
    """

    def replaced(array: Array, rows: Array) -> Array:
        index = slots if array.ndim == 1 else (slots, slice(rows.shape[1]))
        assert rows.dtype == array.dtype
        return array.at[index].set(rows, mode="drop")

    return jax.tree.map(replaced, arrays, new)
