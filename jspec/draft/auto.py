"""Reads a folder whatever it holds: a target, a draft model, an EAGLE head or Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from convert import orbax
from convert.huggingface import Row, Source
from convert.orbax import Checkpoint, Header, Placement
from convert.plan import Plan
from jspec.core.tree import Tree
from jspec.draft import eagle_formats, medusa
from jspec.draft.base import Drafter
from jspec.draft.draft_model import DraftModel
from jspec.draft.eagle import Eagle, Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.draft.head_config import Overrides
from jspec.draft.medusa import Medusa, MedusaHeads
from jspec.models import load
from jspec.models.decoder import Model
from jspec.models.load import Format, FormatOf

LENGTH = 4  # draft tokens of the chain that a drafter gets by default


def load_checkpoint(
    path: str | Path,
    overrides: Overrides | None = None,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
) -> Checkpoint:
    """Loads a target, a draft model or a draft head.

    Args:
        path: an existing folder, else a hub id ("owner/name").
        overrides: values that replace those of the file.
        kind: what the caller needs, "target", "eagle3", "eagle" (1 and 2) or "medusa"; None: any.
        dtype, quantize, placement: as for `jspec.models.load.load`.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: with what was expected, what was got, what to do.
    """
    options: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "placement": placement}
    return load.read_checkpoint(path, _formats(overrides), kind=kind, **options)


def load_drafter(
    path: str | Path, tree: Tree | None = None, *, dtype: str | None = None, length: int = LENGTH
) -> Drafter:
    """Loads a folder as a drafter: a head, or a model as a draft model.

    Args:
        tree: None: a chain of `length` tokens, or of as many as there are Medusa heads.
    """
    found, chain = load_checkpoint(path, dtype=dtype), tree or Tree.chain(length)
    match found.kind:
        case "eagle3":
            return Eagle3(EagleHead.from_weights(found.config, found.weights), chain)
        case "eagle":
            return Eagle(EagleHead.from_weights(found.config, found.weights), chain)
        case "medusa":
            heads = MedusaHeads.from_weights(found.config, found.weights)
            return Medusa(heads, tree or Tree.chain(min(length, len(heads.heads))))
        case _:
            return DraftModel(Model.from_weights(found.config, found.weights), chain)


def plan(folder: str | Path, overrides: Overrides | None = None) -> Plan:
    """Plans the reading of a Hugging Face folder; errors as `convert.plan.plan_folder`."""
    return load.read_plan(folder, _formats(overrides))


def read_header(path: str | Path) -> Header:
    """Reads what a folder holds, without its weights; arguments and errors as `load_checkpoint`."""
    return load.read_header(path, _formats(None))


def read_draft_to_target(found: Header) -> Int[np.ndarray, "draft_vocab"]:
    """Reads the vocabulary map of a head, and no other parameter."""
    name = "draft_to_target"
    if orbax.is_checkpoint(found.folder):
        return np.asarray(orbax.read_arrays(found, names=[name])[name])
    planned = plan(found.folder)
    row = next(row for row in planned.rows if row.parameter == name)
    return row.fill(planned.source, row, planned.row_dtype(row))


def _formats(overrides: Overrides | None) -> FormatOf:
    """The format of each kind, with these values in place of the file's."""
    given = overrides or Overrides()
    formats: dict[str, FormatOf] = {
        "target": partial(load.target_format, rope_theta=given.rope_theta),
        "eagle3": partial(eagle_formats.head_format, overrides=given),
        "eagle": partial(eagle_formats.head_format, overrides=given),
        "medusa": medusa.head_format,
    }
    return lambda kind: _checked(kind, formats[kind](kind), given)


def _checked(kind: str, form: Format, overrides: Overrides) -> Format:
    """A format that refuses overrides which checkpoints of the kind do not have."""

    def from_hf(fields: Mapping[str, Any], source: Source) -> tuple[Any, list[Row]]:
        overrides.check(kind)
        return form.from_hf(fields, source)

    def override(config: Any) -> Any:
        overrides.check(kind)
        return form.override(config)

    return replace(form, from_hf=from_hf, override=override)
