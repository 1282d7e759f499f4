"""4-bit weights decoded value by value, from the descriptions of the formats."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Tensors = Mapping[str, np.ndarray]
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # row, among eight, that each four bits of a word hold, from the lowest


def bits(word: int, place: int) -> int:
    """Return four bits of a word, counted in fours from the lowest."""
    return (int(word) >> (4 * place)) & 15


def gptq(tensors: Tensors, *, offset: int = 1) -> np.ndarray:
    """Return a weight [out, in] of GPTQ; its first version stores zero points minus 1 (``offset``)."""
    qweight, qzeros, scales, groups = (tensors[name] for name in ("qweight", "qzeros", "scales", "g_idx"))
    wide = np.empty((qweight.shape[1], 8 * qweight.shape[0]), np.float32)
    for row, column in np.ndindex(*wide.shape):
        group = groups[column]
        zero = bits(qzeros[group, row // 8], row % 8) + offset
        value = bits(qweight[column // 8, row], column % 8)
        wide[row, column] = np.float32(value - zero) * np.float32(scales[group, row])
    return wide


def awq(tensors: Tensors) -> np.ndarray:
    """Return a weight [out, in] of AWQ in the layout "gemm"."""
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    columns, size = len(qweight), len(qweight) // len(scales)
    wide = np.empty((8 * qweight.shape[1], columns), np.float32)
    for row, column in np.ndindex(*wide.shape):
        place, group = AWQ_ROWS.index(row % 8), column // size
        difference = bits(qweight[column, row // 8], place) - bits(qzeros[group, row // 8], place)
        wide[row, column] = np.float32(difference) * np.float32(scales[group, row])
    return wide


def compressed_tensors(tensors: Tensors) -> np.ndarray:
    """Return a weight [out, in] of compressed-tensors; values and zero points are stored plus 8."""
    packed, scales, zeros = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    wide = np.empty(tensors["weight_shape"], np.float32)
    size = wide.shape[1] // scales.shape[1]
    for row, column in np.ndindex(*wide.shape):
        group = column // size
        zero = 8 if zeros is None else bits(zeros[row // 8, group], row % 8)
        value = bits(packed[row, column // 8], column % 8)
        wide[row, column] = np.float32(value - zero) * np.float32(scales[row, group])
    return wide


def device(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Return the weight of packed bytes [out, blocks, bytes], each of whose columns has a byte and four of its bits."""
    _, blocks, half = values.shape
    column = np.arange(blocks * 2 * half)
    block, place = np.divmod(column, 2 * half)
    byte, high = np.array([_place(int(k), 2 * half) for k in place]).T
    numbers = (np.asarray(values)[:, block, byte] >> (4 * high)) & 15
    group = column // (len(column) // scales.shape[1])
    differences = numbers.astype(np.float32) - (8 if zeros is None else np.asarray(zeros, np.float32)[:, group])
    return differences * np.asarray(scales)[:, group]


def _place(column: int, block: int) -> tuple[int, int]:
    """Return the byte of a block that holds a column, and whether its high bits do.

    Of 16 columns, thread t of four gets columns 2t, 2t + 1, 2t + 8 and 2t + 9 of the first operand of `wgmma`.
    """
    if block < 32:
        return column % (block // 2), column // (block // 2)
    sixteen, rest = divmod(column, 16)
    high, rest = divmod(rest, 8)
    thread, odd = divmod(rest, 2)
    return thread * (block // 8) + 4 * (sixteen // 2) + 2 * odd + sixteen % 2, high
