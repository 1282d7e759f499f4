"""The norm, the feed-forward and the output head of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.numerics import AUTO, Numerics
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.deterministic_matmul import ROWS, deterministic_matmul
from pallas_kernels.layers.dense.gated_kernel import has_few_rows
from pallas_kernels.layers.gated_matmul import gated_matmul, tiles_for
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.products import matmul, matmul_unscaled
from pallas_kernels.layers.quantize_rows import Activation, activate
from pallas_kernels.layers.residual_norm import add_rms_norm, rms_norm
from pallas_kernels.layers.row_by_row import row_by_row_off_gpu
from pallas_kernels.layers.shard import OwnColumns
from pallas_kernels.layers.split_matmul import split_matmul
from pallas_kernels.layers.weights import Inputs, Weight, has_dynamic_activations

T = TypeVar("T")


def mlp(
    x: Inputs,
    gate_up: Weight | Adapted,
    down: Weight | Adapted,
    numerics: Numerics,
    *,
    activation: Activation = "silu",
    is_gated: bool = True,
) -> PartialSums:
    """Apply a feed-forward, gated (arXiv:2002.05202) or not.

    Args:
        x: normed input [batch, tokens, hidden].
        gate_up: fused gate and up projections [2 * intermediate, hidden], or the up projection alone.
        down: down projection [hidden, intermediate].
        numerics: by which kernels, and whether a row's bits may depend on the batch size.
        activation, is_gated: as in `jspec.models.mlps.mlp_config.Dense`.

    Returns:
        Partial sums of the output, [parts, batch, tokens, hidden].
    """
    implementation = numerics.implementation
    if not is_gated:
        inner = activate(reduce_partials(product(numerics)(x, gate_up), x.dtype), activation)
        return product(numerics)(inner, down)
    if numerics.deterministic:
        (gate_and_up,) = deterministic_matmul(x, gate_up, is_whole=True, implementation=implementation)
        return deterministic_matmul(gate_and_up, down, gate=activation, implementation=implementation)
    # The kernel that quantises computes the activation too.
    has_kernel = has_few_rows(x, gate_up, activation) or tiles_for(x, gate_up, activation) is not None
    if has_dynamic_activations(down) and not has_kernel:
        gate_and_up = matmul(x, gate_up, implementation=implementation)
        return split_matmul(gate_and_up, down, gate=activation, implementation=implementation)
    inner = gated_matmul(x, gate_up, activation=activation, implementation=implementation)
    return split_matmul(inner, down, implementation=implementation)


def logits_of(x: Float[Array, "... hidden"], head: Weight, numerics: Numerics = AUTO) -> Float[Array, "... vocab"]:
    """Return the logits ``x @ head.T``, summed and returned in float32.

    Args:
        x: hidden states.
        head: output head [vocab, hidden].
        numerics: by which kernel, and whether a row's bits may depend on the batch size.
    """
    return reduce_partials(head_product(x, head, numerics), jnp.float32)


def limited(sums: PartialSums, divisor: float, softcap: float | None) -> PartialSums:
    """Divide and limit logits, as Granite and Gemma 2 do.

    A divisor or a limit needs the scales of a quantised output head, so with one of them the scales are applied.

    Args:
        sums: logits as `head_product` returns them.
        divisor: divisor of the logits.
        softcap: limit c of the logits x, which become c * tanh(x / c); None: no limit.
    """
    if divisor == 1.0 and softcap is None:
        return sums
    if isinstance(sums, OwnColumns):
        return replace(sums, own=limited(sums.own, divisor, softcap))
    logits = reduce_partials(sums, jnp.float32) / divisor
    return (logits if softcap is None else softcap * jnp.tanh(logits / softcap))[None]


def head_product(x: Array, head: Weight, numerics: Numerics) -> PartialSums:
    """Return hidden states times output head [1, batch, tokens, vocab]; scales of a quantised head are not applied."""
    if numerics.deterministic:
        return deterministic_matmul(x, head, jnp.float32, is_whole=True, implementation=numerics.implementation)
    return matmul_unscaled(x, head, jnp.float32, implementation=numerics.implementation)


def product(numerics: Numerics) -> Any:
    """Return the function (activations, weight) -> partial sums of their product.

    If ``numerics.deterministic`` is True, the bits of a row's product do not depend on the number of rows.
    """
    multiply = deterministic_matmul if numerics.deterministic else split_matmul
    return partial(multiply, implementation=numerics.implementation)


def small_product(
    x: Float[Array, "*rows hidden"], weight: Float[Array, "out hidden"], numerics: Numerics
) -> Float[Array, "*rows out"]:
    """Return products with a small weight in float32."""
    x = x.astype(weight.dtype)
    if numerics.deterministic:
        padded = jnp.pad(weight, ((0, -len(weight) % ROWS), (0, 0)))
        (logits,) = deterministic_matmul(x, padded, jnp.float32, is_whole=True, implementation=numerics.implementation)
        return logits[..., : len(weight)]
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    return jnp.einsum("...k,nk->...n", x, weight, **exact)


def scaled(x: Float[Array, "*rows size"], factor: float) -> Float[Array, "*rows size"]:
    """Return embeddings times a factor, which is rounded to their dtype."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def norm_rows(
    x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float, numerics: Numerics
) -> Float[Array, "*rows size"]:
    """Return the root-mean-square norm of the last axis; see `rms_norm`.

    If ``numerics.deterministic`` is True, a row's bits do not depend on the number of rows. Only `add_rms_norm` is so,
    which gets zeros to add.
    """
    if not numerics.deterministic:
        return rms_norm(x, weight, eps)
    return add_rms_norm(x, jnp.zeros((1, *x.shape), x.dtype), weight, eps=eps, **numerics.options)[1]


def by_token(function: Callable[..., T], numerics: Numerics, *rows: Any) -> T:
    """Return function(*rows) of arrays [batch, tokens, ...], with bits that depend on no other token if asked for.

    Args:
        function: function of arrays [*rows, ...] that computes each row by itself.
        numerics: whether a token's bits may depend on the shape of the batch.
        rows: the arrays.
    """
    if not numerics.deterministic:
        return function(*rows)
    shape = jax.tree.leaves(rows)[0].shape[:2]
    flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), rows)
    results = row_by_row_off_gpu(function, *flat, implementation=numerics.implementation)
    return jax.tree.map(lambda array: array.reshape(*shape, *array.shape[1:]), results)
