"""Brings low-rank adapters into the form in which a target computes with them, on its devices.

A weight that is fused from several tensors of a checkpoint has the A of each part one above the other, and the B of
each part in columns of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from convert.fields import listed
from convert.huggingface import is_stacked, unselected
from jspec.models import families
from jspec.models.adapter_files import AdapterFile, ModuleAdapter
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.decoder import Model
from jspec.models.load import text_names
from jspec.models.mlps.mlp_config import Dense
from jspec.models.parts.adapter_tables import AdapterTables, LowRank
from jspec.models.parts.param_spec import ParamSpec
from jspec.models.weights.params import model_params
from jspec.models.weights.tensor_parallel import device_rows, put, spec_of
from pallas_kernels.layers.shard import AXIS

MULTIPLE = 64  # the number of columns of all tables is a multiple of this, for the deterministic product
WEIGHT = re.compile(r"layers\.(\d+)\.(qkv|o|q_up|(gate_up|down))")


@dataclass(frozen=True)
class AdaptableWeight:
    """A weight that may have adapters.

    Attributes:
        spec: declaration of the weight.
        modules: number of rows of each of the modules that are concatenated to the weight, by name.
        index: rows of the concatenation that the weight has, in its order; None: all.
    """

    spec: ParamSpec
    modules: Mapping[str, int]
    index: np.ndarray | None

    def width(self, rank: int) -> int:
        """Return the number of columns of a table of adapters of a rank."""
        return rank * len(self.modules)

    def of(self, tables: int, rank: int) -> tuple[ParamSpec, ParamSpec]:
        """Return the declarations of A and B of some tables."""
        return self.shapes(-(-tables * self.width(rank) // MULTIPLE) * MULTIPLE)

    def shapes(self, columns: int) -> tuple[ParamSpec, ParamSpec]:
        """Return the declarations of A and B with a number of columns; they are divided as the weight is."""
        (out, inner), (out_axis, inner_axis) = self.spec.shape, self.spec.axes
        a = ParamSpec((columns, inner), ("", inner_axis))
        return a, ParamSpec((out, columns), (out_axis, ""), parts=self.spec.parts, unit=self.spec.unit)

    def device_modules(self, devices: int) -> tuple[int, ...]:
        """Return the number of rows of each module that each of several devices has.

        The result is () if a device's rows are not those of one module after another, in the order of the modules.
        """
        rows = np.arange(self.spec.shape[0]) if self.index is None else self.index
        order = device_rows(self.spec, devices)
        rows = rows if order is None else rows[order]
        module = np.searchsorted(np.cumsum(list(self.modules.values())), rows, side="right")
        module = module.reshape(devices if spec_of(self.spec)[0] == AXIS else 1, -1)
        is_in_order = (module == np.sort(module[0])).all()
        return tuple(np.bincount(module[0], minlength=len(self.modules)).tolist()) if is_in_order else ()


@lru_cache(maxsize=8)
def adaptable_weights(config: ModelConfig) -> Sequence[Mapping[str, AdaptableWeight]]:
    """Return the weights of a model that may have adapters, for each layer by name.

    These are the projections of mixers, except those of keys and values from a latent vector, of the gates of gated
    delta nets, and of Mamba 2, whose steps are rows of the same tensor; and the projections of feed-forward layers that
    are no experts.
    """
    params, layers = model_params(config), [dict[str, AdaptableWeight]() for _ in config.layers]
    rows = {row.parameter: (row, *unselected(row)) for row in families.family_of(config.family).weights(config, ())}
    adaptable = {
        name: match
        for name, (_, stored, _) in rows.items()
        if (match := WEIGHT.fullmatch(name)) and is_stacked(stored)
        if match[3] is None or isinstance(config.mlps[int(match[1])], Dense)
    }
    others = {tensor for name, (row, _, _) in rows.items() if name not in adaptable for tensor in row.sources}
    for parameter, match in adaptable.items():
        _, stored, index = rows[parameter]
        if others.isdisjoint(stored.sources):
            modules = {name.removesuffix(".weight"): shape[0] for name, shape in stored.sources.items()}
            layers[int(match[1])][match[2]] = AdaptableWeight(params[parameter], modules, index)
    return layers


def empty_tables(model: Model, tables: int, rank: int) -> AdapterTables:
    """Return tables of zeros for adapters of a model, on its devices.

    Args:
        model: the weights, on their devices.
        tables: number of tables.
        rank: largest rank of an adapter.
    """

    devices = 1 if model.mesh is None else model.mesh.size

    def zeros(weight: AdaptableWeight) -> LowRank:
        a, b = weight.of(tables, rank)
        return LowRank(
            _zeros(a, model), _zeros(b, model), weight.width(rank), rank, tables, weight.device_modules(devices)
        )

    return AdapterTables(
        [{n: zeros(weight) for n, weight in layer.items()} for layer in adaptable_weights(model.config)]
    )


def table_bytes(model: Model, tables: int, rank: int) -> int:
    """Return the bytes of `empty_tables` on each device."""
    if not tables:
        return 0  # also for layers that no file of the family has
    shapes = [
        _shape(spec, model)
        for layer in adaptable_weights(model.config)
        for weight in layer.values()
        for spec in weight.of(tables, rank)
    ]
    on_device = (s.shape if s.sharding is None else s.sharding.shard_shape(s.shape) for s in shapes)
    return sum(map(math.prod, on_device)) * model.dtype.itemsize


def _shape(spec: ParamSpec, model: Model) -> jax.ShapeDtypeStruct:
    """Return the shape of an array on a model's devices, with its sharding if they are several."""
    shape = jax.ShapeDtypeStruct(spec.shape, model.dtype)
    return shape if model.mesh is None else put(shape, spec, model.mesh)


