"""The Hopper kernel of weights of four or eight bits, which multiplies any number of rows by such a weight.

    parts[s, t, n] = sum_k x[t, k] (values[n, k] - zeros[n, k // group]) scale[n, k // group]   over part s of S parts

The weight is the first operand of `wgmma`, 64 output channels per warpgroup, and comes from registers. The second
operand is a tile of rows of x, and comes from shared memory. The TMA unit loads the packed bytes into shared memory,
and so the scales and zero points, if a row has enough of them for a copy: loads of their own, a slot ahead, arrived
later than the bytes. A thread loads 16 bytes of a row of the weight at once. They hold the values of 128 columns that
this thread passes to `wgmma`, in the order of the registers, because `int4.pack` orders them so. No value moves between
threads. Bytes of values of eight bits are in the order of the columns (`byte_registers`).

Differences of values and zero points are exact in x's dtype. The tensor cores sum a group of columns in float32, and
this sum is multiplied by the group's scale and added to the total, so no value is rounded twice. If a row of a weight
of eight bits has one scale, the tensor cores add up all columns, and the total is scaled.

With an activation function the weight has gate above up, and a thread joins its sums of both, as in `expert_kernel`:

    out[t, n] = activation(gate) * up,   gate[t, n] = parts[0, t, n],   up[t, n] = parts[0, t, N + n]

`packed_cta` says how a CTA loads slices of k and computes one output tile after the other.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.int4.int4_registers import SLICE, gate_and_up
from pallas_kernels.layers.int4.int4_stores import store
from pallas_kernels.layers.int4.int4_tiling import Int4Tiles, copied_groups
from pallas_kernels.layers.int4.packed_cta import FACTORS, PIECE, PackedCta, group_factors, memory_of
from pallas_kernels.layers.quantize_rows import Activation, gate_logit
from pallas_kernels.layers.weights import FORMATS, Kind


class _Origin(NamedTuple):
    """Where a work item is."""

    channel: Array  # first output channel of the CTA
    part: Array  # part of k
    row: Array  # first row of x


class _Int4Cta(PackedCta):
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
        self.slice_bytes = int(SLICE * FORMATS[kind].value_bytes)
        self.is_scaled_by_row = not FORMATS[kind].is_packed and refs["scale"].shape[1] == 1
        (_, inner), (_, rows, self.out) = refs["x"].shape, refs["out"].shape
        self.halves = 2 if activation else 1
        self.group = inner // refs["scale"].shape[1]  # columns of a scale
        self.own_channels = tiles.width // self.halves  # output channels of a warpgroup
        self.own_rows = HEIGHT // self.halves  # rows of its tile in shared memory of each half
        self.slot_columns = SLICE * tiles.splits * tiles.depth
        self.item_slots = inner // (self.slot_columns * tiles.parts)
        self.row_tiles = math.ceil(rows / tiles.height)
        self.items = self.own_items(self.out // (self.own_channels * tiles.channels) * tiles.parts * self.row_tiles)

    def place_of(self, item):
        """Returns where a work item is; neighbours in time share the weight."""
        index = self.index + item * self.tiles.programs
        row, index = jax.lax.rem(index, self.row_tiles), jax.lax.div(index, self.row_tiles)
        channel, part = jax.lax.div(index, self.tiles.parts), jax.lax.rem(index, self.tiles.parts)
        return _Origin(channel * (self.tiles.channels * self.own_channels), part, row * self.tiles.height)

    def load_slices(self, origin, column, at, barrier):
        """Starts to load a slot: slices of the tile's weights with their scales, and of rows of x."""
        size, copy = self.tiles.channels * self.own_channels, self.plgpu.copy_gmem_to_smem
        first_byte = column // 2 if self.slice_bytes < SLICE else column
        for half in range(self.halves):
            rows, target = pl.ds(half * self.out + origin.channel, size), half * self.tiles.channels * self.own_rows
            for index in range(self.tiles.depth):
                columns = pl.ds(first_byte + index * self.w_tiles.shape[4], self.w_tiles.shape[4])
                weights = self.refs["weight"].at[rows, columns]
                copy(weights, self.w_tiles.at[at, index, half, pl.ds(0, size)], barrier)
            for name, box in self.boxes.items():
                groups = pl.ds(jax.lax.div(column, self.group * box.shape[2]) * box.shape[2], box.shape[2])
                copy(self.refs[name].at[rows, groups], box.at[at, pl.ds(target, size)], barrier)
        x = self.refs["x"].at[pl.ds(origin.row, self.tiles.height), pl.ds(column, self.slot_columns)]
        copy(x, self.x_tiles.at[at], barrier)

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

    def weights(self, at, first):
        return self.widened(self.slice_bytes_of(at, 0), first, PIECE)

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

    def store(self, origin, total):
        """Joins gate and up, and stores a result [64 channels, height] in the rows that exist."""
        if self.activation:
            gate, up = gate_and_up(total, interpret=self.interpret)
            total = gate / (1 + jnp.exp(-gate_logit(gate, self.activation))) * up
        result, at = total.astype(self.refs["out"].dtype), (origin.part, origin.row, self.own_channel(origin))
        width, is_joined = self.own_channels, self.activation is not None
        store(self.refs["out"], result, at, width, is_joined=is_joined, interpret=self.interpret)


