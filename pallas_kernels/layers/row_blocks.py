"""Applies a function to blocks of a fixed number of rows, which makes each row's result batch-invariant.

A compiler chooses the order of a sum by the shape of the whole array, so the last bits of a row's result may change
with the number of rows. The body of a loop over blocks has the same shape for any number of rows, and runs the same
instructions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 8  # rows per block: a matrix product of 8 rows has no remainder rows, which different code would compute
LEAST_BLOCKS = 2  # a loop of one iteration would be unrolled and fused with the code around it


def in_row_blocks(function: Callable[..., Any], *rows: Any, size: int = ROWS) -> Any:
    """Returns function(*rows), computed block by block of rows; the last block is padded with zeros.

    Args:
        function: function that computes each row of its result from the same row of its arguments.
        rows: trees of arrays [M, ...].
        size: rows per block.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    blocks = max(-(-count // size), LEAST_BLOCKS)

    def cut(array: jax.Array) -> jax.Array:
        padding = [(0, blocks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(blocks, size, *array.shape[1:])

    # The barrier: whether one result is used must not change how the other results are computed.
    found = jax.lax.map(lambda block: jax.lax.optimization_barrier(function(*block)), jax.tree.map(cut, rows))
    return jax.tree.map(lambda array: array.reshape(blocks * size, *array.shape[2:])[:count], found)


def in_row_blocks_off_gpu(function: Callable[..., Any], *rows: Any, implementation: str) -> Any:
    """Returns function(*rows); computed by `in_row_blocks`, except on an NVIDIA GPU, where it is called once.

    On a GPU a loop would not fit into the step's CUDA graph. The function must have no sums outside of this package's
    kernels: code without sums is batch-invariant anyway.

    Args:
        function, rows: as in `in_row_blocks`.
        implementation: as in `paged_attention`; "reference": blocks on every device.
    """
    blocked = partial(in_row_blocks, function)
    if implementation == "reference":
        return blocked(*rows)
    return jax.lax.platform_dependent(*rows, cuda=function, default=blocked)
