"""Chooses the tile sizes of the Hopper kernel of packed weights (`int4_kernel`; `packed_cta` defines the terms)."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.layers.hopper import HEIGHT, SHARED_BYTES
from pallas_kernels.layers.packed import int4
from pallas_kernels.layers.weights import FORMATS, Kind

# Most rows of x in a tile, for which shared memory has room for the sums of four splits, and for which the registers of
# a multiprocessor suffice for four warpgroups, and for two. The registers hold sums of a group, and totals. Groups of
# less than 128 columns take more registers.
LEAST_ROWS, FEW_ROWS, MOST_ROWS = 32, 64, 160
FEW_ROWS_OF_SMALL_GROUPS, MOST_ROWS_OF_SMALL_GROUPS = 56, 128
# Channels and splits of a CTA, and rows of the weight of a warpgroup, the preferred first. Splits read longer pieces of
# the weight's rows. Tiles of 56 and 48 rows divide 28672 and 6144 rows into 512 and 128 equal parts.
LEAST_SHAPES = ((1, 4, 64), (1, 4, 56), (1, 4, 48), (2, 2, 64), (4, 1, 64), (3, 1, 64), (2, 1, 64))
FEW_SHAPES = ((4, 1, 64), (2, 2, 64), (3, 1, 64), (2, 1, 64))
MANY_SHAPES = ((2, 1, 64),)
DEEP_ROWS = 8  # most rows of x with which registers suffice for two slices at once
PARTS = (1, 2, 4)  # parts of k
MOST_STAGES = 12
WORTH = 0.9  # more parts of k, or fewer rows of the weight, are worth it if they leave the time below this share
STORE_BUFFERS, STORED_ROWS = 2, 64  # of a warpgroup with many rows: buffers for results, and rows of x in one
STORE_BYTES = STORE_BUFFERS * STORED_ROWS * HEIGHT * 2
SUM_BYTES = 4  # of a float32 sum
SCALE_BYTES, ZERO_BYTES = 4, 1  # of a scale, and of a zero point
# Of the kernel of many rows: most rows of x in a tile, and with slots of 128 columns; then, by a model, the time of a
# work item in that of a row of x and 128 columns: what widening takes beside half of the products, what a slot and an
# item take longer, and what writing and reading 2**16 values of parts takes.
MOST_MANY_ROWS, MOST_ROWS_OF_LONG_SLOTS, LEAST_MANY_ROWS = 256, 192, 48
ROWS_OF_WIDENING, ROWS_OF_SLOT, TIME_OF_ITEM, TIME_OF_PARTS = 80, 8, 600, 3
COPIED = 16  # fewest bytes of a row that the TMA unit copies


class Int4Tiles(NamedTuple):
    """The static sizes of one call; `packed_cta` defines the terms."""

    height: int  # rows of x in an output tile, a multiple of 8
    channels: int  # warpgroups side by side, each for `width` rows of the weight
    splits: int  # equal parts of a slot's slices, each for warpgroups of its own
    stages: int  # slots in flight
    parts: int  # parts of k, which is also the number of partial sums
    programs: int  # number of CTAs
    has_loader: bool = False  # whether another warpgroup does nothing but load slots, instead of the first
    depth: int = 1  # slices of each split in a slot, which its warpgroups multiply one after the other
    width: int = HEIGHT  # rows of the weight of a warpgroup; less than 64 only with one warpgroup of channels
    has_many_rows: bool = (
        False  # whether a slot has half a slice, for tiles of up to 256 rows of a weight of eight bits
    )
    copies_scales: bool = False  # whether the scales of a tile of experts' weights are copied into shared memory

    @property
    def columns(self) -> int:
        """Number of columns of a slice; with more rows of x, shared memory has no room for three long slots."""
        return int4.BLOCK // 2 if self.has_many_rows and self.height > MOST_ROWS_OF_LONG_SLOTS else int4.BLOCK

    @property
    def slices(self) -> int:
        """Number of slices of a slot."""
        return self.splits * self.depth

    @property
    def groups(self) -> int:
        """Number of warpgroups of a CTA that multiply."""
        return self.channels * self.splits

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups of a CTA."""
        return self.groups + self.has_loader


