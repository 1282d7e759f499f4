"""Quantises linear weights to int8, float8 or four bits; those of experts also to mxfp4.

`pallas_kernels.layers.products` has the products with quantised weights. Only the weights named in `NAMES` are
quantised. Embeddings, tied output heads, norms and biases keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from jspec.core.config import DEQUANTIZE, QUANTIZE
from jspec.models.mlps.shared_expert import check_apart
from pallas_kernels.layers.dense.grouped_matmul import (
    exceeds_kernel,
    is_grouped,
    packed_tiles,
    unsupported,
    widened_rows,
)
from pallas_kernels.layers.experts.expert_matmul import unsupported_experts
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.weights import EXPERT_KINDS, FORMATS, KINDS, Kind, Quantized, has_group_scales

FLOAT8_CAPABILITY = (8, 9)  # lowest compute capability of GPUs with float8 products
FLOAT8 = {kind for kind, form in FORMATS.items() if form.dtype == "float8_e4m3fn"}  # kinds of the same arrays
EXPERTS = ("experts_gate_up", "experts_down")
NAMES = ("qkv", "q_up", "o", "gate_up", "down", *EXPERTS, "fc", "head")  # last parts of names of weights to quantise
# Those of small weights that a checkpoint may quantise, and that are widened when loaded.
WIDENED = (
    *("k_up", "v_up", "gates", "embed_gate", "embed_out", "projection"),
    *("attn_taps_project", "mlp_taps_project", "project", "experts_in", "experts_out"),
)

BFLOAT16 = jnp.dtype("bfloat16")

Tree = TypeVar("Tree")
_quantize = jax.jit(quantize, static_argnames="kind")


def check_scope(kind: object, model: str | None) -> None:
    """Raise ValueError if the quantisation is unknown, or if a kind of checkpoint cannot be quantised.

    Args:
        kind: kind of quantisation; None: no quantisation.
        model: kind of checkpoint, one of `convert.detect.KINDS`; None: any kind that can be quantised.
    """
    if kind is not None and kind != DEQUANTIZE and kind not in QUANTIZE:
        raise ValueError(f"quantize: expected None or one of {', '.join(QUANTIZE)}, got {kind!r}; pass one of them")
    if kind == DEQUANTIZE and model not in (None, "target"):
        raise ValueError(f"quantize: expected a target or a draft model for 'none', got a head ({model}); leave it out")
    if kind is not None and model == "medusa":
        raise ValueError("quantize: expected a model or an EAGLE head, got Medusa heads; leave it out")


def quantize_weights(model: Tree, kind: str) -> Tree:
    """Quantise the linear weights of a `Model` or an `EagleHead`.

    Args:
        model: the model or the head. Its weights must be unquantised, or quantised in the given kind. "fp8" weights
            may also become "fp8_dynamic", and vice versa.
        kind: kind of quantisation, "int8", "fp8", "fp8_dynamic", "int4", or for experts alone "mxfp4".

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
    check_apart(model)
    quantized = quantize_parameters(model, kind)
    if quantized_as(quantized) is None:
        raise ValueError(f"quantize: expected weights named {', '.join(_names(kind))}, got none; leave it out")
    return quantized


def check_stored(tree: Any, kind: str | None) -> None:
    """Raise ValueError if a tree has weights that cannot become weights of a kind of quantisation.

    Args:
        tree: tree of weights, or of their shapes and dtypes.
        kind: wanted kind of quantisation; None: as stored.
    """
    if kind is None:
        return
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_quantized)
    names = [_check_experts(path, kind) for path, _ in leaves]
    if not set(names) & set(_names(kind)):
        raise ValueError(f"quantize: expected weights named {', '.join(_names(kind))}, got none; leave it out")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if _is_quantized(leaf) and name in _names(kind):
            _of_kind(leaf, kind)


def quantize_parameters(tree: Tree, kind: str) -> Tree:
    """Quantise the linear weights of a kind's names in any tree of parameters; other leaves stay unchanged."""
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
    if quantized_as(tree) in FLOAT8 or any(dtype.startswith("float8") for dtype in cache_dtypes):
        raise ValueError(
            f"float8: expected a GPU of compute capability 8.9 or later, got {capability}; use int8 weights and a "
            "bfloat16 cache"
        )


