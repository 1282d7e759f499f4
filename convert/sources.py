"""Opens the weights of a Hugging Face folder, whose headers are read first and whose values piece by piece."""

from __future__ import annotations

import abc
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import ml_dtypes  # gives numpy bfloat16 and float8
import numpy as np
from safetensors import SafetensorError, safe_open

from convert.fields import LFS_ADVICE, LFS_POINTER, CheckpointError, listed, read_json, short

PIECE_BYTES = 8 * 2**20  # bytes of one piece of a tensor as float32
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAFETENSORS_DTYPES |= {"I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}
FLOAT8 = "float8_e4m3fn"
SAFETENSORS_DTYPES |= {"F8_E4M3": FLOAT8, "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
EXPONENT = {FLOAT8: 0x7F, "float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """The header of a tensor in a file."""

    shape: Shape
    dtype: str  # name of the dtype, as numpy spells it
    file: Path  # file that holds the tensor
    start: int = 0  # offset in bytes of the first value in a safetensors file


class Source(abc.ABC):
    """The tensors of a folder, whose values are read on request.

    Args:
        files: the files that hold the tensors.

    Attributes:
        tensors: headers of the tensors, by name.
        folder: folder of the files.
        not_finite: number of NaN and infinite values by tensor, in the pieces that were read until now; tensors without
            any are absent.

    Raises:
        CheckpointError: a file is incomplete, or two files hold tensors of the same name.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.not_finite: Counter[str] = Counter()
        self.folder = Path()
        for file in files:
            self.folder = file.parent
            for name, tensor in self._headers(file).items():
                if name in self.tensors:
                    other_file = self.tensors[name].file
                    raise CheckpointError(file, f"{short(name)}: expected once, got it in {other_file} too; remove one")
                self.tensors[name] = tensor

    @abc.abstractmethod
    def _headers(self, file: Path) -> dict[str, Tensor]:
        """Read the headers of the tensors in one file, and return them by name.

        Raises:
            CheckpointError: the file is incomplete.
        """

    @abc.abstractmethod
    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows ``start`` to ``stop - 1`` of a tensor, in the dtype of the file; a scalar is one row."""

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield all rows of a tensor in order, in pieces of a few megabytes, and count NaN and infinite values."""
        tensor = self.tensors[name]
        rows, *rest = tensor.shape or (1,)
        step = max(1, PIECE_BYTES // (4 * int(np.prod(rest))))
        for start in range(0, rows, step):
            try:
                piece = self.read(name, start, min(start + step, rows))
            except (SafetensorError, RuntimeError, OSError) as error:
                raise incomplete(tensor.file, f"values of {short(name)}", error) from error
            if not is_finite(piece):
                self.not_finite[name] += int((~np.isfinite(piece)).sum())
            yield piece

    def joined(self, names: Iterable[str], shape: Shape, dtype: str) -> np.ndarray:
        """Return the values of some tensors, one after another, as an array of another shape and dtype."""
        filled, at = np.empty(shape, np.dtype(dtype)), 0
        flat = filled.reshape(-1)  # concatenated and stacked tensors have the same memory layout
        for name in names:
            for piece in self.pieces(name):
                flat[at : at + piece.size] = cast(piece, dtype, name).reshape(-1)
                at += piece.size
        return filled

    def check_equal(self, first: str, other: str) -> None:
        """Raise CheckpointError unless two tensors that are tied have equal values."""
        pairs = zip(self.pieces(first), self.pieces(other), strict=True)
        if any(a.dtype != b.dtype or not np.array_equal(a, b) for a, b in pairs):
            raise CheckpointError(
                self.tensors[other].file,
                f"{other}: expected the values of {first}, to which it is tied, got others; "
                "correct tie_word_embeddings in config.json",
            )


def cast(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Convert values to another dtype through float32, which represents float16 and bfloat16 exactly.

    Args:
        values: values of the tensor.
        dtype: dtype to convert to.
        name: name of the tensor, for the error.

    Raises:
        CheckpointError: a finite value is too large for the dtype.
    """
    wanted = np.dtype(dtype)
    if values.dtype == wanted:
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32).astype(wanted)
    if not is_finite(rounded) and np.isinf(rounded).sum() != np.isinf(values).sum():
        remedy = "use bfloat16" if dtype == "float16" else "the file is damaged; download it again"
        raise CheckpointError(
            name,
            f"expected values within {dtype}'s {float(ml_dtypes.finfo(wanted).max):.9g}, got larger ones; {remedy}",
        )
    return rounded


def is_finite(values: np.ndarray) -> bool:
    """Return whether all values are finite; this is far faster than `np.isfinite` for bfloat16.

    NaN and infinity have all exponent bits set. As integers of the same bits, they are the largest of their sign. The
    NaN of float8_e4m3fn, which has no infinity, has all other bits set too.
    """
    exponent = EXPONENT.get(values.dtype.name)
    if exponent is None or not values.size:
        return True
    sign = 1 << (8 * values.itemsize - 1)
    signed, unsigned = (values.view(f"{kind}{values.itemsize}") for kind in "iu")
    return bool(signed.max() < exponent and unsigned.max() < sign + exponent)


@final
class Safetensors(Source):
    """The tensors of safetensors files.

    Each read opens the file again, because an open memory mapping keeps in memory what was read. Values are read
    without the library, which would read the whole header each time, and has no numpy dtype for float8.
    """

    def _headers(self, file: Path) -> dict[str, Tensor]:
        try:
            with safe_open(file, "numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
                headers = {
                    name: Tensor(tuple(s.get_shape()), SAFETENSORS_DTYPES.get(s.get_dtype(), s.get_dtype()), file)
                    for name, s in slices.items()
                }
            starts = _starts(file)
            return {name: replace(tensor, start=starts[name]) for name, tensor in headers.items()}
        except (SafetensorError, OSError) as error:
            raise incomplete(file, "safetensors file", error) from error

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self.tensors[name]
        row, dtype = math.prod(tensor.shape[1:]), np.dtype(tensor.dtype)
        values = np.empty((stop - start) * row * dtype.itemsize, np.uint8)
        with tensor.file.open("rb") as opened:
            opened.seek(tensor.start + start * row * dtype.itemsize)
            if opened.readinto(values.data) != values.size:
                raise OSError(f"the file ends within rows {start} to {stop}")
        return values.view(dtype).reshape(stop - start, *tensor.shape[1:])


def _starts(file: Path) -> dict[str, int]:
    """Return the offset of each tensor's first byte in a safetensors file whose header the library has checked."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def incomplete(file: Path, what: str, error: object) -> CheckpointError:
    """Return the error for a file of weights that cannot be read.

    Args:
        what: what was expected in the file.
        error: the error of the library that reads the file.
    """
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER.encode():
            return CheckpointError(file, LFS_ADVICE)
    reason = short(str(error).partition("\n")[0], 200)
    return CheckpointError(
        file, f"expected a complete {what}, got an error ({reason}); download it again, or save it as safetensors"
    )


Reader = Callable[[Iterable[Path]], Source]


def _torch_files(files: Iterable[Path]) -> Source:
    from convert.torch_files import TorchFiles  # imported late: torch takes seconds

    return TorchFiles(files)


MODEL: dict[str, Reader] = {"model.safetensors": Safetensors, "pytorch_model.bin": _torch_files}
MEDUSA: dict[str, Reader] = {"medusa_lm_head.safetensors": Safetensors, "medusa_lm_head.pt": _torch_files}
OTHER_FOLDERS = {  # file that identifies another kind of folder: the kind, and advice
    "adapter_config.json": ("a LoRA adapter", "merge it into its model and save that"),
    "*.gguf": ("GGUF files", "take the model's safetensors"),
    "*.safetensors": ("other safetensors", "name the file model.safetensors, or add its index"),
}


def open_source(folder: Path, *, heads_first: bool = False) -> Source:
    """Open the weights of a folder: its safetensors files, or its torch files if there are no safetensors.

    Args:
        folder: folder with the weights.
        heads_first: which weights to open if the folder has both Medusa heads and a whole model; True: the heads,
            False: the model.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is missing.
        CheckpointError: a file is incomplete, the index does not match the files, or the folder has both a whole file
            and shards.
    """
    for single, reader in (MEDUSA | MODEL if heads_first else MODEL | MEDUSA).items():
        index, whole = folder / f"{single}.index.json", folder / single
        if index.is_file() and whole.is_file():
            raise CheckpointError(
                folder, f"expected one set of weights, got {whole.name} and {index.name}, the index of shards; "
                "delete the older of the two",
            )  # fmt: skip
        if index.is_file():
            return _open_sharded(index, reader)
        if whole.is_file():
            return reader([whole])
    raise not_found(folder, f"one of {', '.join(MODEL | MEDUSA)}, or the index of one (*.index.json)")


def not_found(folder: Path, expected: str) -> FileNotFoundError:
    """Return the error for a folder that lacks a file; its message names what the folder has instead."""
    if not folder.is_dir():
        return FileNotFoundError(f"{folder}: expected a folder with {expected}, got no such folder; check the path")
    for pattern, (what, advice) in OTHER_FOLDERS.items():
        if any(folder.glob(pattern)):
            return FileNotFoundError(f"{folder}: expected a folder with {expected}, got {what}; {advice}")
    names = listed(sorted(path.name for path in folder.iterdir())) or "an empty folder"
    return FileNotFoundError(f"{folder}: expected a folder with {expected}, got {names}; download the model's files")


def _open_sharded(index: Path, reader: Reader) -> Source:
    fields = read_json(index)
    shards = fields.object("weight_map")
    if not shards:
        raise fields.error("weight_map", "the file of each tensor")
    if wrong := [name for name, shard in shards.items() if not _is_file_name(shard)]:
        raise CheckpointError(index, f"expected a file name for each tensor, got none for {listed(wrong)}; correct it")
    files = {name: index.parent / name for name in sorted(set(shards.values()))}
    if absent := [name for name, file in files.items() if not file.is_file()]:
        raise FileNotFoundError(f"{index} names files that are not there: {listed(absent)}; download them")
    source = reader(files.values())
    wrong = [n for n, shard in shards.items() if n not in source.tensors or source.tensors[n].file != files[shard]]
    if wrong:
        raise CheckpointError(
            index, f"expected tensors in the files that it names for them, not found there: {listed(sorted(wrong))}; "
            "download the index again",
        )  # fmt: skip
    return source


def _is_file_name(value: object) -> bool:
    """Return whether a value is a file name without a folder."""
    return (
        isinstance(value, str) and value.isprintable() and value == Path(value).name and 0 < len(value.encode()) < 256
    )
