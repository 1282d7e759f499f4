"""Makes the weights of an engine's programs from a target and a drafter, at the start and for an update."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jspec.core.config import EngineConfig
from jspec.core.shared_leaves import once
from jspec.draft.base import Drafter
from jspec.draft.dflash_head import BoundDFlash
from jspec.draft.draft_model import BoundModel
from jspec.models.config.decoder_config import DecoderConfig
from jspec.models.decoder import Model
from jspec.models.parts.transfer import on_one
from jspec.models.weights.quantize import quantize_weights, quantized_as
from jspec.models.weights.tensor_parallel import place
from jspec.step.program import Params

SHOWN = 5  # number of weights that an error names

logger = logging.getLogger(__name__)


def on_devices(target: Model, config: EngineConfig, mesh: Mesh | None) -> Model:
    """Return a target with the rotary embedding of the engine's ``max_len``, divided over its mesh and quantised.

    Without a mesh, arrays that are divided over devices, such as a trainer's, come to the default device.
    """
    target = for_length(target, config.max_len)
    target = jax.tree.map(_on_default, target) if mesh is None else place(target, mesh)
    return target if config.quantize is None else quantize_weights(target, config.quantize)


def drafter_on(drafter: Drafter, config: EngineConfig, mesh: Mesh | None) -> Drafter:
    """Return a drafter with the engine's ``draft_window``, divided over its mesh."""
    if config.draft_window is not None:
        drafter = drafter.with_window(config.draft_window)
    return drafter if mesh is None else drafter.on_mesh(mesh)


def _on_default(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf.sharding, SingleDeviceSharding):
        return leaf
    return jax.device_put(on_one(leaf), jax.config.jax_default_device or jax.local_devices()[0])  # type: ignore[attr-defined]


def bound(target: Model, drafter: Drafter, config: EngineConfig, mesh: Mesh | None) -> Params:
    """Bind a drafter to a target of `on_devices`; the drafter's weights and tables come to its devices."""
    params = Params(target=target, draft=for_length(drafter.bind(target), config.max_len))
    if mesh is None:
        return params
    return place(params, mesh) if drafter.mesh is None else replace(params, target=place(target, mesh))


def for_length(params: Any, max_len: int) -> Any:
    """Return a model or a head whose rotary embedding is that for texts of ``max_len`` tokens; others unchanged."""
    if isinstance(params, (BoundModel, BoundDFlash)):
        return replace(params, model=for_length(params.model, max_len))
    if not isinstance(config := getattr(params, "config", None), DecoderConfig):
        return params
    wanted = config.for_length(max_len)
    if wanted == config:
        return params
    logger.info("longrope: max_len %d is above %d, so long_factor is used", max_len, config.rope.original_max_position)
    return params.replace(config=wanted)


def check_config(new: Model, old: Model) -> None:
    """Raise a ValueError unless a target has the config of an engine's target."""
    if changes := config_changes(new, old):
        raise ValueError(_refusal("a target of the same config", changes))


def config_changes(new: Model, old: Model) -> str:
    """Return which fields of a model's config are not those of an old one's; "": none."""
    values = {
        field.name: (getattr(old.config, field.name), getattr(new.config, field.name)) for field in fields(old.config)
    }
    return ", ".join(f"{name} {was!r} is {now!r}" for name, (was, now) in values.items() if was != now)


def check_kind(new: Model, old: Model) -> None:
    """Raise a ValueError unless a target is quantised as an engine's target is."""
    got, wanted = (quantized_as(model) for model in (new, old))
    if got == wanted:
        return
    if got is None:
        remedy = (
            "unquantised ones: the engine's checkpoint was stored quantised, with scales that other weights lack. Make "
            "the engine of an unquantised checkpoint, with quantize= for such weights, or pass a checkpoint that is "
            "stored as the engine's is"
        )
    else:
        remedy = f"weights in {got}; pass unquantised ones"
    kind = "unquantised weights" if wanted is None else f"weights in {wanted}"
    raise ValueError(f"update_weights: expected {kind}, as the engine's are, got {remedy}. Nothing was changed")


def check_shapes(new: Params, old: Params) -> None:
    """Raise a ValueError unless programs that were compiled for an engine's weights, or shapes, run with others."""
    if changes := shape_changes(new, old):
        raise ValueError(_refusal("weights of the same names, shapes, dtypes and devices", changes))
    if jax.tree.structure(new) != jax.tree.structure(old):  # type: ignore[operator]
        raise ValueError(_refusal("a drafter of the same config and tree", "another"))


def shape_changes(new: Any, old: Any) -> str:
    """Return how the names, shapes, dtypes and devices of a tree's arrays are not those of an old one's; "": none."""
    wanted, got = _leaves(old), _leaves(new)
    faults = {
        "missing": sorted(wanted.keys() - got.keys()),
        "unknown": sorted(got.keys() - wanted.keys()),
        "other": [f"{n} ({got[n]} for {wanted[n]})" for n in wanted if n in got and got[n] != wanted[n]],
    }
    return "; ".join(f"{fault}: {_first(names)}" for fault, names in faults.items() if names)


def check_live(place: str, tree: Any) -> None:
    """Raise a ValueError if arrays of a tree were deleted, because their owner donated them to a program.

    Args:
        place: call and argument, for the error.
        tree: the tree; a value that is no tree of arrays has none.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)):
        raise ValueError(
            f"{place}: expected arrays, got some that were deleted, because they were donated to a program; pass the "
            "arrays that the program returned"
        )


def without(params: Params, others: Any) -> Params:
    """Return weights that share no buffer with the arrays of other trees: those that do are copied."""
    taken = {buffer for leaf in jax.tree.leaves(others) for buffer in _buffers(leaf)}
    return jax.tree.map(once(lambda leaf: leaf if taken.isdisjoint(_buffers(leaf)) else jnp.copy(leaf)), params)


def _buffers(leaf: Any) -> list[int]:
    """Return the addresses of an array's parts on devices."""
    if not isinstance(leaf, jax.Array):
        return []
    return [part.data.unsafe_buffer_pointer() for part in leaf.addressable_shards]


def _leaves(params: Any) -> Mapping[str, str]:
    """Return the shape, dtype and devices of each array as a text, by its name."""
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): _text(leaf) for path, leaf in named}


def _text(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    spec = getattr(sharding, "spec", None)
    devices = "" if sharding is None else f" on {sorted(device.id for device in sharding.device_set)}"
    return f"{leaf.dtype}{list(leaf.shape)}{'' if spec is None else f' {tuple(spec)}'}{devices}"


def _first(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _refusal(expected: str, got: str) -> str:
    return (
        f"update_weights: expected {expected} as the engine's, got others ({got}); nothing was changed. Pass weights "
        "of the same model, or make a new engine"
    )
