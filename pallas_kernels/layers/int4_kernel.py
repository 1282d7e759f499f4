"""The Hopper kernel of weights of four bits, which multiplies any number of rows by a packed weight (`int4`).

    parts[s, t, n] = sum_k x[t, k] (values[n, k] - zeros[n, k // group]) scale[n, k // group]   over part s of S parts

The weight is the first operand of `wgmma`, 64 output channels per warpgroup, and comes from registers. The second
operand is a tile of rows of x, and comes from shared memory. The TMA unit loads the packed bytes into shared memory.
A thread loads 16 bytes of a row of the weight at once. They hold the values of 128 columns that this thread passes to
`wgmma`, in the order of the registers, because `int4.pack` orders them so. No value moves between threads.

Differences of values and zero points are exact in x's dtype. The tensor cores sum a group of columns in float32, and
this sum is multiplied by the group's scale and added to the total, so no value is rounded twice.

A CTA (one Pallas program) computes work items one after the other. A work item is an output tile (`channels` times 64
channels, and `height` rows of x), summed over one part of k. A slot of shared memory holds `splits` slices of 128
columns, and each slice is multiplied by warpgroups of its own, whose sums are added up at the end of the work item.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers import int4_registers as registers
from pallas_kernels.layers.hopper_tiling import HEIGHT
from pallas_kernels.layers.int4_registers import SLICE
from pallas_kernels.layers.int4_tiling import Tiles

PIECE = 64  # most columns of an operand of `wgmma`; 128 bytes of a row of x are the widest swizzle


def _kernel(
    # inputs, in global memory
    x_ref,  # [T, K]
    w_ref,  # [N, K / 2] uint8
    scale_ref,  # [N, K / group] float32
    zeros_ref,  # [N, K / group] uint8; None: zero points are 8
    # outputs, in global memory
    out_ref,  # [parts, T, N]
    # scratch, in shared memory
    x_tiles,  # [stages, splits, height, SLICE]
    w_tiles,  # [stages, splits, channels * HEIGHT, SLICE / 2] uint8
    arrived,  # barriers [stages]: the loads of a slot have arrived
    done,  # barriers [stages]: all warpgroups have read the slot
    *joining,  # with several splits: the sums of their warpgroups but the first [splits - 1, channels, HEIGHT, height]
    # float32; a barrier: these sums have been written; a barrier: they have been read
    # static parameters
    tiles,
    interpret,
):
    """Computes every n-th work item in one of n = `programs` Pallas programs (CTAs)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    refs = (x_ref, w_ref, scale_ref, zeros_ref, out_ref)
    cta = _Cta(refs, (x_tiles, w_tiles, arrived, done, *joining), tiles, interpret)

    @pl.when(cta.warpgroup == 0)
    def _():
        pl.loop(0, jnp.minimum(tiles.stages, cta.total_slots))(cta.load)

    pl.loop(0, cta.items)(cta.compute)

    # A CTA must not end before all arrivals at its barriers are complete.
    @pl.when(cta.warpgroup == 0)
    def _():
        @pl.loop(jnp.maximum(cta.total_slots - tiles.stages, 0), cta.total_slots)
        def _(slot):
            plgpu.barrier_wait(done.at[cta.place_in_ring(slot)])


