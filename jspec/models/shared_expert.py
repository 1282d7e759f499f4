"""Puts the shared expert of a mixture among its experts, as further ones that every row uses.

The launches that multiply by a row's experts then multiply by these too. A shared expert whose width is a multiple of
an expert's is as many experts: their outputs add up to its own. Devices that divide a model have it apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jspec.models.layer_config import LayerConfig
from jspec.models.mlp_config import Experts
from pallas_kernels.layers import expert_bytes, int4
from pallas_kernels.layers.expert_matmul import MOST_ELEMENTS
from pallas_kernels.layers.quantized import Quantized

EXPERTS, SHARED = ("experts_gate_up", "experts_down"), ("gate_up", "down")

Change = Callable[[Experts, Mapping[str, Any]], dict[str, Any]]  # config and weights of a layer -> those that change
Record = TypeVar("Record")


def join_layers(configs: Sequence[LayerConfig], layers: Sequence[dict[str, Any]]) -> None:
    """Join shared experts to experts, in place, one layer after another; the others' weights stay as they are.

    Peak memory is that of the weights and of one layer, if nothing else refers to the arrays.

    Args:
        configs: config of each layer.
        layers: weights of each layer by field of `LayerWeights`, arrays or `jax.ShapeDtypeStruct`.
    """
    for config, layer in zip(configs, layers, strict=True):
        if isinstance(config.mlp, Experts):
            layer.update(jax.block_until_ready(_joined(config.mlp, layer)))


def joined(record: Record) -> Record:
    """Return a model or a head on one device with its shared experts joined to its experts, where they fit."""
    return _changed(record, _joined)


def apart(record: Record) -> Record:
    """Return a model or a head with its shared experts apart from its experts, the inverse of `joined`."""
    return _changed(record, _apart)


def _changed(record: Any, change: Change) -> Any:
    both = zip(record.layers, record.config.layers, strict=True) if hasattr(record, "layers") else ()
    changes = {
        index: change(config.mlp, {name: getattr(layer, name) for name in (*EXPERTS, *SHARED)})
        for index, (layer, config) in enumerate(both)
        if isinstance(config.mlp, Experts)
    }
    if not any(changes.values()):
        return record
    return record.replace(layers=[one.replace(**changes.get(index, {})) for index, one in enumerate(record.layers)])


def _joined(config: Experts, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that change; none if there is no shared expert, or none that fits to the experts."""
    experts, shared = ([layer.get(name) for name in names] for names in (EXPERTS, SHARED))
    if not config.shared_count or any(weight is None for weight in shared):
        return {}
    as_experts = partial(_as_experts, width=config.width)
    if not all(map(_fits, experts, jax.eval_shape(as_experts, *shared))):
        return {}

    def join(experts: list[Any], shared: list[Any]) -> list[Any]:
        pairs = zip(experts, as_experts(*shared), strict=True)
        return [jax.tree.map(lambda *both: jnp.concatenate(both), *pair) for pair in pairs]

    return dict(zip(EXPERTS, _evaluated(join, experts, shared), strict=True)) | dict.fromkeys(SHARED)


def _apart(config: Experts, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that change; none if the shared expert is not joined."""
    experts = [layer[name] for name in EXPERTS]
    if layer["gate_up"] is not None or not config.shared_count or experts[0].shape[0] == config.router.count:
        return {}

    def divide(experts: list[Any]) -> dict[str, Any]:
        others = [jax.tree.map(lambda array: array[: config.router.count], weight) for weight in experts]
        return dict(zip((*EXPERTS, *SHARED), (*others, *shared_weights(config, *experts)), strict=True))

    return _evaluated(divide, experts)


def _evaluated(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute a function of weights, or only the shapes of its values if the weights are shapes."""
    is_abstract = isinstance(jax.tree.leaves(arguments)[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(function, *arguments) if is_abstract else jax.jit(function)(*arguments)


def shared_weights(config: Experts, gate_up: Any, down: Any) -> tuple[Any, Any]:
    """Return gate_up and down of the shared expert that is joined to experts, as they are apart."""
    own = (jax.tree.map(lambda array: array[config.router.count :], weight) for weight in (gate_up, down))
    return _as_one(*(_repacked(weight, expert_bytes.unpack, int4.pack) for weight in own))


def _fits(experts: Any, own: Any) -> bool:
    """Return whether further experts have the dtypes and sizes of others, and a kernel can address all of them."""
    leaves, others = jax.tree.leaves(experts), jax.tree.leaves(own)
    if len(leaves) != len(others):
        return False
    is_same = [(a.dtype, a.shape[1:]) == (b.dtype, b.shape[1:]) for a, b in zip(leaves, others, strict=True)]
    size = sum(math.prod(values.shape) for values in (leaves[0], others[0]))
    return all(is_same) and size < MOST_ELEMENTS


def _as_experts(gate_up: Any, down: Any, width: int) -> tuple[Any, Any]:
    """Return gate_up and down of a shared expert as those of experts of a width, one after another."""
    count = down.shape[1] // width

    def by_expert(rows: Any) -> Any:
        others = rows.shape[1:]
        return rows.reshape(2, count, width, *others).swapaxes(0, 1).reshape(count, 2 * width, *others)

    parts = [_columns(down, index * width, (index + 1) * width) for index in range(count)]
    found = jax.tree.map(by_expert, gate_up), jax.tree.map(lambda *own: jnp.stack(own), *parts)
    first, second = (_repacked(weight, int4.unpack, expert_bytes.pack) for weight in found)
    return first, second


def _columns(weight: Any, start: int, stop: int) -> Any:
    return weight.columns(start, stop) if isinstance(weight, Quantized) else weight[:, start:stop]


def _repacked(weight: Any, unpack: Callable[[Any], Any], pack: Callable[[Any], Any]) -> Any:
    """Return a weight, which has another order of its bytes if it has four bits."""
    is_packed = isinstance(weight, Quantized) and weight.kind == "int4"
    return replace(weight, values=pack(unpack(weight.values))) if is_packed else weight


def _as_one(gate_up: Any, down: Any) -> tuple[Any, Any]:
    """Return gate_up and down of experts as those of one, the inverse of `_as_experts` without its packing."""

    def of_rows(rows: Any) -> Any:
        count, twice, *others = rows.shape
        return rows.reshape(count, 2, twice // 2, *others).swapaxes(0, 1).reshape(count * twice, *others)

    def of_columns(columns: Any) -> Any:
        count, hidden, *others = columns.shape
        if not others:  # scales of rows, which the parts of a row share
            return columns[0]
        return columns.swapaxes(0, 1).reshape(hidden, count * others[0], *others[1:])

    return jax.tree.map(of_rows, gate_up), jax.tree.map(of_columns, down)
