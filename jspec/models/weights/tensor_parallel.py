"""Divides weights over devices (tensor parallelism), by the names of the axes that their declarations give.

Each device has some heads, some channels of the feed-forward or some of its experts, and some rows of the output head;
all else is on every device. Outside of a step, a record of weights (`Weights`) has whole arrays, divided over a mesh of
one axis. The step runs in `jax.shard_map`, where `local` returns the record of one device: its parts of the weights and
its config.

Fused parameters are stored in the order of the devices: first the rows of the first device, from each of the fused
tensors, then those of the second. If there are fewer key-value heads than devices, some devices have the same heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convert.fields import CheckpointError
from convert.orbax import QUANTIZED, Header, Placement, sample
from jspec import distributed
from jspec.core.records import LayerState
from jspec.core.shared_leaves import once
from jspec.models.config.decoder_config import DecoderConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mlps.mlp_config import Dense, Mlp, NoMlp
from jspec.models.mlps.shared_expert import check_apart
from jspec.models.parts.adapter_tables import AdapterTables
from jspec.models.parts.checks import check_divided
from jspec.models.parts.param_spec import Params, ParamSpec
from jspec.models.parts.transfer import moved, over_mesh, with_auto_axes
from pallas_kernels.layers.packed.int4 import reblocked
from pallas_kernels.layers.shard import AXIS, Shard
from pallas_kernels.layers.weights import Quantized

INNER = ("heads", "mlp")  # axes between two products: the second product adds up the parts of all devices
# Axes that are divided over the devices; outputs along axes that are not in INNER are put side by side.
DIVIDED = (*INNER, "projection", "vocab", "draft_vocab", "fused", "experts")
EXPERTS_DOWN = ("experts", "hidden", "channels")  # axes of the weight whose products the devices add up
Tree = TypeVar("Tree")


@runtime_checkable
class Weights(Protocol):
    """A record of weights that can be divided over devices.

    Attributes:
        config: config of the layers.
        mesh: mesh over whose devices the weights are divided; None: they are not.
    """

    config: Any
    mesh: Mesh | None

    def declared(self) -> Params:
        """Return the declaration of each weight, by the names of the fields that lead to it."""

    def replace(self, **changes: Any) -> Self: ...


def mesh_of(devices: int) -> Mesh:
    """Return a mesh over the first devices; of several processes, over equally many of each.

    Raises:
        ValueError: there are fewer devices, or they cannot be divided by the processes.
    """
    available, processes = jax.devices(), jax.process_count()
    if devices > len(available):
        raise ValueError(
            f"tensor_parallel: expected at most {len(available)}, the number of {available[0].platform} devices, got "
            f"{devices}"
        )
    if devices % processes:
        raise ValueError(
            f"tensor_parallel: expected a multiple of {processes}, the number of processes, got {devices}; take as "
            "many devices of each"
        )
    taken = [
        [device for device in available if device.process_index == i][: devices // processes] for i in range(processes)
    ]
    if short := [i for i, of_process in enumerate(taken) if len(of_process) < devices // processes]:
        raise ValueError(
            f"tensor_parallel: expected at most {processes * len(taken[short[0]])}, as process {short[0]} has "
            f"{len(taken[short[0]])} devices, got {devices}"
        )
    return Mesh(np.array(taken).reshape(-1), (AXIS,))


def spec_of(param: ParamSpec) -> P:
    """Return how a parameter is divided."""
    return P(*(AXIS if name in DIVIDED else None for name in param.axes))


def sharding_of(param: ParamSpec, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec_of(param))


def device_rows(param: ParamSpec, devices: int) -> np.ndarray | None:
    """Return the indices of the rows of all devices, device after device; None: they are in this order already."""
    if devices == 1 or param.axes[:1] == () or param.axes[0] not in DIVIDED:
        return None
    indices, first = [], 0
    units = param.unit if isinstance(param.unit, tuple) else (param.unit,) * len(param.parts)
    for rows, unit in zip(param.parts, units, strict=True):
        pieces = np.arange(first, first + rows).reshape(min(rows // unit, devices), -1)
        indices.append(np.repeat(pieces, devices // len(pieces), axis=0))
        first += rows
    return np.concatenate(indices, axis=1).reshape(-1) if indices else None


def put(array: Any, param: ParamSpec, mesh: Mesh, *, is_ordered: bool = False) -> Any:
    """Divide one parameter over the devices of a mesh; each device gets its own part only.

    Rows that are no fused ones, such as those of tokens, are padded to a multiple of the number of devices.

    Args:
        array: array of the host or of devices, or a `jax.ShapeDtypeStruct`.
        param: declaration of the parameter.
        is_ordered: whether the rows are in the order of the devices already.
    """
    sharding, order = sharding_of(param, mesh), None if is_ordered else device_rows(param, mesh.size)
    padding = -array.shape[0] % mesh.size if array.ndim and sharding.spec[0] == AXIS and not param.parts else 0
    if isinstance(array, jax.ShapeDtypeStruct):
        rows = array.shape[:1] if order is None else order.shape
        return jax.ShapeDtypeStruct((rows[0] + padding, *array.shape[1:]), array.dtype, sharding=sharding)
    ordered = _in_order(array, None if order is None else param, mesh.size, padding)
    if _is_on(array, mesh) and (order is not None or not sharding.is_fully_addressable):
        return over_mesh(ordered, sharding)
    if not sharding.is_fully_addressable:
        _compare_later(sample(ordered))
    return to_devices(ordered, sharding)


def _in_order(array: Any, param: ParamSpec | None, devices: int, padding: int) -> Any:
    """Return an array with rows in the order of the devices; None: in the old order, with rows of zeros behind."""
    if param is None and not padding:
        return array
    if not isinstance(array, np.ndarray):
        return _in_order_on_device(with_auto_axes(array), param, devices, padding)
    if param is None:
        return np.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)])
    return array[device_rows(param, devices)]


@partial(jax.jit, static_argnums=(1, 2, 3))  # a program has the order, so the host sends nothing
def _in_order_on_device(array: jax.Array, param: ParamSpec | None, devices: int, padding: int) -> jax.Array:
    rows = array if param is None else array[device_rows(param, devices)]
    return jax.numpy.pad(rows, [(0, padding), *[(0, 0)] * (array.ndim - 1)])


def compare_folder(header: Header, mesh: Mesh) -> None:
    """Add samples of a converted folder's weights to what all processes compare, since each reads its own parts alone.

    Raises:
        CheckpointError: the folder has no samples, because an earlier version has written it.
    """
    if not mesh.is_multi_process:
        return
    if not header.samples:
        raise CheckpointError(
            header.folder, "expected samples of the weights, which several processes compare, got none; convert the "
            "model again",
        )  # fmt: skip
    _compare_later(header.samples.encode())


def _compare_later(values: bytes) -> None:
    """Add values of weights to what all processes compare when they make an engine."""
    job = distributed.current()
    if job is not None:  # else the engine is refused
        job.weights.update(values)


def to_devices(array: Any, sharding: NamedSharding) -> jax.Array:
    """Divide an array of this process over devices; of other processes' devices only the sharding is used."""
    if sharding.is_fully_addressable:
        return moved(array, sharding)
    on_host = np.asarray(array)
    return jax.make_array_from_callback(on_host.shape, sharding, lambda part: on_host[part])