def choose_tiles(
    rows: int,
    packed: tuple[int, ...],
    groups: int,
    dtype: jnp.dtype,
    multiprocessors: int,
    parts: int | None = None,
    *,
    gated: bool = False,
    kind: Kind = "int4",
) -> Int4Tiles | None:
    """Chooses the sizes of the kernel for x [rows, inner] and a weight of four or eight bits per value.

    Args:
        rows: number of rows of x.
        packed: shape of the weight's bytes [out, blocks, bytes of a block]; a byte per value is a block of 128 bytes.
        groups: number of scales of a row of the weight.
        dtype: dtype of x.
        multiprocessors: number of multiprocessors of the GPU.
        parts: number of parts of k; None: the fewest that keep the GPU busy.
        gated: whether the weight has gate and up, which are joined; k has one part then.
        kind: kind of the weight.

    Returns:
        The sizes, or None if the kernel does not support the product.

    Raises:
        ValueError: gate and up are joined, and `parts` is more than 1.
    """
    if gated and parts not in (None, 1):
        raise ValueError(f"parts: expected 1 or None with gate and up, whose sums are joined, got {parts}")
    if rows > FEW_ROWS and not FORMATS[kind].is_packed:
        counts = (1,) if gated else PARTS if parts is None else (parts,)
        if tiles := tiles_of_many_rows(rows, packed, groups, dtype, multiprocessors, counts, halves=1 + gated):
            return tiles
    out, blocks, size = packed
    value_bytes, halves = FORMATS[kind].value_bytes, 1 + gated
    columns_of_block = int(size / value_bytes)
    inner = blocks * columns_of_block
    if columns_of_block != int4.BLOCK or dtype not in (jnp.bfloat16, jnp.float16) or math.gcd(inner // groups, 32) < 32:
        return None
    few, most, is_small = FEW_ROWS, MOST_ROWS, inner // groups % int4.BLOCK > 0
    if is_small:
        few, most = LEAST_ROWS if gated else FEW_ROWS_OF_SMALL_GROUPS, MOST_ROWS_OF_SMALL_GROUPS
    row_tiles = math.ceil(rows / most)
    height = math.ceil(rows / row_tiles / 8) * 8
    has_loader = DEEP_ROWS < height <= LEAST_ROWS and not is_small
    shapes = LEAST_SHAPES if height <= LEAST_ROWS else FEW_SHAPES if height <= few else MANY_SHAPES
    best, least = None, math.inf
    for count in (1,) if gated else PARTS if parts is None else (parts,):
        for channels, splits, width in shapes:
            if not FORMATS[kind].is_packed and width // halves % 8:  # rows of a tile of bytes in shared memory
                continue
            if out % (channels * width) or out // halves % (channels * width // halves) or blocks % (splits * count):
                continue
            is_deep = height <= DEEP_ROWS and not is_small and FORMATS[kind].is_packed
            depth = 2 if is_deep and blocks % (2 * splits * count) == 0 else 1
            columns = splits * depth * int4.BLOCK
            factors = [size * copied_groups(groups, inner, size, columns) for size in (SCALE_BYTES, ZERO_BYTES)]
            if (
                width < HEIGHT and FORMATS[kind].is_packed and not all(factors)
            ):  # those that are loaded into registers are of 64 rows
                continue
            items = out // (channels * width) * count * row_tiles
            time = math.ceil(items / multiprocessors) * multiprocessors / items  # 1: no multiprocessor is ever idle
            if time < least * (1 if best is None or (best.parts, best.width) == (count, width) else WORTH):
                programs = min(items, multiprocessors)
                stages = most_stages(height, channels, splits * depth, splits, sum(factors), value_bytes=value_bytes)
                stages = stages if stages < 4 else 1 << stages.bit_length() - 1  # a power of two needs no division
                best = Int4Tiles(height, channels, splits, stages, count, programs, has_loader, depth, width)
                least = time
    return best


def tiles_of_many_rows(
    rows: int,
    packed: tuple[int, ...],
    groups: int,
    dtype: jnp.dtype,
    multiprocessors: int,
    counts: tuple[int, ...],
    *,
    halves: int,
) -> Int4Tiles | None:
    """Chooses the sizes of the kernel of many rows, which take the least time by a simple model; None: no support.

    Args:
        rows, packed, groups, dtype, multiprocessors: as in `choose_tiles`.
        counts: possible numbers of parts of k.
        halves: 2 if the weight has gate and up, which are joined, else 1.
    """
    (out, blocks, _), channels = packed, 2
    if dtype not in (jnp.bfloat16, jnp.float16) or out % (channels * HEIGHT) or (groups > 1 and blocks % groups):
        return None
    best, least = None, math.inf
    row_tiles = range(math.ceil(rows / MOST_MANY_ROWS), math.ceil(rows / LEAST_MANY_ROWS) + 1)
    for number, count in itertools.product(row_tiles, (count for count in counts if blocks % count == 0)):
        height = math.ceil(rows / number / 16) * 16
        items = out // (channels * HEIGHT) * count * math.ceil(rows / height)
        waves, left = divmod(items, multiprocessors)
        last_height = height / 2 if 2 * left <= multiprocessors else height  # items that are left may be halved
        time = waves * _time(height, blocks // count) + (left > 0) * _time(last_height, blocks // count)
        time += (count > 1) * TIME_OF_PARTS * count * rows * out / 2**16
        if time < least:
            tiles = Int4Tiles(height, channels, 1, 0, count, multiprocessors, True, has_many_rows=True)
            room = SHARED_BYTES - channels * STORE_BYTES // halves
            slot = tiles.columns * (2 * height + channels * HEIGHT)
            best, least = tiles._replace(stages=min(room // slot, MOST_STAGES)), time
    return best


def _time(height: float, slices: int) -> float:
    """Returns the time of a work item with many rows, in that of a row of x and 128 columns."""
    return slices * (max(height, height / 2 + ROWS_OF_WIDENING) + ROWS_OF_SLOT) + TIME_OF_ITEM


def copied_groups(groups: int, inner: int, size: int, columns: int) -> int:
    """Returns of how many groups the scales or zero points of a row are copied with a slot; 0: they are not copied.

    A copy has at least 16 bytes of each row, so it may have groups beside those of the slot.

    Args:
        groups: number of groups of a row.
        inner: number of columns of the weight.
        size: bytes of a scale or zero point.
        columns: columns of a slot.
    """
    group, least = inner // groups, COPIED // size
    count = max(columns // group, least)
    return count if groups % least == 0 and count * group % columns == 0 else 0


def most_stages(
    height: int,
    channels: int,
    slices: int,
    splits: int,
    factor_bytes: int = 0,
    reserved: int = 0,
    value_bytes: float = 0.5,
) -> int:
    """Returns how many slots fit into shared memory beside the sums of other warpgroups.

    Args:
        height, channels, splits: as in `Int4Tiles`.
        slices: slices of a slot.
        factor_bytes: bytes of scales and zero points of each row of a slot.
        reserved: bytes for other things.
        value_bytes: bytes of a value of the weight.
    """
    sums = (splits - 1) * channels * HEIGHT * height * SUM_BYTES
    slot = slices * int4.BLOCK * int(2 * height + channels * HEIGHT * value_bytes) + channels * HEIGHT * factor_bytes
    return min((SHARED_BYTES - sums - reserved) // slot, MOST_STAGES)
