"""Reads Hugging Face folders of models and draft heads: `plan` a folder, then take its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convert import drafts, targets
from convert.hf import FLOATS, Row, Source, batches, check, open_source, read_json
from jspec.models.config import Eagle3Config, ModelConfig


@dataclass(frozen=True)
class Plan:
    """A folder that was understood: what it is, and how each parameter is filled from its tensors."""

    folder: Path
    kind: str
    config: ModelConfig | Eagle3Config
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


def plan(folder: str | Path, *, rope_theta: float | None = None, feature_layers: Iterable[int] | None = None) -> Plan:
    """Reads config and tensor headers of a Hugging Face folder and matches them both ways.

    Args:
        folder: with config.json and weights.
        rope_theta: replaces the rotary base of the config.
        feature_layers: target state indices that replace those of a head's config.

    Returns:
        The plan; no weight is read yet.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the files are damaged, or tensors and config do not match: lists every name.
        NotImplementedError: naming what is not supported.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        got = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder}: expected a folder with config.json, got {got}; give a model's folder")
    fields = read_json(folder / "config.json")
    drafts.refuse_unbuilt(fields)
    source = open_source(folder)
    kind = drafts.detect(fields, source.tensors)
    config: ModelConfig | Eagle3Config
    if kind == "eagle3":
        config = Eagle3Config.from_hf(fields, rope_theta=rope_theta, feature_layers=feature_layers)
        names = {drafts.bare_name(name): name for name in source.tensors}
        rows = [
            replace(row, sources={names.get(name, name): shape for name, shape in row.sources.items()})
            for row in drafts.eagle3(config, names)
        ]
    else:
        if feature_layers is not None:
            raise ValueError(f"feature_layers: expected a draft head, got a target in {folder}; leave them out")
        config = ModelConfig.from_hf(fields, rope_theta=rope_theta)
        rows = targets.llama(config, source.tensors)
    try:
        check(rows, source.tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Plan(folder, kind, config, tuple(rows), source)
