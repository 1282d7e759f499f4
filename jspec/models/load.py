"""Loads models from a Hugging Face folder, from a folder written by `python -m convert`, or from the hub.

`load` reads targets and draft models. To read heads, `jspec.draft` passes the heads' formats to `read_checkpoint`.
"""

from __future__ import annotations

import logging
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
from jspec.core.progress import progress_bar
from jspec.models import families
from jspec.models.config import ModelConfig
from jspec.models.quantize import check_scope, quantize_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """The functions that read one kind of checkpoint.

    Attributes:
        from_hf: function that takes a Hugging Face folder's parsed config.json and tensors, and returns the config
            record and the rows of the weight map.
        from_json: function that takes a converted folder's parsed config, and returns the config record.
        override: function that takes the config record of a converted folder, and applies the caller's options to it.
    """

    from_hf: Callable[[Mapping[str, Any], Source], tuple[Any, list[Row]]]
    from_json: Callable[[Mapping[str, Any]], Any]
    override: Callable[[Any], Any] = lambda config: config


FormatOf = Callable[[str], Format]  # function that takes a kind of checkpoint and returns this kind's format


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    rope_theta: float | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
) -> Checkpoint:
    """Load a target or a draft model.

    Args:
        path: folder, or if no such folder exists, hub id ("owner/name").
        dtype: dtype of the weights, "float32", "bfloat16" or "float16"; None: float32 on CPU, bfloat16 elsewhere.
        rope_theta: rotary base; None: as in config.json.
        quantize: how the weight matrices are quantised, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`);
            None: as stored.
        placement: sharding of each parameter, by parameter name; None: the default device.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        FileNotFoundError: the folder or a file in it is missing, and the hub has no such model.
        ValueError: an argument is wrong, or the files are damaged or contradict each other.
        NotImplementedError: the model's family, or an option of the model, is not supported.
    """
    format_of = partial(target_format, rope_theta=rope_theta)
    return read_checkpoint(path, format_of, kind="target", dtype=dtype, quantize=quantize, placement=placement)


def target_format(kind: str, *, rope_theta: float | None = None) -> Format:
    """Return the format of targets and draft models.

    Args:
        kind: "target", which is the kind of targets and of draft models.
        rope_theta: rotary base; None: as in the checkpoint.
    """
    assert kind == "target", kind

    def from_hf(fields: Mapping[str, Any], source: Source) -> tuple[ModelConfig, list[Row]]:
        config = families.read_config(fields, rope_theta=rope_theta)
        return config, families.family_of(config.family).weights(config, source.tensors)

    def override(config: ModelConfig) -> ModelConfig:
        return config if rope_theta is None else config.resized(rope=replace(config.rope, theta=rope_theta))

    def from_json(fields: Mapping[str, Any]) -> ModelConfig:
        families.family_of(fields["family"])  # raises an error that names an unknown family
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
    """Load a checkpoint of any kind from a Hugging Face folder, a converted folder or the hub.

    Args:
        path, dtype, quantize, placement: arguments of `load`.
        format_of: function that returns the format of the checkpoint's kind.
        kind: required kind of checkpoint; None: any.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        ValueError: the checkpoint is not of the required kind. `load` lists the other errors.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in orbax.DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(orbax.DTYPES)}, got {dtype!r}; pass one of them")
    folder = find(path)
    logger.info("loading %s", folder)
    if orbax.is_checkpoint(folder):
        header = _read_manifest(folder, format_of, kind)
        check_scope(quantize, header.kind)
        weights = orbax.unflatten(orbax.read_arrays(header, dtype=dtype, placement=placement))
        weights = weights if quantize is None else quantize_parameters(weights, quantize)
        return Checkpoint(header.kind, header.config, weights, folder)
    plan = read_plan(folder, format_of, kind=kind)
    check_scope(quantize, plan.kind)
    arrays: dict[str, Any] = {}
    with progress_bar(len(plan.rows), f"loading {folder.name}", "tensors") as progress:
        for batch in plan.batches(dtype):
            placed = {
                name: jax.device_put(array, placement(name) if placement else None) for name, array in batch.items()
            }
            placed = placed if quantize is None else quantize_parameters(placed, quantize)
            arrays |= jax.block_until_ready(placed)  # otherwise the host holds copies of several batches at once
            progress.update(len(batch))
            del batch, placed
    return Checkpoint(plan.kind, plan.config, orbax.unflatten(arrays), folder)


def read_header(path: str | Path, format_of: FormatOf) -> Header:
    """Read the kind, config and parameter shapes of a checkpoint, but no weights.

    Args:
        path: folder, or if no such folder exists, hub id ("owner/name").
        format_of: function that returns the format of the checkpoint's kind.

    Raises: the errors that `load` raises.
    """
    folder = find(path)
    if orbax.is_checkpoint(folder):
        return _read_manifest(folder, format_of, None)
    plan = read_plan(folder, format_of)
    parameters = {row.parameter: jax.ShapeDtypeStruct(row.shape, plan.row_dtype(row)) for row in plan.rows}
    return Header(plan.kind, plan.config, parameters, folder)


def read_plan(folder: str | Path, format_of: FormatOf, *, kind: str | None = None) -> Plan:
    """Plan how a Hugging Face folder is read: find its kind, its config and its weight map.

    Raises the errors of `convert.plan.plan_folder`.

    Args:
        folder: folder with config.json and weights.
        format_of: function that returns the format of the checkpoint's kind.
        kind: required kind of checkpoint; None: any.
    """
    return plan_folder(folder, lambda found, fields, source: format_of(found).from_hf(fields, source), kind=kind)


def _read_manifest(folder: Path, format_of: FormatOf, kind: str | None) -> Header:
    """Read the header of a converted folder, and apply the caller's options to its config record."""
    found = orbax.read_header(folder)
    check_kind(folder, found.kind, kind)
    with orbax.named_damage(folder):
        form = format_of(found.kind)
        config = form.from_json(found.config)
    return replace(found, config=form.override(config))
