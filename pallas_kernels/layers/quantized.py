"""Weights of one byte with a scale for each output channel, and how such a product is taken.

    int8          y = (x @ values.T) * scale              weights alone are rounded; scale = max |w| / 127 of a row of w
    fp8           y = (x @ values.T) * scale              likewise to float8_e4m3fn; scale = max |w| / 448
    fp8_dynamic   y = (x8 @ values.T) * scale_x * scale   so are the inputs; scale_x = max |x| / 448 of a row of x

A row of x is rounded by itself, so that what comes out for it does not depend on the rows beside it. But rounding
turns the last bit of a float32 sum into a step of 1/16: "fp8_dynamic" is exact in law, not bit for bit.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Num

from pallas_kernels.layers.quantize_rows import FP8, INT8, gated, quantize_rows, scaled_rows

Kind = Literal["int8", "fp8", "fp8_dynamic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FEW_ROWS = 64  # beyond, rounding inputs of one byte and their product costs less than writing the latter in float32


@struct.dataclass
class Quantized:
    """A weight [out, inner], values * scale[:, None]."""

    values: Num[Array, "out inner"]  # int8 or float8_e4m3fn
    scale: Float[Array, " out"]  # float32
    dynamic: bool = struct.field(pytree_node=False, default=False)  # its inputs are rounded too

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def kind(self) -> Kind:
        if self.values.dtype == INT8:
            return "int8"
        return "fp8_dynamic" if self.dynamic else "fp8"


@struct.dataclass
class QuantizedActivation:
    """Rows that were rounded for "fp8_dynamic" already, values * scale[..., None]."""

    values: Float[Array, "*rows inner"]  # float8_e4m3fn
    scale: Float[Array, "*rows"]  # float32
    dtype: jnp.dtype = struct.field(pytree_node=False)  # of what was rounded

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@struct.dataclass
class Scaled:
    """Parts of a product of float8 numbers that are still to be scaled: their sum * row_scale[..., None] * scale."""

    values: Float[Array, "parts *rows out"]
    row_scale: Float[Array, "*rows"]
    scale: Float[Array, " out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


PartialSums = Float[Array, "parts *rows out"] | Scaled  # to be added up by whoever reads them
Weight = Float[Array, "_ _"] | Quantized  # [out, inner]
Inputs = Float[Array, "*rows inner"] | QuantizedActivation


def has_dynamic_activations(weight: Weight) -> bool:
    """Whether what this weight is multiplied by is rounded."""
    return isinstance(weight, Quantized) and weight.dynamic


def quantize(weight: Float[Array, "out inner"], kind: Kind) -> Quantized:
    """Rounds a weight to one byte a number, each row to its own scale."""
    return Quantized(*scaled_rows(weight, INT8 if kind == "int8" else FP8), dynamic=kind == "fp8_dynamic")


class Factors(NamedTuple):
    """What is multiplied, and what the float32 product is to be multiplied by (None: nothing)."""

    x: Array  # [*rows, inner]
    weight: Array  # [out, inner]; one byte's numbers are exact in x's dtype
    row_scale: Array | None  # [*rows]
    scale: Array | None  # [out]

    def scaled(self, product: Float[Array, "*parts rows out"]) -> Array:
        if self.scale is None:
            return product
        product = product if self.row_scale is None else product * self.row_scale[..., None]
        return product * self.scale


def rounded(x: Array, *, is_gated: bool = False, implementation: str = "auto") -> QuantizedActivation:
    """Rows rounded for "fp8_dynamic"; arguments as in `factors`."""
    values, scale = quantize_rows(x, is_gated=is_gated, implementation=implementation)
    return QuantizedActivation(values, scale, x.dtype)


def factors(x: Inputs, weight: Weight, *, is_gated: bool = False, implementation: str = "auto") -> Factors:
    """Takes a product apart; "fp8_dynamic" rounds x here, unless it is already.

    Args:
        is_gated: x is gate and up side by side, and silu(gate) * up is multiplied.
        implementation: of the rounding, as in `paged_attention`.
    """
    if isinstance(weight, Quantized) and weight.dynamic:
        x = x if isinstance(x, QuantizedActivation) else rounded(x, is_gated=is_gated, implementation=implementation)
        return Factors(x.values, weight.values, x.scale, weight.scale)
    if isinstance(x, QuantizedActivation):
        raise TypeError("rounded inputs are for weights of fp8_dynamic; pass them as they were")
    x = gated(x) if is_gated else x
    if isinstance(weight, Quantized):
        return Factors(x, weight.values, None, weight.scale)
    return Factors(x, weight, None, None)


def matmul_unscaled(
    x: Inputs,
    weight: Weight,
    dtype: jnp.dtype | None = None,
    *,
    is_gated: bool = False,
    implementation: str = "auto",
) -> PartialSums:
    """`matmul` in one part, with "fp8_dynamic" still to be scaled: where one kernel alone reads it, it can do so."""
    f = factors(x, weight, is_gated=is_gated, implementation=implementation)
    dtype = dtype or x.dtype
    precision = jax.lax.Precision.HIGHEST if f.x.dtype == jnp.float32 else None
    is_rounded_twice = f.row_scale is not None and math.prod(x.shape[:-1]) > FEW_ROWS and dtype != jnp.float16
    wide = dtype if f.scale is None or is_rounded_twice else jnp.float32
    right = f.weight if f.scale is None else f.weight.astype(f.x.dtype)
    dims = (((f.x.ndim - 1,), (1,)), ((), ()))
    whole = jax.lax.dot_general(f.x, right, dims, precision=precision, preferred_element_type=wide)
    if f.row_scale is not None and f.scale is not None:
        return Scaled(whole[None], f.row_scale, f.scale)
    return f.scaled(whole).astype(dtype)[None]


def matmul(
    x: Inputs,
    weight: Weight,
    dtype: jnp.dtype | None = None,
    *,
    is_gated: bool = False,
    implementation: str = "auto",
) -> Float[Array, "*rows out"]:
    """x @ weight.T, summed in float32 and rounded once; float32 inputs are multiplied in float32 on every device.

    The product of more than 64 rows of "fp8_dynamic" is rounded to the result's dtype before it is scaled, too, unless
    that is float16, which ends before 448 * 448.

    Args:
        dtype: of the result; None: x's.
        is_gated, implementation: as in `factors`.
    """
    dtype = dtype or x.dtype
    return reduce_partials(matmul_unscaled(x, weight, dtype, is_gated=is_gated, implementation=implementation), dtype)


def split_scales(parts: PartialSums) -> tuple[Array, tuple[Array, ...]]:
    """The parts, and the scales of rows and columns if they are still to be applied."""
    return (parts.values, (parts.row_scale, parts.scale)) if isinstance(parts, Scaled) else (parts, ())


def sum_f32(parts: Iterable[Array]) -> Array:
    """Their sum in float32, in their order; in a kernel too. (On a CPU jax 0.11.2's reduction is less exact.)"""
    first, *others = (part.astype(jnp.float32) for part in parts)
    return sum(others, first)


def reduce_partials(parts: PartialSums, dtype: jnp.dtype) -> Float[Array, "*rows out"]:
    """The sum of the parts, scaled, rounded once."""
    values, scales = split_scales(parts)
    total = sum_f32(values)
    return (total * scales[0][..., None] * scales[1] if scales else total).astype(dtype)
