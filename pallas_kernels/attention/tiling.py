"""How `paged_attention` divides its work: what a program holds, reads in a loop step, and shares with others.

The thresholds were measured on an H200 (132 multiprocessors); NOTES.md has the figures. Sizes depend on shapes only,
never on the lengths of the contexts in a call.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.experimental import pallas as pl

from pallas_kernels.layers.quantized import FP8

FIXED_SPLITS = 8  # of a context in deterministic attention, at any batch size
MMA_ROWS = 16  # smallest side of a matrix product on tensor cores
LEAST_SPLIT = 128  # rows of context in a split: fewer are read before another program has started
ENOUGH = 512  # rows of context that keep a program with a multiprocessor to itself busy
FULL = 264  # programs that fill the GPU: two large ones (four warps) on each of 132 multiprocessors
SPARE = 8  # programs that may be missing from FULL
LONG = 4096  # rows of context from which on small programs share contexts of many sequences
SHORT = 128  # bytes of a row of K up to which the number of instructions is the limit, not the bytes


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    group: int  # query heads per KV head
    queries: int  # per sequence
    new: int  # uncommitted rows, after the committed ones, that a query may see
    words: int  # 32-bit words of ancestor bits per query; 0: causal
    page: int  # rows per page
    capacity: int  # rows that the page table can address
    start: int  # rows below are hidden
    window: int  # rows that a query sees, counted back from its own; 0: all
    packed: int  # rows (query, head of the group) that a program holds
    tile: int  # context rows of a loop step
    splits: int  # programs that share a context
    warps: int  # of a program
    stages: int  # tiles in flight
    fixed: bool = False  # deterministic: the order of a query's sums depends on nothing but the rows it sees
    depths: int = 0  # entries of a query's path, where queries have paths; a program then holds one query

    @property
    def span(self) -> int:
        """Packed rows of one query."""
        return self.packed if self.depths else self.group


def choose_tiles(
    q: Array | ShapeDtypeStruct,
    k_pool: Array,
    page_table: Array,
    bits: Array | None,
    *,
    new_rows: int,
    start: int,
    window: int | None,
    wide: bool,
) -> Tiles:
    """Chooses sizes so that about two programs run on each multiprocessor, or four small ones.

    A program is large (four warps; eight count as two programs) or small (two warps). Enough programs for the GPU
    without splitting: contexts are not split. Else each is split at least in two.

    Args:
        wide: products are taken in float32.
    """
    batch, queries, heads = q.shape[:3]
    kv_heads, page, dim = *k_pool.shape[1:3], pl.next_power_of_2(q.shape[3])
    group, capacity = heads // kv_heads, page_table.shape[1] * page
    rows_read = capacity if window is None else min(capacity, window + new_rows)  # per sequence, at most

    # Packed rows. 64 with four warps are as fast as 128 with eight at 1k and faster at 8k. A float32 product is three
    # TF32 products, with four times the registers for the same rows.
    most = max(4096 // dim, MMA_ROWS) if wide else 64
    packed = min(max(pl.next_power_of_2(queries * group), MMA_ROWS), most)
    programs = batch * kv_heads * pl.cdiv(queries * group, packed)

    # Warps. 16 packed rows are work for two warps: with four, the program needs registers for which only three fit on
    # a multiprocessor. 32 packed rows are two warps' work as well where
    # - contexts are long: more programs in flight read faster;
    # - large programs would run in two waves (two or more splits of each context, more than FULL in all);
    # - a row of K is short (head_dim 64, or float8) and fewer than three large programs would share a context: then
    #   instructions are the limit, and two warps execute fewer of them.
    is_narrow, is_long = dim <= 128 and not wide, rows_read > LONG
    runs_in_two_waves = programs * (1 if programs >= FULL - SPARE else 2) >= FULL
    is_short = dim * k_pool.dtype.itemsize <= SHORT and 3 * programs > FULL
    small = is_narrow and packed <= 32 and (packed == MMA_ROWS or is_long or runs_in_two_waves or is_short)
    warps = 2 if small else (8 if wide or packed * max(dim, 128) >= 64 * 256 else 4)

    # Tile. 16 KiB each of K and V, 8 KiB for small programs, of which more run side by side. Float8 of wide heads
    # counts as two bytes: longer tiles would need too many registers.
    few = small or packed == MMA_ROWS
    width = k_pool.dtype.itemsize if is_narrow else max(k_pool.dtype.itemsize, 2)
    tile = min(max((8 if wide or few else 16) * 1024 // (dim * width), MMA_ROWS), 64)

    # Splits. Fill the GPU once with large programs, twice with small ones.
    load = programs if warps < 8 else 2 * programs
    wanted = 2 * FULL if few else FULL
    splits = max(wanted // load, 2)
    if is_narrow and packed == most and splits // 2 * ENOUGH >= rows_read:
        splits //= 2  # few rows a split: one program for each multiprocessor is as fast, and less is left to merge
    # Small programs on long contexts are split even at 32 sequences, where four fit on a multiprocessor.
    are_enough = load > FULL if small and is_long else load >= FULL - SPARE
    splits = 1 if are_enough else min(splits, pl.cdiv(rows_read, LEAST_SPLIT))

    # Stages. A third tile in flight pays for short tiles and for float8, whose conversion takes time; a large program
    # of few rows needs it only where it has a whole context.
    is_alone = splits == 1 and packed <= 32
    return Tiles(
        group=group,
        queries=queries,
        new=new_rows,
        words=0 if bits is None else bits.shape[-1],
        page=page,
        capacity=capacity,
        start=start,
        window=window or 0,
        packed=packed,
        tile=tile,
        splits=splits,
        warps=warps,
        stages=3 if few or is_alone or k_pool.dtype == FP8 else 2,
    )


def fixed_tiles(q: Array, k_pool: Array, page_table: Array, paths: Array | None, *, start: int, wide: bool) -> Tiles:
    """Sizes for deterministic attention, where the sizes of a query's sums depend on heads, head_dim and dtypes only.

    Args:
        paths: [B, T, depths], as in `paged_attention`.
        wide: products are taken in float32.
    """
    queries, heads, dim = *q.shape[1:3], pl.next_power_of_2(q.shape[3])
    group, page = heads // k_pool.shape[1], k_pool.shape[2]
    width = max(k_pool.dtype.itemsize, 2)
    depths = 0 if paths is None else paths.shape[-1]
    return Tiles(
        group=group,
        queries=queries,
        new=depths or queries,
        words=0,
        page=page,
        capacity=page_table.shape[1] * page,
        start=start,
        window=0,
        packed=max(pl.next_power_of_2(group), MMA_ROWS),
        tile=min(max(8 * 1024 // (dim * width), MMA_ROWS), 64),
        splits=FIXED_SPLITS,
        warps=8 if wide else 4,
        stages=3,
        fixed=True,
        depths=depths,
    )


def own_tiles(tile: Array | int, split: Array | int, splits: int) -> Array:
    """Number of tiles before `tile` that belong to a split: split i of S has the tiles i, i + S, i + 2 S, ...

    So all splits have the same amount of work at any length, and which split has a row depends on the row alone.
    """
    return pl.cdiv(jnp.maximum(tile - split, 0), splits)