def put_named(name: str, array: Any, params: Params, mesh: Mesh, kinds: Mapping[str, str] | None = None) -> jax.Array:
    """Divide a stored array over the devices of a mesh.

    Args:
        name: name of the array: that of a parameter, or with ".values", ".scale" or ".zeros" that of a part of a
            quantised one.
        array: the whole array, in the order of the checkpoint.
        params: declarations of the parameters.
        mesh: the devices.
        kinds: kind of each quantised parameter, by name; None: there are none.
    """
    base, _, part = name.rpartition(".")
    if kinds is None or base not in kinds:
        return put(array, params[name], mesh)
    array = _divisible(array, params[base], mesh.size, kinds[base], is_values=part == "values")
    return put(array, of_part(params[base], array), mesh)


def placement(params: Params, shapes: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh) -> Placement:
    """Return how to read the arrays of a converted folder, so that each device reads its share of the rows or columns.

    `put_named` then brings fused rows into the order of the devices.
    """

    def sharding(name: str) -> NamedSharding:
        base, _, kind = name.rpartition(".")
        shape = shapes[name]
        spec = spec_of(of_part(params[base], shape) if kind in QUANTIZED else params[name])
        sizes = zip(spec, shape.shape, strict=True)
        return NamedSharding(mesh, P(*(axis if size % mesh.size == 0 else None for axis, size in sizes)))

    return sharding


