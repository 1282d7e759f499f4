"""Reads Hugging Face folders of models and draft heads: `plan` a folder, then take its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert import drafts, targets
from convert.heads import read_head
from convert.hf import FLOATS, Row, Source, batches, check, open_source, read_json
from jspec.models.config import Config, ModelConfig, Overrides


@dataclass(frozen=True)
class Plan:
    """A folder that was understood: what it is, and how each parameter is filled from its tensors."""

    folder: Path
    kind: str
    config: Config
    rows: tuple[Row, ...]
    source: Source

    def dtype(self, wanted: str | None = None) -> str:
        """The wanted floating dtype, or the one that all the file's tensors share."""
        if wanted is not None:
            if wanted not in FLOATS:
                raise ValueError(f"dtype: expected one of {', '.join(FLOATS)}, got {wanted!r}; pass one of them")
            return wanted
        found = {self.source.tensors[name].dtype for row in self.rows if row.dtype is None for name in row.sources}
        if len(found) > 1 or not found <= set(FLOATS):
            raise ValueError(
                f"dtype: expected one of {', '.join(FLOATS)} in the file, got {sorted(found)}; pass a dtype"
            )
        return found.pop()

    def row_dtype(self, row: Row) -> str:
        """The dtype that the file gives a parameter."""
        return row.dtype or self.source.tensors[next(iter(row.sources))].dtype

    def batches(self, dtype: str) -> Iterator[dict[str, np.ndarray]]:
        """All parameters by name, a few at a time; drop a batch before taking the next."""
        return batches(self.source, self.rows, dtype)


def plan(folder: str | Path, overrides: Overrides | None = None) -> Plan:
    """Reads config and tensor headers of a Hugging Face folder and matches them both ways.

    Args:
        folder: with config.json and weights.
        overrides: what replaces the word of config.json.

    Returns:
        The plan; no weight is read yet.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the files are damaged or contradict themselves, or tensors and config do not match: lists
            every name.
        NotImplementedError: naming what is not supported.
    """
    folder, overrides = Path(folder), overrides or Overrides()
    if not (folder / "config.json").is_file():
        got = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder}: expected a folder with config.json, got {got}; give a model's folder")
    fields = read_json(folder / "config.json")
    source = open_source(folder, heads_first="medusa_num_heads" in fields)
    kind = drafts.detect(fields, source.tensors)
    overrides.check(kind)
    config, rows = _map(kind, fields, source, overrides)
    try:
        check(rows, source.tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Plan(folder, kind, config, tuple(rows), source)


def _map(kind: str, fields: Mapping[str, Any], source: Source, overrides: Overrides) -> tuple[Config, list[Row]]:
    """The config of a folder, and the rows that fill its parameters from the file's own tensor names."""
    if kind == "target":
        model = ModelConfig.from_hf(fields, rope_theta=overrides.rope_theta)
        return model, targets.llama(model, source.tensors)
    names = {drafts.bare_name(name): name for name in source.tensors}
    config: Config
    if kind == "medusa":
        config = drafts.medusa_config({bare: source.tensors[name] for bare, name in names.items()})
        rows = drafts.medusa(config)
    else:
        config = read_head(fields, kind, overrides)
        rows = drafts.eagle(config, names)
    return config, [
        replace(row, sources={names.get(name, name): shape for name, shape in row.sources.items()}) for row in rows
    ]
