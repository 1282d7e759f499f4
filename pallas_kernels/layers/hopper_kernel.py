"""The Hopper kernel: a product of up to some hundreds of rows with a large weight.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal pieces of k          (`split_matmul`)
    out[t, i] = silu(x[t] . w[i]) * (x[t] . w[I + i])                                     (`gated_matmul`)

x and w have two bytes per value, or both are float8 with a scale per row, which is applied to the sums.

An output tile is `columns` wide and as high as x, so every weight is read once. Each warpgroup holds 64 rows; the TMA
unit reads rows past the last as zeros and does not write them. For gate and up the tile's columns of both lie one above
the other in shared memory as one operand of a `wgmma`, so both products of an output end up in one thread. Transposed
(`hopper_tiling`), a warpgroup holds 64 columns of gate and 64 of up as two operands, and all rows. The first warpgroup
also issues the loads of later steps, as soon as all warpgroups have read the oldest step's tiles.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.hopper_tiling import HEIGHT, INNER_BYTES, MOST_COLUMNS, STORE_BUFFERS, Tiles


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
    arrived,  # barriers [stages]: the loads of a step have arrived
    done,  # barriers [stages]: a warpgroup has read a step's tiles
    *scales_memory,  # row scales [height], column scales [scale_tiles, halves, 128], both float32, and their barrier
    # static parameters
    tiles,
):
    """One program: every `programs`-th item (a tile, or one part of it); loads run ahead from item to item."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x_tiles, out_tiles = x_and_out_tiles
    memory = (x_tiles, out_tiles, w_tiles, arrived, done, *scales_memory)
    program = _Program((x_ref, w_ref, row_scale_ref, scale_ref, out_ref), memory, tiles)

    # Fill the pipeline: the first steps, and the scales of all items.
    @pl.when(program.group == 0)
    def _():
        pl.loop(0, jnp.minimum(tiles.stages, program.total_steps))(program.load)
        if tiles.scale_tiles:
            program.load_scales()

    # Multiply and store item by item.
    @pl.loop(0, program.items)
    def _(item):
        zeros = [plgpu.ACC(shape, jnp.float32) for shape in tiles.accumulators]
        sums = pl.run_scoped(functools.partial(program.multiply, item), *zeros)
        if tiles.scale_tiles:
            pl.when(item == 0)(lambda: plgpu.barrier_wait(scales_memory[-1]))
        program.store(sums, item)

    # Drain: no program ends before all arrivals at its barriers and all stores.
    pl.when(program.total_steps > 0)(lambda: program.release(program.total_steps - 1))

    @pl.when(program.group == 0)
    def _():
        @pl.loop(jnp.maximum(program.total_steps - tiles.stages, 0), program.total_steps)
        def _(step):
            plgpu.barrier_wait(done.at[program.slot_of(step)])

    plgpu.wait_smem_to_gmem(0)


