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
from pallas_kernels.layers.packed.int4_registers import SLICE, Mlir, interleaved

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

# The same to two float32 numbers, first and second.
WIDEN_TO_FLOATS = {
    "float8_e4m3fn": (
        "mov.b32 {half, none}, $1; cvt.rn.f16x2.e4m3x2 pair, half; mov.b32 {half, none}, pair;",
        "cvt.f32.f16 first, half; cvt.f32.f16 second, none;",
    ),
    "int8": (
        "xor.b32 pair, $1, 0x8080; mov.b32 low, 0x4B000000;",  # 128 + value, in the last bits of 2**23
        "prmt.b32 factor, pair, low, 0x7540; mov.b32 first, factor;",
        "prmt.b32 factor, pair, low, 0x7541; mov.b32 second, factor;",
        "add.f32 first, first, 0fCB000080; add.f32 second, second, 0fCB000080;",  # - 2**23 - 128
    ),
}


def transforms(columns: int) -> tuple[Any, ...]:
    """Returns how bytes of 64 or 128 columns are stored in shared memory: tiles of 8 rows, swizzled."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns)


def widened(
    ref: Any, kind: jnp.dtype, dtype: jnp.dtype, first: int, size: int, scale: Array | None = None, *, interpret: bool
) -> Array:
    """Returns the values of some columns of bytes [64, size], an operand of `wgmma`; without scales they are exact.

    Args:
        ref: bytes of 64 or 128 columns in shared memory, uint8 [64, columns], or [2, 32, columns] of rows that are 8 of
            the first half, 8 of the second, and so on; stored as `transforms` says.
        kind: dtype of the values, int8 or float8_e4m3fn.
        dtype: bfloat16 or float16.
        first: first of the columns.
        size: number of columns, 32 or 64.
        scale: float32 scales of the rows [64], by which values are multiplied before they are rounded; None: none.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        values = ref[...] if ref[...].ndim == 2 else interleaved(ref[...])
        numbers = jax.lax.bitcast_convert_type(values, kind).astype(jnp.float32)[:, first : first + size]
        return (numbers if scale is None else numbers * scale[:, None]).astype(dtype)
    piece = plgpu.ShapeDtypeStruct((HEIGHT, size), dtype, layout=plgpu.Layout.WGMMA)

    scales = () if scale is None else (scale,)
    types = plgpu.RefType(transforms(ref.shape[-1])), *(plgpu.Layout.WGMMA.reduce(1) for _ in scales)

    @plgpu.inline_mgpu(arg_types=types, return_type=piece)
    def widen(_, ref, *scales):
        m = Mlir()
        factors = [m.vector.extract(factor, [], [0]) for array in scales for factor in array.registers.flat] or [
            None
        ] * 2
        pairs = enumerate(_pairs(m, ref, first, size))  # alternately of a thread's first row and of its second
        registers = [_widen(m, pair, kind, dtype, factors[index % 2]) for index, pair in pairs]
        return m.array(registers, m.wgmma, (HEIGHT, size))

    return widen(ref, *scales)


def keep(piece: Array) -> None:
    """Keeps the registers of a piece from being overwritten before this call, by a store that is never executed."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def store(_, piece):
        m = Mlir()
        words = [m.as_word(register) for register in piece.registers.flat]
        lines = [".reg .pred never; .reg .b32 size; mov.u32 size, %total_smem_size; setp.eq.u32 never, size, 0;"]
        for first in range(0, len(words), 4):
            names = ", ".join(f"${index}" for index in range(first, first + 4))
            lines.append(f"@never st.shared.v4.b32 [size], {{{names}}};")
        text, kinds = "{" + " ".join(lines) + "}", ",".join("r" * len(words))
        m.llvm.inline_asm(m.ir.Type.parse("!llvm.void"), words, text, kinds, has_side_effects=True)

    store(piece)


def _pairs(m, ref, start, size):
    """Returns words of two bytes: for each 8 of some columns those of a thread's two rows."""
    kind = m.ir.MemRefType(ref.type)
    (strides, _), columns = kind.get_strides_and_offset(), kind.shape[-1]  # [halves, tiles of rows, 1, 8, columns]
    tile = strides[-4]  # bytes from 8 rows to the next 8
    apart = None if len(strides) == 4 else strides[0] // tile * 8
    _, first = next(iter(m.wgmma.thread_idxs((HEIGHT, 8))))
    i16, byte = (m.ir.IntegerType.get_signless(bits) for bits in (16, 8))
    rows = []
    for row in m.rows(apart):
        within = m.arith.andi(row, m.c(7, m.i64))
        offset = m.arith.muli(m.arith.shrui(row, m.c(3, m.i64)), m.c(tile, m.i64))
        moved = within if columns == SLICE else m.arith.shrui(within, m.c(1, m.i64))  # by 16 bytes: the swizzle
        offset = m.arith.addi(offset, m.arith.muli(within, m.c(columns, m.i64)))
        offset = m.arith.addi(offset, m.arith.muli(moved, m.c(16, m.i64)))
        rows.append(m.arith.trunci(m.i32, m.arith.addi(offset, m.wide(first))))
    pairs = []
    for block in range(start // 8, (start + size) // 8):
        for row in rows:
            offset = m.arith.xori(row, m.c(block // 2 * 16, m.i32))
            pointer = m.utils.getelementptr(m.utils.memref_ptr(ref), [offset], byte)
            pointer = m.utils.getelementptr(pointer, [block % 2 * 8], byte)
            pairs.append(m.arith.extui(m.i32, m.llvm.load(i16, pointer)))
    return pairs


def _widen(m, pair, kind, dtype, factor):
    """Returns a vector of the two numbers of a word of two bytes, times a factor if it is not None."""
    lines = [".reg .b32 pair, low, factor; .reg .b16 half, none; .reg .f32 first, second;"]
    if factor is None:
        lines += WIDEN[kind.name, dtype.name]
    else:
        lines += *WIDEN_TO_FLOATS[kind.name], "mul.f32 first, first, $2; mul.f32 second, second, $2;"
        lines.append(f"cvt.rn.{'bf16x2' if dtype == jnp.bfloat16 else 'f16x2'}.f32 $0, second, first;")
    factors = [] if factor is None else [factor]
    word = m.llvm.inline_asm(m.i32, [pair, *factors], "{" + " ".join(lines) + "}", "=r,r" + ",f" * len(factors))
    number = m.ir.BF16Type.get() if dtype == jnp.bfloat16 else m.ir.F16Type.get()
    return m.as_pair(word, m.ir.VectorType.get((2,), number))
