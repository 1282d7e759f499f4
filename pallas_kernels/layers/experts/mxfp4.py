"""Weights in mxfp4: values of four bits, with a power of two for each 32 columns (OCP Microscaling Formats 1.0).

    w[n, k] = number(values[n, k]) * 2^(scale[n, k // 32] - 127)

A value is an E2M1 number: a sign, two bits of exponent, one of mantissa. Scales are bytes (E8M0); 255 is NaN. Values
are packed as `expert_bytes` says, in blocks of 32 columns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32, UInt8

from pallas_kernels.layers.experts.expert_bytes import pack, unpack
from pallas_kernels.layers.packed import int4

GROUP = 32  # columns that share a scale, and columns of a block
BIAS = 127  # exponent of the scale 1
LARGEST = 2  # exponent of the largest number, 6


def numbers(values: Array) -> Float[Array, "..."]:
    """Returns the float32 numbers of values from 0 to 15, inside or outside of a kernel."""
    code = values.astype(jnp.int32) & 7
    doubled = jnp.where(code < 2, code, (2 + (code & 1)) << jnp.maximum((code >> 1) - 1, 0))
    return jnp.where(values >= 8, -0.5, 0.5) * doubled.astype(jnp.float32)


def factors(scale: UInt8[Array, "..."] | Int32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Returns the powers of two of scales, inside or outside of a kernel; 2^-127 is a subnormal number."""
    bits = jnp.where(scale == 0, 0x40, jnp.where(scale == 255, 0x7FC0, scale.astype(jnp.int32) << 7))
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def widened(
    packed: UInt8[Array, "*rows blocks bytes"], scale: UInt8[Array, "*rows blocks"]
) -> Float[Array, "*rows columns"]:
    """Returns the weight in float32; nothing is rounded."""
    return numbers(unpack(packed)) * jnp.repeat(factors(scale).astype(jnp.float32), GROUP, axis=-1)


def round_to_mxfp4(
    weight: Float[Array, "*rows columns"],
) -> tuple[UInt8[Array, "*rows blocks bytes"], UInt8[Array, "*rows blocks"]]:
    """Rounds a weight to mxfp4: the nearest numbers times the scale 2^(e - 2), where 2^e <= max |w| < 2^(e + 1).

    Values above 6 scales become 6 scales, as the format's specification says.

    Returns:
        The packed values, and the scales.

    Raises:
        ValueError: the number of columns is no multiple of 32.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"mxfp4: expected a multiple of {GROUP} input channels, got {weight.shape[-1]}; use int8")
    grouped = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, GROUP)
    _, exponent = jnp.frexp(jnp.abs(grouped).max(-1))  # max |w| = mantissa * 2^exponent, with a mantissa below 1
    scale = jnp.clip(exponent - 1 - LARGEST + BIAS, 1, 254).astype(jnp.uint8)
    ratio = jnp.abs(grouped) / factors(scale).astype(jnp.float32)[..., None]
    # Numbers below 2 are multiples of 1/2, those below 4 of 1, and others of 2. Halves are rounded to even codes.
    step = jnp.where(ratio < 2, 0.5, jnp.where(ratio < 4, 1.0, 2.0))
    rounded = jnp.minimum(jnp.round(ratio / step) * step, 6.0)
    code = jnp.where(rounded < 2, 2 * rounded, jnp.where(rounded < 4, rounded + 2, rounded / 2 + 4))
    values = code.astype(jnp.uint8) | (jnp.signbit(grouped).astype(jnp.uint8) << 3)
    return pack(values.reshape(weight.shape)), scale


def products(packed: Array, scale: Array, interpret: bool) -> tuple[Array, Array]:
    """Returns the low and the high values of bytes in bfloat16, inside of a kernel; they are exact.

    On a GPU four bytes are unpacked at a time. The bits of a number are put into a bfloat16 number, which thereby is
    2^-126 times the number, and this is multiplied by 2^126 and by the power of two.

    Args:
        packed: bytes [out, bytes] of blocks of 32 columns.
        scale: scales [out, blocks].
        interpret: use jax operations instead of PTX.
    """
    wide = jnp.broadcast_to(factors(scale)[:, :, None], (*scale.shape, GROUP // 2)).reshape(packed.shape)
    if interpret:
        low, high = (numbers(values).astype(jnp.bfloat16) * wide for values in (packed & 15, packed >> 4))
        return low, high
    halves = []
    # In each half of ``pair`` a byte is bits 8 to 15: the low value's sign is bit 11, the high value's bit 15. The sign
    # goes to bit 15, and the three bits below it to bits 6 to 8, the mantissa's first and the exponent's last two.
    # ``most`` is 2^126; ``none`` is -0, to which a zero of either sign is added without losing its sign.
    for left in (4, 0):  # the low values, the high values
        lines = [".reg .b32 word, pair, sign, none, most; mov.b32 none, 0x80008000; mov.b32 most, 0x7E807E80"]
        for result, selector in enumerate(("0x1404", "0x3424")):  # two bytes of the word, each with a zero before it
            lines.append(f"prmt.b32 pair, $2, 0, {selector}")
            lines.append(f"shl.b32 sign, pair, {left}; shr.b32 word, pair, {6 - left}; and.b32 word, word, 0x01C001C0")
            lines.append("lop3.b32 word, sign, 0x80008000, word, 0xEA")  # (sign & bits) | word
            lines.append("fma.rn.bf16x2 word, word, most, none")
            lines.append(f"fma.rn.bf16x2 ${result}, word, ${3 + result}, none")
        halves.append(int4.of_words(lines, packed, wide))
    low, high = halves
    return low, high
