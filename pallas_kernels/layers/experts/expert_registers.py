"""Operations on registers of the Hopper kernel of narrow experts (`expert_kernel`), as `int4_registers` has others."""

import itertools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.experts import mxfp4
from pallas_kernels.layers.experts.expert_bytes import registered, unpack
from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed.int4_registers import SLICE, WORD, Mlir, interleaved, rows_by_jax, words

THREADS = SLICE // mxfp4.GROUP  # threads that share a row of a slice; each has the columns of a group


def scales(
    ref: Any,
    first: Array,
    group: Array,
    *,
    apart: int | None,
    width: int = HEIGHT,
    columns: int | None = None,
    interpret: bool,
) -> Array:
    """Returns the scales of a slice's four groups for 64 rows, int32 [64, 8]; each is there twice.

    So a thread has the scales of its own group for its two rows. From global memory they are loaded a slot ahead, and
    not used before.

    Args:
        ref: scales of mxfp4, uint8 [rows, groups].
        first, apart, width, columns: as in `int4_registers.column`.
        group: first group; a group that does not exist gets the scale of the last one.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    if interpret:
        return _scales_by_jax(ref, first, group, apart, width, columns)
    scalar, shape = plgpu.Layout.WG_SPLAT, (HEIGHT, 2 * THREADS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WGMMA),
    )
    def load(_, ref, first, group):
        m = Mlir()
        groups = columns or m.ir.MemRefType(ref.type).shape[1]
        _, twice = next(iter(m.wgmma.thread_idxs(shape)))
        own_group = m.arith.shrui(m.arith.index_cast(m.i32, twice), m.c(1, m.i32))
        own_group = m.wide(m.arith.minsi(m.arith.addi(group.registers.item(), own_group), m.c(groups - 1, m.i32)))
        registers = []
        for row in m.rows(apart, width):
            row = m.arith.addi(row, m.wide(first.registers.item()))
            offset = m.arith.addi(m.arith.muli(row, m.c(groups, m.i64)), own_group)
            registers.append(m.vector.broadcast(m.ir.VectorType.get((2,), m.i32), m.byte_at(ref, offset)))
        return m.array(registers, m.wgmma, shape, is_signed=True)

    return load(ref, first, group)


def _power_bits(m, scale):
    """Returns the bits of 2^(scale - 128) in bfloat16, twice in a word: of 0 and 1 subnormal numbers, of 255 NaN."""
    bits = m.arith.shli(m.arith.subi(scale, m.c(1, m.i32)), m.c(7, m.i32))
    is_subnormal = m.arith.cmpi(m.arith.CmpIPredicate.slt, scale, m.c(2, m.i32))
    bits = m.arith.select(is_subnormal, m.arith.shli(m.c(0x20, m.i32), scale), bits)
    is_nan = m.arith.cmpi(m.arith.CmpIPredicate.eq, scale, m.c(255, m.i32))
    bits = m.arith.select(is_nan, m.c(0x7FC0, m.i32), bits)
    return m.arith.ori(bits, m.arith.shli(bits, m.c(16, m.i32)))


def _scales_by_jax(ref, first, group, apart, width, columns):
    last = (columns or ref.shape[1]) - 1
    groups = [jnp.minimum(group + index, last) for index in range(THREADS)]
    columns_of_groups = [rows_by_jax(ref, first, group_index, apart, width, columns) for group_index in groups]
    return jnp.repeat(jnp.stack(columns_of_groups, axis=1).astype(jnp.int32), 2, axis=1)


def tables(*, interpret: bool) -> Array | None:
    """Returns the first half of `POSITIVE` and of `NEGATIVE` in two words of each thread, int32 [64, 8].

    A bit of the threads' masks that is never set keeps the compiler from knowing these constants: it would keep them in
    uniform registers, and copy them for each use.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        return None
    shape = HEIGHT, 8

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WGMMA))
    def make(_):
        m, made = Mlir(), []
        for word, _ in (POSITIVE, NEGATIVE):
            lines = f"{{.reg .b32 mask; mov.u32 mask, %lanemask_lt; lop3.b32 $0, mask, 0x80000000, {word:#x}, 0xEA;}}"
            value = m.llvm.inline_asm(m.i32, [], lines, "=r")
            made.append(m.vector.broadcast(m.ir.VectorType.get((2,), m.i32), value))
        return m.array(made, m.wgmma, shape, is_signed=True)

    return make()


