"""How the Hopper kernel (`hopper_kernel`) divides a product.

`wgmma` multiplies a first operand of 64 rows per warpgroup by a second operand whose size is any multiple of 8. Usually
the rows of x are the first operand and the weights the second: the tile's width is chosen so that the number of tiles
is just below a multiple of the number of multiprocessors. Where x has far fewer rows than the next multiple of 64 the
product is transposed: the weights are the first operand (64 columns of gate and of up per warpgroup) and all rows of x
the second, so that padding rows are not multiplied.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.layers.quantize_rows import FP8

DTYPES = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), FP8}
INNER_BYTES = 128  # of a row in a step: the widest swizzle
STORE_BUFFERS = 2  # per warpgroup: one is written while the TMA unit reads the other
HEIGHT = 64  # rows of a warpgroup's product
SHARED_BYTES = 227 * 1024 - 512  # of a multiprocessor, without the barriers
ALIGNMENT = 1024  # bytes, of each array in shared memory; TMA copies need multiples of 128
MOST_GROUPS = 5  # warpgroups of a program: they share a multiprocessor's registers
REGISTERS = 512  # per thread, if a multiprocessor had one warpgroup
OTHER_REGISTERS = 40  # per thread, beside its accumulators
LEAST_COLUMNS, MOST_COLUMNS = 48, 128  # of gate and of up: both together are one operand, of at most 256
MOST_TRANSPOSED = 160  # rows of x, for which a warpgroup has registers (gate and up)
MOST_IDLE = 1.15  # time over that of an even distribution of the tiles: above, XLA's product is faster


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    groups: int  # warpgroups, of 64 rows each; transposed: of 64 columns
    columns: int  # of an output tile
    inner: int  # values of a row in a step
    stages: int  # steps in flight
    store: int  # columns stored at once; transposed: rows
    programs: int
    parts: int = 1  # of the sum over k
    halves: int = 1  # 2: gate and up
    scale_tiles: int = 0  # tiles of a program whose scales are kept in shared memory; 0: no scales, or no room
    transposed: int = 0  # rows of x, where the product is transposed; else 0

    @property
    def height(self) -> int:
        """Rows of x that a program holds."""
        return self.transposed or self.groups * HEIGHT

    @property
    def accumulators(self) -> list[tuple[int, int]]:
        """Shapes of a warpgroup's accumulators."""
        if self.transposed:
            return [(HEIGHT, self.transposed)] * self.halves
        return [(HEIGHT, self.halves * self.columns)]

    @property
    def stores_in_x(self) -> bool:
        """Whether a result tile is stored at once, from the memory of the tile's last step of x.

        It is not swizzled, so its rows must be so narrow that eight of them lie in different banks.
        """
        return not self.transposed and self.store == self.columns

    @property
    def store_shape(self) -> tuple[int, int]:
        """Shape of what a warpgroup stores at once."""
        return (self.store, HEIGHT) if self.transposed else (HEIGHT, self.store)


def choose_tiles(
    rows: int, inner: int, out: int, dtype: jnp.dtype, multiprocessors: int, *, parts: int = 1, halves: int = 1
) -> Tiles | None:
    """Chooses how the kernel divides a product [rows, inner] x [halves * out, inner]; None: the kernel does not fit.

    Args:
        parts: of the sum over `inner`; several are returned in float32.
        halves: 2: gate and up.
    """
    groups, step = math.ceil(rows / HEIGHT), INNER_BYTES // dtype.itemsize
    if dtype not in DTYPES or groups > MOST_GROUPS or (rows > 8 and rows % 8) or inner % (step * parts):
        return None

    # Width: of the widths that divide `out` and whose accumulators fit into registers, the one that leaves the fewest
    # multiprocessors idle; of equals the widest.
    most = min(REGISTERS // groups // 8 * 8 - OTHER_REGISTERS, MOST_COLUMNS)
    widths = [width for width in range(most, LEAST_COLUMNS - 1, -8) if out % width == 0]
    time = {width: _imbalance(out // width * parts, multiprocessors) for width in widths}
    if not widths or min(time.values()) > MOST_IDLE:
        return None
    columns, height, transposed = min(widths, key=lambda width: time[width]), groups * HEIGHT, 0

    # Transposed (65 to 160 rows), if waves times rows are fewer: padding rows cost as much as others.
    can_transpose = halves == 2 and HEIGHT < rows <= MOST_TRANSPOSED and out % MOST_COLUMNS == 0
    if can_transpose and _imbalance(out // MOST_COLUMNS * parts, multiprocessors) * rows < time[columns] * height:
        groups, columns, height, transposed = MOST_COLUMNS // HEIGHT, MOST_COLUMNS, rows, rows

    # Shared memory: store buffers, scales (float8), and as many steps as fit into the rest.
    items = out // columns * parts
    stores_in_x = parts == 1 and not transposed and columns % 16 and columns * 2 < INNER_BYTES
    store = columns if stores_in_x else 8 if (transposed or columns) % 16 else 16
    store_bytes = 0 if stores_in_x else groups * HEIGHT * STORE_BUFFERS * store * (4 if parts > 1 else 2)
    scale_tiles = math.ceil(items / multiprocessors) if dtype == FP8 else 0
    sizes = (height, scale_tiles * halves * MOST_COLUMNS) if scale_tiles else ()
    scale_bytes = sum(math.ceil(4 * size / ALIGNMENT) * ALIGNMENT for size in sizes)
    room, step_bytes = SHARED_BYTES - store_bytes, (height + halves * columns) * INNER_BYTES
    stages, fewer = (min(free // step_bytes, inner // step // parts) for free in (room, room - scale_bytes))
    # A step in flight is worth more than scales in shared memory. But without them the kernel reads the rows' scales
    # in multiples of 64, past the array's end unless x has as many rows.
    if fewer < stages and rows == height:
        scale_tiles = 0
    stages = fewer if scale_tiles else stages
    if stages < min(2, inner // step // parts):  # the scales leave no room for two steps
        return None
    programs = min(items, multiprocessors)
    return Tiles(groups, columns, step, stages, store, programs, parts, halves, scale_tiles, transposed)


def _imbalance(items: int, multiprocessors: int) -> float:
    """Waves of programs over the mean number of items per multiprocessor: 1 if all are always busy."""
    return math.ceil(items / multiprocessors) * multiprocessors / items
