"""Weights of four or eight bits per value and scales, and matrix products with such weights.

A weight has one scale per output channel:

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

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeGuard, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt8

from pallas_kernels.layers import expert_bytes, int4, mxfp4
from pallas_kernels.layers.grouped_matmul import grouped_matmul, widened
from pallas_kernels.layers.plain_product import plain_product
from pallas_kernels.layers.quantize_rows import FP8, INT8, Activation, gated, quantize_rows, scaled_rows
from pallas_kernels.layers.shard import OwnColumns, Shard, gather_columns

Kind = Literal["int8", "fp8", "fp8_dynamic", "int4", "mxfp4"]
EXPERT_KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4", "mxfp4")  # kinds of the weights of experts
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "mxfp4")  # kinds of other weights
FEW_ROWS = 64  # with more rows, rounding a float8 product twice takes less time than writing it in float32
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
        if self.values.dtype == INT8:
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

    def columns(self, start: int, stop: int) -> "Quantized":
        """Returns columns `start` to `stop - 1` of the weight, as a weight with the same values."""
        if self.kind == "int4":
            values = int4.pack(int4.unpack(self.values)[:, start:stop])
        else:
            values = self.values[:, start:stop]
        if self.group is None:
            return replace(self, values=values)
        fine = math.gcd(self.group, start, stop)  # groups of this size lie within the columns
        count, part = self.group // fine, slice(start // fine, stop // fine)
        zeros = None if self.zeros is None else jnp.repeat(self.zeros, count, axis=1)[:, part]
        return replace(self, values=values, scale=jnp.repeat(self.scale, count, axis=1)[:, part], zeros=zeros)

    def widened(self) -> Float[Array, "out inner"]:
        """Returns the weight in float32."""
        return widened(self.values, self.scale.reshape(self.shape[0], -1), self.zeros)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """A float8 product x @ weight.T, kept as partial sums and scales: sum(values) * row_scale[..., None] * scale."""

    values: Float[Array, "parts *rows out"]
    row_scale: Float[Array, "*rows"]
    scale: Float[Array, " out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


# The kernel that reads partial sums adds them up. It cannot read `OwnColumns`; `reduce_partials` gathers these.
PartialSums = Float[Array, "parts *rows out"] | Scaled | OwnColumns
Weight = Float[Array, "_ _"] | Quantized | Shard  # [out, inner]
Inputs = Float[Array, "*rows inner"] | QuantizedActivation


def has_dynamic_activations(weight: Weight | None) -> bool:
    """Returns whether activations are quantised before they are multiplied by this weight; None: there is none."""
    weight = weight.weight if isinstance(weight, Shard) else weight
    return isinstance(weight, Quantized) and weight.dynamic


def has_group_scales(weight: Weight) -> TypeGuard[Quantized]:
    """Returns whether a weight is quantised with scales for groups of columns."""
    return isinstance(weight, Quantized) and weight.group is not None


def quantize(weight: Float[Array, "*experts out inner"], kind: Kind) -> Quantized:
    """Returns a weight quantised to one byte per value with a scale per output channel, or to four bits in groups."""
    if kind == "mxfp4":
        return Quantized(*mxfp4.round_to_mxfp4(weight))
    if kind == "int4":
        values, scale = int4.round_to_int4(weight.reshape(-1, weight.shape[-1]))
        if weight.ndim > 2:
            values = expert_bytes.pack(int4.unpack(values).reshape(weight.shape))
        return Quantized(values, scale.reshape(*weight.shape[:-1], -1))
    return Quantized(*scaled_rows(weight, INT8 if kind == "int8" else FP8), dynamic=kind == "fp8_dynamic")


class Factors(NamedTuple):
    """The operands of a matrix product, and the scales of its float32 result; None: no scale."""

    x: Array  # [*rows, inner]
    weight: Array  # [out, inner]; int8 and float8 values are exact in x's dtype
    row_scale: Array | None  # [*rows]
    scale: Array | None  # [out]

    def scaled(self, sums: Float[Array, "*parts rows out"]) -> Array:
        """Multiplies sums of the product x @ weight.T by the scales, if there are any."""
        if self.scale is None:
            return sums
        sums = sums if self.row_scale is None else sums * self.row_scale[..., None]
        return sums * self.scale


def quantize_activation(
    x: Array, *, gate: Activation | None = None, implementation: str = "auto"
) -> QuantizedActivation:
    """Quantises activations for a weight of "fp8_dynamic"; the arguments are those of `factors`."""
    values, scale = quantize_rows(x, gate=gate, implementation=implementation)
    return QuantizedActivation(values, scale, x.dtype)


def factors(x: Inputs, weight: Weight, *, gate: Activation | None = None, implementation: str = "auto") -> Factors:
    """Returns the operands and the scales of x @ weight.T.

    For a weight of "fp8_dynamic", x is quantised first, unless x is quantised already.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        gate: activation function; x has gate and up side by side [*rows, 2 * inner], and activation(gate) * up is
            multiplied by the weight. None: x is multiplied.
        implementation: implementation that quantises x, as in `paged_attention`.

    Raises:
        TypeError: x is quantised, and the weight is not of "fp8_dynamic".
    """
    assert not has_group_scales(weight), "sums over several groups have no common scale"
    assert not isinstance(weight, Shard), "products of several devices have no common scale"
    if isinstance(weight, Quantized) and weight.dynamic:
        if not isinstance(x, QuantizedActivation):
            x = quantize_activation(x, gate=gate, implementation=implementation)
        return Factors(x.values, weight.values, x.scale, weight.scale)
    if isinstance(x, QuantizedActivation):
        raise TypeError("x: quantised activations need a weight of fp8_dynamic; pass them unquantised")
    x = gated(x, gate) if gate else x
    if isinstance(weight, Quantized):
        return Factors(x, weight.values, None, weight.scale)
    return Factors(x, weight, None, None)


def matmul_unscaled(
    x: Inputs,
    weight: Weight,
    dtype: jnp.dtype | None = None,
    *,
    gate: Activation | None = None,
    implementation: str = "auto",
) -> PartialSums:
    """Returns the product of `matmul` as one partial sum [1, *rows, out]; the arguments are those of `matmul`.

    For a weight of "fp8_dynamic" the result is a `Scaled`; the kernel that reads the `Scaled` applies the scales. The
    product of several devices is that of `join`.
    """
    if isinstance(weight, Shard):
        own_dtype = dtype if weight.by == "rows" else jnp.float32
        own = matmul_unscaled(x, weight.weight, own_dtype, gate=gate, implementation=implementation)
        return join(own, weight, dtype or x.dtype)
    if has_group_scales(weight):
        return matmul_grouped(x, weight, dtype, gate=gate, implementation=implementation)
    f = factors(x, weight, gate=gate, implementation=implementation)
    dtype = dtype or x.dtype
    is_rounded_twice = f.row_scale is not None and math.prod(x.shape[:-1]) > FEW_ROWS and dtype != jnp.float16
    sums_dtype = dtype if f.scale is None or is_rounded_twice else jnp.float32
    right = f.weight if f.scale is None else f.weight.astype(f.x.dtype)
    sums = plain_product(f.x, right, sums_dtype)
    if f.row_scale is not None and f.scale is not None:
        return Scaled(sums[None], f.row_scale, f.scale)
    return f.scaled(sums).astype(dtype)[None]


def matmul_grouped(
    x: Inputs,
    weight: Quantized,
    dtype: jnp.dtype | None = None,
    *,
    parts: int = 1,
    gate: Activation | None = None,
    implementation: str = "auto",
) -> Float[Array, "parts *rows out"]:
    """Returns the product with a weight that has group scales, as partial sums.

    Args:
        x, gate, implementation: as in `matmul`.
        dtype: dtype of the partial sums; None: float32 for several ones, else x's dtype.
        weight: [out, inner], with group scales.
        parts: number of partial sums.
    """
    if isinstance(x, QuantizedActivation) or weight.dynamic:
        raise TypeError("weight: group scales need activations that are not quantised; use kind fp8")
    x = gated(x, gate) if gate else x
    dtype = dtype or (jnp.dtype("float32") if parts > 1 else x.dtype)
    return grouped_matmul(
        x, weight.values, weight.scale, dtype, weight.zeros, parts=parts, implementation=implementation
    )


def matmul(
    x: Inputs,
    weight: Weight,
    dtype: jnp.dtype | None = None,
    *,
    gate: Activation | None = None,
    implementation: str = "auto",
) -> Float[Array, "*rows out"]:
    """Returns x @ weight.T [*rows, out], summed in float32 and rounded once.

    float32 inputs are multiplied in float32 on every device.

    With "fp8_dynamic" and more than 64 rows, the product is also rounded to the result's dtype before it is scaled. It
    is not rounded to float16, whose largest value is below 448 * 448.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        dtype: dtype of the result; None: x's dtype.
        gate, implementation: as in `factors`.
    """
    dtype = dtype or x.dtype
    return reduce_partials(matmul_unscaled(x, weight, dtype, gate=gate, implementation=implementation), dtype)


def join(
    own: PartialSums, weight: Shard, dtype: jnp.dtype, *, deterministic: bool = False
) -> Float[Array, "parts_of_all *rows out_of_all"] | OwnColumns:
    """Returns a product with a weight of several devices: by rows `OwnColumns`, by columns the parts of `Shard.join`.

    Args:
        own: product with this device's part of the weight.
        weight: the weight.
        dtype, deterministic: as in `Shard.join`.
    """
    if weight.by == "columns":
        return weight.join(with_scales(own), dtype, deterministic=deterministic)
    columns = OwnColumns(own, weight.size)
    return reduce_partials(columns, dtype)[None] if weight.gathers else columns


def split_scales(parts: PartialSums) -> tuple[Array, tuple[Array, ...]]:
    """Returns partial sums without scales, and the scales: (row scales, column scales), or () if there are none."""
    assert not isinstance(parts, OwnColumns), "a kernel reads the columns of one device, or those of all after a gather"
    return (parts.values, (parts.row_scale, parts.scale)) if isinstance(parts, Scaled) else (parts, ())


def with_scales(parts: PartialSums) -> Float[Array, "parts *rows out"]:
    """Returns partial sums that are multiplied by their scales, if they have any."""
    values, scales = split_scales(parts)
    return values * scales[0][..., None] * scales[1] if scales else values


def sum_f32(parts: Iterable[Array]) -> Array:
    """Adds arrays in float32, in their order, inside or outside of a kernel.

    On a CPU, this sum is more exact than the reduction of jax 0.11.2.
    """
    first, *others = (part.astype(jnp.float32) for part in parts)
    return sum(others, first)


def reduce_partials(parts: PartialSums, dtype: jnp.dtype) -> Float[Array, "*rows out"]:
    """Adds up partial sums [parts, *rows, out], applies their scales, and rounds the result once to `dtype`.

    `OwnColumns` are gathered then, so that each device has the columns of all.
    """
    if isinstance(parts, OwnColumns):
        return gather_columns(reduce_partials(parts.own, dtype))[..., : parts.size]
    values, scales = split_scales(parts)
    total = sum_f32(values)
    return (total * scales[0][..., None] * scales[1] if scales else total).astype(dtype)
