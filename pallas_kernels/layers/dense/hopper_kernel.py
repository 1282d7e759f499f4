"""The Hopper kernel, which multiplies up to some hundreds of rows by a large weight.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal parts of k           (`split_matmul`)
    out[t, i] = activation(x[t] . w[i]) * (x[t] . w[I + i])                               (`gated_matmul`)

x and w either have two bytes per value, or are both float8 with one scale per row. The scales are applied to the sums.

An output tile is `columns` wide and as high as x, so every weight is read once. Each warpgroup holds 64 rows. The TMA
unit reads rows past the last row as zeros and does not write them. If w has gate and up, the tile's columns of gate and
of up lie one above the other in shared memory and form one operand of a `wgmma`, or two if they have more than 256
columns. So one thread gets both products of an output. In a transposed product (`hopper_tiling`), a warpgroup holds all
rows of x, and 64 columns of gate and 64 of up as two operands.

A CTA (one Pallas program) computes work items one after the other. A work item is one output tile, summed over one part
of k. The CTA loads k slice by slice into a ring of `stages` slots in shared memory. The first warpgroup also issues the
loads. As soon as all warpgroups have read a slot, the first warpgroup loads a later slice into the slot.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers.dense.hopper_tiling import INNER_BYTES, STORE_BUFFERS, HopperTiles, scale_columns
from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.quantize_rows import Activation, gate_logit


def _kernel(
    # inputs, in global memory
    x_ref,  # [T, K]
    w_ref,  # [halves * N, K]
    row_scale_ref,  # [T] float32; None: no scales
    scale_ref,  # [halves * N] float32; None: no scales
    # outputs, in global memory
    out_ref,  # [parts, T, N]
    # scratch, in shared memory
    x_and_out_tiles,  # x [stages, height, inner]; results [groups, STORE_BUFFERS, *store_shape], or, in the memory of
    # x, [stages, groups, bytes of 64 rows of x]
    w_tiles,  # [stages, halves * columns, inner]
    arrived,  # barriers [stages]: the loads of a slice of k have arrived in the slot
    done,  # barriers [stages]: all warpgroups have read the slot
    *scales_memory,  # float32 scales of rows [height] and columns [scale_tiles, halves, columns]; their barrier
    # static parameters
    tiles,
    activation,
):
    """Computes every n-th work item in one of n = `programs` Pallas programs (CTAs).

    A work item is one output tile, summed over one part of k. The loads for the next work item start while the current
    work item is computed.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x_tiles, out_tiles = x_and_out_tiles
    memory = (x_tiles, out_tiles, w_tiles, arrived, done, *scales_memory)
    cta = _HopperCta((x_ref, w_ref, row_scale_ref, scale_ref, out_ref), memory, tiles)

    # Fill the pipeline: load the first slices of k, and the scales of all items.
    @pl.when(cta.group == 0)
    def _():
        pl.loop(0, jnp.minimum(tiles.stages, cta.total_slices))(cta.load)
        if tiles.scale_tiles:
            cta.load_scales()

    # Multiply and store, item by item.
    @pl.loop(0, cta.items)
    def _(item):
        zeros = [plgpu.ACC(shape, jnp.float32) for shape in tiles.accumulators]
        sums = pl.run_scoped(functools.partial(cta.multiply, item), *zeros)
        if tiles.scale_tiles:
            pl.when(item == 0)(lambda: plgpu.barrier_wait(scales_memory[-1]))
        cta.store(sums, item, activation)

    # Drain the pipeline: a CTA must not end before all arrivals at its barriers, and all its stores, are complete.
    pl.when(cta.total_slices > 0)(lambda: cta.release(cta.total_slices - 1))

    @pl.when(cta.group == 0)
    def _():
        @pl.loop(jnp.maximum(cta.total_slices - tiles.stages, 0), cta.total_slices)
        def _(k_slice):
            plgpu.barrier_wait(done.at[cta.slot_of(k_slice)])

    plgpu.wait_smem_to_gmem(0)


