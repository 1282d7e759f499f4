"""Brings arrays from some devices to others without the host, through which `jax.device_put` sends divided ones.

A trainer has its weights on a mesh of its own, which need not be the engine's.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P


def with_auto_axes(array: Any) -> Any:
    """Return an array with the buffers of another, whose mesh may have explicit axes, the default of `jax.make_mesh`.

    A program of arrays over such axes must state how each of its results is divided.
    """
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.are_all_axes_auto:
        return array
    names = sharding.mesh.axis_names
    mesh = Mesh(sharding.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
    return jax.device_put(array, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))


def on_one(array: jax.Array) -> jax.Array:
    """Return an array on one device with all values of an array that may be divided over several.

    Raises:
        ValueError: the array is divided in another way than over the axes of a mesh.
    """
    sharding = array.sharding
    if len(sharding.device_set) == 1:
        return array
    if not sharding.is_fully_replicated:
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"weights: expected arrays divided over the axes of a mesh, got {sharding}; bring them there"
            )
        array = over_mesh(array, NamedSharding(sharding.mesh, P()))
    return array.addressable_data(0)


def moved(array: Any, sharding: Sharding) -> jax.Array:
    """Return an array of the host or of devices on other devices, all of this process."""
    if not isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    places = sharding.addressable_devices_indices_map(array.shape)
    if array.sharding.is_equivalent_to(sharding, array.ndim) or len(places) == len(array.sharding.device_set) == 1:
        return jax.device_put(array, sharding)
    whole = on_one(array)
    parts = [jax.device_put(_part(whole, index), device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _part(array: jax.Array, index: tuple[slice, ...] | None) -> jax.Array:
    assert index is not None
    bounds = [each.indices(size)[:2] for each, size in zip(index, array.shape, strict=True)]
    starts, stops = (tuple(ends) for ends in zip(*bounds, strict=True)) if bounds else ((), ())
    return array if stops == array.shape and not any(starts) else _slice(array, starts, stops)


_slice = jax.jit(jax.lax.slice, static_argnums=(1, 2))  # a program has the bounds, so the host sends nothing


def over_mesh(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return an array divided otherwise over the devices that it is on, by a program of theirs."""
    return jax.jit(_same, out_shardings=sharding)(array)


def _same(array: jax.Array) -> jax.Array:
    return array
