"""Floats as integers of the same order, and a bound among them found by halving."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def ordered(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def float_of(order: Array) -> Array:
    """The inverse of `ordered`."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32((1 << 31) - 1), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest_bound(weigh: Callable[[Array], Array], goal: Array, low: Array, high: Array) -> Array:
    """The largest bound from `low` to below `high` above which there is at least `goal`; `low` if there is none.

    Args:
        weigh: from a candidate to the weight at or above it.
    """

    def halve(ends):
        low, high = ends
        middle = low + ((high - low) >> 1)
        is_enough = weigh(middle) >= goal
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    def is_open(ends):
        width = ends[1] - ends[0]
        return (jnp.max(width) if width.ndim else width) > 1

    return jax.lax.while_loop(is_open, halve, (low, high))[0]
