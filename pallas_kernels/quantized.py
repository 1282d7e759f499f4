"""Weights of one byte with a scale for each output channel, and how such a product is taken.

    int8          y = (x @ values.T) * scale              weights alone are rounded; scale = max |w| / 127 of a row of w
    fp8           y = (x @ values.T) * scale              likewise to float8_e4m3fn; scale = max |w| / 448
    fp8_dynamic   y = (x8 @ values.T) * scale_x * scale   so are the inputs; scale_x = max |x| / 448 of a row of x

A row of x is rounded by itself, so that what comes out for it does not depend on the rows beside it. But rounding
turns the last bit of a float32 sum into a step of 1/16: "fp8_dynamic" is exact in law, not bit for bit.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Num

Kind = Literal["int8", "fp8", "fp8_dynamic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
INT8, FP8 = jnp.dtype("int8"), jnp.dtype("float8_e4m3fn")
LARGEST = {INT8: 127.0, FP8: 448.0}


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


Weight = Float[Array, "_ _"] | Quantized  # [out, inner]


def quantize(weight: Float[Array, "out inner"], kind: Kind) -> Quantized:
    """Rounds a weight to one byte a number, each row to its own scale."""
    return Quantized(*_round_rows(weight, INT8 if kind == "int8" else FP8), dynamic=kind == "fp8_dynamic")


def _round_rows(x: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Returns values of one byte and the float32 scale of each row."""
    wide = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.maximum(top / LARGEST[dtype], jnp.finfo(jnp.float32).tiny)
    values = wide / scale[..., None]
    return (jnp.round(values) if dtype == INT8 else values).astype(dtype), scale


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


def factors(x: Float[Array, "*rows inner"], weight: Weight) -> Factors:
    """Takes a product apart; "fp8_dynamic" rounds x here."""
    if not isinstance(weight, Quantized):
        return Factors(x, weight, None, None)
    if not weight.dynamic:
        return Factors(x, weight.values, None, weight.scale)
    values, row_scale = _round_rows(x, FP8)
    return Factors(values, weight.values, row_scale, weight.scale)


def matmul(x: Float[Array, "*rows inner"], weight: Weight, dtype: jnp.dtype | None = None) -> Float[Array, "*rows out"]:
    """x @ weight.T, summed in float32 and rounded once; float32 inputs are multiplied in float32 on every device.

    Args:
        dtype: of the result; None: x's.
    """
    f = factors(x, weight)
    precision = jax.lax.Precision.HIGHEST if f.x.dtype == jnp.float32 else None
    wide = dtype if f.scale is None else jnp.float32
    right = f.weight if f.scale is None else f.weight.astype(f.x.dtype)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    product = jax.lax.dot_general(f.x, right, dims, precision=precision, preferred_element_type=wide)
    return f.scaled(product).astype(dtype or x.dtype)
