"""The weights of matrix products, which may be quantised, and activations that are quantised for them.

A quantised weight has four or eight bits per value, and one scale per output channel:

    int8          y = (x @ values.T) * scale              only weights are quantised; scale = max |w| / 127 per row of w
    fp8           y = (x @ values.T) * scale              like int8, to float8_e4m3fn; scale = max |w| / 448
    fp8_dynamic   y = (x8 @ values.T) * scale_x * scale   like fp8, and x to x8; scale_x = max |x| / 448 per row of x

Each row of x is quantised separately, so its result does not depend on other rows. But quantising can turn a difference
in the last bit of a float32 sum into a relative difference of 1/16. Therefore "fp8_dynamic" keeps the probabilities of
decoding only up to such rounding errors, not bit for bit.

A weight of int8 or fp8 may instead have a scale for each group of input channels in each row (`grouped_matmul`). A
weight of int4 always has such scales, and may have zero points (`int4`). Only experts may be of mxfp4, whose scales are
powers of two, stored in a byte (`mxfp4`). Experts of both kinds are packed in another order (`expert_bytes`).
"""

from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt8

from pallas_kernels.layers.shard import Shard

Kind = Literal["int8", "fp8", "fp8_dynamic", "int4", "mxfp4"]
EXPERT_KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4", "mxfp4")  # kinds of the weights of experts
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "mxfp4")  # kinds of other weights
STATIC = {"static": True}  # metadata of a field that belongs to the pytree's structure, not to its leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantised weight [out, inner], equal to values * scale[:, None]; or one of experts [experts, out, inner].

    With group scales [out, groups], each scale belongs to the next inner / groups columns of its row. The scales of
    experts are [experts, out], or of packed values [experts, out, groups].
    """

    values: Num[Array, "*experts out inner"] | UInt8[Array, "*experts out blocks bytes"]  # int8, float8 or packed
    scale: Num[Array, "*experts out"] | Num[Array, "*experts out groups"]  # float32; of mxfp4 uint8
    dynamic: bool = field(default=False, metadata=STATIC)  # kind "fp8_dynamic": activations are quantised too
    zeros: UInt8[Array, "*experts out groups"] | None = None  # zero points of int4; None: 8

    @property
    def shape(self) -> tuple[int, ...]:
        if self.values.dtype != jnp.uint8:
            return self.values.shape
        *rows, blocks, half = self.values.shape
        return (*rows, blocks * 2 * half)

    @property
    def kind(self) -> Kind:
        if self.values.dtype == jnp.uint8:
            return "mxfp4" if self.scale.dtype == jnp.uint8 else "int4"
        if self.values.dtype == jnp.int8:
            return "int8"
        return "fp8_dynamic" if self.dynamic else "fp8"

    @property
    def group(self) -> int | None:
        """Number of columns that share a scale; None: all columns of a row."""
        return None if self.scale.ndim < len(self.shape) else self.shape[-1] // self.scale.shape[-1]

    def rows(self, index: Int[Array, " rows"]) -> "Quantized":
        """Returns some rows of the weight, as a weight with the same values."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, values=self.values[index], scale=self.scale[index], zeros=zeros)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedActivation:
    """Activations that are quantised for an "fp8_dynamic" weight; they equal values * scale[..., None]."""

    values: Float[Array, "*rows inner"]  # float8_e4m3fn
    scale: Float[Array, "*rows"]  # float32
    dtype: jnp.dtype = field(metadata=STATIC)  # dtype of the activations before they were quantised

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Weight = Float[Array, "_ _"] | Quantized | Shard  # [out, inner]
Inputs = Float[Array, "*rows inner"] | QuantizedActivation


def has_dynamic_activations(weight: Weight | None) -> bool:
    """Returns whether activations are quantised before they are multiplied by this weight; None: there is none."""
    weight = weight.weight if isinstance(weight, Shard) else weight
    return isinstance(weight, Quantized) and weight.dynamic


def has_group_scales(weight: Weight) -> TypeGuard[Quantized]:
    """Returns whether a weight is quantised with scales for groups of columns."""
    return isinstance(weight, Quantized) and weight.group is not None
