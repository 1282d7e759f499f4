"""How `paged_attention` divides its work: what one program holds, reads in a step, and shares with others.

What was measured on an H200 stands in NOTES.md. Nothing here depends on how long a context is at the moment.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.experimental import pallas as pl

from pallas_kernels.layers.quantized import FP8

FIXED_SPLITS = 8  # at any batch, where the arithmetic must not depend on it
MMA_ROWS = 16  # smallest side of a matrix product on tensor cores
LEAST_SPLIT = 128  # rows of context: fewer are read before another program has started
ENOUGH = 512  # rows of context for a program that has a multiprocessor to itself
FULL = 264  # programs: two for each of about 132 multiprocessors
SPARE = 8  # of them may be missing
LONG = 4096  # rows of context
SHORT = 128  # bytes of a row of K


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    group: int  # query heads per kv head
    queries: int
    new: int  # rows behind the committed ones that a query may see
    words: int  # of bits a query; 0 is causal
    page: int
    capacity: int  # rows that the page table can address
    start: int
    window: int  # rows back that a query sees, itself included; 0 is all
    packed: int  # rows (query, head of the group) a program holds
    tile: int  # context rows a loop step reads
    splits: int  # programs that share a context
    warps: int
    stages: int
    fixed: bool = False  # whether what a query adds up, and in which order, follows from its own rows alone
    depths: int = 0  # new rows of a query's path, where queries have one; then a program holds one query

    @property
    def span(self) -> int:
        """Rows of a program that are one query's."""
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
    """So many splits, two at least, that about two programs run on each multiprocessor (four, if of few rows).

    One of eight warps counts as two, and half as many full ones are enough where each then reads few rows. A context is
    not split where there are enough without, unless small programs read long ones and four fit.

    Args:
        wide: products are taken in float32.
    """
    batch, queries, heads = q.shape[:3]
    kv_heads, page, dim = *k_pool.shape[1:3], pl.next_power_of_2(q.shape[3])
    group, capacity = heads // kv_heads, page_table.shape[1] * page
    read = capacity if window is None else min(capacity, window + new_rows)  # rows of context, at most
    # A float32 product is three TF32 ones: four times the registers for the same rows.
    most = max(4096 // dim, MMA_ROWS) if wide else 64
    packed = min(max(pl.next_power_of_2(queries * group), MMA_ROWS), most)
    programs = batch * kv_heads * pl.cdiv(queries * group, packed)
    # 16 rows are two warps' work. So are 32 where contexts are long, where programs of four warps (of which a
    # multiprocessor runs two) would wait for each other, and where rows are so short that instructions count and fewer
    # than three programs of four warps would share a context.
    is_narrow, is_long = dim <= 128 and not wide, read > LONG
    waits = programs * (1 if programs >= FULL - SPARE else 2) >= FULL
    is_short = dim * k_pool.dtype.itemsize <= SHORT and 3 * programs > FULL
    small = is_narrow and packed <= 32 and (packed == MMA_ROWS or is_long or waits or is_short)
    warps = 2 if small else (8 if wide or packed * max(dim, 128) >= 64 * 256 else 4)
    few = small or packed == MMA_ROWS  # rows of a tile: 8 KiB each of K and V, or 16
    width = k_pool.dtype.itemsize if is_narrow else max(k_pool.dtype.itemsize, 2)  # else too many registers
    tile = min(max((8 if wide or few else 16) * 1024 // (dim * width), MMA_ROWS), 64)
    load = programs if warps < 8 else 2 * programs
    wanted = 2 * FULL if few else FULL
    splits = max(wanted // load, 2)
    if is_narrow and packed == most and splits // 2 * ENOUGH >= read:
        splits //= 2
    are_enough = load > FULL if small and is_long else load >= FULL - SPARE
    splits = 1 if are_enough else min(splits, pl.cdiv(read, LEAST_SPLIT))
    is_alone = splits == 1 and packed <= 32  # a program then has time for a third tile in flight
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
    """Tiles for which only heads, head_dim and dtypes count: a query's sums are the same in every call.

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


def own_tiles(tile: Array | int, piece: Array | int, splits: int) -> Array:
    """How many of the tiles before `tile` are a piece's, which has every so-many-th one.

    So all pieces have the same to do at any length, and whose a row is depends on where it stands alone.
    """
    return pl.cdiv(jnp.maximum(tile - piece, 0), splits)
