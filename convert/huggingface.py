"""Reads the tensors of a Hugging Face folder into parameters, piece by piece.

A weight map says from which tensors each parameter is made; it has one `MapRow` per parameter. Parameters are read in
batches. Peak memory is one piece of a tensor and one batch. A batch has at most `BATCH_BYTES` bytes, or the bytes of
the largest parameter if it has more.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from convert.fields import listed, named
from convert.sources import FLOAT8, Shape, Source, Tensor

if TYPE_CHECKING:  # a file of jax
    from pallas_kernels.layers.weights import Kind

BATCH_BYTES = 32 * 2**20  # lower bound of a batch's size limit: smaller batches would only make more files
FLOATS = ("float32", "bfloat16", "float16")
SOURCE_FLOATS = (*FLOATS, "float64")  # dtypes that a file may have for weights
INTEGERS = ("int64", "int32", "bool")  # dtypes that a file may have for vocabulary maps
# For each dtype that a row may give its parameter: the dtypes that the tensors may have, and their name in errors.
DTYPES: dict[str | None, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys((None, *FLOATS), (SOURCE_FLOATS, "floating point")),
    FLOAT8: ((FLOAT8,), FLOAT8),
    "int32": (INTEGERS, "integers"),
    "uint8": (("int32", "int64"), "integers"),  # words of packed values, and what describes them
    "bytes": (("uint8",), "uint8"),
}
IGNORED = ("rotary_emb.inv_freq",)  # tensors of old checkpoints; the config determines their values


@dataclass(frozen=True)
class MapRow:
    """A row of a weight map, which says how one parameter is made from tensors.

    Attributes:
        parameter: name of the parameter.
        sources: expected shapes of the tensors, by tensor name.
        shape: shape of the parameter.
        fill: function (source, row, dtype) that reads and returns the values of the parameter; they are jax arrays if
            those of the source are.
        dtype: dtype of the parameter; None: the dtype that the caller of `batches` asks for.
        kinds: key of `DTYPES` for each tensor whose dtype is not one for the dtype of the parameter, by tensor name.
        quantized: kind of the quantised weight of which the parameter is one of the arrays; None: it is a whole weight.
    """

    parameter: str
    sources: Mapping[str, Shape]
    shape: Shape
    fill: Callable[[Source, MapRow, str], np.ndarray]
    dtype: str | None = None
    kinds: Mapping[str, str | None] = field(default_factory=dict)
    quantized: Kind | None = None

    def nbytes(self, dtype: str) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype or dtype).itemsize


def stacked(parameter: str, sources: Mapping[str, Shape], dtype: str | None = None) -> MapRow:
    """Make a row for a parameter that is one tensor, or several tensors concatenated along axis 0.

    Args:
        parameter: name of the parameter.
        sources: shapes of the tensors, by tensor name, in order.
        dtype: dtype of the parameter; None: the dtype that the caller of `batches` asks for.
    """
    shapes = list(sources.values())
    return MapRow(parameter, sources, (sum(s[0] for s in shapes), *shapes[0][1:]), _stack, dtype)


def is_stacked(row: MapRow) -> bool:
    """Return whether a row is one that `stacked` or `side_by_side` makes."""
    return row.fill is _stack


@dataclass(frozen=True)
class _Selection:
    """A `fill` that keeps some rows of what another one fills, along axis 0."""

    fill: Callable[[Source, MapRow, str], np.ndarray]
    index: np.ndarray
    stored: Shape  # shape of what the other one fills

    def __call__(self, source: Source, row: MapRow, dtype: str) -> np.ndarray:
        return self.fill(source, replace(row, shape=self.stored), dtype)[self.index]


def selected(row: MapRow, index: np.ndarray) -> MapRow:
    """Return a row whose parameter has some rows of the given row's parameter, in any order.

    Args:
        row: the given row.
        index: indices of the rows along axis 0.
    """
    row, before = unselected(row)
    index = index if before is None else before[index]
    return replace(row, shape=(len(index), *row.shape[1:]), fill=_Selection(row.fill, index, row.shape))


def unselected(row: MapRow) -> tuple[MapRow, np.ndarray | None]:
    """Return the row that `selected` was called with, and the index; None: the row is not of `selected`."""
    if not isinstance(row.fill, _Selection):
        return row, None
    return replace(row, shape=row.fill.stored, fill=row.fill.fill), row.fill.index


def side_by_side(parameter: str, sources: Mapping[str, Shape], parts: int = 1) -> MapRow:
    """Make a row for a parameter that is several tensors of one shape, stacked along a new axis 0.

    Args:
        parameter: name of the parameter.
        sources: shapes of the tensors, by tensor name, in order.
        parts: number of successive tensors that are concatenated along their axis 0 before they are stacked.
    """
    first, *others = next(iter(sources.values()))
    return MapRow(parameter, sources, (len(sources) // parts, parts * first, *others), _stack)


def flat(parameter: str, name: str, shape: Shape) -> MapRow:
    """Make a row for a parameter that is one tensor, read as a vector."""
    return MapRow(parameter, {name: shape}, (int(np.prod(shape)),), _stack)


def _stack(source: Source, row: MapRow, dtype: str) -> np.ndarray:
    return source.joined(row.sources, row.shape, dtype)


def same(parameter: str, sources: Mapping[str, Shape]) -> MapRow:
    """Make a row for a parameter that a file may store as several tensors with equal values (tied weights).

    Args:
        parameter: name of the parameter.
        sources: shapes of the tensors, by tensor name.
    """
    return MapRow(parameter, sources, next(iter(sources.values())), _first_of_same)


def _first_of_same(source: Source, row: MapRow, dtype: str) -> np.ndarray:
    first, *others = row.sources
    for other in others:
        source.check_equal(first, other)
    return _stack(source, stacked(row.parameter, {first: row.shape}), dtype)


def mapped(row: MapRow, function: Callable[[np.ndarray], np.ndarray], stored: Shape | None = None) -> MapRow:
    """Return a row whose parameter is a function of the values that the given row fills.

    Args:
        row: the given row.
        function: function of an array of numpy or jax that returns values in the shape of the parameter.
        stored: shape of the values in the row's only tensor; None: that of the parameter.
    """
    sources = row.sources if stored is None else dict.fromkeys(row.sources, stored)

    def fill(source: Source, map_row: MapRow, dtype: str) -> np.ndarray:
        shape = map_row.shape if stored is None else next(iter(map_row.sources.values()))
        return function(row.fill(source, replace(map_row, shape=shape), dtype))

    return replace(row, sources=sources, fill=fill)


def renamed(rows: Iterable[MapRow], names: Mapping[str, str]) -> list[MapRow]:
    """Return the rows of a weight map with renamed tensors.

    Args:
        rows: rows of a weight map.
        names: new tensor names by old name; tensors without an entry keep their names.
    """
    return [replace(row, sources={names.get(name, name): shape for name, shape in row.sources.items()}) for row in rows]


def check(rows: Iterable[MapRow], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tensors of a folder match a weight map.

    Every tensor must occur in a row, or in several rows that `selected` made. Every tensor of a row must exist, and
    shapes and dtypes must be as expected.

    Args:
        rows: rows of the weight map.
        tensors: headers of the tensors, by name.
    """
    rows = list(rows)
    wanted = {name: shape for row in rows for name, shape in row.sources.items()}
    taken = (name for row in rows if not isinstance(row.fill, _Selection) for name in row.sources)
    twice = [name for names in (taken, (row.parameter for row in rows)) for name, n in Counter(names).items() if n > 1]
    assert not twice, f"the weight map names these more than once: {twice}"
    unused = sorted(name for name in tensors if name not in wanted and not name.endswith(IGNORED))
    missing = sorted(name for name in wanted if name not in tensors)
    both = sorted(name for name in wanted if name in tensors)
    misshapen = [f"{n} (expected {wanted[n]}, got {tensors[n].shape})" for n in both if tensors[n].shape != wanted[n]]
    kinds = {name: row.kinds.get(name, row.dtype and np.dtype(row.dtype).name) for row in rows for name in row.sources}
    dtypes = {name: DTYPES[kind] for name, kind in kinds.items()}
    faults = {"missing": missing, "unknown": unused, "wrong shape": misshapen}
    for name in both:
        accepted, kind = dtypes[name]
        if tensors[name].dtype not in accepted:
            faults.setdefault(f"not {kind}", []).append(f"{name} ({tensors[name].dtype})")
    if any(faults.values()):
        summary = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"the tensors do not match the config ({summary}); check config.json against the weights")


