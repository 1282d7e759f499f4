"""How the Hopper kernel of packed weights (`int4_kernel`) stores its results from registers."""

from typing import Any

from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed.int4_registers import Mlir


def store(
    ref: Any, result: Array, origin: tuple[Array, Array, Array], width: int, *, is_joined: bool, interpret: bool
) -> None:
    """Stores a result transposed, without the rows of x and the channels that do not exist.

    Args:
        ref: array in global memory [parts, rows, channels].
        result: [64 channels, rows] in the array's dtype. If `is_joined`, its rows are 8 channels, the same 8 again, the
            next 8, and so on.
        origin: the part, the first row, and the first channel.
        width: number of channels to store, at most 64, or 32 if `is_joined`.
        is_joined: whether a channel is there twice.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        _store_by_jax(ref, channels_by_jax(result, is_joined)[:width], origin)
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar, scalar))
    def write(_, ref, result, *origin):
        m = Mlir()
        _, rows, channels = m.ir.MemRefType(ref.type).shape
        _, first = next(iter(m.wgmma.thread_idxs(result.shape)))
        part, row, channel = (m.wide(value.registers.item()) for value in origin)
        row = m.arith.addi(row, m.wide(first))
        offset = m.arith.addi(m.arith.muli(part, m.c(rows, m.i64)), row)
        offset = m.arith.addi(m.arith.muli(offset, m.c(channels, m.i64)), channel)
        for half, below in enumerate(m.rows(0 if is_joined else None)[: 1 if is_joined else 2]):
            pointer = m.utils.getelementptr(m.utils.memref_ptr(ref), [m.arith.addi(offset, below)], result.mlir_dtype)
            is_channel = m.arith.cmpi(m.arith.CmpIPredicate.slt, below, m.c(width, m.i64))
            for block, register in enumerate(list(result.registers.flat)[half::2]):
                for odd in range(2):
                    more = 8 * block + odd
                    is_row = m.arith.cmpi(m.arith.CmpIPredicate.slt, row, m.c(rows - more, m.i64))
                    value = m.vector.extract(register, [], [odd])
                    with m.utils.when(m.arith.andi(is_row, is_channel)):
                        m.llvm.store(value, m.utils.getelementptr(pointer, [more * channels], result.mlir_dtype))

    write(ref, result, *origin)


def _store_by_jax(ref, result, origin):
    from jax.experimental import pallas as pl

    part, row, channel = origin
    for index in range(result.shape[1]):

        @pl.when(row + index < ref.shape[1])
        def _(index=index):
            ref[part, row + index, pl.ds(channel, len(result))] = result[:, index]


def channels_by_jax(result, is_joined):
    """Returns the different channels of a result."""
    return result.reshape(4, 2, 8, -1)[:, 0].reshape(HEIGHT // 2, -1) if is_joined else result


def store_through(
    buffers: Any, ref: Any, result: Array, origin: tuple[Array, Array, Array], *, is_joined: bool
) -> None:
    """Stores a result as `store` does, through shared memory.

    Args:
        buffers: shared memory of this warpgroup [buffers, rows, channels], swizzled.
        ref, result, origin, is_joined: as in `store`; results have two bytes.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (part, row, channel), (count, size, channels) = origin, buffers.shape
    tiled = plgpu.TilingTransform((8, channels)), plgpu.SwizzleTransform(channels * result.dtype.itemsize)
    for index, first in enumerate(range(0, result.shape[1], size)):
        rows = min(size, result.shape[1] - first)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled), plgpu.Layout.WGMMA))
        def write(_, ref, result, first=first, rows=rows):
            _write_transposed(Mlir(), ref, result, first, rows, is_joined)

        plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
        write(buffers.at[index % count], result)
        plgpu.commit_smem()
        target = ref.at[part, pl.ds(row + first, rows), pl.ds(channel, channels)]
        plgpu.copy_smem_to_gmem(buffers.at[index % count, pl.ds(0, rows)], target)


def _write_transposed(m, ref, result, first, rows, is_joined):
    """Writes some rows of x of a result to shared memory; a warp transposes squares of 8 x 8 numbers on the way."""
    beside = 1 if is_joined else 2  # squares of a warp side by side
    registers = list(result.registers.flat)[first // 8 * 2 : (first + rows) // 8 * 2 : 2 if is_joined else 1]
    thread, base = m.arith.remui(m.utils.thread_idx(), m.c(128, m.i32)), m.shared_address(ref)
    lane, warp = m.arith.remui(thread, m.c(32, m.i32)), m.arith.divui(thread, m.c(32, m.i32))
    row, square = m.arith.remui(lane, m.c(8, m.i32)), m.arith.divui(lane, m.c(8, m.i32))
    below, right = m.arith.divui(square, m.c(beside, m.i32)), m.arith.remui(square, m.c(beside, m.i32))
    right = m.arith.addi(m.arith.muli(warp, m.c(beside, m.i32)), right)
    moved = m.arith.xori(right, m.arith.divui(row, m.c(2 // beside, m.i32)))  # the swizzle, of 16 bytes
    offset = m.arith.addi(m.arith.muli(below, m.c(8, m.i32)), row)
    offset = m.arith.muli(offset, m.c(64 * beside, m.i32))
    address = m.arith.addi(base, m.arith.addi(offset, m.arith.muli(moved, m.c(16, m.i32))))
    done = 0
    while done < len(registers):
        count = next(size for size in (4, 2, 1) if size <= len(registers) - done)
        words = [m.as_word(register) for register in registers[done : done + count]]
        at = m.arith.addi(address, m.c(done // beside * 8 * 64 * beside, m.i32))
        names = ", ".join(f"${index + 1}" for index in range(count))
        lines = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{names}}};"
        m.llvm.inline_asm(m.ir.Type.parse("!llvm.void"), [at, *words], lines, "r" + ",r" * count, has_side_effects=True)
        done += count
