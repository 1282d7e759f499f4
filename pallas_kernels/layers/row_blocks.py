"""Work on rows in blocks of a fixed number, so that what comes out for a row depends on that row alone.

A compiler chooses how to add up by the shape of the whole: the same row may differ in its last bits when others join.
The body of a loop has the same shape whatever number of rows there are, so it is compiled to the same instructions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

ROWS = 8  # a block; a product of so many leaves no row to another path of its code
LEAST_BLOCKS = 2  # a loop of one turn would be taken apart and fused with what is around it


def in_row_blocks(function: Callable[..., Any], *rows: Any, size: int = ROWS) -> Any:
    """function(*rows) for a function that treats its rows alike and apart; rows that are missing to a block are zero.

    Args:
        rows: trees of arrays [M, ...].
        size: rows of a block.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    blocks = max(-(-count // size), LEAST_BLOCKS)

    def cut(array: jax.Array) -> jax.Array:
        padding = [(0, blocks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(blocks, size, *array.shape[1:])

    # A result that nobody reads must not change how the others are computed.
    found = jax.lax.map(lambda block: jax.lax.optimization_barrier(function(*block)), jax.tree.map(cut, rows))
    return jax.tree.map(lambda array: array.reshape(blocks * size, *array.shape[2:])[:count], found)


def in_row_blocks_off_gpu(function: Callable[..., Any], *rows: Any, implementation: str) -> Any:
    """`in_row_blocks`, but on an NVIDIA GPU the function itself, for one that adds up nothing but in kernels of ours.

    There a loop would not fit into the round's graph, and numbers that are not added up come out alike in any number.
    """
    blocked = partial(in_row_blocks, function)
    if implementation == "reference":
        return blocked(*rows)
    return jax.lax.platform_dependent(*rows, cuda=function, default=blocked)
