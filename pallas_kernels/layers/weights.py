"""The weights of matrix products, which may be quantised, and activations that are quantised for them.

A quantised weight has four or eight bits per value, and one scale per output channel:

    int8          y = (x @ values.T) * scale              only weights are quantised; scale = max |w| / 127 per row of w
    fp8           y = (x @ values.T) * scale              like int8, to float8_e4m3fn; scale = max |w| / 448
    fp8_dynamic   y = (x8 @ values.T) * scale_x * scale   like fp8, and x to x8; scale_x = max |x| / 448 per row of x

Each row of x is quantised separately, so its result does not depend on other rows. But quantising can turn a difference
in the last bit of a float32 sum into a relative difference of 1/16. Therefore "fp8_dynamic" keeps the probabilities of
decoding only up to such rounding errors, not bit for bit.

A weight of int8 or fp8 may instead have a scale for each group of input channels in each row (`grouped_matmul`), and
so may experts (`expert_matmul`). A weight of int4 always has such scales, and may have zero points (`int4`). Only
experts may be of mxfp4, whose scales are powers of two, stored in a byte (`mxfp4`). Experts of both kinds of four bits
are packed in another order (`expert_bytes`).
"""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt8

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.shard import Shard

Kind = Literal["int8", "fp8", "fp8_dynamic", "int4", "mxfp4"]


class WeightFormat(NamedTuple):
    """What a kind of quantised weight is made of; packed values are two in a byte."""

    dtype: str  # of the values, or of the bytes of packed ones
    scale_dtype: str = "float32"
    is_packed: bool = False
    group: int | None = None  # columns that share a scale in each such weight; None: they may be of any number
    is_dense: bool = True  # whether other weights than those of experts may be of the kind
    is_of_experts: bool = True  # whether the weights of experts may be

    @property
    def value_bytes(self) -> float:
        """Bytes of a value."""
        return 0.5 if self.is_packed else 1


FORMATS: dict[Kind, WeightFormat] = {
    "int8": WeightFormat("int8"),
    "fp8": WeightFormat("float8_e4m3fn"),
    "fp8_dynamic": WeightFormat("float8_e4m3fn", is_of_experts=False),
    "int4": WeightFormat("uint8", is_packed=True),
    "mxfp4": WeightFormat("uint8", "uint8", is_packed=True, group=32, is_dense=False),
}
KINDS = tuple(kind for kind, form in FORMATS.items() if form.is_dense)
EXPERT_KINDS = tuple(kind for kind, form in FORMATS.items() if form.is_of_experts)
STATIC = {"static": True}  # metadata of a field that belongs to the pytree's structure, not to its leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantised weight [out, inner], equal to values * scale[:, None]; or one of experts [experts, out, inner].

    With group scales [out, groups], each scale belongs to the next inner / groups columns of its row. The scales of
    experts are [experts, out] or [experts, out, groups].
    """

    values: Num[Array, "*experts out inner"] | UInt8[Array, "*experts out blocks bytes"]  # int8, float8 or packed
    scale: Num[Array, "*experts out"] | Num[Array, "*experts out groups"]  # float32; of mxfp4 uint8
    kind: Kind = field(metadata=STATIC)
    zeros: UInt8[Array, "*experts out groups"] | None = None  # zero points of int4; None: 8

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.is_packed:
            return self.values.shape
        *rows, blocks, half = self.values.shape
        return (*rows, blocks * 2 * half)

    @property
    def is_packed(self) -> bool:
        """Whether the values are packed, two in a byte."""
        return FORMATS[self.kind].is_packed

    @property
    def is_dynamic(self) -> bool:
        """Whether activations are quantised too."""
        return self.kind == "fp8_dynamic"

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the weight by name, without those that it lacks."""
        arrays = {"values": self.values, "scale": self.scale, "zeros": self.zeros}
        return {name: array for name, array in arrays.items() if array is not None}

    @property
    def has_groups(self) -> bool:
        """Whether a row has scales for groups of columns."""
        return self.scale.ndim == len(self.shape)

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1] if self.has_groups else self.shape[-1]

    @property
    def in_groups(self) -> "Quantized":
        """The same dense weight with group scales: if a row has one scale, its columns are one group."""
        return self if self.has_groups else replace(self, scale=self.scale[:, None])

    def rows(self, index: Int[Array, "*rows"] | slice | int) -> "Quantized":
        """Returns some rows of the weight, or some experts or one, as a weight with the same values."""
        return Quantized(kind=self.kind, **{name: array[index] for name, array in self.arrays.items()})


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


def has_dynamic_activations(weight: Weight | Adapted | None) -> bool:
    """Returns whether activations are quantised before they are multiplied by this weight; None: there is none.

    Those of a weight with adapters are quantised in the product, because the adapters multiply them unquantised.
    """
    weight = weight.weight if isinstance(weight, Shard) else weight
    return isinstance(weight, Quantized) and weight.is_dynamic


def has_group_scales(weight: Weight) -> TypeGuard[Quantized]:
    """Returns whether a weight is quantised with scales for groups of columns."""
    return isinstance(weight, Quantized) and weight.has_groups