def _zeros(spec: ParamSpec, model: Model) -> jax.Array:
    shape = _shape(spec, model)
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding or jax.tree.leaves(model)[0].sharding)


def as_tables(adapter: AdapterFile, model: Model, rank: int) -> list[dict[str, LowRank]]:
    """Return an adapter as one table, on the host and in the model's dtype, for each layer by name of the weight.

    Args:
        adapter: the adapter.
        model: the weights, or their shapes.
        rank: largest rank of a table.

    Raises:
        ValueError: the adapter has a larger rank, or modules that the model does not have or whose weights can have no
            adapter, or of other sizes.
    """
    if adapter.rank > rank:
        raise ValueError(f"expected an adapter of rank {rank} at most, got {adapter.rank}; raise adapter_rank")
    stored = text_names(f"{module}.weight" for module in adapter.modules)
    factors = {n.removesuffix(".weight"): adapter.modules[s.removesuffix(".weight")] for n, s in stored.items()}
    layers = adaptable_weights(model.config)
    known = {module for layer in layers for weight in layer.values() for module in weight.modules}
    if unknown := sorted(factors.keys() - known):
        kinds = listed(sorted({name.rpartition(".")[2] for name in known}))
        raise ValueError(
            f"expected adapters of {kinds}, got {listed(unknown)}; merge the adapter into its model, or train one "
            "without these modules"
        )
    return [{name: _table(weight, factors, rank, model.dtype) for name, weight in layer.items()} for layer in layers]


def _table(weight: AdaptableWeight, factors: Mapping[str, ModuleAdapter], rank: int, dtype: jnp.dtype) -> LowRank:
    """Return the table of one weight, with zeros for modules without an adapter."""
    inner, width = weight.spec.shape[1], weight.width(rank)
    a, b = np.zeros((width, inner), np.float32), np.zeros((sum(weight.modules.values()), width), np.float32)
    row = 0
    for i, (module, rows) in enumerate(weight.modules.items()):
        if module in factors:
            part, column = factors[module], i * rank
            got, wanted = (part.b.shape[0], part.a.shape[1]), (rows, inner)
            if got != wanted:
                raise ValueError(f"{module}: expected {wanted} outputs and inputs, got {got}; take the adapter's model")
            if not all(np.isfinite(array.astype(dtype)).all() for array in (part.a, part.b)):
                raise ValueError(f"{module}: expected finite values in {dtype}, got NaN or infinity; check the scales")
            a[column : column + len(part.a)] = part.a
            b[row : row + rows, column : column + len(part.a)] = part.b
        row += rows
    return LowRank(a.astype(dtype), (b if weight.index is None else b[weight.index]).astype(dtype), width, rank)


def no_adapter(model: Model, rank: int) -> list[dict[str, LowRank]]:
    """Return a table of zeros in the form of `as_tables`."""
    return as_tables(AdapterFile({}, 0, b""), model, rank)


def on_devices(adapter: Sequence[Mapping[str, LowRank]], model: Model) -> list[dict[str, LowRank]]:
    """Return the table of `as_tables` on the devices of a model."""
    layers = []
    for layer, weights in zip(adapter, adaptable_weights(model.config), strict=True):
        layers.append({name: _put(layer[name], weights[name], model) for name in layer})
    return layers


def _put(table: LowRank, weight: AdaptableWeight, model: Model) -> LowRank:
    if model.mesh is None:
        return jax.device_put(table, jax.tree.leaves(model)[0].sharding)
    a, b = weight.shapes(table.width)
    return replace(table, a=put(table.a, a, model.mesh), b=put(table.b, b, model.mesh))
