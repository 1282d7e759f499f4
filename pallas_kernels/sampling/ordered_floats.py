"""Floats as integers of the same order, and bisection for a threshold among them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def ordered(x: Array) -> Array:
    """Maps float32 to uint32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def float_of(order: Array) -> Array:
    """The inverse of `ordered`."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32((1 << 31) - 1), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest_bound(weight_above: Callable[[Array], Array], goal: Array, low: Array, high: Array) -> Array:
    """Bisects for the largest integer in [low, high) at or above which the weight is at least `goal`; else `low`.

    Args:
        weight_above: maps a candidate to the weight (count or probability) of the values at or above it.
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
