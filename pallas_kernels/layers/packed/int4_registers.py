"""Operations on registers of the Hopper kernel of packed weights (`int4_kernel`), for which Pallas has no operations.

Each is written for a warpgroup, in Mosaic GPU's own terms, and has a counterpart for jax's interpreter. Threads hold
[64, n] arrays as `wgmma` does: in each 8 columns, a thread holds two neighbours of a row and of the row 8 rows below.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed import int4

SLICE = int4.BLOCK  # columns of a slice of k
WORD = 32  # columns of which a thread has the values in one 32-bit word of each of its rows


def column(
    ref: Any,
    first: Array,
    index: Array,
    *,
    apart: int | None = None,
    width: int = HEIGHT,
    columns: int | None = None,
    interpret: bool,
) -> Array:
    """Returns 64 rows of a column of an array in memory, as float32 [64]; of bytes as int32.

    Bytes are converted when they are used: a conversion here would wait for them.

    Args:
        ref: float32, bfloat16, float16 or uint8 [rows, columns].
        first: first row.
        index: the column.
        apart: if not None, the rows are 32 rows and the 32 rows `apart` rows below, each 8 of both in turn, so that a
            thread has two rows that are `apart`.
        width: number of rows that exist; others repeat one of these.
        columns: None, or number of columns of an array whose rows are one after the other in a shape of its own.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    is_byte = ref.dtype == jnp.uint8
    dtype = jnp.int32 if is_byte else jnp.float32
    if interpret:
        return rows_by_jax(ref, first, index, apart, width, columns).astype(dtype)
    layout, scalar = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((HEIGHT,), dtype, layout=layout),
    )
    def load(_, ref, first, index):
        m = Mlir()
        mgpu_layout, registers = layout.to_mgpu(), []
        for row in m.rows(apart, width):
            row = m.arith.addi(row, m.wide(first.registers.item()))
            start = m.arith.muli(row, m.c(columns or m.ir.MemRefType(ref.type).shape[1], m.i64))
            offset = m.arith.addi(start, m.wide(index.registers.item()))
            value = m.byte_at(ref, offset) if is_byte else m.float_at(ref, offset)
            registers.append(m.vector.broadcast(m.ir.VectorType.get((1,), value.type), value))
        return m.array(registers, mgpu_layout, (HEIGHT,), is_signed=True if is_byte else None)

    return load(ref, first, index)


def differences(ref: Any, zeros: list[Array | None], dtype: jnp.dtype, size: int, *, interpret: bool) -> list[Array]:
    """Returns differences of values and zero points in pieces [64, size], operands of `wgmma`; they are exact.

    A value from 0 to 15 is put into the last bits of the number 128 in bfloat16, or 1024 in float16, whose last bit
    counts 1. Then this number and the zero point are subtracted at once, two values at a time.

    Args:
        ref: bytes of 128 columns in shared memory, uint8 [64, 64], or [2, 32, 64] as in `words`.
        zeros: zero points for equal parts of the columns, int32 [64] each; None: 8.
        dtype: bfloat16 or float16.
        size: columns of a piece, 32 or 64.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        return _differences_by_jax(ref, zeros, dtype, size)
    stored_zeros = [zero for zero in zeros if zero is not None]
    piece = plgpu.ShapeDtypeStruct((HEIGHT, size), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *([plgpu.Layout.WGMMA.reduce(1)] * len(stored_zeros))),
        return_type=(piece,) * (SLICE // size),
    )
    def unpack(_, ref, *stored_zeros):
        m = Mlir()
        numbers = _Numbers(m, dtype)
        offsets = [[numbers.offset(zero, half) for half in range(2)] for zero in stored_zeros or [None]]
        loaded = words(m, ref)  # [half, word]
        pieces = []
        for first in range(0, SLICE // WORD, size // WORD):
            registers: list[Any] = []
            for word in range(first, first + size // WORD):
                word_offsets = offsets[word * len(offsets) // (SLICE // WORD)]
                halves = [numbers.unpack(loaded[half][word], word_offsets[half]) for half in range(2)]
                registers += itertools.chain(*zip(*halves, strict=True))
            pieces.append(m.array(registers, m.wgmma, (HEIGHT, size)))
        return tuple(pieces)

    return unpack(ref, *stored_zeros)


def _differences_by_jax(ref, zeros, dtype, size):
    packed = ref[...]
    packed = packed if packed.ndim == 2 else interleaved(packed)
    values = int4.unpack(packed[:, None]).astype(dtype)
    zeros = [jnp.full(HEIGHT, int4.ZERO) if zero is None else zero for zero in zeros]
    columns = jnp.repeat(jnp.stack(zeros, axis=1), SLICE // len(zeros), axis=1)
    return jnp.split(values - columns.astype(dtype), SLICE // size, axis=1)


def rows_by_jax(ref, first, index, apart, width, columns):
    """Returns 64 rows of a column by operations of jax, as `column` does; rows that do not exist are zeros."""
    from jax.experimental import pallas as pl

    halves = 1 if apart is None else 2

    def load(start):
        count = width // halves
        if columns is None:
            rows = ref[pl.ds(start, count), index]
        else:
            rows = jax.lax.dynamic_slice(ref[...].reshape(-1, columns), (start, index), (count, 1))[:, 0]
        return jnp.pad(rows, (0, HEIGHT // halves - count))

    return load(first) if apart is None else interleaved(jnp.stack([load(first), load(first + apart)]))


def interleaved(halves):
    """Returns [2, 32, ...] as [64, ...]: 8 of the first half, 8 of the second, and so on."""
    _, _, *others = halves.shape
    return halves.reshape(2, 4, 8, *others).swapaxes(0, 1).reshape(HEIGHT, *others)


def gate_and_up(total: Array, *, interpret: bool) -> tuple[Array, Array]:
    """Returns gate and up of sums [64, height] whose rows are 8 of gate, 8 of up, and so on; each is there twice.

    A thread has a row of gate and the same row of up, so that no value moves between threads.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        both = total.reshape(4, 2, 8, -1)
        gate, up = (jnp.repeat(both[:, half : half + 1], 2, axis=1).reshape(total.shape) for half in range(2))
        return gate, up
    sums = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(sums, sums))
    def divide(_, total):
        m, registers = Mlir(), list(total.registers.flat)  # alternately a row of gate, and 8 rows below it, of up
        doubled = [list(itertools.chain(*((value, value) for value in registers[half::2]))) for half in range(2)]
        gate, up = (m.array(values, m.wgmma, total.shape) for values in doubled)
        return gate, up

    return divide(total)


