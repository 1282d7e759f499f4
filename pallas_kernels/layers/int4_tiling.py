"""Chooses the tile sizes of the Hopper kernel of packed weights (`int4_kernel`; `packed_cta` defines the terms)."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.layers import int4
from pallas_kernels.layers.hopper_tiling import HEIGHT, SHARED_BYTES

# Most rows of x in a tile, for which shared memory has room for the sums of four splits, and for which the registers of
# a multiprocessor suffice for four warpgroups, and for two. The registers hold sums of a group, and totals. Groups of
# less than 128 columns take more registers.
LEAST_ROWS, FEW_ROWS, MOST_ROWS = 32, 64, 160
FEW_ROWS_OF_SMALL_GROUPS, MOST_ROWS_OF_SMALL_GROUPS = 56, 128
# Channels and splits of a CTA, the preferred first. Splits read longer pieces of the weight's rows.
LEAST_SHAPES = ((1, 4), (2, 2), (4, 1), (3, 1), (2, 1))  # with up to `LEAST_ROWS` rows of x in a tile
FEW_SHAPES = ((4, 1), (2, 2), (3, 1), (2, 1))
MANY_SHAPES = ((2, 1),)
PARTS = (1, 2, 4)  # parts of k
MOST_STAGES = 12
WORTH = 0.9  # more parts of k are worth their sums if they leave the time below this share
SUM_BYTES = 4  # of a float32 sum


class Tiles(NamedTuple):
    """The static sizes of one call; `packed_cta` defines the terms."""

    height: int  # rows of x in an output tile, a multiple of 8
    channels: int  # warpgroups side by side, 64 output channels each
    splits: int  # slices of k in a slot, each for warpgroups of its own
    stages: int  # slots in flight
    parts: int  # parts of k, which is also the number of partial sums
    programs: int  # number of CTAs
    has_loader: bool = False  # whether another warpgroup does nothing but load slots, instead of the first

    @property
    def groups(self) -> int:
        """Number of warpgroups of a CTA that multiply."""
        return self.channels * self.splits

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups of a CTA."""
        return self.groups + self.has_loader


def choose_tiles(
    rows: int, packed: tuple[int, ...], groups: int, dtype: jnp.dtype, multiprocessors: int, parts: int | None = None
) -> Tiles | None:
    """Chooses the sizes of the kernel for x [rows, inner] and a packed weight.

    Args:
        rows: number of rows of x.
        packed: shape of the weight's bytes [out, blocks, bytes of a block].
        groups: number of scales of a row of the weight.
        dtype: dtype of x.
        multiprocessors: number of multiprocessors of the GPU.
        parts: number of parts of k; None: the fewest that keep the GPU busy.

    Returns:
        The sizes, or None if the kernel does not support the product.
    """
    out, blocks, size = packed
    inner = blocks * 2 * size
    if 2 * size != int4.BLOCK or dtype not in (jnp.bfloat16, jnp.float16) or math.gcd(inner // groups, 32) < 32:
        return None
    few, most = FEW_ROWS, MOST_ROWS
    if inner // groups % int4.BLOCK:
        few, most = FEW_ROWS_OF_SMALL_GROUPS, MOST_ROWS_OF_SMALL_GROUPS
    row_tiles = math.ceil(rows / most)
    height = math.ceil(rows / row_tiles / 8) * 8
    shapes = LEAST_SHAPES if height <= LEAST_ROWS else FEW_SHAPES if height <= few else MANY_SHAPES
    best, least = None, math.inf
    for count in (parts,) if parts else PARTS:
        for channels, splits in shapes:
            if out % (channels * HEIGHT) or blocks % (splits * count):
                continue
            items = out // (channels * HEIGHT) * count * row_tiles
            time = math.ceil(items / multiprocessors) * multiprocessors / items  # 1: no multiprocessor is ever idle
            if time < least * (1 if best is None or best.parts == count else WORTH):
                programs = min(items, multiprocessors)
                slots = blocks // (splits * count) * math.ceil(items / programs)
                stages = min(most_stages(height, channels, splits), slots)
                best, least = Tiles(height, channels, splits, stages, count, programs), time
    return best


def most_stages(height: int, channels: int, splits: int) -> int:
    """Returns how many slots fit into shared memory beside the sums of other warpgroups."""
    sums = (splits - 1) * channels * HEIGHT * height * SUM_BYTES
    slot = splits * int4.BLOCK * (2 * height + channels * HEIGHT // 2)
    return min((SHARED_BYTES - sums) // slot, MOST_STAGES)
