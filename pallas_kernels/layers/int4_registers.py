"""Operations on registers of the Hopper kernel of packed weights (`int4_kernel`), for which Pallas has no operations.

Each is written for a warpgroup, in Mosaic GPU's own terms, and has a counterpart for jax's interpreter. Threads hold
[64, n] arrays as `wgmma` does: in each 8 columns, a thread holds two neighbours of a row and of the row 8 rows below.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.layers import int4
from pallas_kernels.layers.hopper_tiling import HEIGHT

SLICE = int4.BLOCK  # columns of a slice of k
WORD = 32  # columns of which a thread has the values in one 32-bit word of each of its rows


def column(ref: Any, first: Array, index: Array, *, interpret: bool) -> Array:
    """Returns 64 rows of a column of an array in global memory, as float32 [64].

    Args:
        ref: float32 or uint8 [rows, columns].
        first: first row.
        index: the column.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    if interpret:
        return ref[pl.ds(first, HEIGHT), index].astype(jnp.float32)
    layout, scalar, is_byte = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT, ref.dtype == jnp.uint8

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((HEIGHT,), jnp.float32, layout=layout),
    )
    def load(_, ref, first, index):
        m = _Mlir()
        element, own = m.ir.IntegerType.get_signless(8) if is_byte else m.f32, layout.to_mgpu()
        columns = m.ir.MemRefType(ref.type).shape[1]
        registers = []
        for (row,) in own.thread_idxs((HEIGHT,)):
            row = m.arith.addi(m.wide(row), m.wide(first.registers.item()))
            place = m.arith.addi(m.arith.muli(row, m.c(columns, m.i64)), m.wide(index.registers.item()))
            value = m.llvm.load(element, m.utils.getelementptr(m.utils.memref_ptr(ref), [place], element))
            if is_byte:
                value = m.arith.uitofp(m.f32, m.arith.extui(m.i32, value))
            registers.append(m.vector.broadcast(m.ir.VectorType.get((1,), m.f32), value))
        return m.array(registers, own, (HEIGHT,))

    return load(ref, first, index)


def differences(ref: Any, zeros: list[Array | None], dtype: jnp.dtype, size: int, *, interpret: bool) -> list[Array]:
    """Returns differences of values and zero points in pieces [64, size], operands of `wgmma`; they are exact.

    A value from 0 to 15 is put into the last bits of the number 128 in bfloat16, or 1024 in float16, whose last bit
    counts 1. Then this number and the zero point are subtracted at once, two values at a time.

    Args:
        ref: bytes of 128 columns in shared memory, uint8 [64, 64].
        zeros: zero points for equal parts of the columns, float32 [64] each; None: 8.
        dtype: bfloat16 or float16.
        size: columns of a piece, 32 or 64.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        return _differences_by_jax(ref, zeros, dtype, size)
    given = [zero for zero in zeros if zero is not None]
    piece = plgpu.ShapeDtypeStruct((HEIGHT, size), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *([plgpu.Layout.WGMMA.reduce(1)] * len(given))),
        return_type=(piece,) * (SLICE // size),
    )
    def unpack(_, ref, *given):
        m = _Mlir()
        numbers = _Numbers(m, dtype)
        offsets = [[numbers.offset(zero, half) for half in range(2)] for zero in given or [None]]
        words = _words(m, ref)  # [half, word]
        pieces = []
        for first in range(0, SLICE // WORD, size // WORD):
            registers: list[Any] = []
            for word in range(first, first + size // WORD):
                own = offsets[word * len(offsets) // (SLICE // WORD)]
                halves = [numbers.unpack(words[half][word], own[half]) for half in range(2)]
                registers += itertools.chain(*zip(*halves, strict=True))
            pieces.append(m.array(registers, m.wgmma, (HEIGHT, size)))
        return tuple(pieces)

    return unpack(ref, *given)


def _differences_by_jax(ref, zeros, dtype, size):
    values = int4.unpack(ref[...][:, None]).astype(dtype)
    zeros = [jnp.full(HEIGHT, int4.ZERO) if zero is None else zero for zero in zeros]
    columns = jnp.repeat(jnp.stack(zeros, axis=1), SLICE // len(zeros), axis=1)
    return jnp.split(values - columns.astype(dtype), SLICE // size, axis=1)


def store(ref: Any, result: Array, place: tuple[Array, Array, Array], *, interpret: bool) -> None:
    """Stores a result transposed, without the rows of x that do not exist.

    Args:
        ref: array in global memory [parts, rows, channels].
        result: [64 channels, rows] in the array's dtype.
        place: the part, the first row, and the first channel.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        _store_by_jax(ref, result, place)
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar, scalar))
    def write(_, ref, result, *place):
        m = _Mlir()
        _, rows, channels = m.ir.MemRefType(ref.type).shape
        own, first = (m.wide(index) for index in next(iter(m.wgmma.thread_idxs(result.shape))))
        part, row, channel = (m.wide(value.registers.item()) for value in place)
        row, channel = m.arith.addi(row, first), m.arith.addi(channel, own)
        offset = m.arith.addi(m.arith.muli(part, m.c(rows, m.i64)), row)
        offset = m.arith.addi(m.arith.muli(offset, m.c(channels, m.i64)), channel)
        pointer = m.utils.getelementptr(m.utils.memref_ptr(ref), [offset], result.mlir_dtype)
        for index, register in enumerate(result.registers.flat):
            block, half = divmod(index, 2)
            for odd in range(2):
                more = 8 * block + odd
                is_row = m.arith.cmpi(m.arith.CmpIPredicate.slt, row, m.c(rows - more, m.i64))
                value = m.vector.extract(register, [], [odd])
                with m.utils.when(is_row):
                    at = m.utils.getelementptr(pointer, [more * channels + 8 * half], result.mlir_dtype)
                    m.llvm.store(value, at)

    write(ref, result, *place)


