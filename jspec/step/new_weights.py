"""Reads new weights from what a trainer has, and brings them to an engine's devices in the form of its old ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from jspec.core.config import EngineConfig
from jspec.core.shared_leaves import once
from jspec.core.shorten import short
from jspec.draft.base import Drafter
from jspec.draft.beside import Beside
from jspec.draft.mtp import MTP
from jspec.models import exchange, load
from jspec.models.decoder import Model
from jspec.models.parts.transfer import moved
from jspec.step.program import Params, Program
from jspec.step.weights import (
    bound,
    check_config,
    check_kind,
    check_live,
    check_shapes,
    drafter_on,
    on_devices,
    without,
)
from jspec.step.weights_off_devices import arrays_of, back_on_devices, with_arrays

WeightSource = Model | Mapping[str, Any] | str | os.PathLike[str]


def new_weights(
    weights: WeightSource,
    drafter: Drafter | str | None,
    program: Program,
    old: Params,
    config: EngineConfig,
    *,
    copy: bool,
) -> tuple[Drafter, Params]:
    """Return the drafter and the weights that an update of an engine uses, once they are on its devices.

    Args:
        weights, drafter, copy: arguments of `jspec.Engine.update_weights`.
        program: settings of the engine's programs.
        old: its weights, or their shapes.
        config: its options.

    Raises:
        TypeError, ValueError: the weights or the drafter are not like the engine's.
    """
    check_live("update_weights: weights", weights)
    check_live("update_weights: drafter", arrays_of(drafter if isinstance(drafter, Drafter) else program.drafter))
    proposes = _drafter_of(drafter, program, config)
    if copy and isinstance(drafter, Drafter):
        proposes = with_arrays(proposes, once(_copied))
    proposes, _ = back_on_devices(proposes, Params(target=None, draft=()))  # they may be on the host
    if isinstance(drafter, Drafter) and program.mesh is None and proposes.mesh is None:
        proposes = with_arrays(proposes, once(partial(_moved, jax.tree.leaves(old.main)[0].sharding)))
    model = model_of("update_weights: weights", weights, old.main, config.quantize, program.mesh)
    target = on_devices(model, config, program.mesh)
    check_config(target, old.main)
    check_kind(target, old.main)
    params = bound(target, proposes, config, program.mesh)
    check_shapes(params, old)
    if copy and isinstance(weights, Model):
        params = without(params, weights)
    return proposes, jax.block_until_ready(params)


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _moved(sharding: Sharding, leaf: Any) -> Any:
    return moved(leaf, sharding) if isinstance(leaf, jax.Array) else leaf


def _in_form(model: Model, old: Model, mesh: Mesh | None) -> Model:
    """Return a model with the dtype of an old one, on its device if it has one, and with experts as there."""
    dtype, given_dtype = old.dtype, model.dtype
    sharding = jax.tree.leaves(old)[0].sharding

    def converted(leaf: Any) -> Any:
        leaf = leaf.astype(dtype) if leaf.dtype == given_dtype != dtype else leaf
        return leaf if mesh is not None else moved(leaf, sharding)

    return exchange.joined_like(jax.tree.map(converted, model), old)


def model_of(
    place: str, weights: WeightSource, old: Model, quantize: str | None = None, mesh: Mesh | None = None
) -> Model:
    """Return new weights of a model in the form of the old one.

    Args:
        place: call and argument, for errors.
        weights: what has the weights.
        old: a model with weights, or their shapes.
        quantize: how weights of a folder are quantised.
        mesh: mesh over whose devices those of a folder are divided, and the old ones are; None: one device.

    Raises:
        TypeError, ValueError: the weights are of another kind or model.
    """
    dtype = str(old.dtype)
    if isinstance(weights, Model):
        model = weights
    elif isinstance(weights, (str, os.PathLike)):
        checkpoint = load.load(os.fspath(weights), dtype=dtype, quantize=quantize, mesh=mesh)
        model = Model.from_weights(checkpoint.config, checkpoint.weights, mesh)
    elif isinstance(weights, Mapping):
        model = exchange.from_names(weights, old.config, dtype)
    else:
        raise TypeError(
            f"{place}: expected a Model, a mapping of arrays by the names of a Hugging Face checkpoint, a folder or a "
            f"hub id, got {short(weights)}"
        )
    _check_whole(place, model)
    return _in_form(model, old, mesh)


def _check_whole(place: str, model: Model) -> None:
    """Raise a ValueError unless a model has all its layers, in a floating-point dtype."""
    if not jnp.issubdtype(model.dtype, jnp.floating):
        raise ValueError(f"{place}: expected weights in a floating-point dtype, got {model.dtype}")
    if len(model.layers) != model.config.num_layers:
        raise ValueError(
            f"{place}: expected the {model.config.num_layers} layers of the model's config, got {len(model.layers)}"
        )


def _drafter_of(drafter: Drafter | str | None, program: Program, config: EngineConfig) -> Drafter:
    """Return a drafter of new weights in the form of the engine's, or the engine's."""
    old = program.drafter
    if drafter == "keep":
        return old
    if drafter is None:
        if isinstance(old.model if isinstance(old, Beside) else old, MTP):
            raise ValueError(
                "update_weights: drafter: expected the MTP layer that belongs to the new weights, got None; pass "
                'drafter=jspec.MTP(head, tree), or drafter="keep" to draft with the old layer'
            )
        return old
    if not isinstance(drafter, Drafter) or type(drafter) is not type(old) or drafter.tree != old.tree:
        raise ValueError(f"update_weights: drafter: expected one like the engine's {old!r}, got {short(drafter)}")
    return drafter_on(drafter, config, program.mesh)
