"""Arrays on the device that are made without a program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def on_device(values: Any, dtype: Any = None) -> jax.Array:
    """Return a copy of values as a jax array, converted by numpy; `jnp.asarray` compiles a program for each shape.

    On a CPU the array may be numpy's memory, which a program that gets the array as a donation does not write into.

    Args:
        values: an array, or numbers.
        dtype: dtype of the result; None: that of the values, with 32 bits in place of 64.
    """
    return jax.device_put(np.array(values, None if dtype is None else jnp.dtype(dtype)))
