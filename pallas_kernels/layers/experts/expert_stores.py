"""How the Hopper kernel of narrow experts (`expert_kernel`) stores its results, as `int4_stores` stores others."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.experts.expert_bytes import SLICE, place_of
from pallas_kernels.layers.packed.int4_registers import Mlir
from pallas_kernels.layers.packed.int4_stores import channels_by_jax


def store_choices(
    ref: Any,
    total: Array,
    origin: tuple[Array, Array, Array],
    choices_ref: Any,
    factors_ref: Any,
    *,
    width: int,
    is_joined: bool,
    interpret: bool,
) -> None:
    """Stores a result [64, height] transposed, each of its columns in the row of a choice, times a factor.

    Args:
        ref: array in global memory [parts, choices, channels].
        total: the result, float32. If `is_joined`, its rows are 8 channels, the same 8 again, the next 8, and so on.
        origin: the part, the block, and the first channel.
        choices_ref: choices of each block [blocks, height] int32; -1: none, which is not stored.
        factors_ref: factor of each choice, float32 [choices, 1]; None: 1.
        width: number of channels to store, at most 64, or 32 if `is_joined`.
        is_joined: whether a channel is there twice.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        _store_choices_by_jax(ref, total, origin, choices_ref, factors_ref, width, is_joined)
        return
    scalar, refs = plgpu.Layout.WG_SPLAT, [choices_ref] if factors_ref is None else [choices_ref, factors_ref]
    types = [plgpu.RefType()] * (1 + len(refs))

    @plgpu.inline_mgpu(arg_types=(*types, plgpu.Layout.WGMMA, scalar, scalar, scalar))
    def write(_, ref, choices_ref, *others):
        *factors_ref, total, part, block, channel = others
        m = Mlir()
        (_, choices, channels), element = m.ir.MemRefType(ref.type).shape, m.ir.MemRefType(ref.type).element_type
        part, block, channel = (m.wide(value.registers.item()) for value in (part, block, channel))
        rows = m.rows(0 if is_joined else None)[: 1 if is_joined else 2]
        is_channel = [m.arith.cmpi(m.arith.CmpIPredicate.slt, row, m.c(width, m.i64)) for row in rows]
        _, column_of_thread = next(iter(m.wgmma.thread_idxs(total.shape)))
        first = m.arith.addi(m.arith.muli(block, m.c(total.shape[1], m.i64)), m.wide(column_of_thread))
        base = m.arith.muli(part, m.c(choices, m.i64))
        for column in range(0, total.shape[1], 8):
            for odd in range(2):
                choice = m.load(choices_ref, m.arith.addi(first, m.c(column + odd, m.i64)), m.i32)
                is_choice = m.arith.cmpi(m.arith.CmpIPredicate.sge, choice, m.c(0, m.i32))
                with m.utils.when(is_choice):
                    choice = m.wide(choice)
                    factor = m.float_at(factors_ref[0], choice) if factors_ref else None
                    start = m.arith.addi(m.arith.muli(m.arith.addi(base, choice), m.c(channels, m.i64)), channel)
                    for half, row in enumerate(rows):
                        value = m.vector.extract(total.registers.flat[column // 4 + half], [], [odd])
                        value = value if factor is None else m.arith.mulf(value, factor)
                        value = value if element == m.f32 else m.arith.truncf(element, value)
                        at = m.utils.getelementptr(m.utils.memref_ptr(ref), [m.arith.addi(start, row)], element)
                        with m.utils.when(is_channel[half]):
                            m.llvm.store(value, at)

    write(ref, *refs, total, *origin)


def _store_choices_by_jax(ref, total, origin, choices_ref, factors_ref, width, is_joined):
    from jax.experimental import pallas as pl

    part, block, channel = origin
    total = channels_by_jax(total, is_joined)[:width]
    for index in range(total.shape[1]):
        choice = choices_ref[block, index]

        @pl.when(choice >= 0)
        def _(index=index, choice=choice):
            values = total[:, index] if factors_ref is None else total[:, index] * factors_ref[choice, 0]
            ref[part, choice, pl.ds(channel, len(total))] = values.astype(ref.dtype)


def store_block(
    ref: Any,
    total: Array,
    origin: tuple[Array, Array],
    channels: int,
    kind: str,
    *,
    width: int,
    is_joined: bool,
    interpret: bool,
) -> None:
    """Stores a result [64, height] transposed, in the rows of a block of x of the next product.

    The channels that fill the last slice are zeros.

    Args:
        ref: array in global memory [slices, rows, 128], in the order of `expert_bytes.registered`.
        total: as in `store_choices`.
        origin: the first row, and the first channel.
        channels: number of channels of all results, a multiple of 32 and at least 64.
        kind: kind of the next product's weight, one of `expert_bytes.PACKED`.
        width, is_joined: as in `store_choices`.
        interpret: whether the kernel is interpreted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    padding = -channels % SLICE
    if interpret:
        _store_block_by_jax(ref, channels_by_jax(total, is_joined)[:width], origin, channels, kind)
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar))
    def write(_, ref, total, row, channel):
        m = Mlir()
        (_, rows, _), element = m.ir.MemRefType(ref.type).shape, m.ir.MemRefType(ref.type).element_type
        _, column_of_thread = next(iter(m.wgmma.thread_idxs(total.shape)))
        row = m.arith.addi(m.wide(row.registers.item()), m.wide(column_of_thread))

        def pointer(channel):
            """Returns the address of a channel in a thread's first row."""
            channel = m.arith.trunci(m.i32, channel)
            index = m.arith.shrui(channel, m.c(7, m.i32))
            at = m.arith.addi(m.arith.muli(m.wide(index), m.c(rows, m.i64)), row)
            at = m.arith.addi(m.arith.muli(at, m.c(SLICE, m.i64)), m.wide(_place(m, channel, kind)))
            return m.utils.getelementptr(m.utils.memref_ptr(ref), [at], element)

        for half, below in enumerate(m.rows(0 if is_joined else None)[: 1 if is_joined else 2]):
            own_channel = m.arith.addi(m.wide(channel.registers.item()), below)
            values = [
                m.arith.truncf(element, m.vector.extract(total.registers.flat[column // 4 + half], [], [odd]))
                for column in range(0, total.shape[1], 8)
                for odd in range(2)
            ]
            is_channel = m.arith.cmpi(m.arith.CmpIPredicate.slt, below, m.c(width, m.i64))
            with m.utils.when(is_channel):
                _store_column(m, pointer(own_channel), element, values)
            if padding:
                is_last = m.arith.cmpi(m.arith.CmpIPredicate.sge, own_channel, m.c(channels - padding, m.i64))
                with m.utils.when(m.arith.andi(is_last, is_channel)):
                    zeros = [m.c(0.0, element)] * len(values)
                    _store_column(m, pointer(m.arith.addi(own_channel, m.c(padding, m.i64))), element, zeros)

    write(ref, total, *origin)


def _store_column(m, pointer, element, values):
    """Stores a thread's values of a channel, two of each eight rows."""
    for index, value in enumerate(values):
        row = index // 2 * 8 + index % 2
        m.llvm.store(value, m.utils.getelementptr(pointer, [row * SLICE], element))


def _place(m, channel, kind):
    """Returns `expert_bytes.place_of` of a channel as a 32-bit integer."""
    return place_of(_Bits(m, channel), kind).value


class _Bits:
    """A 32-bit integer with the operations on bits that `expert_bytes.place_of` uses."""

    def __init__(self, m, value):
        self.m, self.value = m, value

    def _with(self, operation, other):
        other = other.value if isinstance(other, _Bits) else self.m.c(other, self.m.i32)
        return _Bits(self.m, operation(self.value, other))

    def __rshift__(self, other):
        return self._with(self.m.arith.shrui, other)

    def __lshift__(self, other):
        return self._with(self.m.arith.shli, other)

    def __and__(self, other):
        return self._with(self.m.arith.andi, other)

    def __or__(self, other):
        return self._with(self.m.arith.ori, other)


def _store_block_by_jax(ref, total, origin, channels, kind):
    from jax.experimental import pallas as pl

    (first, channel), padding, total = origin, -channels % SLICE, total.astype(ref.dtype)
    rows = pl.ds(first, total.shape[1])
    for index in range(len(total)):
        own_channel = channel + index
        ref[own_channel // SLICE, rows, place_of(own_channel % SLICE, kind)] = total[index]

        @pl.when(own_channel >= channels - padding)
        def _(own_channel=own_channel + padding):
            ref[own_channel // SLICE, rows, place_of(own_channel % SLICE, kind)] = jnp.zeros(total.shape[1], ref.dtype)
