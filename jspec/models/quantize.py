"""Round the weights of products to one byte a number: `pallas_kernels.layers.quantized` says how they are then
multiplied.

The embedding, and with it the output head of a model that ties them, stays as it is; so do norms and biases.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax

from pallas_kernels.layers.quantized import KINDS, Quantized, quantize

FLOAT8_CAPABILITY = (8, 9)
NAMES = ("qkv", "o", "gate_up", "down", "fc", "head")

Tree = TypeVar("Tree")
_quantize = jax.jit(quantize, static_argnames="kind")


def check_scope(kind: object, model: str | None) -> None:
    """Raises ValueError unless `kind` is None, or one that a checkpoint of the kind `model` (None: any) can have."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"quantize: expected None or one of {', '.join(KINDS)}, got {kind!r}; pass one of them")
    if kind is not None and model == "medusa":
        raise ValueError("quantize: expected a model or an EAGLE head, got Medusa heads; leave it out")


def quantize_weights(model: Tree, kind: str) -> Tree:
    """Quantises the products' weights of a `Model` or an `EagleHead`.

    Args:
        kind: "int8", "fp8" or "fp8_dynamic"; between the last two a quantised model may change.

    Raises:
        ValueError: unknown kind, weights that are quantised otherwise, or a model that has none of `NAMES`.
    """
    check_scope(kind, None)
    rounded = quantize_parameters(model, kind)
    if quantized_as(rounded) is None:
        raise ValueError(f"quantize: expected weights named {', '.join(NAMES)}, got none; leave it out")
    return rounded


def quantize_parameters(tree: Tree, kind: str) -> Tree:
    """Likewise of any part of a model, parameters by name for instance, in which there may be nothing to quantise."""
    return jax.tree_util.tree_map_with_path(partial(_leaf, kind), tree, is_leaf=_is_quantized)


def check_device(tree: Any, *cache_dtypes: str) -> None:
    """Raises ValueError where float8 is asked of a GPU that has none."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None or tuple(map(int, str(capability).split("."))) >= FLOAT8_CAPABILITY:
        return
    if (quantized_as(tree) or "").startswith("fp8") or any(dtype.startswith("float8") for dtype in cache_dtypes):
        raise ValueError(
            f"float8: expected a GPU of compute capability 8.9 or later, got {capability}; use int8 weights and a "
            "bfloat16 cache"
        )


def quantized_as(tree: Any) -> str | None:
    """How the weights of a tree are quantised; None: they are not."""
    return next((leaf.kind for leaf in jax.tree.leaves(tree, is_leaf=_is_quantized) if _is_quantized(leaf)), None)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _leaf(kind: str, path: tuple[Any, ...], leaf: Any) -> Any:
    if _is_quantized(leaf):
        if "int8" in (kind, leaf.kind) and leaf.kind != kind:
            raise ValueError(f"quantize: expected unquantised weights, got {leaf.kind}; start from the original")
        return replace(leaf, dynamic=kind == "fp8_dynamic")
    name = jax.tree_util.keystr(path[-1:], simple=True).rpartition(".")[2]
    return _quantize(leaf, kind=kind) if name in NAMES else leaf
