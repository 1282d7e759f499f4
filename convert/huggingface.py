"""Streams the tensors of a Hugging Face folder into parameters.

A weight map says which tensors make which parameter; it has one `Row` per parameter. Tensors are read piece by piece
into the parameters' arrays. Peak memory is one piece and one batch of parameters; a batch is at most as large as the
largest parameter (or `BATCH_BYTES`, if that is larger).
"""

from __future__ import annotations

import abc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

PIECE_BYTES = 8 * 2**20  # bytes of a tensor that are read at a time, as float32
BATCH_BYTES = 32 * 2**20  # least size limit of a batch: smaller batches would only make more files
FLOATS = ("float32", "bfloat16", "float16")
IGNORED = ("rotary_emb.inv_freq",)  # tensors of old checkpoints whose values follow from the config
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAFETENSORS_DTYPES |= {"I64": "int64", "I32": "int32", "BOOL": "bool"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """The header of a tensor in a file."""

    shape: Shape
    dtype: str  # name of the dtype, as numpy spells it
    file: Path  # file that holds the tensor


class Source(abc.ABC):
    """The tensors of a folder; `tensors` has their headers by name, `read` reads their values.

    Args:
        files: the files that hold the tensors.

    Raises:
        ValueError: a file is incomplete, or two files hold tensors of the same name.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in self._headers(file).items():
                if name in self.tensors:
                    raise ValueError(
                        f"{name}: expected once, got it in {self.tensors[name].file} and {file}; remove one"
                    )
                self.tensors[name] = tensor

    @abc.abstractmethod
    def _headers(self, file: Path) -> dict[str, Tensor]:
        """The headers of the tensors in one file, by name.

        Raises:
            ValueError: the file is incomplete.
        """

    @abc.abstractmethod
    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """The rows from start (inclusive) to stop (exclusive) of a tensor, in the dtype of the file."""

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """All rows of a tensor in order, in pieces of a few megabytes."""
        rows, *rest = self.tensors[name].shape
        step = max(1, PIECE_BYTES // (4 * int(np.prod(rest))))
        for start in range(0, rows, step):
            yield self.read(name, start, min(start + step, rows))


@final
class Safetensors(Source):
    """Tensors in safetensors files.

    Each read opens the file again, because an open memory mapping keeps all pages that were read in memory.
    """

    def _headers(self, file: Path) -> dict[str, Tensor]:
        try:
            with safe_open(file, "numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
                return {
                    name: Tensor(tuple(s.get_shape()), SAFETENSORS_DTYPES.get(s.get_dtype(), s.get_dtype()), file)
                    for name, s in slices.items()
                }
        except SafetensorError as error:
            raise _incomplete(file, "safetensors", error) from error

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        with safe_open(self.tensors[name].file, "numpy") as opened:
            return opened.get_slice(name)[start:stop]


@final
class TorchFiles(Source):
    """Tensors in files that torch.save wrote; each read maps the file again, as in `Safetensors`."""

    def _headers(self, file: Path) -> dict[str, Tensor]:
        return {
            name: Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file)
            for name, tensor in _torch_load(file).items()
        }

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        import torch

        rows = _torch_load(self.tensors[name].file)[name].detach()[start:stop].contiguous()
        if rows.dtype == torch.bfloat16:
            return rows.view(torch.int16).numpy().view(bfloat16).copy()
        return rows.numpy().copy()


def _torch_load(file: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{file} needs torch to be read: pip install -e '.[convert]' in the folder of jspec, "
            "or save it as safetensors"
        ) from error
    others = ValueError(f"{file}: expected tensors by name, got other objects; save the model's state_dict()")
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise others from None  # torch's own message recommends to disable its protection
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise _incomplete(file, "torch", error) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise others
    return tensors


def _incomplete(file: Path, form: str, error: Exception) -> ValueError:
    return ValueError(
        f"{file}: expected a complete {form} file, got an error ({str(error).partition(chr(10))[0]}); "
        "download it again, or save it as safetensors"
    )


Reader = Callable[[Iterable[Path]], Source]
MODEL: dict[str, Reader] = {"model.safetensors": Safetensors, "pytorch_model.bin": TorchFiles}
MEDUSA: dict[str, Reader] = {"medusa_lm_head.safetensors": Safetensors, "medusa_lm_head.pt": TorchFiles}


def open_source(folder: Path, *, heads_first: bool = False) -> Source:
    """Opens the weights of a folder, in one file or sharded: safetensors files if there are any, else torch files.

    Args:
        folder: folder with the weights.
        heads_first: open the Medusa heads if the folder has both heads and a whole model; False: open the model.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is missing.
        ValueError: a file is incomplete, or the index does not match the files.
    """
    for single, reader in (MEDUSA | MODEL if heads_first else MODEL | MEDUSA).items():
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _open_sharded(index, reader)
        if (folder / single).is_file():
            return reader([folder / single])
    raise FileNotFoundError(
        f"{folder}: expected one of {', '.join(MODEL | MEDUSA)}, or the index of one (*.index.json), "
        f"got {sorted(p.name for p in folder.iterdir())}; download the weights"
    )


def _open_sharded(index: Path, reader: Reader) -> Source:
    shards = read_json(index).get("weight_map")
    if not shards:
        raise ValueError(f"{index}: expected a weight_map, got none; download it again")
    files = {name: index.parent / Path(name).name for name in sorted(set(shards.values()))}
    absent = [name for name, file in files.items() if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{index} names files that are not there: {', '.join(absent)}; download them")
    source = reader(files.values())
    wrong = sorted(
        k for k, shard in shards.items() if k not in source.tensors or source.tensors[k].file != files[shard]
    )
    if wrong:
        raise ValueError(f"{index}: expected these tensors in the files it names, but they are not: {', '.join(wrong)}")
    return source


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        ValueError: the file holds something else; the message names the file.
    """
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got an error ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}; download it again")
    return value