def _check_packed(tree: Any) -> None:
    """Raise ValueError if a GPU would have to widen a packed weight, or experts, in memory to multiply them.

    The activations of a record of weights, such as a model, have its ``dtype``.
    """
    for record in filter(_is_record, jax.tree.leaves(tree, is_leaf=_is_record)):
        for path, weight in jax.tree_util.tree_leaves_with_path(record, is_leaf=_is_quantized):
            name = _name(path)
            if not _is_quantized(weight) or not (weight.is_packed or (name in EXPERTS and weight.has_groups)):
                continue
            if name in EXPERTS:
                reason = unsupported_experts(weight, record.dtype, gated=name == EXPERTS[0])
            else:
                reason = unsupported(weight.shape[1], weight.scale.shape[1], record.dtype)
            if reason:
                raise ValueError(
                    f"{weight.kind}: on a GPU {reason}; quantize='none' widens the weights of a checkpoint when they "
                    "are loaded"
                )


def widened_bytes(tree: Any, rows: int) -> int:
    """Return the bytes of the largest copy of a quantised weight, or of a part of it, that products of rows write.

    The copies have two bytes per value. The Hopper kernel writes none.
    """
    weights = [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_quantized) if _is_quantized(leaf)]
    dense = [weight for weight in weights if len(weight.shape) == 2 and exceeds_kernel(rows, weight)]
    grouped = [weight for weight in dense if is_grouped(rows, weight, BFLOAT16)]
    copied = [weight for weight in grouped if packed_tiles(rows, weight, BFLOAT16) is None]
    return max((2 * widened_rows(*weight.shape) * weight.shape[1] for weight in copied), default=0)


def _is_record(node: Any) -> bool:
    """Return whether a node of a tree is a record of weights (`jspec.models.weights.tensor_parallel.Weights`)."""
    return hasattr(node, "declared")


def quantized_shapes(
    weight: tuple[int, ...], stored: Mapping[str, jax.ShapeDtypeStruct], kind: Kind
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the stored arrays of a quantised weight must have, by the arrays' names.

    There may be a scale per row or per group of columns, and packed values may have blocks of any size.

    Args:
        weight: shape of the weight.
        stored: stored arrays of the weight, by name.
        kind: kind of the weight.
    """
    form, (*rows, inner) = FORMATS[kind], weight
    shapes: dict[str, tuple[int, ...]] = {"values": weight, "scale": tuple(rows)}
    values, scale = stored.get("values"), stored.get("scale")
    if values is None or scale is None or len(scale.shape) != len(weight):
        return shapes
    is_packed = form.is_packed and len(values.shape) == len(weight) + 1
    groups = scale.shape[-1] if form.group is None else inner // form.group
    if groups and inner % groups == 0:
        shapes["scale"] = (*rows, groups)
    if not is_packed:
        return shapes
    width = 2 * values.shape[-1]
    if width and inner % width == 0:
        shapes["values"] = (*rows, inner // width, values.shape[-1])
    return shapes | ({"zeros": shapes["scale"]} if "zeros" in stored else {})


def quantized_as(tree: Any) -> str | None:
    """Return the kind of quantisation of the first quantised weight in a tree; None if no weight is quantised."""
    return next((leaf.kind for leaf in jax.tree.leaves(tree, is_leaf=_is_quantized) if _is_quantized(leaf)), None)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _leaf(kind: str, path: tuple[Any, ...], leaf: Any) -> Any:
    name = _check_experts(path, kind)
    if name not in _names(kind):
        return leaf
    return _of_kind(leaf, kind) if _is_quantized(leaf) else _quantize(leaf, kind=kind)


def _names(kind: str) -> tuple[str, ...]:
    """Return the last parts of the names of the weights that a kind of quantisation is for."""
    return NAMES if kind in KINDS else EXPERTS


def _name(path: tuple[Any, ...]) -> str:
    """Return the last part of a parameter's name."""
    return jax.tree_util.keystr(path[-1:], simple=True).rpartition(".")[2]


def _check_experts(path: tuple[Any, ...], kind: str) -> str:
    """Return the last part of a parameter's name; raise ValueError if the kind is not one for experts."""
    name = _name(path)
    if name in EXPERTS and kind not in EXPERT_KINDS:
        kinds = " or ".join(EXPERT_KINDS)
        raise ValueError(f"quantize: expected {kinds} for the experts of a mixture ({name}), got {kind}; pass fp8")
    return name


def _of_kind(weight: Quantized, kind: str) -> Quantized:
    if kind != weight.kind and not {kind, weight.kind} <= FLOAT8:
        raise ValueError(f"quantize: expected unquantised weights, got {weight.kind}; start from the original")
    if kind == "fp8_dynamic" and has_group_scales(weight):
        raise ValueError(
            f"quantize: expected one scale per output channel for fp8_dynamic, got a scale for each {weight.group} "
            "columns; leave it out, or pass fp8"
        )
    return replace(weight, kind=cast(Kind, kind))
