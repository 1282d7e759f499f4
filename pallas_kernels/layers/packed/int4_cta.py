"""The operations of one CTA of the Hopper kernel of packed weights (`int4_kernel`)."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed.int4_registers import SLICE, gate_and_up
from pallas_kernels.layers.packed.int4_stores import store
from pallas_kernels.layers.packed.packed_cta import FACTORS, PackedCta, group_factors
from pallas_kernels.layers.quantize_rows import gate_logit

ROW_TILES = 8  # row tiles whose work items are neighbours in time


class Origin(NamedTuple):
    """Where a work item is."""

    channel: Array  # first output channel of the CTA
    part: Array  # part of k
    row: Array  # first row of x
    is_half: Array | bool = False  # whether it has half as many rows of x as others


class Int4Cta(PackedCta):
    """The operations of one CTA (Pallas program) inside the kernel.

    Args:
        refs: arrays in global memory by name: x [T, K]; weight [halves * N, K / 2] uint8; scale [halves * N, K / group]
            float32; some of zeros as scale, uint8; out [parts, T, N].
        memory: shared memory of `memory_of`.
        boxes: scales and zero points of the slots in shared memory by name [stages, channels * HEIGHT, groups]; those
            without are loaded into registers.
        tiles: static sizes of the call.
        kind, activation: as in `multiply`.
        interpret: whether the kernel is interpreted.
    """

    def __init__(self, refs, memory, boxes, tiles, kind, activation, interpret):
        super().__init__(memory, tiles, interpret)
        self.refs, self.boxes, self.activation, self.kind = refs, boxes, activation, kind
        (_, inner), (_, rows, self.out) = refs["x"].shape, refs["out"].shape
        self.halves = 2 if activation else 1
        self.group = inner // refs["scale"].shape[1]  # columns of a scale
        self.own_channels = tiles.width // self.halves  # output channels of a warpgroup
        self.own_rows = HEIGHT // self.halves  # rows of its tile in shared memory of each half
        self.slot_columns = tiles.columns * tiles.splits * tiles.depth
        self.item_slots = inner // (self.slot_columns * tiles.parts)
        self.row_tiles = math.ceil(rows / tiles.height)
        self.channel_tiles = self.out // (self.own_channels * tiles.channels)
        self.all_items = self.channel_tiles * tiles.parts * self.row_tiles
        self.items = self.own_items(self.all_items)

    def place_of(self, item):
        """Returns where a work item is."""
        return self.place_at(self.index + item * self.tiles.programs)

    def place_at(self, index):
        """Returns where a work item of all CTAs is; neighbours in time share the weight, or rows of x in the L2."""
        block = ROW_TILES * self.channel_tiles * self.tiles.parts
        first = jax.lax.div(index, block) * ROW_TILES
        rows, index = jnp.minimum(self.row_tiles - first, ROW_TILES), jax.lax.rem(index, block)
        row, index = first + jax.lax.rem(index, rows), jax.lax.div(index, rows)
        channel, part = jax.lax.div(index, self.tiles.parts), jax.lax.rem(index, self.tiles.parts)
        return Origin(channel * (self.tiles.channels * self.own_channels), part, row * self.tiles.height)

    def load_slices(self, origin, column, at, barrier):
        """Starts to load a slot: slices of the tile's weights with their scales, and of rows of x."""
        size, copy = self.tiles.channels * self.own_channels, self.plgpu.copy_gmem_to_smem
        for half in range(self.halves):
            rows, target = pl.ds(half * self.out + origin.channel, size), half * self.tiles.channels * self.own_rows
            for index in range(self.tiles.depth):
                columns = pl.ds(self.first_byte(column) + index * self.w_tiles.shape[4], self.w_tiles.shape[4])
                weights = self.refs["weight"].at[rows, columns]
                copy(weights, self.w_tiles.at[at, index, half, pl.ds(0, size)], barrier)
            for name, box in self.boxes.items():
                groups = pl.ds(jax.lax.div(column, self.group * box.shape[2]) * box.shape[2], box.shape[2])
                copy(self.refs[name].at[rows, groups], box.at[at, pl.ds(target, size)], barrier)
        self.load_x(origin, column, at, barrier)

    def load_x(self, origin, column, at, barrier):
        """Starts to load the rows of x of a slot."""
        self.load_rows(origin, self.tiles.height, column, at, barrier)

    def load_rows(self, origin, height, column, at, barrier):
        """Starts to load this number of rows of x of a slot."""
        x = self.refs["x"].at[pl.ds(origin.row, height), pl.ds(column, self.slot_columns)]
        self.plgpu.copy_gmem_to_smem(x, self.x_tiles.at[at, pl.ds(0, height)], barrier)

    def x_piece(self, at, index, first, size):
        first += index * SLICE * self.tiles.splits
        return self.x_tiles.at[at, :, pl.ds(self.split * SLICE + first, size)]

    def own_channel(self, origin):
        """Returns the first output channel of this warpgroup."""
        return origin.channel + self.channel * self.own_channels

    def factors(self, origin, column):
        """Returns scales and zero points of this warpgroup's slices, None for those that are loaded with the slot."""
        refs = [None if name in self.boxes else self.refs.get(name) for name in FACTORS]
        apart = self.out if self.activation else None
        load = functools.partial(group_factors, apart=apart, width=self.tiles.width, interpret=self.interpret)
        return [load(refs, self.own_channel(origin), first, self.group) for first in self.slice_columns(column)]

    def slot_factors(self, name, at, column):
        """Returns what the groups of a slice have in a box of a slot."""
        box, first_row = self.boxes[name], self.channel * self.own_rows
        apart = self.tiles.channels * self.own_rows if self.activation else None
        column = jax.lax.rem(column, self.group * box.shape[2])
        groups = group_factors([box.at[at]], first_row, column, self.group, apart=apart, interpret=self.interpret)
        return [values for (values,) in groups]

    def slice_bytes_of(self, at, index):
        """Returns the bytes of slice ``index`` of this warpgroup's slices in a slot."""
        rows = pl.ds(self.channel * self.own_rows, self.own_rows)
        columns = pl.ds(self.split * self.slice_bytes, self.slice_bytes)
        return self.w_tiles.at[at, index, slice(None) if self.activation else 0, rows, columns]

    def product(self, origin, at, column, factors, total):
        """Returns a total [64, height] with the products of this warpgroup's slices of a slot added to it."""
        slices = []
        for index, (first, groups) in enumerate(zip(self.slice_columns(column), factors, strict=True)):
            packed = self.slice_bytes_of(at, index)
            for name in self.boxes:
                for values, loaded in zip(groups, self.slot_factors(name, at, first), strict=True):
                    values[FACTORS.index(name)] = loaded
            slices.append((packed, groups))
        return self.group_product(at, slices, total)

    def joined(self, total):
        """Returns a result [64 channels, height] in its dtype; gate and up are joined."""
        if self.activation:
            gate, up = gate_and_up(total, interpret=self.interpret)
            total = gate / (1 + jnp.exp(-gate_logit(gate, self.activation))) * up
        return total.astype(self.refs["out"].dtype)

    def store(self, origin, total):
        """Stores a result [64 channels, height] in the rows that exist."""
        result, at = self.joined(total), (origin.part, origin.row, self.own_channel(origin))
        width, is_joined = self.own_channels, self.activation is not None
        store(self.refs["out"], result, at, width, is_joined=is_joined, interpret=self.interpret)
