"""The operations of one CTA of the Hopper kernel of weights of eight bits (`int4_kernel`)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed import byte_registers, int4_stores
from pallas_kernels.layers.packed import int4_registers as registers
from pallas_kernels.layers.packed.int4_cta import Int4Cta
from pallas_kernels.layers.packed.int4_registers import SLICE
from pallas_kernels.layers.packed.packed_cta import PIECE


class ByteCta(Int4Cta):
    """The operations of one CTA for weights of eight bits; the arguments are those of `Int4Cta`.

    If a row of the weight has one scale, the tensor cores add up all columns, and the total is scaled. If it has scales
    of groups, the sum of a group is scaled. But with many rows of x (`Int4Tiles.has_many_rows`) there are no registers
    for two sums: values are multiplied by their scale when they are widened, and rounded to the dtype of x.

    With many rows the work items that are left when all CTAs have equally many are halved along the rows of x, if
    there is a CTA for each half.
    """

    def __init__(self, refs, memory, boxes, tiles, kind, activation, interpret):
        super().__init__(refs, memory, boxes, tiles, kind, activation, interpret)
        self.is_scaled_by_row = refs["scale"].shape[1] == 1
        self.halve_items()
        self.items = self.own_items(self.all_items + self.halved_items)

    def halve_items(self):
        """Says how many of the last work items are halved, and how many come before them."""
        left = self.all_items % self.tiles.programs
        self.halved_items = left if self.tiles.has_many_rows and 2 * left <= self.tiles.programs else 0
        self.whole_items = self.all_items - self.halved_items

    def run(self):
        """Computes the work items of this CTA."""
        super().run()
        self.plgpu.wait_smem_to_gmem(0)  # a CTA must not end before its results are copied

    def finish_reading(self):
        """Waits until all threads of this warpgroup have read a slot; with many rows, without a fence of memory."""
        if self.interpret or not self.tiles.has_many_rows:  # the interpreter's detector of races knows the fence alone
            super().finish_reading()
            return

        @self.plgpu.inline_mgpu()
        def wait(_):
            registers.Mlir().utils.warpgroup_barrier()

        wait()

    def place_of(self, item):
        """Returns where a work item is."""
        if not self.halved_items:
            return super().place_of(item)
        index = self.index + item * self.tiles.programs
        half = jnp.maximum(index - self.whole_items, 0)
        origin = self.place_at(jnp.minimum(index, self.whole_items + half // 2))
        is_half = index >= self.whole_items
        return origin._replace(row=origin.row + (half & 1) * (self.tiles.height // 2), is_half=is_half)

    def for_height(self, origin, run):
        """Calls a function with the number of rows of x of a work item."""
        if not self.halved_items:
            run(self.tiles.height)
            return
        pl.when(~origin.is_half)(lambda: run(self.tiles.height))
        pl.when(origin.is_half)(lambda: run(self.tiles.height // 2))

    def load_x(self, origin, column, at, barrier):
        """Starts to load the rows of x of a slot."""
        self.for_height(origin, lambda height: self.load_rows(origin, height, column, at, barrier))

    def weights(self, at, first, scale):
        """Returns `PIECE` columns from `first` on of this warpgroup's slice of a slot, widened in registers.

        Args:
            at: place of the slot in the ring.
            first: first column in the slice.
            scale: scales of the rows [64], by which values are multiplied before they are rounded; None: none.
        """
        return self.widened(self.slice_bytes_of(at, 0), first, PIECE, scale)

    def compute(self, item):
        """Computes a work item and stores its result."""
        if not self.is_scaled_by_row and not self.tiles.has_many_rows:
            super().compute(item)
            return
        origin = self.place_of(item)

        def compute(height):
            self.join(self.whole_sums(origin, item, height), item, functools.partial(self.store, origin))

        self.for_height(origin, compute)

    def whole_sums(self, origin, item, height):
        """Returns the sums of a work item [64, height], which the tensor cores add up over all columns."""
        row_scale = self.scale_at(origin, jnp.int32(0)) if self.is_scaled_by_row else None
        first = item * self.item_slots
        if self.interpret:
            sums = self.interpreted_sums(origin, first, height)
        else:
            run = functools.partial(self.slot_sums, first)
            if self.tiles.has_many_rows:
                run = functools.partial(self.pipelined_sums, origin, first)
            sums = pl.run_scoped(run, self.plgpu.ACC((HEIGHT, height), jnp.float32))
        return sums if row_scale is None else sums * jax.lax.broadcast_in_dim(row_scale, sums.shape, [0])

    def scale_at(self, origin, column):
        """Returns the scales of this warpgroup's rows in the group of a column [64]."""
        place, apart = (
            (self.own_channel(origin), jax.lax.div(column, self.group)),
            self.out if self.activation else None,
        )
        return registers.column(
            self.refs["scale"], *place, apart=apart, width=self.tiles.width, interpret=self.interpret
        )

    def slot_scale(self, origin, slot):
        """Returns the scales by which the values of a slot are multiplied; None: there are none."""
        if self.is_scaled_by_row:
            return None
        index = jax.lax.rem(jnp.minimum(slot, self.total_slots - 1), self.item_slots)
        return self.scale_at(origin, self.first_column(origin.part, index))

    def interpreted_sums(self, origin, first, height):
        """Computes `pipelined_sums` slot by slot: the interpreter has no `wgmma` with an operand in registers."""

        def add(index, total):
            at = self.place_in_ring(first + index)
            self.plgpu.barrier_wait(self.arrived.at[at])
            for start in range(0, self.tiles.columns, PIECE):
                x = self.x_piece(at, 0, start, PIECE)[...].astype(jnp.float32)[:height]
                weights = self.weights(at, start, self.slot_scale(origin, first + index))
                total += jnp.dot(weights.astype(jnp.float32), x.T)
            self.release(first + index)
            return total

        return jax.lax.fori_loop(0, self.item_slots, add, jnp.zeros((HEIGHT, height), jnp.float32))

    def slot_sums(self, first, accumulator):
        """Returns the sums of an item's slots of 128 columns from ``first`` on, one slot after the other."""

        @pl.loop(0, self.item_slots)
        def _(index):
            at = self.place_in_ring(first + index)
            self.plgpu.barrier_wait(self.arrived.at[at])
            for start in range(0, SLICE, PIECE):
                self.plgpu.wgmma(accumulator, self.weights(at, start, None), self.x_piece(at, 0, start, PIECE).T)
            self.plgpu.wgmma_wait(0)
            self.release(first + index)

        return accumulator[...]

    def pipelined_sums(self, origin, first, accumulator):
        """Returns the sums of an item's slots from ``first`` on; a piece is widened while products of others run.

        The last products of an iteration run while the next one begins. ptxas does not know that they still read their
        registers, and would overwrite these, if the next iteration did not seem to use them after their end.
        """
        height, slots = accumulator.shape[1], 2 * PIECE // self.tiles.columns

        def step(iteration, carry):
            before, scale = carry
            for number in range(2):
                index, start = iteration * slots + number * slots // 2, number * PIECE % self.tiles.columns
                at = self.place_in_ring(first + index)
                if not start:
                    following = self.slot_scale(origin, first + index + 1)  # loaded a slot ahead
                    self.plgpu.barrier_wait(self.arrived.at[at])
                piece = self.weights(at, start, scale)
                self.plgpu.wgmma(accumulator, piece, self.x_piece(at, 0, start, PIECE).at[pl.ds(0, height)].T)
                self.plgpu.wgmma_wait(1)  # for the products of the piece before
                byte_registers.keep(before)
                if not start:
                    pl.when(index > 0)(functools.partial(self.release, first + index - 1))
                before, scale = piece, following if start + PIECE == self.tiles.columns else scale
            return before, scale

        scale = self.slot_scale(origin, first)
        nothing = self.weights(self.place_in_ring(first), 0, scale)
        before, _ = jax.lax.fori_loop(0, self.item_slots // slots, step, (nothing, scale))
        self.plgpu.wgmma_wait(0)
        byte_registers.keep(before)
        self.release(first + self.item_slots - 1)
        return accumulator[...]

    def store(self, origin, total):
        """Stores a result [64 channels, height] in the rows that exist."""
        if not self.results:
            super().store(origin, total)
            return
        result, is_joined = self.joined(total), self.activation is not None
        at = origin.part, origin.row, self.own_channel(origin)
        int4_stores.store_through(self.results[0].at[self.warpgroup], self.refs["out"], result, at, is_joined=is_joined)
