"""Checkpoint folders with 4-bit weights in each format that jspec reads, and the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.reference.int4 import AWQ_ROWS
from tests.support import folders
from tests.support.quantized_folders import compressed, is_linear

GROUP = 16
CONFIG: dict[str, Any] = folders.TARGET | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AWQ |= {"modules_to_not_convert": ["lm_head"]}

Tensors = dict[str, np.ndarray]
Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]  # values [out, in], zero points and scales [out, groups]


def packed_config(**weights: Any) -> dict[str, Any]:
    """Return the config of compressed-tensors; ``weights`` replace values of its weights."""
    own = {"num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True, **weights}
    return compressed(own.pop("strategy", "group"), None, **own) | {"format": "pack-quantized"}


def rounded(weight: np.ndarray, group: int, *, is_symmetric: bool = False) -> Numbers:
    """Round a weight in groups of columns; zero points are 1 to 15, or 8."""
    out = len(weight)
    grouped = weight.reshape(out, -1, group)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scale = np.maximum(-low, high) / 7.5 if is_symmetric else (high - low) / 14
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)  # exact in bfloat16, and not below float16's range
    zeros = np.full(scale.shape, 8) if is_symmetric else np.clip(np.rint(-low / scale), 1, 15)
    values = np.clip(np.rint(grouped / scale[..., None]) + zeros[..., None], 0, 15)
    return values.reshape(out, -1).astype(np.int64), zeros.astype(np.int64), scale


def words(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack eight neighbours along an axis into a word; ``order`` lists them from the lowest bits."""
    eights = np.moveaxis(numbers, axis, -1)
    eights = eights.reshape(*eights.shape[:-1], -1, 8)
    packed = sum(eights[..., number] << (4 * place) for place, number in enumerate(order))
    return np.moveaxis(np.asarray(packed), -1, axis).astype(np.uint32).view(np.int32)


def as_gptq(numbers: Numbers, *, offset: int = 1) -> Tensors:
    values, zeros, scale = numbers
    groups = np.arange(values.shape[1], dtype=np.int32) // (values.shape[1] // scale.shape[1])
    tensors = {"qweight": words(values.T, 0), "qzeros": words(zeros.T - offset, 1)}
    return {**tensors, "scales": scale.T.astype(np.float16), "g_idx": groups}


def as_awq(numbers: Numbers) -> Tensors:
    values, zeros, scale = numbers
    tensors = {"qweight": words(values.T, 1, AWQ_ROWS), "qzeros": words(zeros.T, 1, AWQ_ROWS)}
    return {**tensors, "scales": scale.T.astype(np.float16)}


def as_packed(numbers: Numbers, *, has_zeros: bool = False) -> Tensors:
    values, zeros, scale = numbers
    tensors = {"weight_packed": words(values, 1), "weight_scale": scale.astype(ml_dtypes.bfloat16)}
    tensors |= {"weight_shape": np.array(values.shape, np.int64)}
    return tensors | ({"weight_zero_point": words(zeros, 0)} if has_zeros else {})


class Int4Format(NamedTuple):
    config: dict[str, Any]  # quantization_config
    write: Callable[[Numbers], Tensors]
    is_symmetric: bool = False
    group: int | None = GROUP  # columns that share a scale; None: all


FORMATS = {
    "gptq": Int4Format(GPTQ, as_gptq),
    "gptq v2": Int4Format({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda numbers: as_gptq(numbers, offset=0)),
    "awq": Int4Format(AWQ, as_awq),
    "compressed-tensors": Int4Format(packed_config(), as_packed, is_symmetric=True),
    "compressed-tensors with zero points": Int4Format(
        packed_config(symmetric=False), lambda numbers: as_packed(numbers, has_zeros=True)
    ),
    "compressed-tensors by row": Int4Format(
        packed_config(strategy="channel", group_size=None), as_packed, is_symmetric=True, group=None
    ),
}


def quantised(
    form: Int4Format, excluded: Collection[str] = (), plain: Tensors | None = None
) -> tuple[Tensors, Tensors]:
    """Return the tensors of a quantised checkpoint, and those of the unquantised one that it stands for.

    The arguments are those of `quantized_folders.quantised`.
    """
    stored: Tensors = {}
    wide = folders.target_tensors(CONFIG) if plain is None else dict(plain)
    for name, tensor in list(wide.items()):
        if not is_linear(name, tensor, excluded):
            stored[name] = tensor
            continue
        weight = tensor / tensor.shape[1] ** 0.5 if plain is None else tensor
        values, zeros, scale = numbers = rounded(weight, form.group or weight.shape[1], is_symmetric=form.is_symmetric)
        for end, array in form.write(numbers).items():
            stored[f"{name.removesuffix('weight')}{end}"] = np.ascontiguousarray(array)  # safetensors ignores strides
        size = weight.shape[1] // scale.shape[1]
        wide[name] = (values - zeros.repeat(size, 1)).astype(np.float32) * scale.repeat(size, 1)
    return stored, wide


def write(folder: Path, form: Int4Format, stored: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """Write a quantised checkpoint; ``changes`` replace values of its quantization_config."""
    return folders.write(folder, {**CONFIG, "quantization_config": {**form.config, **changes}}, stored)
