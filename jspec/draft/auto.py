"""Loads checkpoints of any kind: targets, draft models, heads, and assistants of Gemma 4."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from convert import hub, orbax
from convert.orbax import Checkpoint, Header, Placement
from convert.plan import Plan
from jspec.core.config import DEQUANTIZE
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.base import Drafter
from jspec.draft.dflash import DFlash
from jspec.draft.dflash2 import DFlash2
from jspec.draft.draft_model import DraftModel
from jspec.draft.dspark import DSpark
from jspec.draft.eagle import Eagle, Eagle3
from jspec.draft.gemma4_assistant import Gemma4Assistant
from jspec.draft.head_config import Overrides
from jspec.draft.medusa import Medusa
from jspec.draft.peagle import PEagle
from jspec.draft.pretrained import Pretrained
from jspec.draft.uno import UNO
from jspec.models import load
from jspec.models.adapter_files import is_adapter
from jspec.models.load import FormatOf

# The drafter of each kind of checkpoint; a target's folder also is a draft model's.
DRAFTERS: Mapping[str, type[Pretrained]] = {
    drafter.method: drafter
    for drafter in (DraftModel, Eagle3, PEagle, Eagle, Medusa, DFlash, DFlash2, DSpark, Gemma4Assistant)
}


def load_checkpoint(
    path: str | Path,
    overrides: Overrides | None = None,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
    mesh: Mesh | None = None,
) -> Checkpoint:
    """Load a target, a draft model or a draft head.

    Args:
        path: an existing folder, or else a hub id ("owner/name").
        overrides: config values that replace those of the checkpoint.
        kind: required kind of checkpoint, one of `convert.detect.KINDS`; None: any.
        dtype, quantize, placement, mesh: arguments of `jspec.models.load.load`.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        FileNotFoundError: the folder or a file in it is missing, and the hub has no such model.
        ValueError: an argument is wrong, the checkpoint is of another kind, or its files are damaged.
        NotImplementedError: an option or a method of the checkpoint is not supported.
    """
    options: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "placement": placement, "mesh": mesh}
    return load.read_checkpoint(path, _formats(overrides, dequantize=quantize == DEQUANTIZE), kind=kind, **options)


def load_drafter(
    path: str | os.PathLike[str],
    tree: Tree | None = None,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    length: int = DEFAULT_TREE.depth,
    mesh: Mesh | None = None,
) -> Drafter:
    """Load a draft head, a draft model, or an adapter with which the target drafts, as a drafter.

    Args:
        path: an existing folder, or else a hub id ("owner/name").
        tree: draft tree; None: a chain of `length` tokens, or of as many tokens as there are Medusa heads, or as a
            block can hold, if fewer.
        dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
        quantize: how weights are quantised (`jspec.models.weights.quantize`); None: as stored.
        length: number of draft tokens of the default chain.
        mesh: mesh over whose devices the weights are divided; None: the default device.
    """
    path = hub.find(path)
    if is_adapter(path):
        return UNO.from_pretrained(path, tree=Tree.chain(length) if tree is None else tree)
    checkpoint = load_checkpoint(os.fspath(path), dtype=dtype, quantize=quantize, mesh=mesh)
    drafter = DRAFTERS[checkpoint.kind]
    weights = drafter.weights_of(checkpoint, mesh)
    return drafter(weights, drafter.chain(weights, length) if tree is None else tree)


def plan(folder: str | Path, overrides: Overrides | None = None) -> Plan:
    """Plan how to read a Hugging Face folder: its kind, config and weight map.

    The errors are those of `convert.plan.plan_folder`.

    Args:
        folder: folder of any kind of checkpoint, with config.json and weights.
        overrides: config values that replace those of the folder.
    """
    return load.read_plan(folder, _formats(overrides))


def read_header(path: str | Path) -> Header:
    """Read the kind, config and parameter shapes of a checkpoint, without its weights.

    The errors are those of `load_checkpoint`.

    Args:
        path: an existing folder, or else a hub id ("owner/name").
    """
    return load.read_header(path, _formats(None))


def read_draft_to_target(header: Header) -> Int[np.ndarray, "draft_vocab"]:
    """Read from an EAGLE-3 head only the target id of each draft id.

    Args:
        header: header of the head's folder.
    """
    name = "draft_to_target"
    if orbax.is_checkpoint(header.folder):
        return np.asarray(orbax.read_arrays(header, names=[name])[name])
    planned = plan(header.folder)
    row = next(row for row in planned.rows if row.parameter == name)
    return row.fill(planned.source, row, planned.row_dtype(row))


def _formats(overrides: Overrides | None, *, dequantize: bool = False) -> FormatOf:
    """Return a function that maps a kind of checkpoint to its format; the arguments are those of `format_of`."""
    return lambda kind: DRAFTERS[kind].format_of(kind, overrides, dequantize=dequantize)
