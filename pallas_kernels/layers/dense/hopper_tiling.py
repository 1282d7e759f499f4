"""Chooses the tile sizes of the Hopper kernel (`hopper_kernel`), which multiplies x by a weight.

Terms: a CTA is one Pallas program. A part of k is one of the equal ranges of k over which partial sums are returned. A
work item is one output tile, summed over one part of k; a CTA computes several work items one after the other. The
kernel loads k in slices of 128 bytes per row.

`wgmma` multiplies a first operand of 64 rows per warpgroup by a second operand whose size is any multiple of 8. Usually
the first operand holds rows of x and the second operand holds weights. The width of an output tile is then chosen so
that the number of tiles is just less than a multiple of the number of multiprocessors.

If x has far fewer rows than the next multiple of 64, the product is transposed. The first operand then holds weights
(64 columns of gate and 64 of up per warpgroup), and the second operand holds all rows of x. So no padding rows are
multiplied.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.layers.hopper import HEIGHT, SHARED_BYTES
from pallas_kernels.layers.quantize_rows import FP8

DTYPES = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), FP8}
INNER_BYTES = 128  # bytes of a row in a slice of k; this is the widest swizzle
STORE_BUFFERS = 2  # buffers per warpgroup: one is written while the TMA unit reads the other
ALIGNMENT = 1024  # alignment in bytes of each array in shared memory; TMA copies need a multiple of 128
MOST_GROUPS = 5  # most warpgroups per CTA, because they share a multiprocessor's registers
REGISTERS = 512  # registers per thread if a multiprocessor had one warpgroup
OTHER_REGISTERS = 40  # registers per thread in addition to the accumulators
LEAST_COLUMNS, MOST_COLUMNS = 48, 136  # columns of gate, and as many of up
MOST_OPERAND = 256  # most columns of an operand; gate and up of more columns are two operands
TRANSPOSED_COLUMNS = 128  # columns of gate, and as many of up, if the product is transposed
MOST_TRANSPOSED = 160  # most rows of x whose accumulators (gate and up) fit into a warpgroup's registers
MOST_IDLE = 1.15  # XLA is faster if the time exceeds that of an even distribution of the tiles by this factor


class HopperTiles(NamedTuple):
    """The static sizes of one call of the Hopper kernel; the module's docstring defines the terms."""

    groups: int  # warpgroups per CTA, each for 64 rows of an output tile; transposed: for 64 columns
    columns: int  # columns of an output tile
    inner: int  # values of a row in a slice of k
    stages: int  # slices of k in flight
    store: int  # columns that a warpgroup stores at once; transposed: rows
    programs: int  # number of CTAs
    parts: int = 1  # parts of k, which is also the number of partial sums
    halves: int = 1  # 2 if the weight has gate and up, else 1
    scale_tiles: int = 0  # output tiles of a CTA whose scales are kept in shared memory; 0: no scales, or no room
    transposed: int = 0  # number of rows of x if the product is transposed, else 0

    @property
    def height(self) -> int:
        """Number of rows of x, with padding, that a CTA holds in shared memory."""
        return self.transposed or self.groups * HEIGHT

    @property
    def operands(self) -> int:
        """Number of operands that the weights of a slice are: two if gate and up have an accumulator each."""
        is_joined = not self.transposed and self.halves * self.columns <= MOST_OPERAND
        return 1 if is_joined else self.halves

    @property
    def accumulators(self) -> list[tuple[int, int]]:
        """Shapes (rows, columns) of the accumulators of a warpgroup."""
        columns = self.transposed or self.halves // self.operands * self.columns
        return [(HEIGHT, columns)] * self.operands

    @property
    def stores_in_x(self) -> bool:
        """Whether a warpgroup stores a whole result tile at once, from the shared memory of the last slice of x.

        The result is not swizzled in this memory, so its rows must be narrow enough that eight rows lie in different
        memory banks.
        """
        return not self.transposed and self.store == self.columns

    @property
    def store_shape(self) -> tuple[int, int]:
        """Shape (rows, columns) of the block of results that a warpgroup stores at once."""
        return (self.store, HEIGHT) if self.transposed else (HEIGHT, self.store)


