"""Runs a step on all devices of a mesh at once, each with its own part of the weights and of the KV pools."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec.core.config import EngineConfig
from jspec.core.records import SlotState
from jspec.core.shared_leaves import once
from jspec.core.shorten import short
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.tensor_parallel import layout, local, local_shapes, mesh_of, state_layout, to_devices
from jspec.step.program import KERNELS_IN_GRAPHS, Params, Program, init_state, is_on_gpus
from pallas_kernels.layers.shard import AXIS

logger = logging.getLogger(__name__)

EVERYWHERE = P()  # every device has the whole array
Step = Callable[..., Any]
Devices = Sequence[jax.Device] | int | None


def mesh_for(config: EngineConfig, target: Model | None = None) -> Mesh | None:
    """Return the mesh over whose devices an engine divides its weights; None: the engine uses the default device.

    Args:
        config: options of the engine.
        target: a loaded target, which may be divided over a mesh already.

    Raises:
        ValueError: there are fewer devices than asked for, or the target is on another mesh.
    """
    target_mesh = None if target is None else target.mesh
    mesh = config.mesh or target_mesh
    if mesh is None:
        return mesh_of(config.tensor_parallel) if config.tensor_parallel > 1 else None
    if target_mesh not in (None, mesh):
        raise ValueError(f"mesh: expected {target_mesh}, over which the target is divided, got {mesh}; leave it out")
    if config.tensor_parallel not in (1, mesh.size):
        raise ValueError(
            f"tensor_parallel: expected {mesh.size}, the number of devices of the mesh, got {config.tensor_parallel}; "
            "leave it out"
        )
    return mesh


def spans_processes(mesh: Mesh | None) -> bool:
    """Return whether a mesh has devices of several processes."""
    return mesh is not None and mesh.is_multi_process


def meshes_of(devices: Devices, size: int) -> list[Mesh]:
    """Return meshes of ``size`` devices each, over consecutive devices.

    Args:
        devices: the devices; or their number, of which the first are taken; None: all devices of this process.
        size: number of devices of a mesh.

    Raises:
        TypeError, ValueError: these are no devices, none, more than there are, one twice, or no multiple of ``size``.
    """
    available = jax.local_devices()
    if devices is None or type(devices) is int:
        count = len(available) if devices is None else devices
        if not 1 <= count <= len(available):
            raise ValueError(
                f"devices: expected 1 to {len(available)}, the number of {available[0].platform} devices, got {count}"
            )
        devices = available[:count]
    if not isinstance(devices, Sequence) or not all(isinstance(each, jax.Device) for each in devices):
        raise TypeError(f"devices: expected jax devices, such as jax.devices(), or their number, got {short(devices)}")
    if twice := [each for index, each in enumerate(devices) if each in devices[:index]]:
        raise ValueError(f"devices: expected each device once, got {twice[0]} twice")
    if not devices:
        raise ValueError("devices: expected at least one device, got none")
    if type(size) is not int or size < 1 or len(devices) % size:
        raise ValueError(f"tensor_parallel: expected a divisor of {len(devices)}, the number of devices, got {size!r}")
    return [Mesh(np.array(devices[first : first + size]), (AXIS,)) for first in range(0, len(devices), size)]


def log_devices(mesh: Mesh | None) -> None:
    """Log on which devices an engine runs, and that an old jax runs the exchanges of several outside of graphs."""
    if mesh is None:
        return
    (first, *_), late = mesh.devices.flat, ""
    if mesh.size == 1:
        logger.info("the engine runs on %s", first)
        return
    if is_on_gpus(mesh) and jax.__version_info__ < KERNELS_IN_GRAPHS:
        late = f"; jax {jax.__version__} divides a round into many CUDA graphs, jax 0.12 does not and is faster"
    logger.info("weights are divided over %d devices (%s)%s", mesh.size, first.device_kind, late)


def step_on(
    mesh: Mesh | None, step: Step, params: Params, *, has_output: bool = True, divides_logits: bool = False
) -> Step:
    """Return a step (params, state, *inputs) -> (state, output) that runs on all devices of a mesh.

    Args:
        mesh: the devices; None: one device, for which the step is returned unchanged.
        step: the step on one device. Its inputs and its output are equal on all devices.
        params: the parameters, on the mesh; only their shardings are used.
        has_output: whether the step returns an output; False: it returns the state alone.
        divides_logits: as in `Program`.
    """
    if mesh is None:
        return step
    specs, devices = layout(params), mesh.size

    def on_device(params: Params, *arguments: Any) -> Any:
        return step(local(params, specs, devices, gathers=not divides_logits), *arguments)

    def on_all(params: Params, state: SlotState, *inputs: Any) -> Any:
        pools = state_layout(state)
        in_specs = (specs, pools, *[EVERYWHERE] * len(inputs))
        out_specs = (pools, EVERYWHERE) if has_output else pools
        return _shard_map(on_device, mesh, in_specs, out_specs)(params, state, *inputs)

    return on_all


def helper_on(mesh: Mesh | None, function: Step, specs: Any = EVERYWHERE) -> Step:
    """Return a function of a part of the state and of an array, for all devices of a mesh; None: for one device.

    Args:
        mesh: the devices.
        function: the function on one device.
        specs: how the part of the state is divided.
    """
    return function if mesh is None else _shard_map(function, mesh, (specs, EVERYWHERE), specs)


def _shard_map(function: Step, mesh: Mesh, in_specs: Any, out_specs: Any) -> Step:
    # Kernels do not say how their outputs differ between devices, which jax would check.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def make_state(program: Program, params: Params, pool: PoolShape) -> SlotState:
    """Make the initial slot state on the devices of the program's mesh, or on one device."""
    if program.mesh is None:
        return init_state(program, params, pool)
    of_device, specs = on_one(program, params), layout(params)
    pools = state_layout(jax.eval_shape(lambda: init_state(*of_device, pool)))
    devices = program.mesh.size
    make = partial(_init_local, of_device[0], specs, devices, pool)
    return jax.jit(_shard_map(make, program.mesh, (specs,), pools))(params)


def _init_local(program: Program, specs: Any, devices: int, pool: PoolShape, params: Params) -> SlotState:
    return init_state(program, local(params, specs, devices), pool)


def on_one(program: Program, params: Params) -> tuple[Program, Params]:
    """Return the program and the shapes of the parameters of one of the devices."""
    if program.mesh is None:
        return program, shared_shapes(params)
    return replace(program, mesh=None), local_shapes(params, program.mesh)


def shared_shapes(tree: Any) -> Any:
    """Return the shapes of arrays of one device; arrays that are shared in the tree are shared shapes."""
    return jax.tree.map(once(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)), tree)


def shapes_of(tree: Any, mesh: Mesh | None) -> Any:
    """Return the shapes of arrays, with their shardings on a mesh; arrays without one are on every device."""
    if mesh is None:
        return jax.eval_shape(lambda: tree)
    everywhere = NamedSharding(mesh, EVERYWHERE)

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf_sharding = getattr(leaf, "sharding", None)
        sharding = leaf_sharding if isinstance(leaf_sharding, NamedSharding) else everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)


def sender(mesh: Mesh | None) -> Callable[[Any], Any]:
    """Return the function that sends arrays of the host to the devices, to every device of a mesh the same."""
    if mesh is None:
        return jax.device_put
    everywhere = NamedSharding(mesh, EVERYWHERE)
    if everywhere.is_fully_addressable:
        return partial(jax.device_put, device=everywhere)
    return partial(jax.tree.map, partial(to_devices, sharding=everywhere))
