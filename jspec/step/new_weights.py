"""Reads new weights from what a trainer has, and brings them to an engine's devices in the form of its old ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

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
    check_live("weights", weights if isinstance(weights, (Model, Mapping)) else ())
    proposes = _drafter_of(drafter, program, config)
    check_live("drafter", arrays_of(proposes))
    if copy and isinstance(drafter, Drafter):
        proposes = with_arrays(proposes, once(_copied))
    proposes, _ = back_on_devices(proposes, Params(target=None, draft=()))  # they may be on the host
    model = _in_form(_model_of(weights, program, old, config), old, program.mesh)
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


def _in_form(model: Model, old: Params, mesh: Mesh | None) -> Model:
    """Return a model with the dtype of the engine's target, on its device if it has one, and with experts as there."""
    dtype, given_dtype = old.main.dtype, model.dtype
    sharding = jax.tree.leaves(old.main)[0].sharding

    def converted(leaf: Any) -> Any:
        leaf = leaf.astype(dtype) if leaf.dtype == given_dtype != dtype else leaf
        return leaf if mesh is not None else moved(leaf, sharding)

    return exchange.joined_like(jax.tree.map(converted, model), old.main)


def _model_of(weights: WeightSource, program: Program, old: Params, config: EngineConfig) -> Model:
    if isinstance(weights, Model):
        return weights
    dtype = str(old.main.dtype)
    if isinstance(weights, (str, os.PathLike)):
        checkpoint = load.load(os.fspath(weights), dtype=dtype, quantize=config.quantize, mesh=program.mesh)
        return Model.from_weights(checkpoint.config, checkpoint.weights, program.mesh)
    if isinstance(weights, Mapping):
        return exchange.from_names(weights, old.main.config, dtype)
    raise TypeError(
        "update_weights: weights: expected a Model, a mapping of arrays by the names of a Hugging Face checkpoint, a "
        f"folder or a hub id, got {short(weights)}"
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