def choose_tiles(
    rows: int, inner: int, out: int, dtype: jnp.dtype, multiprocessors: int, *, parts: int = 1, halves: int = 1
) -> HopperTiles | None:
    """Chooses the sizes of the Hopper kernel for x [rows, inner] and a weight [halves * out, inner].

    Args:
        rows, inner: shape of x.
        out: number of output columns.
        dtype: dtype of x and of the weight's values.
        multiprocessors: number of multiprocessors of the GPU.
        parts: number of equal ranges of `inner` whose partial sums are returned; several partial sums are float32.
        halves: 2 if the weight has gate and up, else 1.

    Returns:
        The sizes, or None if the kernel does not support the product or would be slower than XLA.
    """
    groups, slice_size = math.ceil(rows / HEIGHT), INNER_BYTES // dtype.itemsize
    if dtype not in DTYPES or groups > MOST_GROUPS or (rows > 8 and rows % 8) or inner % (slice_size * parts):
        return None

    # Width of an output tile. A width must divide `out`, and its accumulators must fit into registers. Of these widths,
    # choose the one that leaves the fewest multiprocessors idle; among equally good widths, choose the widest.
    most = min(REGISTERS // groups // 8 * 8 - OTHER_REGISTERS, MOST_COLUMNS)
    widths = [width for width in range(most, LEAST_COLUMNS - 1, -8) if out % width == 0]
    time = {width: imbalance(out // width * parts, multiprocessors) for width in widths}
    if not widths or min(time.values()) > MOST_IDLE:
        return None
    columns, height, transposed = min(widths, key=lambda width: time[width]), groups * HEIGHT, 0

    # Transpose the product (65 to 160 rows) if this lowers waves * rows; a padding row takes as long as any other row.
    can_transpose = halves == 2 and HEIGHT < rows <= MOST_TRANSPOSED and out % TRANSPOSED_COLUMNS == 0
    if can_transpose and imbalance(out // TRANSPOSED_COLUMNS * parts, multiprocessors) * rows < time[columns] * height:
        groups, columns, height, transposed = TRANSPOSED_COLUMNS // HEIGHT, TRANSPOSED_COLUMNS, rows, rows

    # Shared memory holds store buffers, scales (float8), and as many slices of k as fit into the rest.
    items = out // columns * parts
    stores_in_x = parts == 1 and not transposed and columns % 16 and columns * 2 < INNER_BYTES
    store = columns if stores_in_x else 8 if (transposed or columns) % 16 else 16
    store_bytes = 0 if stores_in_x else groups * HEIGHT * STORE_BUFFERS * store * (4 if parts > 1 else 2)
    scale_tiles = math.ceil(items / multiprocessors) if dtype == FP8 else 0
    sizes = (height, scale_tiles * halves * scale_columns(columns)) if scale_tiles else ()
    scale_bytes = sum(math.ceil(4 * size / ALIGNMENT) * ALIGNMENT for size in sizes)
    room, slice_bytes = SHARED_BYTES - store_bytes, (height + halves * columns) * INNER_BYTES
    stages, fewer = (min(free // slice_bytes, inner // slice_size // parts) for free in (room, room - scale_bytes))
    # One more slice in flight saves more time than scales in shared memory. But without scales in shared memory, the
    # kernel reads the scales of x for multiples of 64 rows, which may lie past the array's end.
    if fewer < stages and rows == height:
        scale_tiles = 0
    stages = fewer if scale_tiles else stages
    if stages < min(2, inner // slice_size // parts):  # the scales leave no room for two slices of k
        return None
    programs = min(items, multiprocessors)
    return HopperTiles(groups, columns, slice_size, stages, store, programs, parts, halves, scale_tiles, transposed)


def scale_columns(columns: int) -> int:
    """Returns the length of the memory of a tile's scales, in float32: a multiple of 128 bytes."""
    return math.ceil(columns / 32) * 32


def imbalance(items: int, multiprocessors: int) -> float:
    """Returns the time of `items` equal work items, divided by their time if no multiprocessor were ever idle."""
    return math.ceil(items / multiprocessors) * multiprocessors / items
