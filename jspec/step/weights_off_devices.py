"""Weights of an engine that sleeps: on the host, or dropped; and the arrays that a drafter object holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jspec.core.shared_leaves import once
from jspec.draft.base import Drafter
from jspec.step.program import Params


@dataclass(frozen=True, eq=False)
class HostArray:
    """An array in the host's memory that comes from devices."""

    values: np.ndarray
    sharding: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype


def off_devices(drafter: Drafter, params: Params, where: str) -> tuple[Drafter, Params]:
    """Return a drafter and bound weights that hold no device memory; what is off the devices already stays as it is.

    Args:
        where: "host"; or "drop": the weights become shapes. The drafter's own arrays go to the host in either case.
    """
    to_host = once(_on_host)
    for array in (*arrays_of(drafter), *(jax.tree.leaves(params) if where == "host" else ())):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # the copies wait for none before them
    kept = with_arrays(drafter, to_host)
    if where == "host":
        return kept, jax.tree.map(to_host, params)
    return kept, jax.tree.map(_shape, params)


def _on_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    values = np.asarray(leaf)  # on CPUs the buffer itself
    is_buffer = any(device.platform == "cpu" for device in leaf.devices())
    return HostArray(np.array(values) if is_buffer else values, leaf.sharding)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, (jax.Array, HostArray)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def back_on_devices(drafter: Drafter, params: Params) -> tuple[Drafter, Params]:
    """Return a drafter and bound weights with the arrays of `off_devices` on their devices again.

    Raises:
        RuntimeError: weights were dropped.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise RuntimeError(
            'wake_up: expected weights, but sleep(weights="drop") dropped them; call update_weights(weights) first'
        )
    back = once(lambda leaf: jax.device_put(leaf.values, leaf.sharding) if isinstance(leaf, HostArray) else leaf)
    return with_arrays(drafter, back), jax.tree.map(back, params)


def with_arrays(drafter: Drafter, function: Callable[[Any], Any]) -> Drafter:
    """Return a drafter whose leaves, also those of its parts, are a function of its leaves."""
    other = copy.copy(drafter)
    for name, value in vars(drafter).items():
        changed = with_arrays(value, function) if isinstance(value, Drafter) else jax.tree.map(function, value)
        object.__setattr__(other, name, changed)
    return other


def arrays_of(drafter: Drafter) -> list[jax.Array]:
    """Return the arrays that a drafter and its parts hold."""
    arrays: list[jax.Array] = []

    def note(leaf: Any) -> Any:
        arrays.extend([leaf] if isinstance(leaf, jax.Array) else [])
        return leaf

    with_arrays(drafter, note)
    return arrays
