"""Weights of four bits per value, two values in a byte.

    w[n, k] = (values[n, k] - zeros[n, k // group]) * scale[n, k // group]

Values are from 0 to 15, and zero points are 8 in a weight without any.

Columns are packed in blocks: the low four bits of a byte hold a column of a block's first half, the high ones the
column half a block later. So a kernel that loads a row of bytes gets two rows of consecutive columns. A block has up to
32 columns, and a packed weight is [out, blocks, bytes of a block].
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, UInt8

BLOCK = 32  # most columns of a block; two halves of 16 are the smallest operands of a product on tensor cores
GROUP = 128  # most columns that share a scale in a weight that is rounded at load
ZERO = 8  # zero point of weights without zero points
STEPS = 7.5  # steps of a scale from zero to the largest value: from -8 to 7 there are 15

Values = TypeVar("Values", jax.Array, np.ndarray)  # arrays of a device or of the host


def block_of(columns: int) -> int:
    """Returns the number of columns of a block for a weight with this number of columns.

    Raises:
        ValueError: the number is odd, so that two values of a byte would belong to two rows.
    """
    if columns % 2:
        raise ValueError(
            f"int4: expected an even number of input channels, got {columns}; leave the weight unquantised"
        )
    return math.gcd(BLOCK, columns)


def pack(values: Values, block: int | None = None) -> Values:
    """Returns values from 0 to 15 [*rows, columns] of dtype uint8 as bytes [*rows, blocks, block / 2].

    Args:
        values: the values.
        block: number of columns of a block; None: `block_of` the columns.
    """
    *rows, columns = values.shape
    half = (block or block_of(columns)) // 2
    halves = values.reshape(*rows, -1, 2, half)
    return halves[..., 0, :] | halves[..., 1, :] << 4


def unpack(packed: Values) -> Values:
    """Returns the values [*rows, columns] of bytes [*rows, blocks, block / 2]; the inverse of `pack`."""
    shifts = np.array([[0], [4]], np.uint8)
    return (packed[..., None, :] >> shifts & 15).reshape(*packed.shape[:-2], -1)


def reblocked(packed: Values, parts: int) -> Values:
    """Returns the same values in blocks that `parts` equal parts of the columns do not cut.

    Raises:
        ValueError: a part has an odd number of columns.
    """
    blocks, half = packed.shape[-2:]
    if blocks % parts == 0:
        return packed
    return pack(unpack(packed), math.gcd(2 * half, block_of(blocks * 2 * half // parts)))


def widened(
    packed: UInt8[Array, "out blocks bytes"],
    scale: Float[Array, "out groups"],
    zeros: UInt8[Array, "out groups"] | None,
) -> Float[Array, "out columns"]:
    """Returns the weight in float32; differences and their products with a scale are rounded once."""
    values = unpack(packed).astype(jnp.float32)
    group = values.shape[1] // scale.shape[1]
    zero = ZERO if zeros is None else jnp.repeat(zeros.astype(jnp.float32), group, axis=1)
    return (values - zero) * jnp.repeat(scale, group, axis=1)


def round_to_int4(
    weight: Float[Array, "out columns"],
) -> tuple[UInt8[Array, "out blocks bytes"], Float[Array, "out groups"]]:
    """Rounds a weight to four bits, symmetrically, with a scale for each group of up to 128 columns.

    A group has the largest power of two of columns that divides the width, up to 128. Its scale is max |w| / 7.5, so no
    value changes by more than half a scale.

    Returns:
        The packed values, and the float32 scales.

    Raises:
        ValueError: the number of columns is odd.
    """
    columns = weight.shape[1]
    block = block_of(columns)
    grouped = weight.astype(jnp.float32).reshape(len(weight), -1, math.gcd(GROUP, columns))
    scale = jnp.maximum(jnp.abs(grouped).max(-1) / STEPS, jnp.finfo(jnp.float32).tiny)
    values = jnp.clip(jnp.round(grouped / scale[..., None]), -ZERO, ZERO - 1) + ZERO
    return pack(values.astype(jnp.uint8).reshape(weight.shape), block), scale


def differences(packed: Array, zero: Array, dtype: jnp.dtype, interpret: bool) -> tuple[Array, Array]:
    """Returns the low and the high values of bytes minus their zero points, inside of a kernel; they are exact.

    On a GPU four bytes are unpacked at a time. A value from 0 to 15 is put into the last bits of the number 128 in
    bfloat16, or 1024 in float16, whose last bit counts 1. Then this number and the zero point are subtracted at once.

    Args:
        packed: bytes [out, bytes].
        zero: zero points [out, bytes] of an integer dtype.
        dtype: bfloat16 or float16.
        interpret: use jax operations instead of PTX.
    """
    if interpret:
        return (packed & 15).astype(dtype) - zero.astype(dtype), (packed >> 4).astype(dtype) - zero.astype(dtype)
    if dtype == jnp.bfloat16:
        kind, base, base_bits, one_bits = "bf16x2", 128, 0x4300, 0x3F80
    else:
        kind, base, base_bits, one_bits = "f16x2", 1024, 0x6400, 0x3C00
    mask, bases, ones = (f"{half << 16 | half:#x}" for half in (15, base_bits, one_bits))
    offset = -(zero.astype(jnp.float32) + base).astype(dtype)
    found = []
    for shift in (0, 4):
        lines = [f".reg .b32 word, pair, ones; mov.b32 ones, {ones}; shr.b32 word, $2, {shift}"]
        for result, selector in enumerate(("0x4140", "0x4342")):  # two bytes of the word, each with a zero after it
            lines.append(f"prmt.b32 pair, word, 0, {selector}")
            lines.append(f"lop3.b32 pair, pair, {mask}, {bases}, 0xEA")  # (pair & mask) | bases
            lines.append(f"fma.rn.{kind} ${result}, pair, ones, ${3 + result}")
        (half,) = pltriton.elementwise_inline_asm(
            "{ " + "; ".join(lines) + "; }",
            args=[packed, offset],
            constraints="=&r,=&r,r,r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, dtype)],
        )
        found.append(half)
    low, high = found
    return low, high
