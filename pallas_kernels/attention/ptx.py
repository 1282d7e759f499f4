"""Arithmetic of the attention kernel, in PTX instructions for a GPU and in jax operations for a CPU (`interpret`)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.layers.quantize_rows import FP8


def unpack_fp8(loaded: Array, dtype: jnp.dtype, interpret: bool) -> list[Array]:
    """Converts values loaded from a pool to the dtype of the matrix products.

    Args:
        loaded: values of the pool's dtype, or pairs of float8_e4m3fn channels as uint16. Pools of float8 are read as
            pairs because the tensor core's operand V is transposed, and `ldmatrix` transposes only elements of two
            bytes.
        dtype: dtype of the matrix products.
        interpret: use jax operations instead of PTX.

    Returns:
        A list with one array; for pairs, a list with the even channels and the odd channels.
    """
    if loaded.dtype != jnp.uint16:
        return [loaded.astype(dtype)]
    if interpret:
        halves = [(loaded >> shift).astype(jnp.uint8) for shift in (0, 8)]
        return [jax.lax.bitcast_convert_type(half, FP8).astype(dtype) for half in halves]
    halves = []
    for byte_selector in ("0x20", "0x31"):  # $1 holds two pairs; select their low bytes, then their high bytes
        assembly = (
            f"{{ .reg .b32 own; .reg .b16 pair; prmt.b32 own, $1, 0, {byte_selector}; cvt.u16.u32 pair, own; "
            "cvt.rn.f16x2.e4m3x2 $0, pair; }"
        )
        halves.append(_elementwise(assembly, "=r,r", jnp.float16, loaded, pack=2))
    return [half.astype(dtype) for half in halves]


def replace_nonfinite(values: Array, interpret: bool) -> Array:
    """Returns the values with infinities and NaN replaced by finite values.

    In bfloat16 and float16, an infinity becomes the largest finite value with the same sign, and NaN becomes the lowest
    finite value. In float32, infinities and NaN become 0.
    """
    if values.dtype == jnp.float32:  # the largest float32 values would overflow when split into TF32 parts
        return jnp.where(jnp.abs(values) < jnp.inf, values, 0)
    if interpret:
        most = jnp.finfo(values.dtype).max
        return jnp.where(jnp.isnan(values), -most, jnp.clip(values, -most, most))
    kind, largest = ("bf16x2", 0x7F7F) if values.dtype == jnp.bfloat16 else ("f16x2", 0x7BFF)
    bounds = [f"{pair | pair << 16:#x}" for pair in (largest | 0x8000, largest)]
    assembly = (
        f"{{ .reg .b32 low, high; mov.b32 low, {bounds[0]}; mov.b32 high, {bounds[1]}; "
        f"max.{kind} low, $1, low; min.{kind} $0, low, high; }}"  # max and min of a number and NaN return the number
    )
    return _elementwise(assembly, "=r,r", values.dtype, values, pack=2)


def scaled_exp2(exponent: Array, factor: float, offset: Array, interpret: bool) -> Array:
    """Returns 2**(exponent * factor - offset) for a positive factor, or 0 where the power is below 2**-126.

    The result takes two instructions.
    """
    if interpret:
        return jnp.exp2(exponent * factor - offset)
    bits = np.float32(factor).view(np.uint32)
    assembly = f"{{ .reg .f32 e; fma.rn.f32 e, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, e; }}"
    return _elementwise(assembly, "=f,f,f", jnp.float32, exponent, -offset)


def scaled_tanh(values: Array, factor: float, exact: bool) -> Array:
    """Returns tanh(values * factor), in five instructions unless `exact`; their absolute error is at most 2**-21.

    The five instructions compute 1 - 2 / (1 + e) with e = exp(2 * values * factor), where e may be infinite.
    """
    if exact:
        return jnp.tanh(values * factor)
    bits = np.float32(2 * math.log2(math.e) * factor).view(np.uint32)
    assembly = (
        f"{{ .reg .f32 e; mul.f32 e, $1, 0f{bits:08X}; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 e, e; fma.rn.f32 $0, e, 0fC0000000, 0f3F800000; }"
    )
    return _elementwise(assembly, "=f,f", jnp.float32, values)


def count_ones(words: Array, interpret: bool) -> Array:
    """Returns the number of bits that are 1 in each 32-bit word, as int32."""
    if interpret:
        return jax.lax.population_count(words).astype(jnp.int32)
    return _elementwise("popc.b32 $0, $1;", "=r,r", jnp.int32, words)


def divmod_u32(row: Array, page: int) -> tuple[Array, Array]:
    """Returns row // page and row % page for non-negative int32 rows.

    The division is unsigned, because then each result takes only one instruction if `page` is a power of two.
    """
    row = row.astype(jnp.uint32)
    return (row // page).astype(jnp.int32), (row % page).astype(jnp.int32)


def _elementwise(assembly: str, constraints: str, dtype: jnp.dtype, *values: Array, pack: int = 1) -> Array:
    """Runs PTX instructions on each element, or on each group of `pack` elements, of arrays of one shape.

    Args:
        assembly: the instructions; $0 is the register of the result, $1, $2 and so on are those of the arrays.
        constraints: kinds of the registers, the result's first.
        dtype: dtype of the result.
        values: the arrays.
        pack: number of elements in a register.
    """
    result = jax.ShapeDtypeStruct(values[0].shape, dtype)
    (output,) = pltriton.elementwise_inline_asm(
        assembly, args=values, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return output