def batches(source: Source, rows: Iterable[MapRow], dtype: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield all parameters in batches of at most `BATCH_BYTES` bytes, or of one larger parameter.

    Args:
        source: tensors of the folder, which `check` has accepted.
        rows: rows of the weight map.
        dtype: dtype of the parameters whose row has none.

    Yields:
        A batch of parameters by name. The caller should delete each batch before it takes the next one.
    """
    rows = list(rows)
    limit = max(BATCH_BYTES, *(row.nbytes(dtype) for row in rows))
    batch: dict[str, np.ndarray] = {}
    size = 0
    for row in rows:
        if size + row.nbytes(dtype) > limit:
            yield batch
            batch, size = {}, 0
        with named(source.folder):
            batch[row.parameter] = row.fill(source, row, row.dtype or dtype)
        size += row.nbytes(dtype)
    yield batch
    warn_not_finite(source.folder, source.not_finite)


def warn_not_finite(folder: Path, counts: Mapping[str, int]) -> None:
    """Warn once if weights of a folder have NaN or infinite values.

    Args:
        folder: folder of the checkpoint, for the message.
        counts: number of NaN and infinite values, by name of the tensor.
    """
    if counts:
        damaged = listed(f"{name} ({count:,})" for name, count in counts.items())
        warnings.warn(
            f"{folder}: expected finite weights, got NaN or infinity in {damaged}; the files are damaged or overflowed "
            "when they were saved; download them again",
            stacklevel=2,
        )
