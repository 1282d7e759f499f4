"""How the Hopper kernel of packed weights (`int4_kernel`) stores its results from registers."""

from typing import Any

from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.int4.int4_registers import Mlir


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
