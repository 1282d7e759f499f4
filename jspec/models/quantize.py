"""int8 and fp8 quantisation of linear weights; `pallas_kernels.layers.quantized` defines their products.

The embedding is not quantised, nor is the output head of a model that ties both; norms and biases are not either.
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
    """Raises ValueError unless a checkpoint can be quantised so.

    Args:
        kind: of quantisation; None: no quantisation.
        model: the kind of the checkpoint, "target", "eagle3", "eagle" or "medusa"; None: a model or an EAGLE head.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"quantize: expected None or one of {', '.join(KINDS)}, got {kind!r}; pass one of them")
    if kind is not None and model == "medusa":
        raise ValueError("quantize: expected a model or an EAGLE head, got Medusa heads; leave it out")


def quantize_weights(model: Tree, kind: str) -> Tree:
    """Quantises the linear weights of a `Model` or an `EagleHead`.

    Args:
        kind: "int8", "fp8" or "fp8_dynamic"; a model in one of the last two may be changed to the other.

    Raises:
        ValueError: unknown kind, weights that are quantised otherwise, or a model that has none of `NAMES`.
    """
    check_scope(kind, None)
    quantized = quantize_parameters(model, kind)
    if quantized_as(quantized) is None:
        raise ValueError(f"quantize: expected weights named {', '.join(NAMES)}, got none; leave it out")
    return quantized


def quantize_parameters(tree: Tree, kind: str) -> Tree:
    """Quantises the linear weights in any tree of parameters; it may hold none."""
    return jax.tree_util.tree_map_with_path(partial(_leaf, kind), tree, is_leaf=_is_quantized)


def check_device(tree: Any, *cache_dtypes: str) -> None:
    """Raises ValueError if weights or caches are float8 and the GPU does not support it."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None or tuple(map(int, str(capability).split("."))) >= FLOAT8_CAPABILITY:
        return
    if (quantized_as(tree) or "").startswith("fp8") or any(dtype.startswith("float8") for dtype in cache_dtypes):
        raise ValueError(
            f"float8: expected a GPU of compute capability 8.9 or later, got {capability}; use int8 weights and a "
            "bfloat16 cache"
        )


def quantized_as(tree: Any) -> str | None:
    """The kind of quantisation of a tree's weights; None: not quantised."""
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
