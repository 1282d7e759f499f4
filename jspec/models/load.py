"""Loads models from a Hugging Face folder, a folder written by `python -m convert`, or the hub."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int

from convert import orbax
from convert.hub import find
from convert.orbax import Checkpoint, Header, Placement
from jspec.draft import auto
from jspec.draft.head_config import HeadConfig, MedusaConfig, Overrides
from jspec.models.config import ModelConfig
from jspec.models.quantize import check_scope, quantize_parameters

CONFIGS: dict[str, type[ModelConfig] | type[HeadConfig] | type[MedusaConfig]] = {
    "target": ModelConfig,
    "eagle3": HeadConfig,
    "eagle": HeadConfig,
    "medusa": MedusaConfig,
}


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    kind: str | None = None,
    rope_theta: float | None = None,
    feature_layers: Iterable[int] | None = None,
    norm_before_residual: bool | None = None,
    norm_output: bool | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
) -> Checkpoint:
    """Loads a target, a draft model or a draft head.

    Args:
        path: an existing folder, else a hub id ("owner/name").
        dtype: "float32", "bfloat16" or "float16"; None: float32 on CPU, bfloat16 elsewhere.
        kind: what the caller needs, "target", "eagle3", "eagle" (1 and 2) or "medusa"; None: whatever it is.
        rope_theta: replaces the rotary base of the file.
        feature_layers: target state indices that replace those of a head.
        norm_before_residual: whether the first residual of an EAGLE-3 head is the normed hidden state; None: as the
            file says.
        norm_output: whether an EAGLE-3 head's normed output is fed back; None: as the file says.
        quantize: the products' weights, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`); None: as they are
        stored.
        placement: sharding by parameter name; None: the default device.

    Returns:
        The checkpoint, its weights on the devices.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: with what was expected, what was got, what to do.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in orbax.DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(orbax.DTYPES)}, got {dtype!r}; pass one of them")
    layers = None if feature_layers is None else tuple(feature_layers)
    overrides = Overrides(rope_theta, layers, norm_before_residual, norm_output)
    folder = find(path)
    if orbax.is_checkpoint(folder):
        header = read_header(folder)
        _check_kind(folder, header.kind, kind)
        check_scope(quantize, header.kind)
        overrides.check(header.kind)
        config = overrides.apply(header.config)
        arrays = orbax.read_arrays(header, dtype=dtype, placement=placement)
        weights = orbax.unflatten(arrays)
        weights = weights if quantize is None else quantize_parameters(weights, quantize)
        return Checkpoint(header.kind, config, weights, folder)
    plan = auto.plan(folder, overrides)
    _check_kind(folder, plan.kind, kind)
    check_scope(quantize, plan.kind)
    arrays = {}
    for batch in plan.batches(dtype):
        placed = {name: jax.device_put(array, placement(name) if placement else None) for name, array in batch.items()}
        placed = placed if quantize is None else quantize_parameters(placed, quantize)
        arrays |= jax.block_until_ready(placed)  # else host copies pile up
        del batch, placed
    return Checkpoint(plan.kind, plan.config, orbax.unflatten(arrays), folder)


def read_header(folder: Path) -> Header:
    """Reads what a converted folder holds, its config as the record of its kind; errors as `orbax.read_header`."""
    found = orbax.read_header(folder)
    with orbax.named_damage(folder):
        return replace(found, config=CONFIGS[found.kind].from_json(found.config))


def header(path: str | Path) -> Header:
    """Reads what a folder holds, without its weights; arguments and errors as `load`."""
    folder = find(path)
    if orbax.is_checkpoint(folder):
        return read_header(folder)
    plan = auto.plan(folder)
    parameters = {row.parameter: jax.ShapeDtypeStruct(row.shape, plan.row_dtype(row)) for row in plan.rows}
    return Header(plan.kind, plan.config, parameters, folder)


def draft_to_target(found: Header) -> Int[np.ndarray, "draft_vocab"]:
    """Reads the vocabulary map of a head, and no other parameter."""
    name = "draft_to_target"
    if orbax.is_checkpoint(found.folder):
        return np.asarray(orbax.read_arrays(found, names=[name])[name])
    plan = auto.plan(found.folder)
    row = next(row for row in plan.rows if row.parameter == name)
    return row.fill(plan.source, row, plan.row_dtype(row))


def _check_kind(folder: Path, got: str, expected: str | None) -> None:
    if expected is not None and got != expected:
        raise ValueError(f"{folder}: expected a checkpoint of kind {expected!r}, got {got!r}; give another folder")
