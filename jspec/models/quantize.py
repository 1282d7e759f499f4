"""Quantises linear weights to int8, float8 or four bits.

`pallas_kernels.layers.quantized` defines the products with quantised weights. Only the weights named in `NAMES` are
quantised. Embeddings, tied output heads, norms and biases keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from jspec.core.config import DEQUANTIZE
from pallas_kernels.layers.grouped_matmul import unsupported
from pallas_kernels.layers.quantized import KINDS, Quantized, has_group_scales, quantize

FLOAT8_CAPABILITY = (8, 9)  # lowest compute capability of GPUs with float8 products
EXPERTS = ("experts_gate_up", "experts_down")
NAMES = (
    "qkv",
    "q_up",
    "o",
    "gate_up",
    "down",
    *EXPERTS,
    "fc",
    "head",
)  # last parts of the names of weights to quantise
WIDENED = ("k_up", "v_up")  # those of small weights that a checkpoint may quantise, and that are widened when loaded

Tree = TypeVar("Tree")
_quantize = jax.jit(quantize, static_argnames="kind")


def check_scope(kind: object, model: str | None) -> None:
    """Raise ValueError if the quantisation is unknown, or if a kind of checkpoint cannot be quantised.

    Args:
        kind: kind of quantisation; None: no quantisation.
        model: kind of checkpoint, one of `convert.detect.KINDS`; None: any kind that can be quantised.
    """
    if kind is not None and kind != DEQUANTIZE and kind not in KINDS:
        raise ValueError(f"quantize: expected None or one of {', '.join(KINDS)}, got {kind!r}; pass one of them")
    if kind == DEQUANTIZE and model not in (None, "target"):
        raise ValueError(f"quantize: expected a target or a draft model for 'none', got a head ({model}); leave it out")
    if kind is not None and model == "medusa":
        raise ValueError("quantize: expected a model or an EAGLE head, got Medusa heads; leave it out")


def quantize_weights(model: Tree, kind: str) -> Tree:
    """Quantise the linear weights of a `Model` or an `EagleHead`.

    Args:
        model: the model or the head. Its weights must be unquantised, or quantised in the given kind. "fp8" weights
            may also become "fp8_dynamic", and vice versa.
        kind: kind of quantisation, "int8", "fp8", "fp8_dynamic" or "int4".

    Returns:
        The model or the head with quantised weights.

    Raises:
        ValueError: the kind is unknown, the weights are quantised in another kind, or no weight is named in `NAMES`.
    """
    check_scope(kind, None)
    if kind == DEQUANTIZE:
        if stored := quantized_as(model):
            raise ValueError(
                f"quantize: expected unquantised weights for 'none', got {stored}; load the folder with it"
            )
        return model
    quantized = quantize_parameters(model, kind)
    if quantized_as(quantized) is None:
        raise ValueError(f"quantize: expected weights named {', '.join(NAMES)}, got none; leave it out")
    return quantized


def check_stored(tree: Any, kind: str | None) -> None:
    """Raise ValueError if a tree has weights that cannot become weights of a kind of quantisation.

    Args:
        tree: tree of weights, or of their shapes and dtypes.
        kind: wanted kind of quantisation; None: as stored.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_quantized):
        if kind is not None:
            _check_experts(path, kind)
            if _is_quantized(leaf):
                _of_kind(leaf, kind)


def quantize_parameters(tree: Tree, kind: str) -> Tree:
    """Quantise the linear weights (`NAMES`) in any tree of parameters; other leaves stay unchanged."""
    return jax.tree_util.tree_map_with_path(partial(_leaf, kind), tree, is_leaf=_is_quantized)


