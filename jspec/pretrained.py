"""Loads models from a Hugging Face folder, a folder written by `python -m convert`, or the hub."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int

import convert
from convert.hf import read_json
from jspec import checkpoint
from jspec.checkpoint import Checkpoint, Header, Placement
from jspec.models.config import Overrides
from jspec.quantize import check_scope, quantize_parameters

HUB_FILES = ["*.json", "model*.safetensors", "medusa_lm_head.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]
TORCH_FILES = ["pytorch_model*.bin", "medusa_lm_head.pt"]  # where there are no safetensors
SUBFOLDERS = ["*/*"]  # of a repository: other formats of the same weights


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
        quantize: the products' weights, "int8", "fp8" or "fp8_dynamic" (`jspec.quantize`); None: as they are stored.
        placement: sharding by parameter name; None: the default device.

    Returns:
        The checkpoint, its weights on the devices.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: with what was expected, what was got, what to do.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in checkpoint.DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(checkpoint.DTYPES)}, got {dtype!r}; pass one of them")
    layers = None if feature_layers is None else tuple(feature_layers)
    overrides = Overrides(rope_theta, layers, norm_before_residual, norm_output)
    folder = find(path)
    if checkpoint.is_checkpoint(folder):
        header = checkpoint.read_header(folder)
        _check_kind(folder, header.kind, kind)
        check_scope(quantize, header.kind)
        overrides.check(header.kind)
        config = overrides.apply(header.config)
        arrays = checkpoint.read_arrays(header, dtype=dtype, placement=placement)
        weights = checkpoint.unflatten(arrays)
        weights = weights if quantize is None else quantize_parameters(weights, quantize)
        return Checkpoint(header.kind, config, weights, folder)
    plan = convert.plan(folder, overrides)
    _check_kind(folder, plan.kind, kind)
    check_scope(quantize, plan.kind)
    arrays = {}
    for batch in plan.batches(dtype):
        placed = {name: jax.device_put(array, placement(name) if placement else None) for name, array in batch.items()}
        placed = placed if quantize is None else quantize_parameters(placed, quantize)
        arrays |= jax.block_until_ready(placed)  # else host copies pile up
        del batch, placed
    return Checkpoint(plan.kind, plan.config, checkpoint.unflatten(arrays), folder)


def header(path: str | Path) -> Header:
    """Reads what a folder holds, without its weights; arguments and errors as `load`."""
    folder = find(path)
    if checkpoint.is_checkpoint(folder):
        return checkpoint.read_header(folder)
    plan = convert.plan(folder)
    parameters = {row.parameter: jax.ShapeDtypeStruct(row.shape, plan.row_dtype(row)) for row in plan.rows}
    return Header(plan.kind, plan.config, parameters, folder)


def draft_to_target(found: Header) -> Int[np.ndarray, "draft_vocab"]:
    """Reads the vocabulary map of a head, and no other parameter."""
    name = "draft_to_target"
    if checkpoint.is_checkpoint(found.folder):
        return np.asarray(checkpoint.read_arrays(found, names=[name])[name])
    plan = convert.plan(found.folder)
    row = next(row for row in plan.rows if row.parameter == name)
    return row.fill(plan.source, row, plan.row_dtype(row))


def find(path: str | Path) -> Path:
    """The folder itself if there is one, else a local copy of what the hub has under that id.

    Raises:
        FileNotFoundError: if neither has it.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder}: expected a folder, got a file; give the folder that holds it")
    if folder.is_absolute() or len(folder.parts) > 2 or str(path).startswith("."):
        raise FileNotFoundError(
            f"{folder}: expected a folder or a hub id (owner/name), got no such folder; check the path"
        )
    import huggingface_hub

    try:
        download = partial(huggingface_hub.snapshot_download, str(path), ignore_patterns=SUBFOLDERS)
        copy = Path(download(allow_patterns=HUB_FILES))
        if not any(copy.glob("*.safetensors")):
            download(allow_patterns=TORCH_FILES)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{path}: no such folder here, and the hub gave no such model ({error})") from error
    return copy


def eos_ids(folder: str | Path) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json, else of config.json; () if neither names one."""
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        ids = read_json(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _check_kind(folder: Path, got: str, expected: str | None) -> None:
    if expected is not None and got != expected:
        raise ValueError(f"{folder}: expected a checkpoint of kind {expected!r}, got {got!r}; give another folder")
