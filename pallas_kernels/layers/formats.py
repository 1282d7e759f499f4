"""How weights are quantised to each kind, and how quantised ones are divided."""

import math
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.layers.experts import expert_bytes, mxfp4
from pallas_kernels.layers.packed import int4
from pallas_kernels.layers.quantize_rows import scaled_rows
from pallas_kernels.layers.weights import FORMATS, Kind, Quantized


def quantize(weight: Float[Array, "*experts out inner"], kind: Kind) -> Quantized:
    """Returns a weight quantised to one byte per value with a scale per output channel, or to four bits in groups."""
    if kind == "mxfp4":
        return Quantized(*mxfp4.round_to_mxfp4(weight), kind)
    if kind == "int4":
        values, scale = int4.round_to_int4(weight.reshape(-1, weight.shape[-1]))
        if weight.ndim > 2:
            values = expert_bytes.pack(int4.unpack(values).reshape(weight.shape))
        return Quantized(values, scale.reshape(*weight.shape[:-1], -1), kind)
    return Quantized(*scaled_rows(weight, jnp.dtype(FORMATS[kind].dtype)), kind)


def columns_of(weight: Quantized, start: int, stop: int) -> Quantized:
    """Returns columns `start` to `stop - 1` of the weight, as a weight with the same values."""
    if weight.kind == "int4":
        values = int4.pack(int4.unpack(weight.values)[:, start:stop])
    else:
        values = weight.values[:, start:stop]
    if not weight.has_groups:
        return replace(weight, values=values)
    fine = math.gcd(weight.group, start, stop)  # groups of this size lie within the columns
    count, part = weight.group // fine, slice(start // fine, stop // fine)
    zeros = None if weight.zeros is None else jnp.repeat(weight.zeros, count, axis=1)[:, part]
    return replace(weight, values=values, scale=jnp.repeat(weight.scale, count, axis=1)[:, part], zeros=zeros)
