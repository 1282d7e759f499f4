"""Maps floats to integers that have the same order, and finds a threshold among these integers by bisection."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def ordered(x: Array) -> Array:
    """Maps float32 values to uint32 integers that have the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def float_of(order: Array) -> Array:
    """Returns the float32 values that `ordered` maps to the given integers."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32((1 << 31) - 1), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest_bound(weight_above: Callable[[Array], Array], goal: Array, low: Array, high: Array) -> Array:
    """Finds by bisection the largest integer c in [low, high) with weight_above(c) >= goal; `low` if there is none.

    Args:
        weight_above: function that takes an integer, and returns the total weight (number or probability) of all values
            at or above the integer.
        goal: weight to reach.
        low, high: bounds of the search.
    """

    def halve(ends):
        low, high = ends
        middle = low + ((high - low) >> 1)
        is_enough = weight_above(middle) >= goal
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    def is_open(ends):
        width = ends[1] - ends[0]
        return (jnp.max(width) if width.ndim else width) > 1

    return jax.lax.while_loop(is_open, halve, (low, high))[0]
