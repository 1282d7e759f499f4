"""Weights of four bits per value, two values in a byte.

    w[n, k] = (values[n, k] - zeros[n, k // group]) * scale[n, k // group]

Values are from 0 to 15, and zero points are 8 in a weight without any.

Columns are packed in blocks of up to 128, and a packed weight is [out, blocks, bytes of a block]. The low and the high
four bits of a byte hold columns that are 8 apart. The bytes are in the order in which the threads of a warp need them
as the first operand of `wgmma` (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): of each 16 columns, thread
t of four holds columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. So a thread loads its values of a block at once:

    byte t * (block / 8) + 4 * q + 2 * e + s    holds columns k and k + 8,  k = 32 q + 16 s + 2 t + e

A block of less than 32 columns has its bytes in the order of the columns. If it has less than 16, the columns of a byte
are half a block apart.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, UInt8

BLOCK = 128  # most columns of a block; 16 bytes for each of four threads
BYTES = 16  # fewest bytes of a block in the order of `wgmma`
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
    both = ordered(values, block or block_of(values.shape[-1]))
    return both[..., 0, :] | both[..., 1, :] << 4


def unpack(packed: Values) -> Values:
    """Returns the values [*rows, columns] of bytes [*rows, blocks, block / 2]; the inverse of `pack`."""
    *rows, blocks, size = packed.shape
    library = np if isinstance(packed, np.ndarray) else jnp  # a kernel must not contain an array of numpy
    shifts = 4 * library.arange(2, dtype=np.uint8)[:, None]
    both = packed[..., None, :] >> shifts & 15  # [*rows, blocks, 2, bytes]
    if size >= BYTES:
        both = both.reshape(*rows, blocks, 2, 4, -1, 2, 2)  # axes h, t, q, e, s
        return _moved(both, (2, 4, 0, 1, 3)).reshape(*rows, -1)
    return both.reshape(*rows, -1)


def ordered(values: Values, block: int) -> Values:
    """Returns values [*rows, columns] in the order of bytes [*rows, blocks, 2, block / 2]: low bits, then high bits.

    Activations in this order fit the bytes of a weight.
    """
    *rows, _ = values.shape
    if block >= 2 * BYTES:
        split = values.reshape(*rows, -1, block // 32, 2, 2, 4, 2)  # axes q, s, h, t, e
        values = _moved(split, (2, 3, 0, 4, 1))
    return values.reshape(*rows, -1, 2, block // 2)


def _moved(values: Values, axes: tuple[int, ...]) -> Values:
    """Returns values with their last axes in another order."""
    first = values.ndim - len(axes)
    return values.transpose(*range(first), *(first + axis for axis in axes))


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
    return scaled(unpack(packed), scale, zeros)


def scaled(
    values: UInt8[Array, "out columns"],
    scale: Float[Array, "out groups"],
    zeros: UInt8[Array, "out groups"] | None,
) -> Float[Array, "out columns"]:
    """Returns `widened` of values that are unpacked."""
    group = values.shape[1] // scale.shape[1]
    zero = ZERO if zeros is None else jnp.repeat(zeros.astype(jnp.float32), group, axis=1)
    return (values.astype(jnp.float32) - zero) * jnp.repeat(scale, group, axis=1)


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

    On a GPU four bytes are unpacked at a time. A value from 0 to 15 is put into the last bits of a base, where the last
    bit counts 1: 128 in bfloat16, 1024 in float16. One addition then removes the base and the zero point.

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
    # Exact: at most 128 + 15 fits into the 8 bits of a bfloat16, and 1024 + 15 into the 11 bits of a float16.
    offset = -(zero.astype(jnp.float32) + base).astype(dtype)
    halves = []
    for shift in (0, 4):
        lines = [f".reg .b32 word, pair, ones; mov.b32 ones, {ones}; shr.b32 word, $2, {shift}"]
        for result, selector in enumerate(("0x4140", "0x4342")):  # two bytes of the word, each with a zero after it
            lines.append(f"prmt.b32 pair, word, 0, {selector}")
            lines.append(f"lop3.b32 pair, pair, {mask}, {bases}, 0xEA")  # (pair & mask) | bases
            # pair * 1 + offset, because PTX cannot add pairs of bfloat16 before compute capability 9.0
            lines.append(f"fma.rn.{kind} ${result}, pair, ones, ${3 + result}")
        halves.append(of_words(lines, packed, offset))
    low, high = halves
    return low, high


def of_words(lines: list[str], packed: Array, numbers: Array) -> Array:
    """Returns what PTX instructions make of four bytes and the four numbers that belong to them, inside of a kernel.

    Args:
        lines: instructions. $2 is the word of four bytes, $3 and $4 are pairs of numbers, $0 and $1 pairs of results.
        packed: bytes [out, bytes].
        numbers: numbers of two bytes each [out, bytes]; the results have their dtype.
    """
    (results,) = pltriton.elementwise_inline_asm(
        "{ " + "; ".join(lines) + "; }",
        args=[packed, numbers],
        constraints="=&r,=&r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, numbers.dtype)],
    )
    return results
