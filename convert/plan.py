"""A plan of a Hugging Face folder: what it holds and how its tensors fill parameters, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.detect import check_kind, kind_of
from convert.huggingface import FLOATS, Row, Source, batches, check, open_source, read_json

# From (kind, the parsed config.json, the tensors) to the config record of that kind and the rows of its weight map.
ReadFormat = Callable[[str, Mapping[str, Any], Source], tuple[Any, list[Row]]]


@dataclass(frozen=True)
class Plan:
    """The kind and config of a folder, and the rows by which its tensors fill each parameter."""

    folder: Path
    kind: str
    config: Any
    rows: tuple[Row, ...]
    source: Source

    def dtype(self, wanted: str | None = None) -> str:
        """The wanted floating dtype; None: the dtype that all tensors in the folder share."""
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
        """The dtype of a parameter as the folder stores it."""
        return row.dtype or self.source.tensors[next(iter(row.sources))].dtype

    def batches(self, dtype: str) -> Iterator[dict[str, np.ndarray]]:
        """All parameters by name, a few at a time; drop a batch before taking the next."""
        return batches(self.source, self.rows, dtype)


def plan_folder(folder: str | Path, read_format: ReadFormat, *, kind: str | None = None) -> Plan:
    """Reads config and tensor headers of a Hugging Face folder and matches them both ways.

    Args:
        folder: with config.json and weights.
        read_format: reads the config of a kind and gives the rows of its weight map.
        kind: the kind that the caller needs; None: any.

    Returns:
        The plan; no weight is read yet.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the files are damaged or contradict themselves, the folder is of another kind, or tensors and
            config do not match (the message lists every name).
        NotImplementedError: naming what is not supported.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        got = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder}: expected a folder with config.json, got {got}; give a model's folder")
    fields = read_json(folder / "config.json")
    source = open_source(folder, heads_first="medusa_num_heads" in fields)
    found = kind_of(fields, source.tensors)
    check_kind(folder, found, kind)
    config, rows = read_format(found, fields, source)
    try:
        check(rows, source.tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Plan(folder, found, config, tuple(rows), source)
