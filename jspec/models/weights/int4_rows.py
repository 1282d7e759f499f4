"""Reads weights of four bits: rows of a weight map for packed values, scales and zero points.

Files pack eight values into an int32 word. GPTQ and AWQ store a weight's transpose, and compressed-tensors the weight:

    format               words of values            words of zero points          scales
    gptq                 8 columns [in / 8, out]    8 rows [groups, out / 8]      [groups, out]
    awq                  8 rows [in, out / 8]       8 rows [groups, out / 8]      [groups, out]
    compressed-tensors   8 columns [out, in / 8]    8 rows [out / 8, groups]      [out, groups]

AWQ orders the values of a word as `AWQ` says. On the device a weight is packed as `pallas_kernels.layers.packed.int4`
says, and experts as `pallas_kernels.layers.experts.expert_bytes` says.
Nothing is rounded: values and zero points are whole numbers, and scales become float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.fields import CheckpointError, short
from convert.huggingface import MapRow
from convert.sources import Shape, Source, Tensor
from jspec.models.parts.checks import unsupported
from jspec.models.weights.scheme import Scheme
from pallas_kernels.layers.experts import expert_bytes
from pallas_kernels.layers.packed.int4 import block_of, pack

WORD = 8  # values in an int32 word
ONES = 0x11111111  # a word of eight times 1
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight rows, in fours of bits from the lowest
PACKED = (".qweight", ".weight_packed")  # ends of the names of packed weights


@dataclass(frozen=True)
class Layout:
    """How a format stores a weight.

    Attributes:
        values, zeros, scale: last parts of the tensors' names.
        order: last part of the name of the tensor that holds each column's group.
        axes: axes of the words of values, and of zero points, along which neighbours are packed.
        is_transposed: whether input channels come first.
        places: place in a word of each of its values.
    """

    values: str
    zeros: str
    scale: str
    order: str
    axes: tuple[int, int]
    is_transposed: bool
    places: tuple[int, ...] = tuple(range(WORD))

    def stored(self, out: int, columns: int, axis: int | None) -> Shape:
        """Return the shape in the file of a tensor [out, columns] whose neighbours along an axis are packed."""
        shape = [columns, out] if self.is_transposed else [out, columns]
        if axis is not None:
            shape[axis] = -(-shape[axis] // WORD)
        return tuple(shape)


LAYOUTS = {
    "gptq": Layout("qweight", "qzeros", "scales", "g_idx", (0, 1), is_transposed=True),
    "awq": Layout("qweight", "qzeros", "scales", "g_idx", (1, 1), is_transposed=True, places=AWQ),
    "compressed-tensors": Layout(
        "weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", (1, 0), is_transposed=False
    ),
}


@dataclass(frozen=True)
class FusedPart:
    """One of the weights of which a parameter is fused.

    Attributes:
        module: name of the linear layer.
        out, columns: shape of the weight.
        groups: number of scales of a row.
        scheme: how the checkpoint is quantised.
        layout: how the format stores the weight.
        order: name of the tensor that holds each column's group; None: groups are consecutive columns.
        shape: name of the tensor that holds the shape; None: there is none.
    """

    module: str
    out: int
    columns: int
    groups: int
    scheme: Scheme
    layout: Layout
    order: str | None
    shape: str | None

    def read(self, source: Source, end: str, columns: int, axis: int | None, *, added: int = 0) -> np.ndarray:
        """Read a tensor, unpack its words if neighbours along an axis are packed, and return it as [out, columns].

        Args:
            added: number that is added to each word before it is unpacked.
        """
        name = f"{self.module}.{end}"
        pieces = [
            piece if axis is None else self._unpacked(piece.view(np.uint32) + np.uint32(added), axis)
            for piece in source.pieces(name)
        ]
        values = np.concatenate(pieces)
        if axis is None:
            check_scales(source, name, values, is_signed=True)  # AutoRound writes negative scales into these formats
        return (values.T if self.layout.is_transposed else values)[: self.out, :columns]

    def _unpacked(self, words: np.ndarray, axis: int) -> np.ndarray:
        shifts = np.array(self.layout.places, np.uint32) * 4
        if axis == 0:
            values = words[:, None, :] >> shifts[:, None] & 15
            return values.astype(np.uint8).reshape(-1, words.shape[1])
        values = words[..., None] >> shifts & 15
        return values.astype(np.uint8).reshape(len(words), -1)

    def read_zeros(self, source: Source) -> np.ndarray:
        """Read the zero points [out, groups].

        GPTQ's first format stores them less 1, its second one as they are, and published files name the wrong one. Of
        a symmetric weight all are 8, which tells the two apart.

        Raises:
            NotImplementedError: the file does not tell how its zero points are to be read.
        """
        name, axis, scheme = self.layout.zeros, self.layout.axes[1], self.scheme
        stored = self.read(source, name, self.groups, axis)
        if self.layout is not LAYOUTS["gptq"]:
            return stored
        if scheme.is_symmetric is not False and any((stored == common).all() for common in (7, 8)):
            return np.full_like(stored, 8)
        if scheme.is_symmetric:
            got, expected = f"{stored.min()} to {stored.max()}", "zero points 7 or 8 throughout, as sym: true says"
            raise unsupported(short(f"{self.module}.{name}"), got, expected)
        if scheme.zero_offset == 0:
            return stored
        by_word, by_value = self.read(source, name, self.groups, axis, added=ONES), (stored + 1) & 15
        if not scheme.subtracts_words and not np.array_equal(by_word, by_value):
            expected = "gptq_v2 as checkpoint_format, or gptqmodel as meta.quantizer, beside zero points of 0"
            raise unsupported(short(f"{self.module}.{name}"), "gptq without it", expected)
        return by_word

    def group_of(self, source: Source) -> np.ndarray:
        """Return the group of each column.

        Raises:
            CheckpointError: a group does not exist, or the stored shape is not that of the weight.
        """
        if self.shape is not None:
            stored = np.concatenate(list(source.pieces(self.shape)))
            if stored.tolist() != [self.out, self.columns]:
                raise _damage(source, self.shape, f"the shape {[self.out, self.columns]}", stored.tolist())
        if self.order is None:
            return np.arange(self.columns) // (self.columns // self.groups)
        groups = np.concatenate(list(source.pieces(self.order)))
        if (wrong := groups[(groups < 0) | (groups >= self.groups)]).size:
            raise _damage(source, self.order, f"groups from 0 to {self.groups - 1}", wrong[0])
        return groups

    def check_order(self, source: Source) -> None:
        """Raise NotImplementedError unless each group is the next columns."""
        groups = self.group_of(source)
        if not np.array_equal(groups, np.arange(self.columns) // (self.columns // self.groups)):
            expected = "groups of consecutive columns (desc_act: false), or quantize='none', which widens the weights"
            raise unsupported(short(self.order), "groups in another order", expected)


def _damage(source: Source, name: str, expected: str, got: object) -> CheckpointError:
    file = source.tensors[name].file
    return CheckpointError(file, f"{short(name)}: expected {expected}, got {got}; download it again")


def check_scales(source: Source, name: str, scales: np.ndarray, *, is_signed: bool = False) -> None:
    """Raise CheckpointError if a scale is infinite or NaN, or if it is negative and must not be."""
    wrong = scales[~(np.isfinite(scales) & (is_signed | (scales >= 0)))]
    if wrong.size:
        expected = "finite scales" if is_signed else "finite scales from 0"
        raise _damage(source, name, expected, f"{wrong.flat[0]} (values of this kind: {wrong.size})")


def packed_name(weight: str, tensors: Mapping[str, object]) -> str | None:
    """Return the name of the packed tensor of a weight; None: there is none."""
    base = weight.removesuffix(".weight")
    return next((f"{base}{end}" for end in PACKED if f"{base}{end}" in tensors), None)


def split_int4(
    row: MapRow, scheme: Scheme, tensors: Mapping[str, Tensor], known: Set[str], *, by_column: bool
) -> list[MapRow]:
    """Return the rows of a parameter's packed values, its scales, and its zero points if it has any.

    Args:
        row: row of the unquantised weight, whose sources are concatenated along axis 0, or of experts.
        scheme: how the checkpoint is quantised.
        tensors: headers of the tensors, by name.
        known: names of the tensors of all other rows.
        by_column: give each column scales of its own, so that groups may be in any order.

    Raises:
        CheckpointError: a packed tensor is not int32.
        NotImplementedError: groups do not divide the columns.
    """
    layout, (*out, columns) = LAYOUTS[scheme.method], row.shape
    size = columns if scheme.block is None else scheme.block[1]
    if columns % size:
        raise unsupported(f"{row.parameter}: group_size", size, f"a divisor of its {columns} input channels")
    groups, block = columns // size, block_of(columns)
    block = block if len(out) == 1 else math.gcd(expert_bytes.BLOCK, block)
    parts = [_part(name, shape, groups, scheme, tensors) for name, shape in row.sources.items()]
    values = _sources(parts, layout.values, columns, layout.axes[0])
    if wrong := [name for name in values if name in tensors and tensors[name].dtype != "int32"]:
        tensor = tensors[wrong[0]]
        raise CheckpointError(tensor.file, f"{short(wrong[0])}: expected int32, got {tensor.dtype}; download it again")
    others = {name: tensors[name].shape for part in parts for name in (part.order, part.shape) if name}
    zero_biases = {name: (part.out,) for part in parts if (name := f"{part.module}.bias") in tensors.keys() - known}
    scales = {**_sources(parts, layout.scale, groups, None), **zero_biases}
    shape = (*out, columns if by_column else groups)
    fill_values = partial(_fill_values, parts, by_column)
    fill_scale = partial(_fill_scale, parts, tuple(zero_biases), by_column)
    rows = [
        MapRow(f"{row.parameter}.values", values | others, (*out, columns // block, block // 2), fill_values, "uint8"),
        MapRow(f"{row.parameter}.scale", scales, shape, fill_scale, "float32"),
    ]
    if scheme.has_zeros:
        zeros = _sources(parts, layout.zeros, groups, layout.axes[1])
        rows.append(MapRow(f"{row.parameter}.zeros", zeros, shape, partial(_fill_zeros, parts, by_column), "uint8"))
    return [replace(part, quantized="int4") for part in rows]


def _part(weight: str, shape: Shape, groups: int, scheme: Scheme, tensors: Mapping[str, Tensor]) -> FusedPart:
    module, layout = weight.removesuffix(".weight"), LAYOUTS[scheme.method]
    names = (f"{module}.{layout.order}", f"{module}.weight_shape")
    order, stored = (name if name in tensors else None for name in names)
    out, columns = shape
    return FusedPart(module, out, columns, groups, scheme, layout, order, stored)


def _sources(parts: list[FusedPart], end: str, columns: int, axis: int | None) -> dict[str, Shape]:
    return {f"{part.module}.{end}": part.layout.stored(part.out, columns, axis) for part in parts}


def _fill_values(parts: list[FusedPart], by_column: bool, source: Source, row: MapRow, dtype: str) -> np.ndarray:
    filled, first = np.empty(row.shape, np.dtype(dtype)), 0
    flat = filled.reshape(-1, *row.shape[-2:])  # the rows of experts, one expert after another
    for part in parts:
        if not by_column:
            part.check_order(source)
        values = part.read(source, part.layout.values, part.columns, part.layout.axes[0])
        is_plain = len(row.shape) == 3  # not of experts
        flat[first : first + part.out] = pack(values, 2 * row.shape[-1]) if is_plain else expert_bytes.pack(values)
        first += part.out
    return filled


def _fill_scale(
    parts: list[FusedPart], zero_biases: tuple[str, ...], by_column: bool, source: Source, row: MapRow, dtype: str
) -> np.ndarray:
    for name in zero_biases:
        if any(piece.any() for piece in source.pieces(name)):
            raise _damage(source, name, "zeros, as the model has no such bias", "other values")
    scales = [part.read(source, part.layout.scale, part.groups, None).astype(np.float32) for part in parts]
    return _joined(parts, scales, by_column, source).reshape(row.shape)


def _fill_zeros(parts: list[FusedPart], by_column: bool, source: Source, row: MapRow, dtype: str) -> np.ndarray:
    return _joined(parts, [part.read_zeros(source) for part in parts], by_column, source).reshape(row.shape)


def _joined(parts: list[FusedPart], arrays: list[np.ndarray], by_column: bool, source: Source) -> np.ndarray:
    """Concatenate arrays [out, groups], with the columns of the weight instead of groups if wanted."""
    pairs = zip(parts, arrays, strict=True)
    return np.concatenate([array[:, part.group_of(source)] if by_column else array for part, array in pairs])