class _Program:
    """In the kernel: the stages of one program.

    A program has `items`, each of `steps` along k; steps are counted over all items, and step i uses slot i modulo
    `stages` of shared memory.
    """

    def __init__(self, refs, memory, tiles):
        from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

        self.x_ref, self.w_ref, self.row_scale_ref, self.scale_ref, self.out_ref = refs
        self.x_tiles, self.out_tiles, self.w_tiles, self.arrived, self.done, *self.scales_memory = memory
        self.tiles, self.plgpu = tiles, plgpu
        inner, self.out = self.x_ref.shape[1], self.out_ref.shape[2]
        self.group, self.index = jax.lax.axis_index("group"), jax.lax.axis_index("program")
        self.own_part = pl.ds(self.group * HEIGHT, HEIGHT)  # of the rows; transposed: of the tile's columns
        self.all_rows = pl.ds(0 * self.index, tiles.height)  # traced start: the slice may be longer than the array
        self.steps = inner // tiles.inner // tiles.parts
        self.items = (self.out // tiles.columns * tiles.parts - self.index + tiles.programs - 1) // tiles.programs
        self.total_steps = self.items * self.steps

    def place_of(self, item):
        """First column of an item's tile, and the item's part."""
        index = self.index + item * self.tiles.programs
        return jax.lax.div(index, self.tiles.parts) * self.tiles.columns, jax.lax.rem(index, self.tiles.parts)

    def slot_of(self, step):
        """Slot of a step in shared memory."""
        return jax.lax.rem(step, self.tiles.stages)

    def load(self, step):
        """Issues the loads of a step: the weights (gate and up) and all rows of x."""
        tiles = self.tiles
        slot, (column, part) = self.slot_of(step), self.place_of(jax.lax.div(step, self.steps))
        inner = pl.ds((part * self.steps + jax.lax.rem(step, self.steps)) * tiles.inner, tiles.inner)
        for half in range(tiles.halves):
            weights = self.w_ref.at[pl.ds(half * self.out + column, tiles.columns), inner]
            target = self.w_tiles.at[slot, pl.ds(half * tiles.columns, tiles.columns)]
            self.plgpu.copy_gmem_to_smem(weights, target, self.arrived.at[slot])
        self.plgpu.copy_gmem_to_smem(self.x_ref.at[self.all_rows, inner], self.x_tiles.at[slot], self.arrived.at[slot])

    def release(self, step):
        """Marks a step's slot as read by this warpgroup; once all have read it, the first one loads a later step."""
        slot = self.slot_of(step)
        self.plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # results stored from the slot have been read
        self.plgpu.barrier_arrive(self.done.at[slot])

        @pl.when((self.group == 0) & (step + self.tiles.stages < self.total_steps))
        def _():
            self.plgpu.barrier_wait(self.done.at[slot])
            self.load(step + self.tiles.stages)

    def operands(self, slot):
        """Both operands for each accumulator."""
        if not self.tiles.transposed:
            return [(self.x_tiles.at[slot, self.own_part], self.w_tiles.at[slot].T)]
        starts = [half * self.tiles.columns + self.group * HEIGHT for half in range(self.tiles.halves)]
        return [(self.w_tiles.at[slot, pl.ds(start, HEIGHT)], self.x_tiles.at[slot].T) for start in starts]

    def multiply(self, item, *accumulators):
        """Adds up an item's products and returns the sums."""

        @pl.loop(0, self.steps)
        def _(index):
            step = item * self.steps + index
            slot = self.slot_of(step)
            self.plgpu.barrier_wait(self.arrived.at[slot])
            for accumulator, pair in zip(accumulators, self.operands(slot), strict=True):
                self.plgpu.wgmma(accumulator, *pair)
            self.plgpu.wgmma_wait(len(accumulators))  # all but this step's: the step before may be released
            pl.when(step > 0)(lambda: self.release(step - 1))

        self.plgpu.wgmma_wait(0)
        return [accumulator[...] for accumulator in accumulators]

    def load_scales(self):
        """Issues the loads of the scales of all rows and of all items' columns."""
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
        """A piece of the output tile: (first row, number of rows), (first column, number of columns)."""
        own, across = (self.group * HEIGHT, HEIGHT), (first, self.tiles.store)
        return (across, own) if self.tiles.transposed else (own, across)

    def scaled(self, sums, item, half, first):
        """A piece of the sums of gate or up, scaled."""
        tiles = self.tiles
        start = first if tiles.transposed else half * tiles.columns + first
        piece = sums[half if tiles.transposed else 0][:, start : start + tiles.store]
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
        """Shared memory from which the index-th piece of an item is stored."""
        tiles = self.tiles
        if not tiles.stores_in_x:
            return self.out_tiles.at[self.group, index % STORE_BUFFERS]
        last = self.out_tiles.at[self.slot_of(item * self.steps + self.steps - 1), self.group]
        if last.shape == tiles.store_shape:
            return last
        return last.at[pl.ds(0, math.prod(tiles.store_shape))].reshape(tiles.store_shape)

    def store(self, sums, item):
        """Scales an item's sums, multiplies silu(gate) by up, and stores the result piece by piece."""
        tiles, (column, part) = self.tiles, self.place_of(item)
        for index in range((tiles.transposed or tiles.columns) // tiles.store):
            first = index * tiles.store
            result = self.scaled(sums, item, 0, first)
            if tiles.halves == 2:
                result = result / (1 + jnp.exp(-result)) * self.scaled(sums, item, 1, first)
            if index >= STORE_BUFFERS:  # the first buffers are free: `release` has waited since the last item
                self.plgpu.wait_smem_to_gmem(STORE_BUFFERS - 1, wait_read_only=True)
            shared = self.store_buffer(index, item)
            (shared.T if tiles.transposed else shared)[...] = result.astype(self.out_ref.dtype)
            self.plgpu.commit_smem()
            rows, (start, size) = self.piece_of(first)
            self.plgpu.copy_smem_to_gmem(shared, self.out_ref.at[part, pl.ds(*rows), pl.ds(column + start, size)])


def multiply(x: Array, weight: Array, *scales: Array, tiles: Tiles, dtype: jnp.dtype, interpret: Any = False) -> Array:
    """Runs the kernel; returns [parts, rows, out].

    Args:
        x: [rows, inner].
        weight: [halves * out, inner].
        scales: of the rows [rows] and of the weight [halves * out], if there are any.
        dtype: of the result.
        interpret: jax's parameters for interpreting the kernel, with which it detects races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def memory(*shape, dtype=x.dtype):
        width = shape[-1] * jnp.dtype(dtype).itemsize
        swizzled = (plgpu.TilingTransform((8, shape[-1])), plgpu.SwizzleTransform(width)) if width > 16 else ()
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    scales_memory = [
        plgpu.SMEM((math.ceil(tiles.height / HEIGHT) * HEIGHT,), jnp.float32),
        plgpu.SMEM((tiles.scale_tiles, tiles.halves, MOST_COLUMNS), jnp.float32),
        plgpu.Barrier(num_arrivals=math.ceil(tiles.height / HEIGHT) + tiles.scale_tiles * tiles.halves),
    ]

    def x_and_out_memory(x_tiles):
        if not tiles.stores_in_x:
            return x_tiles, memory(tiles.groups, STORE_BUFFERS, *tiles.store_shape, dtype=dtype)
        if interpret:  # the interpreter does not support refs that share memory, nor `reshape`
            return x_tiles, plgpu.SMEM((tiles.stages, tiles.groups, *tiles.store_shape), dtype)
        room = HEIGHT * INNER_BYTES // dtype.itemsize  # the results take the beginning of it
        return plgpu.RefUnion(x_tiles, plgpu.SMEM((tiles.stages, tiles.groups, room), dtype))

    def entry(x_ref, w_ref, *refs):
        *scale_refs, out_ref = refs
        pl.run_scoped(
            functools.partial(_kernel, x_ref, w_ref, *(scale_refs or (None, None)), out_ref, tiles=tiles),
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


def choose_compiled(implementation: Implementation, kernel: Callable, reference: Callable, *arguments: Any) -> Any:
    """As `dispatch`, for this kernel: a CPU always runs the reference, with "pallas" too.

    jax interprets such a kernel only with parameters of its own, and with effects that are not allowed in a branch of
    `platform_dependent`.
    """
    compiled: Implementation = "auto" if implementation == "pallas" else implementation
    return dispatch(compiled, None, kernel, reference, *arguments)


def multiprocessors() -> int | None:
    """Number of multiprocessors of the GPU that a program is traced for; None unless it is a Hopper GPU (9.0)."""
    if jax.__version_info__ < (0, 11):
        return None  # earlier versions cannot compile such kernels on a machine without a GPU
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.num_cores if re.search(r"\bG?H\d+\b", device.device_kind) else None
    own = jax.local_devices()[0]
    return own.core_count if getattr(own, "compute_capability", None) == "9.0" else None
