"""Reads experts in mxfp4, the format of gpt-oss: values of four bits, with a power of two for each 32 of them.

A tensor `X` [experts, in, out] of an unquantised checkpoint is stored as `X_blocks` [experts, out, in / 32, 16] and
`X_scales` [experts, out, in / 32], both uint8. A byte holds two neighbours of `in`, the first in its low bits. A value
is an E2M1 number (a sign, two bits of exponent, one of mantissa) times 2^(scale - 127) (OCP Microscaling Formats 1.0).
On the device a weight is packed as `pallas_kernels.layers.experts.mxfp4` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np

from convert.fields import CheckpointError, short
from convert.huggingface import MapRow
from convert.sources import Source, Tensor
from jspec.models.parts.checks import unsupported
from pallas_kernels.layers.experts.expert_bytes import pack
from pallas_kernels.layers.weights import Kind

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors
BLOCK = 32  # values that share a scale
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # E2M1 numbers by their bits without sign
BIAS = 127  # exponent of the scale 1
NAN = 255  # the scale that is no number
REMEDY = "download it again"

Function = Callable[..., np.ndarray]


def widened(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 values [*rows, 32 * groups] of blocks [*rows, groups, 16] and scales [*rows, groups].

    Products with powers of two are exact. The scale 255 is NaN, and 2^-127 is not rounded.
    """
    numbers = np.concatenate([NUMBERS, -NUMBERS])
    values = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    factors = np.ldexp(np.float32(1), np.minimum(scales, 254).astype(np.int32) - BIAS)
    factors = np.where(scales == 255, np.float32(np.nan), factors)
    return (values * factors[..., None]).reshape(*blocks.shape[:-2], -1)


def repacked(blocks: np.ndarray) -> np.ndarray:
    """Return the bytes [*rows, 16 * groups] of a weight on the device, for blocks [*rows, groups, 16] of a file."""
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    return pack(values).reshape(*blocks.shape[:-2], -1)


@final
class _Derived(Source):
    """The tensors of a folder, where one in mxfp4 has the name of the unquantised one.

    Args:
        source: tensors of the folder.
        name: name of the unquantised tensor.
        tensor: its header, with the shape [experts, columns, out].
        ends: ends of the names of the tensors that are read.
        function: function of parts of these tensors that returns values [experts, out, columns].
    """

    def __init__(self, source: Source, name: str, tensor: Tensor, ends: tuple[str, ...], function: Function) -> None:
        super().__init__(())
        self._source, self._ends, self._function = source, ends, function
        self.folder, self.not_finite, self.tensors = source.folder, source.not_finite, {name: tensor}

    def _headers(self, file: Path) -> dict[str, Tensor]:
        return {}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._function(*(self._source.read(f"{name}{end}", start, stop) for end in self._ends)).swapaxes(1, 2)


def mxfp4_rows(rows: Iterable[MapRow], tensors: Mapping[str, Tensor], *, dequantize: bool) -> list[MapRow]:
    """Return the rows of a weight map, where those of experts in mxfp4 read packed values and scales.

    Families know nothing of this: what they do with an unquantised tensor [experts, in, out] is done with its packed
    values and with its scales, of which each stands for several input channels. So it must not mix these.

    Args:
        rows: rows of the weight map, as for an unquantised checkpoint.
        tensors: headers of the tensors, by name.
        dequantize: read the values that the tensors stand for instead.

    Raises:
        CheckpointError: no tensor is in mxfp4.
        NotImplementedError: a width is no multiple of 32.
    """
    new_rows = [part for row in rows for part in _rows_of(row, tensors, dequantize)]
    if not any(name.endswith(BLOCKS) for name in tensors):
        raise CheckpointError("quantization_config", "expected experts in mxfp4, got none; delete quantization_config")
    return new_rows


def _rows_of(row: MapRow, tensors: Mapping[str, Tensor], dequantize: bool) -> list[MapRow]:
    packed = [name for name in row.sources if f"{name}{BLOCKS}" in tensors]
    if not packed:
        return [row]
    (name,), ((experts, inner, out),) = packed, row.sources.values()
    if inner % BLOCK:
        raise unsupported(name, f"{inner} input channels", f"a multiple of {BLOCK}")
    shape = experts, out, inner // BLOCK
    sources = {f"{name}{BLOCKS}": (*shape, BLOCK // 2), f"{name}{SCALES}": shape}

    def made(parameter: str, columns: int, dtype: str | None, ends: tuple[str, ...], function: Function) -> MapRow:
        def fill(source: Source, map_row: MapRow, wanted: str) -> np.ndarray:
            file, stored = source.tensors[f"{name}{ends[0]}"].file, (experts, columns, out)
            derived = _Derived(source, name, Tensor(stored, dtype or "float32", file), ends, function)
            values = row.fill(derived, replace(row, sources={name: stored}, shape=stored), wanted)
            if ends == (SCALES,) and (count := int((values == NAN).sum())):
                got = f"{NAN}, which is NaN (values of this kind: {count})"
                raise CheckpointError(file, f"{short(name + SCALES)}: expected scales below {NAN}, got {got}; {REMEDY}")
            return values.reshape(map_row.shape)

        shapes = {f"{name}{end}": sources[f"{name}{end}"] for end in ends}
        filled = row.shape if dtype is None else (*row.shape[:-1], *next(iter(shapes.values()))[2:])
        kind: Kind | None = None if dtype is None else "mxfp4"
        return MapRow(parameter, shapes, filled, fill, dtype or row.dtype, dict.fromkeys(shapes, "bytes"), kind)

    if dequantize:
        return [made(row.parameter, inner, None, (BLOCKS, SCALES), widened)]
    return [
        made(f"{row.parameter}.values", inner // 2, "uint8", (BLOCKS,), repacked),
        made(f"{row.parameter}.scale", inner // BLOCK, "uint8", (SCALES,), lambda scales: scales),
    ]
