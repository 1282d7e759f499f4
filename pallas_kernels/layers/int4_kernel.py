"""The Hopper kernel of weights of four bits, which multiplies any number of rows by a packed weight (`int4`).

    parts[s, t, n] = sum_k x[t, k] (values[n, k] - zeros[n, k // group]) scale[n, k // group]   over part s of S parts

The weight is the first operand of `wgmma`, 64 output channels per warpgroup, and comes from registers. The second
operand is a tile of rows of x, and comes from shared memory. The TMA unit loads the packed bytes into shared memory.
A thread loads 16 bytes of a row of the weight at once. They hold the values of 128 columns that this thread passes to
`wgmma`, in the order of the registers, because `int4.pack` orders them so. No value moves between threads.

Differences of values and zero points are exact in x's dtype. The tensor cores sum a group of columns in float32, and
this sum is multiplied by the group's scale and added to the total, so no value is rounded twice.

`packed_cta` says how a CTA loads slices of k and computes one output tile after the other.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers import int4_registers as registers
from pallas_kernels.layers.hopper_tiling import HEIGHT
from pallas_kernels.layers.int4_registers import SLICE
from pallas_kernels.layers.int4_tiling import Tiles
from pallas_kernels.layers.packed_cta import PIECE, PackedCta, group_factors, memory_of


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
    refs = (x_ref, w_ref, scale_ref, zeros_ref, out_ref)
    _Cta(refs, (x_tiles, w_tiles, arrived, done, *joining), tiles, interpret).run()


class _Place(NamedTuple):
    """Where a work item is."""

    channel: Array  # first output channel of the CTA
    part: Array  # part of k
    row: Array  # first row of x


class _Cta(PackedCta):
    """The operations of one CTA (Pallas program) inside the kernel."""

    def __init__(self, refs, memory, tiles, interpret):
        super().__init__(memory, tiles, interpret)
        self.x_ref, self.w_ref, self.scale_ref, self.zeros_ref, self.out_ref = refs
        (_, inner), (_, rows, out) = self.x_ref.shape, self.out_ref.shape
        self.group = inner // self.scale_ref.shape[1]  # columns of a scale
        self.item_slots = inner // (SLICE * tiles.splits * tiles.parts)
        self.row_tiles = math.ceil(rows / tiles.height)
        self.items = self.own_items(out // (HEIGHT * tiles.channels) * tiles.parts * self.row_tiles)

    def place_of(self, item):
        """Returns where a work item is; neighbours in time share the weight."""
        index = self.index + item * self.tiles.programs
        row, index = jax.lax.rem(index, self.row_tiles), jax.lax.div(index, self.row_tiles)
        channel, part = jax.lax.div(index, self.tiles.parts), jax.lax.rem(index, self.tiles.parts)
        return _Place(channel * (self.tiles.channels * HEIGHT), part, row * self.tiles.height)

    def load_slices(self, place, column, at, barrier):
        """Starts to load slices of k of the tile's weights and rows of x."""
        channels, rows = pl.ds(place.channel, self.tiles.channels * HEIGHT), pl.ds(place.row, self.tiles.height)
        for split in range(self.tiles.splits):
            own = column + split * SLICE
            weights = self.w_ref.at[channels, pl.ds(own // 2, SLICE // 2)]
            self.plgpu.copy_gmem_to_smem(weights, self.w_tiles.at[at, split], barrier)
            self.plgpu.copy_gmem_to_smem(self.x_ref.at[rows, pl.ds(own, SLICE)], self.x_tiles.at[at, split], barrier)

    def own_channel(self, place):
        """Returns the first output channel of this warpgroup."""
        return place.channel + self.channel * HEIGHT

    def factors(self, place, column):
        """Returns the scales and zero points of a slice."""
        refs, own = (self.scale_ref, self.zeros_ref), self.own_channel(place)
        return group_factors(refs, own, column, self.group, interpret=self.interpret)

    def product(self, at, factors, total):
        """Returns a total [64, height] with the product of this warpgroup's slice of a slot added to it."""
        packed = self.w_tiles.at[at, self.split, pl.ds(self.channel * HEIGHT, HEIGHT)]
        return self.group_product(packed, at, factors, total)

    def store(self, place, total):
        """Stores a result [64 channels, height] in the rows that exist."""
        result, at = total.astype(self.out_ref.dtype), (place.part, place.row, self.own_channel(place))
        registers.store(self.out_ref, result, at, interpret=self.interpret)


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

    def entry(x_ref, w_ref, scale_ref, *refs):
        *zeros_ref, out_ref = refs
        weights = tiles.stages, tiles.splits, tiles.channels * HEIGHT, SLICE // 2
        memory = memory_of(tiles, x.dtype, piece, weights, loads=2 * tiles.splits)
        inputs = (x_ref, w_ref, scale_ref, *(zeros_ref or [None]), out_ref)
        pl.run_scoped(functools.partial(kernel, *inputs), *memory, collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.parts, rows, out), dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        kernel_name="int4_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(x, packed.reshape(out, -1), scale, *zeros)