@dataclass(frozen=True)
class Row:
    """A row of a weight map: how one parameter is made of tensors.

    Attributes:
        parameter: name of the parameter.
        sources: expected shapes of the tensors, by tensor name.
        shape: shape of the parameter.
        fill: function (source, row, dtype) that returns the values of the parameter.
        dtype: dtype of the parameter; None: the dtype that the caller of `batches` asks for.
    """

    parameter: str
    sources: Mapping[str, Shape]
    shape: Shape
    fill: Callable[[Source, Row, str], np.ndarray]
    dtype: str | None = None

    def nbytes(self, dtype: str) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype or dtype).itemsize


def stacked(parameter: str, sources: Mapping[str, Shape]) -> Row:
    """The row of a parameter that is one tensor, or several tensors concatenated along axis 0.

    Args:
        parameter: name of the parameter.
        sources: shapes of the tensors, by tensor name, in order.
    """
    shapes = list(sources.values())
    return Row(parameter, sources, (sum(s[0] for s in shapes), *shapes[0][1:]), _stack)


def side_by_side(parameter: str, sources: Mapping[str, Shape]) -> Row:
    """The row of a parameter that is several tensors of one shape, stacked along a new axis 0.

    Args:
        parameter: name of the parameter.
        sources: shapes of the tensors, by tensor name, in order.
    """
    shapes = list(sources.values())
    return Row(parameter, sources, (len(shapes), *shapes[0]), _stack)


def _stack(source: Source, row: Row, dtype: str) -> np.ndarray:
    filled, at = np.empty(row.shape, np.dtype(dtype)), 0
    flat = filled.reshape(-1)  # concatenated and stacked tensors have the same memory layout
    for name in row.sources:
        for piece in source.pieces(name):
            flat[at : at + piece.size] = cast(piece, dtype, name).reshape(-1)
            at += piece.size
    return filled


