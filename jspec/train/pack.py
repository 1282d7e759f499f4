"""Packs documents into rows of one length, in files that are mapped into memory."""

from __future__ import annotations

import heapq
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

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
        """Append a document, in parts of at most ``length`` tokens; return the number of tokens that are left out.

        Parts of fewer than `LEAST` tokens, and those in which no token counts, are left out.
        """
        left_out = 0
        for first in range(0, len(document.tokens), length):
            part = slice(first, first + length)
            tokens, counted = document.tokens[part], document.counted[part]
            if len(tokens) < LEAST or not counted.any():
                left_out += len(tokens)
                continue
            for file, values in zip(self._files, (tokens.astype(np.uint32), counted), strict=True):
                file.write(values.tobytes())
            self.sizes.append(len(tokens))
            self.lines.append(line)
        return left_out

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
    held, at = np.zeros(shape[0], np.int64), 0
    for row, start, size in zip(rows, places, corpus.sizes, strict=True):
        held[row] += 1
        destination, source = (row, slice(start, start + size)), slice(at, at + size)
        filled["tokens"][destination], filled["counted"][destination] = tokens[source], counted[source]
        filled["segments"][destination] = held[row]
        at += size
    for array in filled.values():
        array.flush()
    lines = np.stack([rows, corpus.lines], axis=1) if rows else np.zeros((0, 2), np.int64)
    np.save(folder / f"{name}.lines.npy", lines[np.argsort(lines[:, 0], kind="stable")])
    del tokens, counted
    corpus.remove()
    return load(folder, name)


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