def _store_by_jax(ref, result, place):
    from jax.experimental import pallas as pl

    part, row, channel = place
    for index in range(result.shape[1]):

        @pl.when(row + index < ref.shape[1])
        def _(index=index):
            ref[part, row + index, pl.ds(channel, HEIGHT)] = result[:, index]


class _Mlir:
    """The parts of MLIR and Mosaic GPU that these operations use."""

    def __init__(self):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import arith, vector

        self.ir, self.arith, self.llvm, self.vector, self.utils = ir, arith, utils.llvm, vector, utils
        self.c, self.wgmma, self.fragmented = mgpu.c, mgpu.WGMMA_LAYOUT, mgpu.FragmentedArray
        self.i32, self.i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        self.f32 = ir.F32Type.get()

    def wide(self, value):
        """Returns an integer or an index as a 64-bit integer."""
        if isinstance(value.type, self.ir.IndexType):
            return self.arith.index_cast(self.i64, value)
        return self.arith.extsi(self.i64, value)

    def array(self, registers, layout, shape):
        """Returns an array made of a thread's registers."""
        registers = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
        return self.fragmented(_registers=registers, _layout=layout, _is_signed=None)


def _words(m, ref):
    """Returns the words of the slice in a thread's two rows, loaded from shared memory 16 bytes at a time."""
    found, bytes_of_row = [], SLICE // 2
    for row, first in m.wgmma.thread_idxs((HEIGHT, 8)):  # thread t of four holds column 2 t first
        offset = m.arith.addi(m.arith.muli(row, m.c(bytes_of_row, row.type)), m.arith.muli(first, m.c(8, row.type)))
        byte = m.ir.IntegerType.get_signless(8)
        place = m.utils.getelementptr(m.utils.memref_ptr(ref), [m.arith.index_cast(m.i32, offset)], byte)
        loaded = m.llvm.load(m.ir.VectorType.get((SLICE // WORD,), m.i32), place, alignment=16)
        found.append([m.vector.extract(loaded, [], [index]) for index in range(SLICE // WORD)])
    return found


class _Numbers:
    """Unpacks words to pairs of 16-bit floating-point numbers."""

    def __init__(self, m, dtype):
        is_bfloat16 = dtype == jnp.bfloat16
        self.m, self.name = m, "bf16x2" if is_bfloat16 else "f16x2"
        self.base = 128 if is_bfloat16 else 1024
        self.base_bits, self.one_bits = (0x4300, 0x3F80) if is_bfloat16 else (0x6400, 0x3C00)
        self.pair = m.ir.VectorType.get((2,), m.ir.BF16Type.get() if is_bfloat16 else m.ir.F16Type.get())

    def twice(self, bits):
        """Returns 16 bits twice, as a word."""
        return self.m.c(np.uint32(bits << 16 | bits).view(np.int32).item(), self.m.i32)

    def offset(self, zero, half):
        """Returns minus the sum of the base and the zero point, twice, for one of a thread's two rows."""
        m = self.m
        if zero is None:
            return self.twice(self.base_bits + int4.ZERO | 0x8000)
        value = m.vector.extract(zero.registers.flat[half], [], [0])
        value = m.arith.subf(m.c(-float(self.base), m.f32), value)
        return m.llvm.inline_asm(m.i32, [value, value], f"cvt.rn.{self.name}.f32 $0, $1, $2;", "=r,f,f")

    def unpack(self, word, offset):
        """Returns the four pairs of values of a word, minus zero points."""
        m, lines = self.m, [".reg .b32 moved;"]
        for index in range(4):
            if index:
                lines.append(f"shr.b32 moved, $4, {4 * index};")
            lines.append(f"lop3.b32 ${index}, {'moved' if index else '$4'}, $5, $6, 0xEA;")  # (moved & $5) | $6
            lines.append(f"fma.rn.{self.name} ${index}, ${index}, $7, $8;")
        struct = m.llvm.StructType.get_literal([m.i32] * 4)
        constants = [self.twice(bits) for bits in (15, self.base_bits, self.one_bits)]
        constraints = ",".join(["=&r"] * 4 + ["r"] * 5)
        found = m.llvm.inline_asm(struct, [word, *constants, offset], "{" + " ".join(lines) + "}", constraints)
        one = m.ir.VectorType.get((1,), m.i32)
        values = (m.llvm.extractvalue(m.i32, found, [index]) for index in range(4))
        return [m.vector.bitcast(self.pair, m.vector.broadcast(one, value)) for value in values]
