"""How the four-bit values of experts are packed, in int4 and in mxfp4, and what kernels know of narrow experts.

Columns are packed in blocks: the low four bits of a byte hold a column of a block's first half, the high ones the
column half a block later. So a kernel that loads a row of bytes gets two rows of consecutive columns. A block has up to
32 columns, and packed weights are [experts, out, blocks, bytes of a block].
"""

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

SLICE = 128  # columns of which four threads have the values in 16 bytes of each row
BLOCK = 32  # most columns of a block; two halves of 16 are the smallest operands of a product on tensor cores

Values = TypeVar("Values", jax.Array, np.ndarray)  # arrays of a device or of the host


def pack(values: Values) -> Values:
    """Returns values from 0 to 15 [*rows, columns] of dtype uint8 as bytes [*rows, blocks, bytes]; columns are even."""
    *rows, columns = values.shape
    halves = values.reshape(*rows, -1, 2, math.gcd(BLOCK, columns) // 2)
    return halves[..., 0, :] | halves[..., 1, :] << 4


def unpack(packed: Values) -> Values:
    """Returns the values [*rows, columns] of bytes [*rows, blocks, bytes]; the inverse of `pack`."""
    stack: Any = np.stack if isinstance(packed, np.ndarray) else jnp.stack
    return stack([packed & 15, packed >> 4], axis=-2).reshape(*packed.shape[:-2], -1)


def ordered(x: jax.Array, step: int) -> jax.Array:
    """Returns activations [rows, columns] in the order in which a kernel multiplies them.

    Of each `step` columns those of low bits are first, and then those of high bits, so that a kernel loads consecutive
    values. Zeros fill the last step.
    """
    rows, columns = x.shape
    half = math.gcd(BLOCK, columns) // 2
    whole = jnp.pad(x, ((0, 0), (0, -columns % step))).reshape(rows, -1, step // (2 * half), 2, half)
    return jnp.moveaxis(whole, 3, 2).reshape(rows, -1)


class PackedExperts(NamedTuple):
    """What the Hopper kernel of narrow experts knows of a kind, packed or of a byte a value."""

    # Bits of a column among 128 that `registered` puts one after another, from the highest: bits below, and how many.
    order: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]  # dtypes of x; mxfp4 has bfloat16's exponents
    zero_bytes: int  # bytes of a zero point; 0: there are none
    copy_rows: int  # most rows of a block with which scales are copied


PACKED = {
    "int4": PackedExperts(((2, 2), (0, 1), (4, 1), (5, 2), (1, 1)), ("bfloat16", "float16"), zero_bytes=1, copy_rows=8),
    "mxfp4": PackedExperts(((2, 2), (0, 2), (5, 2), (4, 1)), ("bfloat16",), zero_bytes=0, copy_rows=16),
    "fp8": PackedExperts(((0, 7),), ("bfloat16", "float16"), zero_bytes=0, copy_rows=8),
}


def registered(x: Values, kind: str) -> Values:
    """Returns activations [rows, columns] in the order in which `wgmma` multiplies them by registers of bytes.

    Of each 128 columns, thread t of four loads the bytes of columns 32 t to 32 t + 31 of a weight's row, four words.
    Its pairs of values are one after another, for each word w, of these columns:

        mxfp4   32 t + 4 w + i + {0, 16}              byte i of the word, i from 0 to 3
        int4    32 t + 4 w + 16 h + o + {0, 2}        o = 0, 1 and h = 0, 1: of two bytes, as `int4.pack` orders them

    Of a kind of a byte a value, columns stay in their order (`byte_registers`). Zeros fill the last 128 columns.
    """
    library: Any = np if isinstance(x, np.ndarray) else jnp
    rows, columns = x.shape
    whole = library.pad(x, ((0, 0), (0, -columns % SLICE)))
    return slices_in_order(whole.reshape(rows, -1, SLICE), kind).reshape(rows, -1)


def slices_in_order(x: Values, kind: str) -> Values:
    """Returns slices of activations [rows, slices, 128] in the order of `registered`, inside or outside of a kernel."""
    order = PACKED[kind].order
    fields = sorted(order, reverse=True)
    whole = x.reshape(*x.shape[:2], *(1 << bits for _, bits in fields))
    return whole.transpose(0, 1, *(2 + fields.index(field) for field in order)).reshape(x.shape)


def place_of(column: Any, kind: str) -> Any:
    """Returns the place of a column among 128 in the order of `registered`; higher bits of the column are ignored."""
    total = None
    for below, bits in PACKED[kind].order:
        field = column >> below & (1 << bits) - 1
        total = field if total is None else total << bits | field
    return total