def _is_on(array: Any, mesh: Mesh) -> bool:
    sharding = getattr(array, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def of_part(param: ParamSpec, array: Any) -> ParamSpec:
    """Return the declaration of an array of a quantised parameter: [rows], [rows, groups] or [rows, blocks, bytes]."""
    axes = (*param.axes, "")[: len(array.shape)]
    return replace(param, shape=(*param.shape[:1], *array.shape[1:]), axes=axes)


def place(tree: Tree, mesh: Mesh) -> Tree:
    """Divide all weights in a tree over the devices of a mesh.

    Arrays that are not in a `Weights` record are copied to every device, except those of `AdapterTables`, which are
    divided already. Arrays that are on the mesh and declared without a divided axis stay as they are, because another
    record shares them.

    Raises:
        ValueError: a number of heads or channels cannot be divided; the message names it. Or weights are divided over
            other devices.
    """
    return jax.tree.map(lambda node: _place(node, mesh), tree, is_leaf=_is_record)


def _is_weights(node: Any) -> bool:
    return isinstance(node, Weights)


def _is_record(node: Any) -> bool:
    return isinstance(node, (Weights, AdapterTables))


def _place(node: Any, mesh: Mesh) -> Any:
    if isinstance(node, AdapterTables):
        return node
    if not isinstance(node, Weights):
        return put(node, ParamSpec(node.shape, ("",) * node.ndim), mesh)
    check_apart(node)
    local_config(node.config, mesh.size)  # raises an error that names what cannot be divided
    if node.mesh not in (None, mesh):
        raise ValueError(
            f"mesh: expected weights that are on one device or over {mesh}, got some over {node.mesh}; load them again"
        )
    is_ordered = node.mesh == mesh

    def put_leaf(leaf: Any, param: ParamSpec) -> Any:
        if isinstance(leaf, Quantized):

            def put_part(array: Any, is_values: bool) -> Any:
                array = _divisible(array, param, mesh.size, leaf.kind, is_values=is_values)
                return put(array, of_part(param, array), mesh, is_ordered=is_ordered)

            zeros = None if leaf.zeros is None else put_part(leaf.zeros, False)
            return replace(leaf, values=put_part(leaf.values, True), scale=put_part(leaf.scale, False), zeros=zeros)
        if _is_on(leaf, mesh) and AXIS not in (spec := spec_of(param)) and leaf.sharding.spec == spec:
            return leaf
        return put(leaf, param, mesh, is_ordered=is_ordered)

    return _map(put_leaf, node).replace(mesh=mesh)


def _divisible(array: Any, param: ParamSpec, devices: int, kind: str, *, is_values: bool) -> Any:
    """Return an array of a quantised parameter whose groups or blocks of columns are not cut between two devices.

    Raises:
        ValueError: a device would get an odd number of packed columns.
    """
    if array.ndim == 1 or spec_of(param)[1] is None or array.shape[1] % devices == 0:
        return array
    if is_values:
        return reblocked(array, devices) if kind == "int4" else array
    groups = array.shape[1]
    return array.repeat(math.lcm(groups, devices) // groups, axis=1)


def _map(function: Callable[..., Any], node: Weights, *others: Any) -> Any:
    """Return a record whose weights are those of ``function(weight, *other weights, declaration)``."""
    params = node.declared()

    def of(path: tuple[Any, ...], *leaves: Any) -> Any:
        return function(*leaves, params[jax.tree_util.keystr(path, simple=True, separator=".")])

    return jax.tree_util.tree_map_with_path(of, node, *others, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def layout(tree: Any) -> Any:
    """Return the `PartitionSpec` of every array in a tree whose arrays are on a mesh."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def state_layout(state: Any) -> Any:
    """Return how the arrays of a slot state are divided: layers' states as they say; all else is on every device."""

    def specs(node: Any) -> Any:
        return node.specs(AXIS) if isinstance(node, LayerState) else P()

    return jax.tree.map(specs, state, is_leaf=lambda node: isinstance(node, LayerState))


def local(tree: Any, specs: Any, devices: int, *, gathers: bool = True) -> Any:
    """Return the weights of one of several devices as `Shard`, with configs of its heads and channels.

    Args:
        tree: tree of weights, whose arrays are the parts of one device.
        specs: `layout` of the whole arrays.
        devices: number of devices.
        gathers: whether products by rows, such as logits, are gathered (`Shard.gathers`).
    """
    return jax.tree.map(partial(_local, devices=devices, gathers=gathers), tree, specs, is_leaf=_is_weights)


def _local(node: Any, specs: Any, *, devices: int, gathers: bool) -> Any:
    if not isinstance(node, Weights):
        return node
    if devices == 1:
        return node.replace(mesh=None)

    def shard(leaf: Any, spec: Any, param: ParamSpec) -> Any:
        mesh_axes = tuple(spec.values if isinstance(spec, Quantized) else spec)
        if param.axes == EXPERTS_DOWN:
            return Shard(leaf, "columns", param.shape[1])  # of all experts' down projections side by side
        if len(param.axes) == 2 and mesh_axes[:1] == (AXIS,) and param.axes[0] not in (*INNER, "experts"):
            return Shard(leaf, "rows", param.shape[0], gathers)
        is_inner = mesh_axes[1:2] == (AXIS,) and param.axes[1] in INNER
        return Shard(leaf, "columns", param.shape[0]) if is_inner else leaf

    return _map(shard, node, specs).replace(config=local_config(node.config, devices), mesh=None)


def local_shapes(tree: Any, mesh: Mesh) -> Any:
    """Return the weights of one device as shapes; arrays that are shared in the tree are shared shapes."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

    return local(jax.tree.map(once(shape), tree), layout(tree), mesh.size)


def local_config(config: DecoderConfig, devices: int) -> Any:
    """Return the config of one device's heads and channels.

    Raises:
        ValueError: heads or channels cannot be divided by the number of devices.
    """
    layers: dict[LayerConfig, LayerConfig] = {layer: _local_layer(layer, devices) for layer in set(config.layers)}
    return replace(config, layers=tuple(layers[layer] for layer in config.layers))


def _local_layer(layer: LayerConfig, devices: int) -> LayerConfig:
    return replace(layer, mixer=layer.mixer.divided(devices), mlp=_local_mlp(layer.mlp, devices))


def _local_mlp(mlp: Mlp, devices: int) -> Mlp:
    """Return the config of one device's channels; its experts are known from their weights."""
    if isinstance(mlp, NoMlp):
        return mlp
    if isinstance(mlp, Dense):
        check_divided("intermediate_size", mlp.width, devices)
        return replace(mlp, width=mlp.width // devices)
    check_divided("num_experts", mlp.router.count, devices)
    check_divided("width of the shared expert", mlp.shared, devices)
    return replace(mlp, shared=mlp.shared // devices)
