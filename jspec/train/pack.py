"""Packs documents into rows of one length, in files that are mapped into memory."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from jspec.train.data import LEAST, Document
from jspec.train.rows import ALIGN

FIELDS = {"tokens": np.uint32, "segments": np.uint16, "counted": np.bool_}


@dataclass(frozen=True)
class Packed:
    """Packed rows; the fields are those of `jspec.train.rows.Rows`.

    Attributes:
        lines: row and line of each document, ordered by row.
    """

    tokens: Integer[np.ndarray, "rows size"]
    segments: Integer[np.ndarray, "rows size"]
    counted: Bool[np.ndarray, "rows size"]
    lines: Integer[np.ndarray, "documents 2"]

    def __len__(self) -> int:
        return len(self.tokens)

    def lines_of(self, rows: Integer[np.ndarray, "chosen"]) -> list[int]:
        """Return the lines of the documents in some rows, ascending."""
        return sorted(set(self.lines[np.isin(self.lines[:, 0], rows), 1].tolist()))


class Corpus:
    """Documents one after another in files of a folder, so that the memory holds few of them.

    Args:
        folder: folder for the files, which exists.
        name: prefix of the files' names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = [folder / f"{name}.{part}" for part in ("tokens", "counted")]
        self._files = [path.open("wb") for path in self._paths]
        self.sizes: list[int] = []
        self.lines: list[int] = []

    def add(self, line: int, document: Document, length: int) -> int:
        """Append the `useful_parts` of a document; return the number of tokens that are left out."""
        parts = useful_parts(document, length)
        for part in parts:
            for file, values in zip(self._files, (part.tokens.astype(np.uint32), part.counted), strict=True):
                file.write(values.tobytes())
            self.sizes.append(len(part.tokens))
            self.lines.append(line)
        return len(document.tokens) - sum(len(part.tokens) for part in parts)

    def close(self) -> tuple[Integer[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"]]:
        """Close the files; return all tokens, and whether each counts."""
        for file in self._files:
            file.close()
        if not self.sizes:
            return np.zeros(0, np.uint32), np.zeros(0, bool)
        tokens, counted = (np.memmap(p, t, "r") for p, t in zip(self._paths, (np.uint32, np.bool_), strict=True))
        return tokens, counted

    def remove(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def useful_parts(document: Document, length: int) -> list[Document]:
    """Return the parts of at most ``length`` tokens of a document that have `LEAST` tokens, of which some count."""
    firsts = range(0, len(document.tokens), length)
    parts = [Document(*(values[first : first + length] for values in document)) for first in firsts]
    return [part for part in parts if len(part.tokens) >= LEAST and part.counted.any()]


def first_fit(sizes: Iterable[int], length: int) -> tuple[list[int], list[int]]:
    """Put each size into the first row with room for it, in order.

    Args:
        sizes: numbers of tokens, each at most ``length``; each starts at a multiple of `ALIGN`.
        length: tokens of a row.

    Returns:
        The row and the first place of each size.
    """
    room: list[list[int]] = [[] for _ in range(length // ALIGN + 1)]  # rows by their free blocks, each a heap
    rows, places, count = [], [], 0
    for size in sizes:
        need = -(-size // ALIGN)
        free = [(held[0], blocks) for blocks, held in enumerate(room) if held and blocks >= need]
        row, blocks = min(free, default=(count, length // ALIGN))
        if row == count:
            count += 1
        else:
            heapq.heappop(room[blocks])
        rows.append(row)
        places.append(length - blocks * ALIGN)
        if blocks > need:
            heapq.heappush(room[blocks - need], row)
    return rows, places


def pack(corpus: Corpus, folder: Path, name: str, length: int) -> Packed:
    """Pack the documents of a corpus into rows, which are written to files of a folder.

    Args:
        corpus: the documents.
        folder: folder for the files, which exists.
        name: prefix of the files' names.
        length: tokens of a row, a multiple of `ALIGN`.
    """
    tokens, counted = corpus.close()
    rows, places = first_fit(corpus.sizes, length)
    shape = (max(rows, default=-1) + 1, length)
    filled = {field: _new_array(folder / f"{name}.{field}.npy", dtype, shape) for field, dtype in FIELDS.items()}
    ends = itertools.accumulate(corpus.sizes)
    parts = (slice(end - size, end) for end, size in zip(ends, corpus.sizes, strict=True))
    _fill(filled, rows, places, (Document(tokens[part], counted[part]) for part in parts))
    for array in filled.values():
        array.flush()
    np.save(folder / f"{name}.lines.npy", _by_row(rows, corpus.lines))
    del tokens, counted
    corpus.remove()
    return load(folder, name)


def pack_in_memory(documents: Sequence[Document], lines: Sequence[int], length: int) -> Packed:
    """Pack documents of at most ``length`` tokens, each with its line, as `pack` packs those of a corpus."""
    rows, places = first_fit([len(document.tokens) for document in documents], length)
    shape = (max(rows, default=-1) + 1, length)
    filled: dict[str, Any] = {field: np.zeros(shape, dtype) for field, dtype in FIELDS.items()}
    _fill(filled, rows, places, documents)
    return Packed(**filled, lines=_by_row(rows, lines))


def _fill(
    filled: Mapping[str, np.ndarray], rows: Sequence[int], places: Sequence[int], documents: Iterable[Document]
) -> None:
    """Write each document from its place in its row on; documents of a row are numbered from 1."""
    held = np.zeros(len(filled["tokens"]), np.int64)
    for row, start, document in zip(rows, places, documents, strict=True):
        held[row] += 1
        destination = row, slice(start, start + len(document.tokens))
        filled["tokens"][destination], filled["counted"][destination] = document
        filled["segments"][destination] = held[row]


def _by_row(rows: Sequence[int], lines: Sequence[int]) -> Integer[np.ndarray, "documents 2"]:
    pairs = np.stack([rows, lines], axis=1) if len(rows) else np.zeros((0, 2), np.int64)
    return pairs[np.argsort(pairs[:, 0], kind="stable")]


def _new_array(path: Path, dtype: type, shape: tuple[int, int]) -> np.memmap:
    """Make an array of zeros in a file; raise OSError if the disk has no room for all of it."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # without room, a write to the mapped file would end the process
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def load(folder: Path, name: str) -> Packed:
    """Map the rows that `pack` wrote into memory."""
    fields = {field: np.load(folder / f"{name}.{field}.npy", mmap_mode="r") for field in FIELDS}
    return Packed(**fields, lines=np.load(folder / f"{name}.lines.npy"))


class Order:
    """The order in which rows are read, epoch after epoch; it follows from the seed alone.

    Args:
        rows: number of rows.
        seed: seed of the order; an epoch is a permutation drawn from (seed, number of the epoch).
    """

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def batch(self, step: int, size: int) -> Integer[np.ndarray, "size"]:
        """Return the rows of a step's batch; steps count from 0."""
        return np.array([self._row(step * size + index) for index in range(size)])

    def _row(self, index: int) -> int:
        epoch, index_in_epoch = divmod(index, self._rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng((self._seed, epoch)).permutation(self._rows)
        return int(self._permutation[index_in_epoch])


def fingerprint(packed: Packed) -> str:
    """Return a text that differs for other rows: their number, and a checksum of each field."""
    values = [np.ascontiguousarray(getattr(packed, field.name)) for field in fields(packed)]  # no copies of maps
    return json.dumps([len(packed), *(zlib.crc32(value.reshape(-1).view(np.uint8).data) for value in values)])
