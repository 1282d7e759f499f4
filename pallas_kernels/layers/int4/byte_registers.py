"""Widens weights of eight bits in the registers of the Hopper kernel of narrow weights (`int4_kernel`).

The fragment of the first operand of `wgmma` gives thread t of four columns 2t and 2t + 1 of each 8 columns, in one
register. So a thread loads two bytes of each 8 columns of its rows, and no value moves between threads. The TMA unit
has stored the bytes with a swizzle of 128 bytes, so that the loads of a warp touch all banks of shared memory.

An e4m3 number has the bits s eeee mmm, and bfloat16 s eeeeeeee mmmmmmm. With its exponent and mantissa in the last 11
bits of bfloat16 it is too small by the factor 2**120, by which it is then multiplied; this is exact, and right for
numbers without an implicit bit too. An int8 number is 128 plus its last 7 bits, which fit into the mantissa of 128,
minus 128, or minus 256 if its first bit is 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.int4.int4_registers import SLICE, Mlir, interleaved

# Instructions that make two numbers of 16 bits ($0) of two bytes ($1), by the dtypes of the bytes and of the numbers.
_SPREAD_HIGH = "prmt.b32 pair, $1, 0, 0x1202;"  # the bytes become the high bytes of two halves
_SPREAD_LOW = "prmt.b32 pair, $1, 0, 0x2120;"
WIDEN = {
    ("float8_e4m3fn", "bfloat16"): (
        _SPREAD_HIGH,
        "shr.u32 low, pair, 4;",
        "and.b32 low, low, 0x07F007F0;",
        "lop3.b32 low, pair, 0x80008000, low, 0xEA;",  # (pair & sign bits) | low
        "mov.b32 factor, 0x7B807B80; mov.b32 pair, 0x80008000;",  # 2**120 and -0
        "fma.rn.bf16x2 $0, low, factor, pair;",
    ),
    ("float8_e4m3fn", "float16"): ("mov.b32 {half, none}, $1;", "cvt.rn.f16x2.e4m3x2 $0, half;"),
    ("int8", "bfloat16"): (
        _SPREAD_LOW,
        "lop3.b32 low, pair, 0x007F007F, 0x43004300, 0xEA;",  # 128 + the last 7 bits
        "lop3.b32 pair, pair, 0x00800080, 0xC300C300, 0xEA;",  # -128, or -256 if the first bit is 1
        "mov.b32 factor, 0x3F803F80; fma.rn.bf16x2 $0, low, factor, pair;",
    ),
    ("int8", "float16"): (
        _SPREAD_LOW,
        "lop3.b32 low, pair, 0x00800080, 0x64006400, 0xBE;",  # (pair ^ first bits) | 1024, which is 1152 + value
        "mov.b32 factor, 0xE480E480; add.rn.f16x2 $0, low, factor;",
    ),
}


def transforms() -> tuple[Any, ...]:
    """Returns how the bytes are stored in shared memory: tiles of 8 rows and 128 columns, swizzled."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    return plgpu.TilingTransform((8, SLICE)), plgpu.SwizzleTransform(SLICE)


def widened(ref: Any, kind: jnp.dtype, dtype: jnp.dtype, first: int, size: int, *, interpret: bool) -> Array:
    """Returns the values of some columns of bytes [64, size], an operand of `wgmma`; they are exact.

    Args:
        ref: bytes of 128 columns in shared memory, uint8 [64, 128], or [2, 32, 128] of rows that are 8 of the first
            half, 8 of the second, and so on; tiles of 8 rows, with a swizzle of 128 bytes.
        kind: dtype of the values, int8 or float8_e4m3fn.
        dtype: bfloat16 or float16.
        first: first of the columns.
        size: number of columns, 32 or 64.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        values = ref[...] if ref[...].ndim == 2 else interleaved(ref[...])
        return jax.lax.bitcast_convert_type(values, kind).astype(dtype)[:, first : first + size]
    piece = plgpu.ShapeDtypeStruct((HEIGHT, size), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms()),), return_type=piece)
    def widen(_, ref):
        m = Mlir()
        registers = [_widen(m, pair, kind, dtype) for pair in _pairs(m, ref, first, size)]
        return m.array(registers, m.wgmma, (HEIGHT, size))

    return widen(ref)


def _pairs(m, ref, start, size):
    """Returns words of two bytes: for each 8 of some columns those of a thread's two rows."""
    strides, _ = m.ir.MemRefType(ref.type).get_strides_and_offset()  # [halves, tiles of rows, tiles of columns, 8, 128]
    tile = strides[-4]  # bytes from 8 rows to the next 8
    apart = None if len(strides) == 4 else strides[0] // tile * 8
    _, first = next(iter(m.wgmma.thread_idxs((HEIGHT, 8))))
    i16, byte = (m.ir.IntegerType.get_signless(bits) for bits in (16, 8))
    rows = []
    for row in m.rows(apart):
        within = m.arith.andi(row, m.c(7, m.i64))
        offset = m.arith.muli(m.arith.shrui(row, m.c(3, m.i64)), m.c(tile, m.i64))
        offset = m.arith.addi(offset, m.arith.muli(within, m.c(SLICE + 16, m.i64)))  # the swizzle moves 16 bytes
        rows.append(m.arith.trunci(m.i32, m.arith.addi(offset, m.wide(first))))
    pairs = []
    for block in range(start // 8, (start + size) // 8):
        for row in rows:
            offset = m.arith.xori(row, m.c(block // 2 * 16, m.i32))
            pointer = m.utils.getelementptr(m.utils.memref_ptr(ref), [offset], byte)
            pointer = m.utils.getelementptr(pointer, [block % 2 * 8], byte)
            pairs.append(m.arith.extui(m.i32, m.llvm.load(i16, pointer)))
    return pairs


def _widen(m, pair, kind, dtype):
    """Returns a vector of the two numbers of a word of two bytes."""
    lines = ".reg .b32 pair, low, factor; .reg .b16 half, none;", *WIDEN[kind.name, dtype.name]
    word = m.llvm.inline_asm(m.i32, [pair], "{" + " ".join(lines) + "}", "=r,r")
    number = m.ir.BF16Type.get() if dtype == jnp.bfloat16 else m.ir.F16Type.get()
    return m.as_pair(word, m.ir.VectorType.get((2,), number))
