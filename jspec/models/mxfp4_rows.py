"""Reads experts in mxfp4, the format of gpt-oss: values of four bits, with a power of two for each 32 of them.

A tensor `X` [experts, in, out] of an unquantised checkpoint is stored as `X_blocks` [experts, out, in / 32, 16] and
`X_scales` [experts, out, in / 32], both uint8. A byte holds two neighbours of `in`, the first in its low bits. A value
is an E2M1 number (a sign, two bits of exponent, one of mantissa) times 2^(scale - 127) (OCP Microscaling Formats 1.0).
There is no product with packed values of this format, so experts are widened, and only if that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np

from convert.fields import CheckpointError, listed
from convert.huggingface import Row
from convert.sources import Shape, Source, Tensor
from jspec.models.layer_config import unsupported

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors
BLOCK = 32  # values that share a scale
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # E2M1 numbers by their bits without sign
BIAS = 127  # exponent of the scale 1


def widened(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 values [*rows, 32 * groups] of blocks [*rows, groups, 16] and scales [*rows, groups].

    Products with powers of two are exact. The scale 255 is NaN, and 2^-127 is not rounded.
    """
    numbers = np.concatenate([NUMBERS, -NUMBERS])
    values = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    factors = np.ldexp(np.float32(1), np.minimum(scales, 254).astype(np.int32) - BIAS)
    factors = np.where(scales == 255, np.float32(np.nan), factors)
    return (values * factors[..., None]).reshape(*blocks.shape[:-2], -1)


@final
class _Widened(Source):
    """The tensors of a folder, where those in mxfp4 have the name, the shape and the values of unquantised ones."""

    def __init__(self, source: Source, shapes: Mapping[str, Shape]) -> None:
        super().__init__(())
        self._source, self.folder, self.not_finite = source, source.folder, source.not_finite
        files = {name: source.tensors[f"{name}{BLOCKS}"].file for name in shapes}
        self.tensors = {name: Tensor(shape, "float32", files[name]) for name, shape in shapes.items()}

    def _headers(self, file: Path) -> dict[str, Tensor]:
        return {}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        blocks, scales = (self._source.read(f"{name}{end}", start, stop) for end in (BLOCKS, SCALES))
        return widened(blocks, scales).swapaxes(1, 2)


def mxfp4_rows(rows: Iterable[Row], tensors: Mapping[str, Tensor], *, dequantize: bool) -> list[Row]:
    """Return the rows of a weight map, where those of experts in mxfp4 read the values that they stand for.

    Args:
        rows: rows of the weight map, as for an unquantised checkpoint.
        tensors: headers of the tensors, by name.
        dequantize: whether experts may be widened.

    Raises:
        CheckpointError: no tensor is in mxfp4.
        NotImplementedError: experts may not be widened, or a width is no multiple of 32.
    """
    found = [_widened_row(row, tensors) for row in rows]
    names = [name for name in tensors if name.endswith(BLOCKS)]
    if not names:
        raise CheckpointError("quantization_config", "expected experts in mxfp4, got none; delete quantization_config")
    if not dequantize:
        raise unsupported("quantization_config: mxfp4", listed(names), "quantize='none', which widens them at load")
    return found


def _widened_row(row: Row, tensors: Mapping[str, Tensor]) -> Row:
    packed = {name: shape for name, shape in row.sources.items() if f"{name}{BLOCKS}" in tensors}
    if not packed:
        return row
    sources: dict[str, Shape] = {name: shape for name, shape in row.sources.items() if name not in packed}
    for name, (experts, inner, out) in packed.items():
        if inner % BLOCK:
            raise unsupported(name, f"{inner} input channels", f"a multiple of {BLOCK}")
        sources[f"{name}{BLOCKS}"] = (experts, out, inner // BLOCK, BLOCK // 2)
        sources[f"{name}{SCALES}"] = (experts, out, inner // BLOCK)

    def fill(source: Source, own: Row, dtype: str) -> np.ndarray:
        return row.fill(_Widened(source, packed), row, dtype)

    kinds = {f"{name}{end}": "bytes" for name in packed for end in (BLOCKS, SCALES)}
    return replace(row, sources=sources, fill=fill, kinds=kinds)