def check_device(tree: Any, *cache_dtypes: str, device: jax.Device | None = None) -> None:
    """Raise ValueError if a GPU cannot multiply weights as they are, or has no float8 products for them or for caches.

    Args:
        tree: tree of weights.
        cache_dtypes: dtypes of the KV caches.
        device: the device; None: the default device.
    """
    capability = getattr(device or jax.devices()[0], "compute_capability", None)
    if capability is None:
        return
    _check_packed(tree)
    if tuple(map(int, str(capability).split("."))) >= FLOAT8_CAPABILITY:
        return
    if (quantized_as(tree) or "").startswith("fp8") or any(dtype.startswith("float8") for dtype in cache_dtypes):
        raise ValueError(
            f"float8: expected a GPU of compute capability 8.9 or later, got {capability}; use int8 weights and a "
            "bfloat16 cache"
        )


def _check_packed(tree: Any) -> None:
    """Raise ValueError if a GPU would have to widen a packed weight in memory to multiply it.

    The activations of a record of weights, such as a model, have its ``dtype``.
    """
    for record in filter(_is_record, jax.tree.leaves(tree, is_leaf=_is_record)):
        for weight in jax.tree.leaves(record, is_leaf=_is_quantized):
            if not _is_quantized(weight) or weight.kind != "int4":
                continue
            if reason := unsupported(weight.shape[1], weight.scale.shape[1], record.dtype):
                raise ValueError(
                    f"int4: on a GPU {reason}; quantize='none' widens the weights of a checkpoint when they are loaded"
                )


def _is_record(node: Any) -> bool:
    """Return whether a node of a tree is a record of weights (`jspec.models.tensor_parallel.Weights`)."""
    return hasattr(node, "declared")


def quantized_shapes(weight: tuple[int, ...], found: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the stored arrays of a quantised weight must have, by the arrays' names.

    There may be a scale per row or per group of columns, and packed values may have blocks of any size.

    Args:
        weight: shape of the weight.
        found: stored arrays of the weight, by name.
    """
    shapes: dict[str, tuple[int, ...]] = {"values": weight, "scale": weight[:-1]}
    values, scale = found.get("values"), found.get("scale")
    if len(weight) != 2 or values is None or scale is None or len(scale.shape) != 2:
        return shapes
    (out, inner), groups = weight, scale.shape[1]
    if groups and inner % groups == 0:
        shapes["scale"] = (out, groups)
    if values.dtype != np.uint8 or len(values.shape) != 3:
        return shapes
    width = 2 * values.shape[2]
    if width and inner % width == 0:
        shapes["values"] = (out, inner // width, values.shape[2])
    return shapes | ({"zeros": shapes["scale"]} if "zeros" in found else {})


def quantized_as(tree: Any) -> str | None:
    """Return the kind of quantisation of the first quantised weight in a tree; None if no weight is quantised."""
    return next((leaf.kind for leaf in jax.tree.leaves(tree, is_leaf=_is_quantized) if _is_quantized(leaf)), None)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _leaf(kind: str, path: tuple[Any, ...], leaf: Any) -> Any:
    name = _check_experts(path, kind)
    if _is_quantized(leaf):
        return _of_kind(leaf, kind)
    return _quantize(leaf, kind=kind) if name in NAMES else leaf


def _check_experts(path: tuple[Any, ...], kind: str) -> str:
    """Return the last part of a parameter's name; raise ValueError if the kind is not one for experts."""
    name = jax.tree_util.keystr(path[-1:], simple=True).rpartition(".")[2]
    if name in EXPERTS and kind in ("fp8_dynamic", "int4"):
        raise ValueError(f"quantize: expected int8 or fp8 for the experts of a mixture ({name}), got {kind}; pass fp8")
    return name


def _of_kind(weight: Quantized, kind: str) -> Quantized:
    if kind != weight.kind and not (kind.startswith("fp8") and weight.kind.startswith("fp8")):
        raise ValueError(f"quantize: expected unquantised weights, got {weight.kind}; start from the original")
    if kind == "fp8_dynamic" and has_group_scales(weight):
        raise ValueError(
            f"quantize: expected one scale per output channel for fp8_dynamic, got a scale for each {weight.group} "
            "columns; leave it out, or pass fp8"
        )
    return replace(weight, dynamic=kind == "fp8_dynamic")