def numbers(ref: Any, scales: Array, tables: Array | None, size: int, *, interpret: bool) -> list[Array]:
    """Returns the numbers of a slice times powers of two in pieces [64, size] of bfloat16; they are exact.

    Two times a number is a whole number n from -12 to 12. `PRMT` takes four values of four bits as they are, and looks
    up the bytes 64 + n. They become the last bits of the number 128 in bfloat16, whose last bit counts 1. This sum is
    multiplied by half the power of two, and 192 times that is subtracted at once. With a scale of more than 248, 2^121,
    192 times half of it is infinite, and so are the results.

    Args:
        ref: bytes of 128 columns in shared memory, as `int4_registers.differences` has them.
        scales: `scales` of the slice.
        tables: `tables`.
        size: columns of a piece, a multiple of 32.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        return _numbers_by_jax(ref, scales, size)
    piece = plgpu.ShapeDtypeStruct((HEIGHT, size), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WGMMA] * 2), return_type=(piece,) * (SLICE // size))
    def load(_, ref, scales, tables):
        m = Mlir()
        known = [m.vector.extract(register, [], [0]) for register in tables.registers.flat]
        powers = [_power_bits(m, m.vector.extract(register, [], [0])) for register in scales.registers.flat]
        products = [m.llvm.inline_asm(m.i32, [power], PRODUCT, "=r,r") for power in powers]
        row_words, pieces = words(m, ref), []  # [half, word]
        for first in range(0, SLICE // WORD, size // WORD):
            registers: list[Any] = []
            for word in range(first, first + size // WORD):
                halves = [_unpack(m, row_words[half][word], powers[half], products[half], *known) for half in range(2)]
                registers += itertools.chain(*zip(*halves, strict=True))
            pieces.append(m.array(registers, m.wgmma, (HEIGHT, size)))
        return tuple(pieces)

    return load(ref, scales, tables)


def _numbers_by_jax(ref, scales, size):
    packed = ref[...]
    packed = packed if packed.ndim == 2 else interleaved(packed)
    values = registered(unpack(packed.reshape(HEIGHT, THREADS, -1)), "mxfp4")
    powers = mxfp4.factors(scales) * jnp.bfloat16(0.5)
    wide = jnp.tile(powers, SLICE // (2 * THREADS))  # a thread's columns are two of each 8
    return jnp.split((2 * mxfp4.numbers(values)).astype(jnp.bfloat16) * wide, SLICE // size, axis=1)


# Bytes 64 + n of positive numbers and 64 - n of negative ones, by exponent and mantissa. `PRMT` returns 0 instead if
# the highest bit of a value is set; this is the sign, and for the second table it is inverted.
POSITIVE, NEGATIVE = (0x43424140, 0x4C484644), (0x3D3E3F40, 0x34383A3C)
PRODUCT = (
    "{.reg .b32 many, none; mov.b32 many, 0xC340C340; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, many, none;}"
)
UNPACK = " ".join(
    (
        ".reg .b32 word, other, low, high;",
        "xor.b32 other, $4, 0x88888888;",
        f"prmt.b32 low, $7, {POSITIVE[1]:#x}, $4;",
        f"prmt.b32 high, $8, {NEGATIVE[1]:#x}, other;",
        "or.b32 low, low, high;",
        "shr.b32 word, $4, 16;",
        "shr.b32 other, other, 16;",
        f"prmt.b32 high, $7, {POSITIVE[1]:#x}, word;",
        f"prmt.b32 other, $8, {NEGATIVE[1]:#x}, other;",
        "or.b32 high, high, other;",
        *(
            f"prmt.b32 word, {'low' if index < 2 else 'high'}, 0x43434343, {'0x4342' if index % 2 else '0x4140'}; "
            f"fma.rn.bf16x2 ${index}, word, $5, $6;"
            for index in range(4)
        ),
    )
)


def _unpack(m, word, *operands):
    """Returns the four pairs of numbers of a word times two powers: of the low and the high bits of each byte.

    Args:
        m: MLIR.
        word: the word.
        operands: half the powers, -192 times them, and the first half of `POSITIVE` and of `NEGATIVE`.
    """
    struct = m.llvm.StructType.get_literal([m.i32] * 4)
    constraints = ",".join(["=&r"] * 4 + ["r"] * (1 + len(operands)))
    pairs = m.llvm.inline_asm(struct, [word, *operands], "{" + UNPACK + "}", constraints)
    pair = m.ir.VectorType.get((2,), m.ir.BF16Type.get())
    return [m.as_pair(m.llvm.extractvalue(m.i32, pairs, [index]), pair) for index in range(4)]