class _Cta:
    """The operations of one CTA (Pallas program) inside the kernel.

    Slots are numbered consecutively over all work items of the CTA; slot i is in place i modulo `stages` of the ring.
    """

    def __init__(self, refs, memory, tiles, interpret):
        from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

        self.x_ref, self.w_ref, self.scale_ref, self.zeros_ref, self.out_ref = refs
        self.x_tiles, self.w_tiles, self.arrived, self.done, *self.joining = memory
        self.tiles, self.interpret, self.plgpu = tiles, interpret, plgpu
        (_, inner), (_, rows, out) = self.x_ref.shape, self.out_ref.shape
        self.group = inner // self.scale_ref.shape[1]  # columns of a scale
        self.step = math.gcd(self.group, SLICE)  # columns that are summed before they are scaled
        self.warpgroup, self.index = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")
        self.channel = jax.lax.rem(self.warpgroup, tiles.channels)
        self.split = jax.lax.div(self.warpgroup, tiles.channels)
        self.item_slots = inner // (SLICE * tiles.splits * tiles.parts)
        self.row_tiles = math.ceil(rows / tiles.height)
        items = out // (HEIGHT * tiles.channels) * tiles.parts * self.row_tiles
        self.items = jax.lax.div(items - self.index + tiles.programs - 1, tiles.programs)
        self.total_slots = self.items * self.item_slots

    def place_of(self, item):
        """Returns a work item's first output channel, its part of k, and its first row of x.

        Neighbours in time share the weight.
        """
        index = self.index + item * self.tiles.programs
        row, index = jax.lax.rem(index, self.row_tiles), jax.lax.div(index, self.row_tiles)
        channel, part = jax.lax.div(index, self.tiles.parts), jax.lax.rem(index, self.tiles.parts)
        return channel * (self.tiles.channels * HEIGHT), part, row * self.tiles.height

    def place_in_ring(self, slot):
        """Returns the place in shared memory of a slot."""
        return jax.lax.rem(slot, self.tiles.stages)

    def first_column(self, part, index):
        """Returns the first column of slot ``index`` of a work item with this part of k."""
        return (part * self.item_slots + index) * (SLICE * self.tiles.splits)

    def load(self, slot):
        """Starts to load a slot: slices of k of the tile's weights and rows of x."""
        tiles, place = self.tiles, self.place_in_ring(slot)
        channel, part, row = self.place_of(jax.lax.div(slot, self.item_slots))
        first, barrier = self.first_column(part, jax.lax.rem(slot, self.item_slots)), self.arrived.at[place]
        for split in range(tiles.splits):
            column = first + split * SLICE
            weights = self.w_ref.at[pl.ds(channel, tiles.channels * HEIGHT), pl.ds(column // 2, SLICE // 2)]
            self.plgpu.copy_gmem_to_smem(weights, self.w_tiles.at[place, split], barrier)
            x = self.x_ref.at[pl.ds(row, tiles.height), pl.ds(column, SLICE)]
            self.plgpu.copy_gmem_to_smem(x, self.x_tiles.at[place, split], barrier)

    def release(self, slot):
        """Marks a slot as read by this warpgroup; the first warpgroup loads a later slot into the place before it."""
        self.plgpu.commit_smem()  # bytes are read before the TMA unit writes others
        self.plgpu.barrier_arrive(self.done.at[self.place_in_ring(slot)])
        before = slot - 1

        @pl.when((self.warpgroup == 0) & (before >= 0) & (before + self.tiles.stages < self.total_slots))
        def _():
            self.plgpu.barrier_wait(self.done.at[self.place_in_ring(before)])
            self.load(before + self.tiles.stages)

    def factors(self, first_channel, column):
        """Returns for each step of a slice its scales and its zero points [64] float32; no zero points: None."""
        found = []
        for start in range(0, SLICE, self.step):
            group = jax.lax.div(column + start, self.group)
            refs = self.scale_ref, self.zeros_ref
            found.append(
                [
                    None if ref is None else registers.column(ref, first_channel, group, interpret=self.interpret)
                    for ref in refs
                ]
            )
        return found

    def product(self, place, factors, total):
        """Returns a total [64, height] with the product of this warpgroup's slice of a slot added to it."""
        packed = self.w_tiles.at[place, self.split, pl.ds(self.channel * HEIGHT, HEIGHT)]
        x, dtype, size = self.x_tiles.at[place, self.split], self.x_ref.dtype, min(self.step, PIECE)
        pieces = registers.differences(packed, [zero for _, zero in factors], dtype, size, interpret=self.interpret)
        operands = [(piece, x.at[:, pl.ds(index * size, size)]) for index, piece in enumerate(pieces)]
        count = self.step // size
        for index, (scale, _) in enumerate(factors):
            pairs = operands[index * count : (index + 1) * count]
            sums = self.sums(pairs, total.shape)
            total += sums * jax.lax.broadcast_in_dim(scale, total.shape, [0])
        return total

    def sums(self, pairs, shape):
        """Returns the sum of products of weights in registers and rows of x in shared memory."""
        if self.interpret:  # the interpreter has no `wgmma` with an operand in registers
            return sum(jnp.dot(w.astype(jnp.float32), x[...].astype(jnp.float32).T) for w, x in pairs)

        def run(accumulator):
            for weights, x in pairs:
                self.plgpu.wgmma(accumulator, weights, x.T)
            self.plgpu.wgmma_wait(0)
            return accumulator[...]

        return pl.run_scoped(run, self.plgpu.ACC(shape, jnp.float32))

    def compute(self, item):
        """Computes a work item and stores its result."""
        tiles, (channel, part, row) = self.tiles, self.place_of(item)
        own = channel + self.channel * HEIGHT

        def factors(index):
            return self.factors(own, self.first_column(part, index) + self.split * SLICE)

        def step(index, carry):
            total, found = carry
            slot = item * self.item_slots + index
            place = self.place_in_ring(slot)
            following = factors(jnp.minimum(index + 1, self.item_slots - 1))
            self.plgpu.barrier_wait(self.arrived.at[place])
            total = self.product(place, found, total)
            self.release(slot)
            return total, following

        zeros = jnp.zeros((HEIGHT, tiles.height), jnp.float32)
        if not self.interpret:
            zeros = self.plgpu.layout_cast(zeros, self.plgpu.Layout.WGMMA)
        total, _ = jax.lax.fori_loop(0, self.item_slots, step, (zeros, factors(0)))
        self.join(total, item, functools.partial(self.store, own, part, row))

    def join(self, total, item, store):
        """Adds up the sums of the warpgroups that multiply the same channels, and stores the result."""
        if self.tiles.splits == 1:
            store(total)
            return
        sums, written, read = self.joining

        @pl.when(self.split > 0)
        def _():
            pl.when(item > 0)(lambda: self.plgpu.barrier_wait(read))
            sums[self.split - 1, self.channel] = total
            self.plgpu.barrier_arrive(written)

        @pl.when(self.split == 0)
        def _():
            self.plgpu.barrier_wait(written)
            others = [sums[index, self.channel] for index in range(self.tiles.splits - 1)]
            pl.when(item + 1 < self.items)(lambda: self.plgpu.barrier_arrive(read))
            store(sum(others, total))

    def store(self, channel, part, row, total):
        """Stores a result [64 channels, height] in the rows that exist."""
        result = total.astype(self.out_ref.dtype)
        registers.store(self.out_ref, result, (part, row, channel), interpret=self.interpret)


def multiply(
    x: Array, packed: Array, scale: Array, *zeros: Array, tiles: Tiles, dtype: jnp.dtype, interpret: Any = False
) -> Array:
    """Runs the Hopper kernel of packed weights, and returns partial sums of x @ w.T [parts, rows, out].

    Args:
        x: activations [rows, inner], bfloat16 or float16.
        packed: packed values [out, blocks, 64] (`int4.pack`).
        scale: float32 scales [out, groups].
        zeros: zero points uint8 [out, groups], if there are any.
        tiles: static sizes of the call.
        dtype: dtype of the result.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (rows, inner), out = x.shape, packed.shape[0]
    if rows > 8 and rows % 8:
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))  # TMA tiles of 8 rows must lie within more than 8 rows
    kernel = functools.partial(_kernel, tiles=tiles, interpret=bool(interpret))
    piece = min(PIECE, math.gcd(inner // scale.shape[1], SLICE))
    swizzled = plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(piece * x.dtype.itemsize)

    def entry(x_ref, w_ref, scale_ref, *refs):
        *zeros_ref, out_ref = refs
        memory = [
            plgpu.SMEM((tiles.stages, tiles.splits, tiles.height, SLICE), x.dtype, transforms=swizzled),
            plgpu.SMEM((tiles.stages, tiles.splits, tiles.channels * HEIGHT, SLICE // 2), jnp.uint8),
            plgpu.Barrier(num_arrivals=2 * tiles.splits, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=tiles.groups, num_barriers=tiles.stages),
        ]
        if tiles.splits > 1:
            memory += [
                plgpu.SMEM((tiles.splits - 1, tiles.channels, HEIGHT, tiles.height), jnp.float32),
                plgpu.Barrier(num_arrivals=tiles.channels * (tiles.splits - 1)),
                plgpu.Barrier(num_arrivals=tiles.channels),
            ]
        inputs = (x_ref, w_ref, scale_ref, *(zeros_ref or [None]), out_ref)
        pl.run_scoped(functools.partial(kernel, *inputs), *memory, collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.parts, rows, out), dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.groups,
        thread_name="warpgroup",
        kernel_name="int4_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(x, packed.reshape(out, -1), scale, *zeros)
