"""Makes a mesh of the devices that a caller names for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.core.shorten import short
from pallas_kernels.layers.shard import AXIS

Place: TypeAlias = jax.Device | Sequence[jax.Device] | Mesh  # one device, or devices over which weights are divided


def mesh_over(name: str, place: Place) -> Mesh:
    """Return a mesh over the given devices.

    Args:
        name: name of the argument, for the error.

    Raises:
        TypeError: the argument is of another type.
        ValueError: there is no device, or one twice, or another process', or the mesh has other axes.
    """
    mesh = _mesh_over(name, place)
    if mesh.is_multi_process:
        local_devices = ", ".join(map(str, jax.local_devices()))
        raise ValueError(
            f"{name}: expected devices of this process ({local_devices}), got {short([*mesh.devices.flat])}; take "
            "others, or leave it out and set tensor_parallel= of the engine, which divides the draft model over "
            "several processes"
        )
    return mesh


def _mesh_over(name: str, place: Place) -> Mesh:
    if isinstance(place, Mesh):
        if place.axis_names != (AXIS,):
            raise ValueError(f'{name}: expected a mesh of one axis named "{AXIS}", got axes {short(place.axis_names)}')
        return place
    devices = [place] if isinstance(place, jax.Device) else place
    if not isinstance(devices, Sequence) or not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(
            f"{name}: expected a device such as jax.devices()[1], several of them, or a jax.sharding.Mesh of one axis "
            f'named "{AXIS}", got {short(place)}'
        )
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(f"{name}: expected at least one device, each once, got {short(devices)}")
    return Mesh(np.array(devices), (AXIS,))
