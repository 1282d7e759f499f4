"""What the Hopper kernels of narrow weights share (`int4_kernel`, `expert_kernel`): the operations of one CTA.

A CTA (one Pallas program) computes work items one after the other. A work item is an output tile (`channels` times
`width` rows of the weight, and `height` rows of x), summed over one part of k. A slice is 128 columns of k. A slot of
shared memory holds `splits` times `depth` slices, `depth` for each split. A split has warpgroups of its own, one for
each `width` rows of the weight. A warpgroup multiplies the slices of its split, one after the other; the sums of the
splits are added up at the end of the work item. A group is the columns of k that share a scale.
"""

import functools
import math
from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed import byte_registers
from pallas_kernels.layers.packed import int4_registers as registers
from pallas_kernels.layers.packed.int4_registers import SLICE
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles
from pallas_kernels.layers.weights import FORMATS, Kind

PIECE = 64  # most columns of an operand of `wgmma`; 128 bytes of a row of x are the widest swizzle
REGISTERS, LOADER_REGISTERS = 512, 40  # of a thread: if there were one warpgroup, and of a loader of many rows
FACTORS = ("scale", "zeros")  # names of the arrays with a value for each group of a row


class PackedCta(ABC):
    """The operations of one CTA (Pallas program) inside a kernel.

    Slots are numbered consecutively over all work items of the CTA; slot i is in place i modulo `stages` of the ring.
    """

    items: Array  # number of work items of the CTA
    kind: Kind  # kind of the weight
    item_slots: int  # slots of a work item

    def __init__(self, memory: tuple[Any, ...], tiles: Int4Tiles, interpret: bool):
        from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

        (self.x_tiles, self.w_tiles, self.arrived, self.done), self.joining, self.results = memory
        self.tiles, self.interpret, self.plgpu = tiles, interpret, plgpu
        self.warpgroup, self.index = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")
        self.channel = jax.lax.rem(self.warpgroup, tiles.channels)
        self.split = jax.lax.div(self.warpgroup, tiles.channels)

    @abstractmethod
    def place_of(self, item: Array) -> Any:
        """Returns where a work item is, with its part of k."""

    @abstractmethod
    def load_slices(self, origin: Any, column: Array, at: Array, barrier: Any) -> None:
        """Starts to load the slices of a slot, from this column of k on, into place `at` of the ring."""

    @abstractmethod
    def factors(self, origin: Any, column: Array) -> Any:
        """Returns what is loaded a slot ahead, from global memory into registers, for this warpgroup's slices.

        Args:
            origin: where the work item is.
            column: first column of the first of the slices.
        """

    @abstractmethod
    def product(self, origin: Any, at: Array, column: Array, factors: Any, total: Array) -> Array:
        """Returns a total [64, height] with the products of this warpgroup's slices of a slot added to it.

        Args:
            origin: where the work item is.
            at: place of the slot in the ring.
            column: first column of the first of the slices.
            factors: `factors` of the slices.
            total: the total.
        """

    @abstractmethod
    def x_piece(self, at: Any, index: int, first: int, size: int) -> Any:
        """Returns columns `first` to `first + size - 1` of x in slice ``index`` of this warpgroup's in a slot."""

    @abstractmethod
    def store(self, origin: Any, total: Array) -> None:
        """Stores a result [64, height]."""

    def begin(self, origin: Any) -> Array:
        """Returns the total [64, height] to which a work item's products are added."""
        return self.zeros()

    def slice_columns(self, column: Array) -> list[Array]:
        """Returns the first columns of this warpgroup's slices in a slot, from that of the first."""
        return [column + index * SLICE * self.tiles.splits for index in range(self.tiles.depth)]

    def own_items(self, items: Any) -> Array:
        """Returns how many of all work items this CTA computes: every n-th of n = `programs` CTAs."""
        return jax.lax.div(items - self.index + self.tiles.programs - 1, self.tiles.programs)

    @property
    def slice_bytes(self) -> int:
        """Bytes of a row of the weight in a slice."""
        return self.first_byte(self.tiles.columns)

    def first_byte(self, column: Any) -> Any:
        """Returns the byte of a row of the weight with the values from this column on."""
        return column // 2 if FORMATS[self.kind].is_packed else column

    @property
    def total_slots(self) -> Array:
        """Number of slots of all work items of this CTA."""
        return self.items * self.item_slots

    def run(self) -> None:
        """Computes the work items of this CTA."""
        tiles, total = self.tiles, self.total_slots
        is_loader, first = self.warpgroup == (tiles.groups if tiles.has_loader else 0), jnp.minimum(tiles.stages, total)

        def wait(slot):
            self.plgpu.barrier_wait(self.done.at[self.place_in_ring(slot)])

        def replace(slot):
            wait(slot)  # for the one that is `stages` before, in the same place
            self.load(slot)

        def load_all():
            self.limit_registers(LOADER_REGISTERS, "decrease")
            pl.loop(0, first)(self.load)
            pl.loop(first, total)(replace)

        def compute_all():
            self.limit_registers((REGISTERS - LOADER_REGISTERS) // tiles.groups // 8 * 8, "increase")
            pl.loop(0, self.items)(self.compute)

        if tiles.has_loader:
            pl.when(is_loader)(load_all)
            pl.when(~is_loader)(compute_all)
        else:
            pl.when(is_loader)(lambda: pl.loop(0, first)(self.load))
            pl.loop(0, self.items)(self.compute)
        # A CTA must not end before all arrivals at its barriers are complete.
        pl.when(is_loader)(lambda: pl.loop(jnp.maximum(total - tiles.stages, 0), total)(wait))

    def limit_registers(self, count, action):
        """Changes the number of registers of a thread, which a loader of many rows leaves to other warpgroups."""
        if self.tiles.has_many_rows and not self.interpret:
            self.plgpu.set_max_registers(count, action=action)

    def place_in_ring(self, slot):
        """Returns the place in shared memory of a slot."""
        stages = self.tiles.stages
        return slot & stages - 1 if stages.bit_count() == 1 else jax.lax.rem(slot, stages)

    def first_column(self, part, index):
        """Returns the first column of slot ``index`` of a work item with this part of k."""
        return (part * self.item_slots + index) * (self.tiles.columns * self.tiles.splits * self.tiles.depth)

    def release(self, slot):
        """Marks a slot as read; without a loader, the first warpgroup loads a later slot into the place before it."""
        self.finish_reading()
        self.plgpu.barrier_arrive(self.done.at[self.place_in_ring(slot)])
        before = slot - 1
        if self.tiles.has_loader:
            return

        @pl.when((self.warpgroup == 0) & (before >= 0) & (before + self.tiles.stages < self.total_slots))
        def _():
            self.plgpu.barrier_wait(self.done.at[self.place_in_ring(before)])
            self.load(before + self.tiles.stages)

    def finish_reading(self):
        """Waits until all threads of this warpgroup have read a slot: the TMA unit may write others then."""
        self.plgpu.commit_smem()

    def sums(self, products, shape):
        """Returns sums of products of weights in registers and rows of x in shared memory.

        Args:
            products: a function for each sum that returns the operands of its products. It is called when the products
                of the sums before it have begun, so what unpacks its weights runs beside them.
            shape: shape of a sum.
        """
        if self.interpret:  # the interpreter has no `wgmma` with an operand in registers
            return [
                sum(jnp.dot(w.astype(jnp.float32), x[...].astype(jnp.float32).T) for w, x in pairs())
                for pairs in products
            ]

        def run(*accumulators):
            for accumulator, pairs in zip(accumulators, products, strict=True):
                for weights, x in pairs():
                    self.plgpu.wgmma(accumulator, weights, x.T)
            self.plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        return pl.run_scoped(run, *[self.plgpu.ACC(shape, jnp.float32)] * len(products))

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

    def load(self, slot):
        """Starts to load a slot."""
        at, origin = self.place_in_ring(slot), self.place_of(jax.lax.div(slot, self.item_slots))
        first, barrier = self.first_column(origin.part, jax.lax.rem(slot, self.item_slots)), self.arrived.at[at]
        self.load_slices(origin, first, at, barrier)

    def compute(self, item):
        """Computes a work item and stores its result."""
        origin = self.place_of(item)
        self.join(self.group_total(origin, item), item, functools.partial(self.store, origin))

    def group_total(self, origin, item):
        """Returns the sums of a work item [64, height] of weights with scales for groups of columns."""

        def own_column(index):
            return self.first_column(origin.part, index) + self.split * SLICE

        def step(index, carry):
            total, factors = carry
            slot = item * self.item_slots + index
            at = self.place_in_ring(slot)
            following = self.factors(origin, own_column(jnp.minimum(index + 1, self.item_slots - 1)))
            self.plgpu.barrier_wait(self.arrived.at[at])
            total = self.product(origin, at, own_column(index), factors, total)
            self.release(slot)
            return total, following

        first = self.begin(origin), self.factors(origin, own_column(0))
        total, _ = jax.lax.fori_loop(0, self.item_slots, step, first)
        return total

    def group_product(self, at, slices, total):
        """Returns a total with the products of slices added, whose sums over groups are scaled.

        Args:
            at: place of the slot in the ring.
            slices: for each of this warpgroup's slices in the slot the bytes of its rows of the weight, as
                `int4_registers.differences` has them, and scales and zero points of its groups (`group_factors`). It is
                one slice if groups are smaller than a slice.
            total: the total [64, height].
        """
        operands = [functools.partial(self.operands, at, index, *pair) for index, pair in enumerate(slices)]
        if len(slices[0][1]) == 1:
            scaled = zip(self.sums(operands, total.shape), [factors[0][0] for _, factors in slices], strict=True)
        else:  # sums of all groups at once would take too many registers
            ((_, factors),) = slices
            scaled = self.sums_of_groups(operands[0](), factors, total.shape)
        for sums, scale in scaled:
            total += sums * jax.lax.broadcast_in_dim(scale, total.shape, [0])
        return total

    def sums_of_groups(self, pairs, groups, shape):
        """Yields the sums of each group of a slice, from the operands of its products, and the group's scales."""
        count = len(pairs) // len(groups)
        for index, (scale, _) in enumerate(groups):
            (sums,) = self.sums([lambda group_pairs=pairs[index * count :][:count]: group_pairs], shape)
            yield sums, scale

    def operands(self, at, index, packed, factors):
        """Returns the operands of the products of slice ``index`` of this warpgroup's slices in a slot."""
        size = min(SLICE // len(factors), PIECE)
        dtype, zeros = self.x_tiles.dtype, [zero for _, zero in factors]
        if FORMATS[self.kind].is_packed:
            pieces = registers.differences(packed, zeros, dtype, size, interpret=self.interpret)
        else:
            pieces = [self.widened(packed, first, size) for first in range(0, SLICE, size)]
        return [(piece, self.x_piece(at, index, number * size, size)) for number, piece in enumerate(pieces)]

    def widened(self, packed, first, size, scale=None):
        """Returns columns of a slice of bytes, widened in registers, as `byte_registers.widened` does."""
        values, dtype = jnp.dtype(FORMATS[self.kind].dtype), self.x_tiles.dtype
        return byte_registers.widened(packed, values, dtype, first, size, scale, interpret=self.interpret)

    def zeros(self):
        """Returns zeros [64, height] in the registers of a result."""
        zeros = jnp.zeros((HEIGHT, self.tiles.height), jnp.float32)
        return zeros if self.interpret else self.plgpu.layout_cast(zeros, self.plgpu.Layout.WGMMA)


def group_factors(refs, first, column, group, **options):
    """Returns for each group of a slice its scales, float32 [64], and zero points, int32 [64]; None: there are none.

    Args:
        refs: scales and zero points in global memory [rows, groups]; None: there are none.
        first: first row.
        column: first column of the slice.
        group: number of columns of a group.
        options: those of `int4_registers.column`.
    """
    groups = []
    for start in range(0, SLICE, math.gcd(group, SLICE)):
        index = jax.lax.div(column + start, group)
        groups.append([None if ref is None else registers.column(ref, first, index, **options) for ref in refs])
    return groups
