"""How `hopper_matmul` divides a product.

The rows are the tensor core's first operand and the weights its second, whose size goes in steps of 8, not 64: so the
width can be chosen with which tiles are a little less than a multiple of the multiprocessors. Where rows are so many
less than a multiple of 64 that it is worth more not to multiply what is not there, they are turned: the weights are the
first operand, 64 columns of gate and of up a warpgroup, and all rows the second.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.layers.quantize_rows import FP8

DTYPES = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), FP8}
INNER_BYTES = 128  # of a row in a step: the widest swizzle
PLACES = 2  # of a warpgroup, for what is stored: one is written while the other is read
HEIGHT = 64  # rows of a warpgroup's product
SHARED_BYTES = 227 * 1024 - 512  # of a multiprocessor, without the barriers
ALIGNMENT = 1024  # bytes, of each array in shared memory; what is copied goes to multiples of 128
MOST_GROUPS = 5  # warpgroups that share the registers of a multiprocessor
REGISTERS = 512  # of a thread, if one warpgroup had a multiprocessor's
OTHER_REGISTERS = 40  # of a thread, beside its sums
LEAST_COLUMNS, MOST_COLUMNS = 48, 128  # twice as many are one operand of gate and up, of 256 at most
MOST_TURNED = 160  # rows of gate and up for which a warpgroup has registers
WASTE = 1.15  # of the time, at most, for tiles that leave multiprocessors idle


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    groups: int  # warpgroups, of 64 rows each; turned: of 64 columns
    columns: int  # of a tile of the output
    inner: int  # numbers of a row in a step
    stages: int  # steps in flight
    store: int  # columns that are stored at once; turned: rows
    programs: int
    parts: int = 1  # pieces of the sum over k
    halves: int = 1  # 2: gate and up
    kept: int = 0  # tiles of a program whose scales wait in shared memory; 0: there are none, or no room for them
    turned: int = 0  # rows, where they are the tensor core's second operand; 0: they are the first

    @property
    def height(self) -> int:
        """Rows of x that a program holds."""
        return self.turned or self.groups * HEIGHT

    @property
    def sums(self) -> list[tuple[int, int]]:
        """Shapes of what a warpgroup adds up."""
        return [(HEIGHT, self.turned)] * self.halves if self.turned else [(HEIGHT, self.halves * self.columns)]

    @property
    def lent(self) -> bool:
        """Whether a tile is stored at once, from where the warpgroup's rows of x were in the tile's last step.

        They are not swizzled: only so wide that eight rows one below the other lie in different banks.
        """
        return not self.turned and self.store == self.columns

    @property
    def piece(self) -> tuple[int, int]:
        """Shape of what a warpgroup stores at once."""
        return (self.store, HEIGHT) if self.turned else (HEIGHT, self.store)


def choose_tiles(
    rows: int, inner: int, out: int, dtype: jnp.dtype, multiprocessors: int, *, parts: int = 1, halves: int = 1
) -> Tiles | None:
    """How the kernel divides a product [rows, inner] x [halves * out, inner]; None where it is not for it.

    Args:
        parts: that the sum over `inner` comes in, float32 if there are several.
        halves: 2: gated.
    """
    groups, step = math.ceil(rows / HEIGHT), INNER_BYTES // dtype.itemsize
    if dtype not in DTYPES or groups > MOST_GROUPS or (rows > 8 and rows % 8) or inner % (step * parts):
        return None
    most = min(REGISTERS // groups // 8 * 8 - OTHER_REGISTERS, MOST_COLUMNS)
    widths = [width for width in range(most, LEAST_COLUMNS - 1, -8) if out % width == 0]
    time = {width: _turns(out // width * parts, multiprocessors) for width in widths}
    if not widths or min(time.values()) > WASTE:
        return None
    columns, height, turned = min(widths, key=lambda width: time[width]), groups * HEIGHT, 0
    can_turn = halves == 2 and HEIGHT < rows <= MOST_TURNED and out % MOST_COLUMNS == 0
    if can_turn and _turns(out // MOST_COLUMNS * parts, multiprocessors) * rows < time[columns] * height:
        groups, columns, height, turned = MOST_COLUMNS // HEIGHT, MOST_COLUMNS, rows, rows
    items, lent = out // columns * parts, parts == 1 and not turned and columns % 16 and columns * 2 < INNER_BYTES
    store = columns if lent else 8 if (turned or columns) % 16 else 16
    stored = 0 if lent else groups * HEIGHT * PLACES * store * (4 if parts > 1 else 2)
    kept = math.ceil(items / multiprocessors) if dtype == FP8 else 0
    sizes = (height, kept * halves * MOST_COLUMNS) if kept else ()
    scales = sum(math.ceil(4 * size / ALIGNMENT) * ALIGNMENT for size in sizes)
    room, own = SHARED_BYTES - stored, (height + halves * columns) * INNER_BYTES  # the second of a step
    stages, fewer = (min(free // own, inner // step // parts) for free in (room, room - scales))
    if fewer < stages and rows == height:  # else what lies behind the rows' scales would be read
        kept = 0
    stages = fewer if kept else stages
    if stages < min(2, inner // step // parts):  # room for scales alone
        return None
    return Tiles(groups, columns, step, stages, store, min(items, multiprocessors), parts, halves, kept, turned)


def _turns(items: int, multiprocessors: int) -> float:
    """How many of them the busiest multiprocessor has, beside the mean."""
    return math.ceil(items / multiprocessors) * multiprocessors / items
