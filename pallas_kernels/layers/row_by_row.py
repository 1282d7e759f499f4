"""Applies a function to one row after another, so that a row's result depends on neither the other rows nor its place.

A compiler chooses instructions and the order of a sum by the shape of the whole array, and a matrix product of several
rows may treat its last rows by other instructions than its first. Which ones depends on the processor. A loop over
single rows runs the same instructions for each row, on every processor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

LEAST_ROWS = 2  # a loop of one iteration would be unrolled and fused with the code around it


def row_by_row(function: Callable[..., Any], *rows: Any) -> Any:
    """Returns function(*rows), computed for one row after another.

    Args:
        function: function that computes row i of its result from row i of each argument.
        rows: trees of arrays [M, ...], where M is the number of rows; the function gets [1, ...].
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    missing = max(LEAST_ROWS - count, 0)

    def pad(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))[:, None]

    # Without the barrier, the compiler would compute a result differently if another result is not used.
    results = jax.lax.map(lambda row: jax.lax.optimization_barrier(function(*row)), jax.tree.map(pad, rows))
    return jax.tree.map(lambda array: array[:count, 0], results)


def row_by_row_off_gpu(function: Callable[..., Any], *rows: Any, implementation: str) -> Any:
    """Returns function(*rows), computed by one call on an NVIDIA GPU, and by `row_by_row` elsewhere.

    On a GPU, a loop would not fit into the step's CUDA graph. So the function may compute sums only in kernels of this
    package; without other sums, a row's result does not depend on the number of rows.

    Args:
        function, rows: as in `row_by_row`.
        implementation: as in `paged_attention`; "reference" runs the loop on every device.
    """
    looped = partial(row_by_row, function)
    if implementation == "reference":
        return looped(*rows)
    return jax.lax.platform_dependent(*rows, cuda=function, default=looped)
