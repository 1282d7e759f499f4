"""Loads models from a Hugging Face folder, a folder written by `python -m convert`, or the hub.

`load` reads targets and draft models. Heads are read by `jspec.draft`, which passes their formats to `read_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from convert import orbax
from convert.detect import check_kind
from convert.hub import find
from convert.huggingface import Row, Source
from convert.orbax import Checkpoint, Header, Placement
from convert.plan import Plan, plan_folder
from jspec.models import families
from jspec.models.config import ModelConfig
from jspec.models.quantize import check_scope, quantize_parameters


@dataclass(frozen=True)
class Format:
    """The functions that read one kind of checkpoint.

    Attributes:
        from_hf: function of a Hugging Face folder's parsed config.json and tensors that returns the config record and
            the rows of the weight map.
        from_json: function of a converted folder's parsed config that returns the config record.
        override: function that applies the caller's overrides to the config record of a converted folder.
    """

    from_hf: Callable[[Mapping[str, Any], Source], tuple[Any, list[Row]]]
    from_json: Callable[[Mapping[str, Any]], Any]
    override: Callable[[Any], Any] = lambda config: config


FormatOf = Callable[[str], Format]  # kind of checkpoint -> format of that kind


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    rope_theta: float | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
) -> Checkpoint:
    """Loads a target or a draft model.

    Args:
        path: existing folder, else hub id ("owner/name").
        dtype: dtype of the weights, "float32", "bfloat16" or "float16"; None: float32 on CPU, bfloat16 elsewhere.
        rope_theta: rotary base; None: as in config.json.
        quantize: how the weight matrices are quantised, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`);
            None: as stored.
        placement: sharding of each parameter, by name; None: the default device.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        FileNotFoundError: the folder or a file in it is missing, and the hub has no such model.
        ValueError: an argument is wrong, or the files are damaged or contradict each other.
        NotImplementedError: the model's family or an option of it is not supported.
    """
    format_of = partial(target_format, rope_theta=rope_theta)
    return read_checkpoint(path, format_of, kind="target", dtype=dtype, quantize=quantize, placement=placement)


def target_format(kind: str, *, rope_theta: float | None = None) -> Format:
    """The format of targets and draft models.

    Args:
        kind: "target", the kind of both.
        rope_theta: rotary base; None: as in the checkpoint.
    """
    assert kind == "target", kind

    def from_hf(fields: Mapping[str, Any], source: Source) -> tuple[ModelConfig, list[Row]]:
        config = families.read_config(fields, rope_theta=rope_theta)
        return config, families.family_of(config.family).weights(config, source.tensors)

    def override(config: ModelConfig) -> ModelConfig:
        return config if rope_theta is None else config.resized(rope=replace(config.rope, theta=rope_theta))

    def from_json(fields: Mapping[str, Any]) -> ModelConfig:
        families.family_of(fields["family"])  # an unknown family is refused by name
        return ModelConfig.from_json(fields)

    return Format(from_hf, from_json, override)


def read_checkpoint(
    path: str | Path,
    format_of: FormatOf,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
) -> Checkpoint:
    """Loads a checkpoint of any kind from a Hugging Face folder, a converted folder or the hub.

    Args:
        path, dtype, quantize, placement: arguments of `load`.
        format_of: function that returns the format of the checkpoint's kind.
        kind: required kind of checkpoint; None: any.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        ValueError: the checkpoint is of another kind; and all errors of `load`.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in orbax.DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(orbax.DTYPES)}, got {dtype!r}; pass one of them")
    folder = find(path)
    if orbax.is_checkpoint(folder):
        header = _read_manifest(folder, format_of, kind)
        check_scope(quantize, header.kind)
        weights = orbax.unflatten(orbax.read_arrays(header, dtype=dtype, placement=placement))
        weights = weights if quantize is None else quantize_parameters(weights, quantize)
        return Checkpoint(header.kind, header.config, weights, folder)
    plan = read_plan(folder, format_of, kind=kind)
    check_scope(quantize, plan.kind)
    arrays: dict[str, Any] = {}
    for batch in plan.batches(dtype):
        placed = {name: jax.device_put(array, placement(name) if placement else None) for name, array in batch.items()}
        placed = placed if quantize is None else quantize_parameters(placed, quantize)
        arrays |= jax.block_until_ready(placed)  # otherwise host copies of several batches are alive at once
        del batch, placed
    return Checkpoint(plan.kind, plan.config, orbax.unflatten(arrays), folder)


def read_header(path: str | Path, format_of: FormatOf) -> Header:
    """Reads the kind, config and parameter shapes of a checkpoint, but no weights.

    Args:
        path: existing folder, else hub id ("owner/name").
        format_of: function that returns the format of the checkpoint's kind.

    Raises: the errors of `load`.
    """
    folder = find(path)
    if orbax.is_checkpoint(folder):
        return _read_manifest(folder, format_of, None)
    plan = read_plan(folder, format_of)
    parameters = {row.parameter: jax.ShapeDtypeStruct(row.shape, plan.row_dtype(row)) for row in plan.rows}
    return Header(plan.kind, plan.config, parameters, folder)


def read_plan(folder: str | Path, format_of: FormatOf, *, kind: str | None = None) -> Plan:
    """The plan for reading a Hugging Face folder: kind, config and weight map; errors as `convert.plan.plan_folder`.

    Args:
        folder: folder with config.json and weights.
        format_of: function that returns the format of the checkpoint's kind.
        kind: required kind of checkpoint; None: any.
    """
    return plan_folder(folder, lambda found, fields, source: format_of(found).from_hf(fields, source), kind=kind)


def _read_manifest(folder: Path, format_of: FormatOf, kind: str | None) -> Header:
    """The header of a converted folder, with its config as a record that has the caller's overrides."""
    found = orbax.read_header(folder)
    check_kind(folder, found.kind, kind)
    with orbax.named_damage(folder):
        form = format_of(found.kind)
        config = form.from_json(found.config)
    return replace(found, config=form.override(config))