class _HopperCta:
    """The operations of one CTA (Pallas program) inside the kernel.

    The CTA computes `items` work items. A work item is one output tile, summed over one part of k, which has
    `item_slices` slices. Slices are numbered consecutively over all work items of the CTA. Slice i uses slot i modulo
    `stages` of shared memory.
    """

    def __init__(self, refs, memory, tiles):
        from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

        self.x_ref, self.w_ref, self.row_scale_ref, self.scale_ref, self.out_ref = refs
        self.x_tiles, self.out_tiles, self.w_tiles, self.arrived, self.done, *self.scales_memory = memory
        self.tiles, self.plgpu = tiles, plgpu
        inner, self.out = self.x_ref.shape[1], self.out_ref.shape[2]
        self.group, self.index = jax.lax.axis_index("group"), jax.lax.axis_index("program")
        self.own_part = pl.ds(self.group * HEIGHT, HEIGHT)  # rows of x of this warpgroup; transposed: columns
        self.all_rows = pl.ds(0 * self.index, tiles.height)  # a slice with a traced start may exceed the array
        self.item_slices = inner // tiles.inner // tiles.parts
        self.items = (self.out // tiles.columns * tiles.parts - self.index + tiles.programs - 1) // tiles.programs
        self.total_slices = self.items * self.item_slices

    def place_of(self, item):
        """Returns the first column of a work item's output tile, and the index of its part of k."""
        index = self.index + item * self.tiles.programs
        return jax.lax.div(index, self.tiles.parts) * self.tiles.columns, jax.lax.rem(index, self.tiles.parts)

    def slot_of(self, k_slice):
        """Returns the index of the shared-memory slot that holds slice ``k_slice`` of the axis k."""
        return jax.lax.rem(k_slice, self.tiles.stages)

    def load(self, k_slice):
        """Starts to load a slice of k (the tile's weights and all rows of x) into the slice's slot."""
        tiles = self.tiles
        slot, (column, part) = self.slot_of(k_slice), self.place_of(jax.lax.div(k_slice, self.item_slices))
        slice_in_k = part * self.item_slices + jax.lax.rem(k_slice, self.item_slices)
        inner = pl.ds(slice_in_k * tiles.inner, tiles.inner)
        for half in range(tiles.halves):
            weights = self.w_ref.at[pl.ds(half * self.out + column, tiles.columns), inner]
            target = self.w_tiles.at[slot, pl.ds(half * tiles.columns, tiles.columns)]
            self.plgpu.copy_gmem_to_smem(weights, target, self.arrived.at[slot])
        self.plgpu.copy_gmem_to_smem(self.x_ref.at[self.all_rows, inner], self.x_tiles.at[slot], self.arrived.at[slot])

    def release(self, k_slice):
        """Marks the slot of a slice of k as read by this warpgroup.

        The first warpgroup then waits until all warpgroups have read the slot, and loads a later slice into the slot.
        """
        slot = self.slot_of(k_slice)
        self.plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # wait until results stored from the slot have been read
        self.plgpu.barrier_arrive(self.done.at[slot])

        @pl.when((self.group == 0) & (k_slice + self.tiles.stages < self.total_slices))
        def _():
            self.plgpu.barrier_wait(self.done.at[slot])
            self.load(k_slice + self.tiles.stages)

    def operands(self, slot):
        """Returns the two operands of `wgmma` for each accumulator, as parts of one slot of shared memory."""
        tiles = self.tiles
        if not tiles.transposed:
            size = tiles.halves // tiles.operands * tiles.columns
            weights = [self.w_tiles.at[slot, pl.ds(index * size, size)].T for index in range(tiles.operands)]
            return [(self.x_tiles.at[slot, self.own_part], part) for part in weights]
        starts = [half * tiles.columns + self.group * HEIGHT for half in range(tiles.halves)]
        return [(self.w_tiles.at[slot, pl.ds(start, HEIGHT)], self.x_tiles.at[slot].T) for start in starts]

    def multiply(self, item, *accumulators):
        """Multiplies all slices of k of a work item; returns the sums, one array for each accumulator."""

        @pl.loop(0, self.item_slices)
        def _(index):
            k_slice = item * self.item_slices + index
            slot = self.slot_of(k_slice)
            self.plgpu.barrier_wait(self.arrived.at[slot])
            for accumulator, pair in zip(accumulators, self.operands(slot), strict=True):
                self.plgpu.wgmma(accumulator, *pair)
            self.plgpu.wgmma_wait(len(accumulators))  # wait for the products of earlier slices
            pl.when(k_slice > 0)(lambda: self.release(k_slice - 1))

        self.plgpu.wgmma_wait(0)
        return [accumulator[...] for accumulator in accumulators]

    def load_scales(self):
        """Starts to load the scales of all rows, and of the columns of all work items, into shared memory."""
        tiles, (row_scales, column_scales, scales_arrived) = self.tiles, self.scales_memory
        for first in range(0, tiles.height, HEIGHT):
            rows = self.row_scale_ref.at[pl.ds(0 * self.index + first, HEIGHT)]
            self.plgpu.copy_gmem_to_smem(rows, row_scales.at[pl.ds(first, HEIGHT)], scales_arrived)
        for item, half in itertools.product(range(tiles.scale_tiles), range(tiles.halves)):
            column, _ = self.place_of(item)
            target = column_scales.at[item, half, pl.ds(0, tiles.columns)]
            columns = self.scale_ref.at[pl.ds(half * self.out + column, tiles.columns)]
            self.plgpu.copy_gmem_to_smem(columns, target, scales_arrived)

    def piece_of(self, first):
        """Returns the position and the size of a block of an output tile, which this warpgroup stores at once.

        Args:
            first: first column of the block in the tile; transposed: first row.

        Returns:
            Two pairs: (first row, number of rows), and (first column in the tile, number of columns).
        """
        along, across = (self.group * HEIGHT, HEIGHT), (first, self.tiles.store)
        return (across, along) if self.tiles.transposed else (along, across)

    def scaled(self, sums, item, half, first):
        """Returns the block of sums that `piece_of(first)` describes, multiplied by its scales if there are any.

        Args:
            sums: sums of a work item, as `multiply` returns them.
            item: index of the work item.
            half: 0 for gate, or if the weight has only one half; 1 for up.
            first: as in `piece_of`.
        """
        tiles = self.tiles
        is_apart = tiles.operands == tiles.halves
        start = first if is_apart else half * tiles.columns + first
        piece = sums[half if is_apart else 0][:, start : start + tiles.store]
        if self.scale_ref is None:
            return piece
        rows, (column, size) = self.piece_of(first)
        if tiles.scale_tiles:
            row_scales, column_scales, _ = self.scales_memory
            refs = row_scales.at[pl.ds(*rows)], column_scales.at[item, half, pl.ds(column, size)]
        else:
            first_scale = half * self.out + self.place_of(item)[0] + column
            refs = self.row_scale_ref.at[pl.ds(*rows)], self.scale_ref.at[pl.ds(first_scale, size)]
        for axis, ref in enumerate(refs[::-1] if tiles.transposed else refs):
            scale = self.plgpu.load(ref, optimized=False)
            piece *= jax.lax.broadcast_in_dim(scale, piece.shape, [axis])
        return piece

    def store_buffer(self, index, item):
        """Returns the shared memory that holds block number `index` of a work item's results while it is stored."""
        tiles = self.tiles
        if not tiles.stores_in_x:
            return self.out_tiles.at[self.group, index % STORE_BUFFERS]
        last = self.out_tiles.at[self.slot_of(item * self.item_slices + self.item_slices - 1), self.group]
        if last.shape == tiles.store_shape:
            return last
        return last.at[pl.ds(0, math.prod(tiles.store_shape))].reshape(tiles.store_shape)

    def store(self, sums, item, activation):
        """Scales a work item's sums, multiplies activation(gate) by up if the weight has both, and stores them."""
        tiles, (column, part) = self.tiles, self.place_of(item)
        for index in range((tiles.transposed or tiles.columns) // tiles.store):
            first = index * tiles.store
            result = self.scaled(sums, item, 0, first)
            if tiles.halves == 2:
                gate = result / (1 + jnp.exp(-gate_logit(result, activation)))
                result = gate * self.scaled(sums, item, 1, first)
            if index >= STORE_BUFFERS:  # the first buffers are free: `release` has waited since the last item
                self.plgpu.wait_smem_to_gmem(STORE_BUFFERS - 1, wait_read_only=True)
            shared = self.store_buffer(index, item)
            (shared.T if tiles.transposed else shared)[...] = result.astype(self.out_ref.dtype)
            self.plgpu.commit_smem()
            rows, (start, size) = self.piece_of(first)
            self.plgpu.copy_smem_to_gmem(shared, self.out_ref.at[part, pl.ds(*rows), pl.ds(column + start, size)])


def multiply(
    x: Array,
    weight: Array,
    *scales: Array,
    tiles: HopperTiles,
    dtype: jnp.dtype,
    activation: Activation = "silu",
    interpret: Any = False,
) -> Array:
    """Runs the Hopper kernel, and returns partial sums of x @ weight.T, or activation(gate) * up, [parts, rows, out].

    Args:
        x: activations [rows, inner].
        weight: [halves * out, inner]; two halves are gate and up.
        scales: float32 scales of the rows of x [rows] and of the weight [halves * out] if both are float8, else none.
        tiles: static sizes of the call.
        dtype: dtype of the result.
        activation: the gate's activation function if the weight has gate and up: "silu" or "gelu_tanh".
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def memory(*shape, dtype=x.dtype):
        width = shape[-1] * jnp.dtype(dtype).itemsize
        swizzled = (plgpu.TilingTransform((8, shape[-1])), plgpu.SwizzleTransform(width)) if width > 16 else ()
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    scales_memory = [
        plgpu.SMEM((math.ceil(tiles.height / HEIGHT) * HEIGHT,), jnp.float32),
        plgpu.SMEM((tiles.scale_tiles, tiles.halves, scale_columns(tiles.columns)), jnp.float32),
        plgpu.Barrier(num_arrivals=math.ceil(tiles.height / HEIGHT) + tiles.scale_tiles * tiles.halves),
    ]

    def x_and_out_memory(x_tiles):
        if not tiles.stores_in_x:
            return x_tiles, memory(tiles.groups, STORE_BUFFERS, *tiles.store_shape, dtype=dtype)
        if interpret:  # the interpreter does not support refs that share memory, nor `reshape`
            return x_tiles, plgpu.SMEM((tiles.stages, tiles.groups, *tiles.store_shape), dtype)
        room = HEIGHT * INNER_BYTES // dtype.itemsize  # the results use the beginning of this memory
        return plgpu.RefUnion(x_tiles, plgpu.SMEM((tiles.stages, tiles.groups, room), dtype))

    kernel = functools.partial(_kernel, tiles=tiles, activation=activation)

    def entry(x_ref, w_ref, *refs):
        *scale_refs, out_ref = refs
        pl.run_scoped(
            functools.partial(kernel, x_ref, w_ref, *(scale_refs or (None, None)), out_ref),
            x_and_out_memory(memory(tiles.stages, tiles.height, tiles.inner)),
            memory(tiles.stages, tiles.halves * tiles.columns, tiles.inner),
            plgpu.Barrier(num_arrivals=tiles.halves + 1, num_barriers=tiles.stages),  # loads of the weights and of x
            plgpu.Barrier(num_arrivals=tiles.groups, num_barriers=tiles.stages),
            *(scales_memory if tiles.scale_tiles else ()),
            collective_axes="group",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.parts, x.shape[0], weight.shape[0] // tiles.halves), dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.groups,
        thread_name="group",
        kernel_name="gated_matmul" if tiles.halves == 2 else "split_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(x, weight, *scales)
