"""Applies a function to blocks of rows, so that a row's result does not depend on the number of rows.

A compiler chooses the order of a sum by the shape of the whole array. So the last bits of a row's result may change
with the number of rows. A block has a fixed number of rows, so a loop over blocks runs the same instructions for any
number of rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 8  # rows per block; a product of 8 rows has no remainder rows, for which a compiler uses different code
LEAST_BLOCKS = 2  # a loop of one iteration would be unrolled and fused with the code around it


def in_row_blocks(function: Callable[..., Any], *rows: Any, size: int = ROWS) -> Any:
    """Returns function(*rows), computed for one block of rows after another; the last block is padded with zeros.

    Args:
        function: function that computes row i of its result from row i of each argument.
        rows: trees of arrays [M, ...], where M is the number of rows.
        size: number of rows per block.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    blocks = max(-(-count // size), LEAST_BLOCKS)

    def cut(array: jax.Array) -> jax.Array:
        padding = [(0, blocks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(blocks, size, *array.shape[1:])

    # Without the barrier, the compiler would compute a result differently if another result is not used.
    found = jax.lax.map(lambda block: jax.lax.optimization_barrier(function(*block)), jax.tree.map(cut, rows))
    return jax.tree.map(lambda array: array.reshape(blocks * size, *array.shape[2:])[:count], found)


def in_row_blocks_off_gpu(function: Callable[..., Any], *rows: Any, implementation: str) -> Any:
    """Returns function(*rows), computed by one call on an NVIDIA GPU, and by `in_row_blocks` elsewhere.

    On a GPU, a loop would not fit into the step's CUDA graph. So the function may compute sums only in kernels of this
    package; without other sums, a row's result does not depend on the number of rows.

    Args:
        function, rows: as in `in_row_blocks`.
        implementation: as in `paged_attention`; "reference" uses blocks on every device.
    """
    blocked = partial(in_row_blocks, function)
    if implementation == "reference":
        return blocked(*rows)
    return jax.lax.platform_dependent(*rows, cuda=function, default=blocked)
