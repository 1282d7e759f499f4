"""Checkpoint folders with float8 weights in each format that jspec reads, with an oracle that widens their weights.

A format's writer takes a weight and returns the float8 values, the tensors beside them by the end of their name, and
the weight that they stand for, computed value by value from the format's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jspec import Model
from pallas_kernels.layers.weights import Quantized
from tests.support import folders

FLOAT8, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
BLOCK = 32, 16
# Of the blocks, the last is partial in both directions, and the rows of k, v and gate are no multiples of one.
CONFIG: dict[str, Any] = folders.TARGET | {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}

Tensors = dict[str, np.ndarray]
Quantised = tuple[np.ndarray, Tensors, np.ndarray]  # float8 values, tensors beside them, the weight they stand for


def by_row(weight: np.ndarray) -> Quantised:
    scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(BFLOAT16)
    values = (weight / scale.astype(np.float32)).astype(FLOAT8)
    return values, {"weight_scale": scale}, values.astype(np.float32) * scale.astype(np.float32)


def by_tensor(weight: np.ndarray, shape: tuple[int, ...] = (1,)) -> Quantised:
    scale = np.float32(np.abs(weight).max() / 448)
    values = (weight / scale).astype(FLOAT8)
    beside = {"weight_scale": np.full(shape, scale), "input_scale": np.full(shape, np.float32(0.37))}
    return values, beside, values.astype(np.float32) * scale


def by_scalar(weight: np.ndarray) -> Quantised:
    return by_tensor(weight, ())


def by_block(weight: np.ndarray, name: str = "weight_scale_inv") -> Quantised:
    """Quantise blocks one by one; each scale is that of its block, so neighbours differ."""
    (rows, columns), (out, inner) = BLOCK, weight.shape
    scales = np.empty((-(-out // rows), -(-inner // columns)), np.float32)
    values, wide = np.empty(weight.shape, FLOAT8), np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(*scales.shape):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scales[i, j] = np.abs(weight[at]).max() / 448
        values[at] = (weight[at] / scales[i, j]).astype(FLOAT8)
        wide[at] = values[at].astype(np.float32) * scales[i, j]
    return values, {name: scales}, wide


def by_block_of_compressed_tensors(weight: np.ndarray) -> Quantised:
    return by_block(weight, "weight_scale")


class QuantizedFormat(NamedTuple):
    config: dict[str, Any]  # quantization_config
    quantise: Callable[[np.ndarray], Quantised]


def compressed(strategy: str, inputs: Mapping[str, Any] | None, **weights: Any) -> dict[str, Any]:
    """Return the config of compressed-tensors."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, "strategy": strategy, **weights},
        "input_activations": inputs and {**common, **inputs},
        "output_activations": None,
    }
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": group}, "kv_cache_scheme": None}


PER_TOKEN, STATIC = {"dynamic": True, "strategy": "token"}, {"dynamic": False, "strategy": "tensor"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
FORMATS = {
    "compressed-tensors by row": QuantizedFormat(compressed("channel", PER_TOKEN), by_row),
    "compressed-tensors by tensor": QuantizedFormat(compressed("tensor", STATIC), by_tensor),
    "compressed-tensors by block": QuantizedFormat(
        compressed("block", PER_TOKEN, block_structure=list(BLOCK)), by_block_of_compressed_tensors
    ),
    "modelopt": QuantizedFormat(MODELOPT, by_scalar),
    "fp8 by block": QuantizedFormat({**FP8, "fmt": "e4m3", "weight_block_size": list(BLOCK)}, by_block),
    "fp8 by tensor": QuantizedFormat({**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}, by_tensor),
}


def weights() -> Tensors:
    """Return the tensors of a random Llama; the blocks and rows of its linear weights differ in size."""
    found = folders.target_tensors(CONFIG)
    rng = np.random.default_rng(1)
    for name, tensor in found.items():
        if tensor.ndim == 2:
            rows, columns = (10.0 ** rng.uniform(-0.5, 0.5, size // 8) for size in tensor.shape)
            sizes = np.repeat(rows, 8)[:, None] * np.repeat(columns, 8)
            found[name] = (tensor * sizes / tensor.shape[1] ** 0.5).astype(np.float32)
    return found


def is_linear(name: str, tensor: np.ndarray, excluded: Collection[str] = ()) -> bool:
    """Return whether a tensor is a linear weight that exporters quantise; ``excluded`` are parts of other names."""
    return tensor.ndim == 2 and not any(part in name for part in ("embed", "lm_head", *excluded))


def quantised(
    form: QuantizedFormat, excluded: Collection[str] = (), plain: Tensors | None = None
) -> tuple[Tensors, Tensors]:
    """Return the tensors of a quantised checkpoint, and those of the unquantised one that it stands for.

    Args:
        form: format of the checkpoint.
        excluded: parts of the names of linear weights that stay as they are.
        plain: tensors to quantise; None: those of a random Llama.
    """
    stored: Tensors = {}
    wide = weights() if plain is None else dict(plain)
    for name, tensor in list(wide.items()):
        if is_linear(name, tensor, excluded):
            stored[name], beside, wide[name] = form.quantise(tensor)
            stored |= {f"{name.removesuffix('weight')}{end}": scale for end, scale in beside.items()}
        else:
            stored[name] = tensor
    return stored, wide


def unrounded(model: Model) -> Model:
    """Return a model with float8 weights that does not round activations."""

    def is_weight(node: Any) -> bool:
        return isinstance(node, Quantized)

    return jax.tree.map(lambda leaf: replace(leaf, kind="fp8") if is_weight(leaf) else leaf, model, is_leaf=is_weight)


def write(folder: Path, form: QuantizedFormat, stored: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """Write a quantised checkpoint; ``changes`` replace values of its quantization_config."""
    return folders.write(folder, {**CONFIG, "quantization_config": {**form.config, **changes}}, stored)
