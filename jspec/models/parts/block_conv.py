"""Convolutions over the tokens of a block before and after a layer's attention, and its feed-forward (DFlash2).

With the normed input x of a part f of a layer, both convolutions have taps that each token gives:

    k[side, tap] = taps[side, tap] + project(x)[side, tap], the latter one number for each group of channels
    conv(y, side)[i] = sum over taps t of k[side, t][i] * y[i - t], with y[i - t] = 0 before the block
    residual += conv(f(conv(x, 0)), 1)

Source: DFlash2 of its authors (`GroupedDynamicCausalConv`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.numerics import Numerics
from jspec.models.parts.param_spec import ParamSpec
from pallas_kernels.layers.partial_sums import with_scales
from pallas_kernels.layers.products import matmul

SIDES = 2  # before and after
PARTS = ("attn", "mlp")  # of a layer, which prefix the names of the weights


def conv_params(hidden: int, taps: int, group: int) -> dict[str, ParamSpec]:
    """Declare the weights of a layer's convolutions.

    Args:
        hidden: channels of the residual stream.
        taps: number of taps.
        group: channels that share what a token adds to the taps.
    """
    rows = SIDES * taps * (hidden // group)
    params = {}
    for part in PARTS:
        params[f"{part}_taps"] = ParamSpec((SIDES, taps, hidden), ("sides", "taps", "hidden"))
        params[f"{part}_taps_project"] = ParamSpec((rows, hidden), ("kernels", "hidden"))
    return params


def before(
    x: Float[Array, "batch tokens hidden"],
    taps: Float[Array, "sides taps hidden"],
    project: Float[Array, "kernels hidden"],
    numerics: Numerics,
) -> tuple[Float[Array, "batch tokens hidden"], Float[Array, "batch tokens taps hidden"]]:
    """Return the convolved input of a part of a layer, and the taps of the convolution of its output in float32.

    Args:
        x: normed inputs of the tokens of a block, the root first.
        taps, project: weights of the part, as `conv_params` declares them.
        numerics: by which kernels.
    """
    _, count, hidden = taps.shape
    added = matmul(x, project, implementation=numerics.implementation).astype(jnp.float32)
    groups = project.shape[0] // (SIDES * count)
    added = added.reshape(*x.shape[:-1], SIDES, count, groups)
    kernels = taps.astype(jnp.float32) + jnp.repeat(added, hidden // groups, axis=-1)
    return _convolved(x, kernels[..., 0, :, :]).astype(x.dtype), kernels[..., 1, :, :]


def after(sums: Any, kernels: Float[Array, "batch tokens taps hidden"]) -> Float[Array, "parts *rows hidden"]:
    """Return the convolved output of a part of a layer; as it is linear, each partial sum is convolved alone.

    Args:
        sums: partial sums of the output of an attention or of a dense feed-forward.
        kernels: the taps of each token, from `before`.
    """
    return _convolved(with_scales(sums), kernels)


def _convolved(values: Any, kernels: Float[Array, "batch tokens taps hidden"]) -> Float[Array, "*rows hidden"]:
    """Convolve values [*parts, batch, tokens, hidden] along their tokens, in float32."""
    values, tokens = values.astype(jnp.float32), values.shape[-2]
    total = kernels[..., 0, :] * values
    for tap in range(1, kernels.shape[-2]):
        width = [(0, 0)] * values.ndim
        width[-2] = (tap, 0)
        total += kernels[..., tap, :] * jnp.pad(values, width)[..., :tokens, :]
    return total