def same(parameter: str, sources: Mapping[str, Shape]) -> Row:
    """The row of a parameter that a file may hold as several tensors with equal values (tied weights).

    Args:
        parameter: name of the parameter.
        sources: shapes of the tensors, by tensor name.
    """
    return Row(parameter, sources, next(iter(sources.values())), _first_of_same)


def _first_of_same(source: Source, row: Row, dtype: str) -> np.ndarray:
    first, *others = row.sources
    for other in others:
        pairs = zip(source.pieces(first), source.pieces(other), strict=True)
        if any(a.dtype != b.dtype or not np.array_equal(a, b) for a, b in pairs):
            raise ValueError(
                f"{other}: expected the values of {first}, to which it is tied, got others; "
                "correct tie_word_embeddings in config.json"
            )
    return _stack(source, stacked(row.parameter, {first: row.shape}), dtype)


def renamed(rows: Iterable[Row], names: Mapping[str, str]) -> list[Row]:
    """The rows of a weight map with their tensors renamed.

    Args:
        rows: rows of a weight map.
        names: new tensor names by old name; tensors without an entry keep their names.
    """
    return [replace(row, sources={names.get(name, name): shape for name, shape in row.sources.items()}) for row in rows]


def cast(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The values in another dtype, converted by way of float32, which holds float16 and bfloat16 exactly.

    Args:
        values: values of the tensor.
        dtype: dtype to convert to.
        name: name of the tensor, for the error.

    Raises:
        ValueError: a finite value is too large for float16.
    """
    wanted = np.dtype(dtype)
    if values.dtype == wanted:
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32).astype(wanted)
    if dtype == "float16" and np.isinf(rounded).sum() != np.isinf(values).sum():
        raise ValueError(f"{name}: expected values within float16's 65504, got larger ones; use bfloat16")
    return rounded


def check(rows: Iterable[Row], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the tensors of a folder match a weight map.

    Every tensor must be used by a row, every tensor of a row must exist, and shapes and dtypes must be as expected.

    Args:
        rows: rows of the weight map.
        tensors: headers of the tensors, by name.
    """
    rows = list(rows)
    wanted = {name: shape for row in rows for name, shape in row.sources.items()}
    twice = [name for name, n in Counter(name for row in rows for name in row.sources).items() if n > 1]
    twice += [name for name, n in Counter(row.parameter for row in rows).items() if n > 1]
    assert not twice, f"the weight map names these more than once: {twice}"
    unused = sorted(name for name in tensors if name not in wanted and not name.endswith(IGNORED))
    missing = sorted(name for name in wanted if name not in tensors)
    both = sorted(name for name in wanted if name in tensors)
    misshapen = [f"{n} (expected {wanted[n]}, got {tensors[n].shape})" for n in both if tensors[n].shape != wanted[n]]
    floats = {name for row in rows if row.dtype is None for name in row.sources}
    not_float = [
        f"{n} ({tensors[n].dtype})" for n in both if n in floats and tensors[n].dtype not in (*FLOATS, "float64")
    ]
    faults = {"missing": missing, "unknown": unused, "wrong shape": misshapen, "not floating point": not_float}
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"the tensors do not match the config ({listed}); check config.json against the weights")


def batches(source: Source, rows: Iterable[Row], dtype: str) -> Iterator[dict[str, np.ndarray]]:
    """Reads all parameters in batches, each at most as large as the largest parameter (or `BATCH_BYTES`).

    Args:
        source: tensors of the folder, which `check` has accepted.
        rows: rows of the weight map.
        dtype: dtype of the parameters whose row gives none.

    Yields:
        A batch of parameters, by name; the caller should drop each batch before taking the next.
    """
    rows = list(rows)
    limit = max(BATCH_BYTES, *(row.nbytes(dtype) for row in rows))
    batch: dict[str, np.ndarray] = {}
    size = 0
    for row in rows:
        if size + row.nbytes(dtype) > limit:
            yield batch
            batch, size = {}, 0
        batch[row.parameter] = row.fill(source, row, row.dtype or dtype)
        size += row.nbytes(dtype)
    yield batch
