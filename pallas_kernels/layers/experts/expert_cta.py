"""The operations of one CTA of the Hopper kernel of narrow experts (`expert_kernel`; `packed_cta` has others)."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers.experts import expert_registers as registers
from pallas_kernels.layers.experts.expert_boxes import item_slots
from pallas_kernels.layers.experts.expert_stores import store_block, store_choices
from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed.int4_registers import SLICE, column, gate_and_up
from pallas_kernels.layers.packed.packed_cta import FACTORS, PIECE, PackedCta, group_factors
from pallas_kernels.layers.weights import Kind


class ExpertOrigin(NamedTuple):
    """Where a work item is."""

    block: Array
    expert: Array  # expert of the block
    channel: Array  # first output channel of the CTA
    part: Array  # part of k
    item: Array  # number of the work item among those of the CTA


class PackedProduct(NamedTuple):
    """The static parameters of a product, beside the sizes of the kernel."""

    kind: Kind  # kind of the weight
    experts: int  # number of experts
    group: int  # columns of a scale
    gate: Any  # as in `expert_kernel.multiply`, like `order`
    order: Kind | None


class ExpertCta(PackedCta):
    """The operations of one CTA (Pallas program) inside the kernel.

    Args:
        refs: arrays in global memory by name: x [slices, blocks * height, SLICE], `registered`; weight [experts * N,
            bytes] uint8; scale [experts * N, groups], of mxfp4 uint8; expert [blocks], choices [blocks, height] and
            counts [2], the numbers of blocks that have an expert, and that have none; out [parts, choices, channels],
            or with an order [slices, blocks * height, SLICE]; some of zeros as scale, bias [experts * N, 1] and
            factors [choices, 1]. Scale and zeros that have a box are [lines, size].
        memory: shared memory of `memory_of`.
        copied: shared memory of `memory_of_boxes`.
        boxes: places of scales and zero points of a tile by name; those without are loaded into registers.
        tiles: static sizes of the call.
        product: the other static parameters.
        interpret: whether the kernel is interpreted.
    """

    def __init__(self, refs, memory, copied, *, boxes, tiles, product, interpret):
        super().__init__(memory, tiles, interpret)
        (self.kind, experts, self.group, self.gate, self.order), self.refs, self.boxes = product, refs, boxes
        self.copied, *self.scaled = copied
        self.rows = refs["weight"].shape[0] // experts  # rows of an expert's weight
        self.width = self.rows // 2 if self.gate else self.rows
        self.apart = self.width if self.gate else None  # rows from gate to up
        self.halves = 2 if self.gate else 1
        self.own_channels = tiles.width // self.halves  # output channels of a warpgroup
        self.own_rows = HEIGHT // self.halves  # rows of its tile in shared memory of each half
        inner = refs["weight"].shape[1] * SLICE // self.slice_bytes
        self.last = inner - self.group  # first column of the last group
        self.item_slots = item_slots(inner, tiles)
        self.channel_tiles = self.width // self.tile_channels
        self.tables = registers.tables(interpret=interpret) if self.kind == "mxfp4" else None
        self.used, self.unused = refs["counts"][0], refs["counts"][1]
        self.items = self.own_items(self.used * (self.channel_tiles * tiles.parts))

    def place_of(self, item):
        """Returns where a work item is; neighbours in time share the block."""
        index = self.index + item * self.tiles.programs
        part, index = jax.lax.rem(index, self.tiles.parts), jax.lax.div(index, self.tiles.parts)
        tile, block = jax.lax.rem(index, self.channel_tiles), jax.lax.div(index, self.channel_tiles)
        return ExpertOrigin(block, self.refs["expert"][block], tile * self.tile_channels, part, item)

    @property
    def tile_channels(self):
        """Number of output channels of a tile."""
        return self.tiles.channels * self.own_channels

    def first_rows(self, origin):
        """Returns the first row of a tile in the weights of all experts, and with a gate that of up."""
        return [origin.expert * self.rows + half * self.width + origin.channel for half in range(self.halves)]

    def load_slices(self, origin, column, at, barrier):
        """Starts to load a slot: slices of the tile's weights and rows of x, beyond the last column zeros."""
        slices, height, (_, copies, *_, size) = self.tiles.slices, self.tiles.height, self.w_tiles.shape
        for (half, first), index in itertools.product(enumerate(self.first_rows(origin)), range(copies)):
            columns = pl.ds(self.first_byte(column) + index * size, size)
            weights = self.refs["weight"].at[pl.ds(first, self.tile_channels), columns]
            target = self.w_tiles.at[at, index, half, pl.ds(0, self.tile_channels)]
            self.plgpu.copy_gmem_to_smem(weights, target, barrier)
        x = self.refs["x"].at[pl.ds(column // SLICE, slices), pl.ds(origin.block * height, height)]
        self.plgpu.copy_gmem_to_smem(x, self.x_tiles.at[at], barrier)

    def load(self, slot):
        super().load(slot)
        if self.boxes:
            pl.when(jax.lax.rem(slot, self.item_slots) == 0)(lambda: self.load_scales(slot))

    def load_scales(self, slot):
        """Starts to load the scales and zero points of a tile's rows, with the first slot of its work item."""
        origin = self.place_of(jax.lax.div(slot, self.item_slots))
        for name, box in self.boxes.items():
            at = jax.lax.rem(origin.item, self.copied[name].shape[0])
            for half, first in enumerate(self.first_rows(origin)):
                source = self.refs[name].at[pl.ds(jax.lax.div(first * box.groups, box.size), box.lines)]
                target = self.copied[name].at[at, pl.ds(half * box.stored_lines, box.lines)]
                self.plgpu.copy_gmem_to_smem(source, target, self.scaled[0].at[at])

    def begin(self, origin):
        """Waits for the tile's scales; returns the bias of this warpgroup's rows, of one split and part of k."""
        for barriers in self.scaled:
            self.plgpu.barrier_wait(barriers.at[jax.lax.rem(origin.item, barriers.shape[0])])
        if "bias" not in self.refs:
            return self.zeros()
        rows: dict[str, Any] = {"apart": self.apart, "width": self.tiles.width, "interpret": self.interpret}
        bias = column(self.refs["bias"], self.first_row(origin), jnp.int32(0), **rows)
        bias = jnp.where((origin.part == 0) & (self.split == 0), 1.0, 0.0) * bias
        return jax.lax.broadcast_in_dim(bias, (HEIGHT, self.tiles.height), [0])

    def x_piece(self, at, index, first, size):
        return self.x_tiles.at[at, index * self.tiles.splits + self.split, :, pl.ds(first, size)]

    def own_channel(self, origin):
        """Returns the first output channel of this warpgroup."""
        return origin.channel + self.channel * self.own_channels

    def first_row(self, origin):
        """Returns the first row of this warpgroup in the weights of all experts."""
        return origin.expert * self.rows + self.own_channel(origin)

    def values(self, name, origin, first):
        """Returns the scales or zero points of the groups of this warpgroup's slice from column `first` on."""
        rows: dict[str, Any] = {"apart": self.apart, "width": self.tiles.width, "interpret": self.interpret}
        ref, first_row = self.refs[name], self.first_row(origin)
        if name in self.boxes:
            ref, box = self.copied[name], self.boxes[name]
            rows |= {"apart": box.rows if self.gate else None, "columns": box.groups}
            ref, first_row = ref.at[jax.lax.rem(origin.item, ref.shape[0])], self.channel * self.own_channels
        if self.kind == "mxfp4":
            return [registers.scales(ref, first_row, first // self.group, **rows)]
        groups = group_factors([ref], first_row, jnp.minimum(first, self.last), self.group, **rows)
        return [values for (values,) in groups]

    def factors(self, origin, column):
        """Returns scales and zero points of this warpgroup's slices by name, without those in boxes."""
        names = [name for name in FACTORS if name in self.refs and name not in self.boxes]
        return [{name: self.values(name, origin, first) for name in names} for first in self.slice_columns(column)]

    def product(self, origin, at, column, factors, total):
        """Returns a total [64, height] with the products of this warpgroup's slices of a slot added to it."""
        rows = pl.ds(self.channel * self.own_rows, self.own_rows)
        beside, slices = self.w_tiles.shape[4] // self.slice_bytes, []
        for index, (first, loaded) in enumerate(zip(self.slice_columns(column), factors, strict=True)):
            loaded = loaded | {name: self.values(name, origin, first) for name in self.boxes}
            number = index * self.tiles.splits + self.split
            columns = pl.ds(jax.lax.rem(number, beside) * self.slice_bytes, self.slice_bytes)
            halves = slice(None) if self.gate else 0
            packed = self.w_tiles.at[at, jax.lax.div(number, beside), halves, rows, columns]
            slices.append((packed, loaded["scale"], loaded.get("zeros", [None] * len(loaded["scale"]))))
        if self.kind != "mxfp4":
            return self.group_product(at, [(packed, [*zip(*groups, strict=True)]) for packed, *groups in slices], total)

        def pairs():
            for index, (packed, (scales,), _) in enumerate(slices):
                pieces = registers.numbers(packed, scales, self.tables, PIECE, interpret=self.interpret)
                for number, piece in enumerate(pieces):
                    yield piece, self.x_piece(at, index, number * PIECE, PIECE)

        (sums,) = self.sums([pairs], total.shape)
        return total + sums

    def store(self, origin, total):
        """Joins gate and up, and stores the results of the block's choices."""
        if self.gate:
            total = self.gate.join(*gate_and_up(total, interpret=self.interpret))
        self.write(origin, total)

    def write(self, origin, total):
        """Stores the results of a block's choices."""
        out, channel = self.refs["out"], self.own_channel(origin)
        same: dict[str, Any] = {"width": self.own_channels, "is_joined": self.halves > 1, "interpret": self.interpret}
        if self.order:
            store_block(out, total, (origin.block * self.tiles.height, channel), self.width, self.order, **same)
            return
        choices, factors = self.refs["choices"], self.refs.get("factors")
        store_choices(out, total, (origin.part, origin.block, channel), choices, factors, **same)

    def clear(self, item):
        """Stores zeros for choices of no expert: one tile of channels of a block."""
        origin = self.place_of(item)

        @pl.when(self.split == 0)
        def _():
            self.write(origin._replace(block=origin.block + self.used), self.zeros())

    def run(self):
        super().run()
        if self.order:
            return
        pl.loop(0, self.own_items(self.unused * (self.channel_tiles * self.tiles.parts)))(self.clear)