def multiply(
    x: Array,
    packed: Array,
    scale: Array,
    *zeros: Array,
    tiles: Int4Tiles,
    dtype: jnp.dtype,
    kind: Kind = "int4",
    activation: Activation | None = None,
    interpret: Any = False,
) -> Array:
    """Runs the Hopper kernel of packed weights, and returns partial sums of x @ w.T [parts, rows, out].

    Args:
        x: activations [rows, inner], bfloat16 or float16.
        packed: packed values [halves * out, blocks, 64] (`int4.pack`), or values of eight bits [halves * out, inner];
            two halves are gate and up.
        scale: float32 scales [halves * out, groups].
        zeros: zero points uint8 [halves * out, groups], if there are any.
        tiles: static sizes of the call.
        dtype: dtype of the result.
        kind: kind of the weight.
        activation: if not None, the weight has gate and up, and the result is activation(x @ gate.T) * (x @ up.T).
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (rows, inner), (out, groups), halves = x.shape, scale.shape, 2 if activation else 1
    if rows > 8 and rows % 8:
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))  # TMA tiles of 8 rows must lie within more than 8 rows
    arrays = {
        "x": x,
        "weight": jax.lax.bitcast_convert_type(packed, jnp.uint8).reshape(out, -1),
        "scale": scale,
        **dict(zip(("zeros",), zeros, strict=False)),
    }
    piece = min(PIECE, math.gcd(inner // groups, SLICE))
    slot_bytes = tiles.splits * int(SLICE * FORMATS[kind].value_bytes)
    weights = tiles.stages, tiles.depth, halves, tiles.channels * HEIGHT // halves, slot_bytes
    columns = tiles.splits * tiles.depth * SLICE  # of a slot
    groups_of = {
        name: copied_groups(groups, inner, arrays[name].dtype.itemsize, columns) for name in FACTORS if name in arrays
    }

    def entry(*refs):
        by_name = dict(zip((*arrays, "out"), refs, strict=True))

        def run(memory, boxes):
            _Int4Cta(by_name, memory, boxes, tiles, kind, activation, bool(interpret)).run()

        boxes = {
            name: plgpu.SMEM((tiles.stages, tiles.channels * HEIGHT, count), arrays[name].dtype)
            for name, count in groups_of.items()
            if count
        }
        rows_of_x = tiles.height, columns
        loads, is_tiled = halves * (tiles.depth + len(boxes)) + 1, not FORMATS[kind].is_packed
        memory = memory_of(tiles, x.dtype, rows_of_x, piece, weights, loads, is_tiled=is_tiled)
        pl.run_scoped(run, memory, boxes, collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.parts, rows, out // halves), dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        kernel_name="int4_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(*arrays.values())