class Mlir:
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

    def rows(self, apart, width=HEIGHT):
        """Returns a thread's two rows of 64, which are `apart` if this is not None, as 64-bit integers.

        If less than 64 rows exist, the last one stands for others.
        """
        (row, _), (below, _) = self.wgmma.thread_idxs((HEIGHT, 8))
        last = (width if apart is None else width // 2) - 1

        def within(row):
            return row if width == HEIGHT else self.arith.minsi(row, self.c(last, self.i64))

        if apart is None:
            return [within(self.wide(row)), within(self.wide(below))]
        row = self.wide(row)  # a warp has 16 rows, of which it has 8 in each half then
        warp = self.arith.shrui(row, self.c(4, self.i64))
        row = within(self.arith.subi(row, self.arith.muli(warp, self.c(8, self.i64))))
        return [row, self.arith.addi(row, self.c(apart, self.i64))]

    def load(self, ref, offset, element, **options):
        """Loads an element of an array in memory."""
        return self.llvm.load(
            element, self.utils.getelementptr(self.utils.memref_ptr(ref), [offset], element), **options
        )

    def float_at(self, ref, offset):
        """Returns an element of an array of floating-point numbers as a float32 number."""
        element = self.ir.MemRefType(ref.type).element_type
        value = self.load(ref, offset, element)
        return value if element == self.f32 else self.arith.extf(self.f32, value)

    def byte_at(self, ref, offset):
        """Returns an element of an array of bytes as a 32-bit integer."""
        return self.arith.extui(self.i32, self.load(ref, offset, self.ir.IntegerType.get_signless(8)))

    def as_pair(self, word, pair):
        """Returns a word as a pair of 16-bit numbers."""
        return self.vector.bitcast(pair, self.vector.broadcast(self.ir.VectorType.get((1,), self.i32), word))

    def as_word(self, pair):
        """Returns a pair of 16-bit numbers as a word."""
        return self.vector.extract(self.vector.bitcast(self.ir.VectorType.get((1,), self.i32), pair), [], [0])

    def shared_address(self, ref):
        """Returns the address of an array in shared memory, as a 32-bit integer."""
        pointer, shared = self.utils.memref_ptr(ref), self.ir.Type.parse("!llvm.ptr<3>")
        pointer = pointer if pointer.type == shared else self.llvm.addrspacecast(shared, pointer)
        return self.llvm.ptrtoint(self.i32, pointer)

    def array(self, registers, layout, shape, *, is_signed=None):
        """Returns an array made of a thread's registers."""
        registers = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
        return self.fragmented(_registers=registers, _layout=layout, _is_signed=is_signed)


def words(m, ref):
    """Returns the words of the slice in a thread's two rows, loaded from shared memory 16 bytes at a time.

    Args:
        m: MLIR.
        ref: bytes [64, 64], or [2, 32, 64] of rows that are 8 of the first half, 8 of the second, and so on.
    """
    strides, _ = m.ir.MemRefType(ref.type).get_strides_and_offset()
    apart = None if len(strides) == 2 else strides[0] // strides[1]
    _, first = next(iter(m.wgmma.thread_idxs((HEIGHT, 8))))  # thread t of four holds column 2 t first
    row_words = []
    for row in m.rows(apart):
        offset = m.arith.addi(m.arith.muli(row, m.c(strides[-2], m.i64)), m.arith.muli(m.wide(first), m.c(8, m.i64)))
        byte = m.ir.IntegerType.get_signless(8)
        pointer = m.utils.getelementptr(m.utils.memref_ptr(ref), [m.arith.trunci(m.i32, offset)], byte)
        loaded = m.llvm.load(m.ir.VectorType.get((SLICE // WORD,), m.i32), pointer, alignment=16)
        row_words.append([m.vector.extract(loaded, [], [index]) for index in range(SLICE // WORD)])
    return row_words


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
        value = m.arith.subf(m.c(-float(self.base), m.f32), m.arith.uitofp(m.f32, value))
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
        pairs = m.llvm.inline_asm(struct, [word, *constants, offset], "{" + " ".join(lines) + "}", constraints)
        return [m.as_pair(m.llvm.extractvalue(m.i32, pairs, [index]), self.pair) for index in range(4)]
