"""Makes a plan for reading a Hugging Face folder (kind, config and weight map) before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.detect import check_kind, kind_of
from convert.fields import Fields, named, read_json
from convert.huggingface import FLOATS, MapRow, batches, check
from convert.sources import Source, not_found, open_source

if TYPE_CHECKING:  # a file of jax
    from pallas_kernels.layers.weights import Kind

# Function (kind, parsed config.json, tensors) -> (config record of the kind, rows of the weight map).
ReadFormat = Callable[[str, Fields, Source], tuple[Any, list[MapRow]]]


@dataclass(frozen=True)
class Plan:
    """The plan for reading a Hugging Face folder."""

    folder: Path  # Hugging Face folder
    kind: str  # kind of checkpoint, one of `convert.detect.KINDS`
    config: Any  # config record of the kind
    rows: tuple[MapRow, ...]  # weight map: from which tensors each parameter is made
    source: Source  # the folder's tensors

    def dtype(self, wanted: str | None = None) -> str:
        """Return the dtype to which floating-point weights are converted.

        Args:
            wanted: dtype that the caller wants; None: the dtype of all unquantised tensors in the folder.

        Raises:
            ValueError: the wanted dtype is not supported, or None is given and the tensors have several dtypes.
        """
        if wanted is not None:
            if wanted not in FLOATS:
                raise ValueError(f"dtype: expected one of {', '.join(FLOATS)}, got {wanted!r}; pass one of them")
            return wanted
        rows = [(row, name) for row in self.rows if row.dtype is None for name in row.sources]
        dtypes = {self.source.tensors[name].dtype for row, name in rows if name not in row.kinds}
        if len(dtypes) > 1 or not dtypes <= set(FLOATS):
            raise ValueError(
                f"dtype: expected one of {', '.join(FLOATS)} in the file, got {sorted(dtypes)}; pass a dtype"
            )
        return dtypes.pop()

    @property
    def quantized(self) -> dict[str, Kind]:
        """The kind of each quantised weight, by name."""
        return {row.parameter.rpartition(".")[0]: row.quantized for row in self.rows if row.quantized}

    def row_dtype(self, row: MapRow) -> str:
        """Return the dtype that a row's parameter has if it is not converted."""
        return row.dtype or self.source.tensors[next(iter(row.sources))].dtype

    def batches(self, dtype: str) -> Iterator[dict[str, np.ndarray]]:
        """Yield all parameters by name, in batches.

        The caller should delete each batch before it takes the next one.

        Args:
            dtype: dtype of floating-point parameters.
        """
        return batches(self.source, self.rows, dtype)


def plan_folder(
    folder: str | Path, read_format: ReadFormat, *, kind: str | None = None, families: Iterable[str] = ()
) -> Plan:
    """Read the config and the tensor headers of a Hugging Face folder, and check that they match.

    Args:
        folder: folder with config.json and weights.
        read_format: function (kind, parsed config.json, tensors) that returns the config record and the weight map.
        kind: required kind of checkpoint; None: any.
        families: values of `model_type` that are supported for targets, for the error.

    Returns:
        The plan; no weight is read yet.

    Raises:
        FileNotFoundError: a file is missing.
        CheckpointError: files are damaged or contradict each other, the checkpoint is of another kind, or the tensors
            do not match the config; the message names the tensors.
        NotImplementedError: an option or the method of the checkpoint is not supported.
    """
    folder = Path(folder).expanduser().absolute()
    file = folder / "config.json"
    if not file.is_file():
        raise not_found(folder, "config.json")
    fields = read_json(file)
    source = open_source(folder, heads_first="medusa_num_heads" in fields)
    with named(file):
        stored_kind = kind_of(fields, source.tensors, families)
    check_kind(folder, stored_kind, kind)
    with named(file):
        config, rows = read_format(stored_kind, fields, source)
    with named(folder):
        check(rows, source.tensors)
    return Plan(folder, stored_kind, config, tuple(rows), source)
