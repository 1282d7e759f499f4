"""Tile sizes of `paged_attention`: the queries that a Pallas program holds, the rows that it reads per loop iteration,
and the number of programs that share a context. "Program" means a Pallas program (one CTA) here.

The thresholds were measured on an H200 (132 multiprocessors); NOTES.md has the figures. Sizes depend on shapes only,
never on the lengths of the contexts in a call.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.experimental import pallas as pl

from pallas_kernels.layers.quantized import FP8

FIXED_SPLITS = 8  # splits of a context in deterministic attention, at any batch size
MMA_ROWS = 16  # smallest side of a matrix product on tensor cores
LEAST_SPLIT = 128  # smallest split, in rows of context: fewer rows are read before another program has started
ENOUGH = 512  # rows of context with which one program keeps a multiprocessor busy
FULL = 264  # programs that fill the GPU: two large ones (four warps) on each of 132 multiprocessors
SPARE = 8  # a GPU with this many programs fewer than FULL still counts as filled
LONG = 4096  # rows of context above which contexts are split among small programs even for many sequences
SHORT = 128  # bytes of a row of K up to which instructions limit the speed, not the bytes read


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    group: int  # query heads per KV head
    queries: int  # per sequence
    new: int  # uncommitted rows, after the committed rows, that a query may see
    words: int  # 32-bit words of ancestor bits per query; 0: causal
    page: int  # rows per page
    capacity: int  # rows that the page table can address
    start: int  # rows before this one are hidden
    window: int  # sliding window: rows that a query sees, counted back from its own row; 0: no window
    packed: int  # packed rows that a program holds: pairs of a query and a query head of the group, padded
    tile: int  # rows of context per loop iteration
    splits: int  # splits of a context, each read by a program of its own
    warps: int  # warps per program
    stages: int  # tiles in flight (pipeline stages)
    fixed: bool = False  # deterministic: the order of a query's sums depends only on the rows that it sees
    depths: int = 0  # entries of a query's path, if queries have paths: a program then holds one query; 0: no paths

    @property
    def span(self) -> int:
        """Number of packed rows per query."""
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
    """Chooses the sizes for a call: about two large programs run on each multiprocessor, or four small ones.

    A large program has four warps (one of eight warps counts as two programs), a small one has two. If the queries
    alone give enough programs to fill the GPU, contexts are not split; otherwise each context has at least two splits.

    Args:
        q, k_pool, page_table, bits, new_rows, start, window: as in `paged_attention`; of arrays, only shapes and dtypes
            matter.
        wide: the matrix products are computed in float32.
    """
    batch, queries, heads = q.shape[:3]
    kv_heads, page, dim = *k_pool.shape[1:3], pl.next_power_of_2(q.shape[3])
    group, capacity = heads // kv_heads, page_table.shape[1] * page
    rows_read = capacity if window is None else min(capacity, window + new_rows)  # at most, per sequence

    # Packed rows. 64 with four warps are as fast as 128 with eight at 1k rows of context, and faster at 8k. A float32
    # product is three TF32 products, with four times the registers for the same rows.
    most = max(4096 // dim, MMA_ROWS) if wide else 64
    packed = min(max(pl.next_power_of_2(queries * group), MMA_ROWS), most)
    programs = batch * kv_heads * pl.cdiv(queries * group, packed)

    # Warps. Programs of 16 packed rows have two warps: with four they need so many registers that only three programs
    # fit on a multiprocessor. Programs of 32 packed rows also have two warps if
    # - contexts are long: more programs in flight read faster;
    # - large programs would run in two waves (two or more splits of each context, more than FULL in all);
    # - a row of K is short (head_dim 64, or float8) and a context would have fewer than three splits of large programs:
    #   then instructions limit the speed, and two warps execute fewer of them.
    is_narrow, is_long = dim <= 128 and not wide, rows_read > LONG
    runs_in_two_waves = programs * (1 if programs >= FULL - SPARE else 2) >= FULL
    is_short = dim * k_pool.dtype.itemsize <= SHORT and 3 * programs > FULL
    small = is_narrow and packed <= 32 and (packed == MMA_ROWS or is_long or runs_in_two_waves or is_short)
    warps = 2 if small else (8 if wide or packed * max(dim, 128) >= 64 * 256 else 4)

    # Tile. 16 KiB each of K and V, or 8 KiB for small programs, because more of them run side by side. A float8 value
    # counts as two bytes if heads are wide: longer tiles would need too many registers.
    few = small or packed == MMA_ROWS
    width = k_pool.dtype.itemsize if is_narrow else max(k_pool.dtype.itemsize, 2)
    tile = min(max((8 if wide or few else 16) * 1024 // (dim * width), MMA_ROWS), 64)

    # Splits. Fill the GPU once with large programs, twice with small ones.
    load = programs if warps < 8 else 2 * programs
    wanted = 2 * FULL if few else FULL
    splits = max(wanted // load, 2)
    if is_narrow and packed == most and splits // 2 * ENOUGH >= rows_read:
        splits //= 2  # short splits: one program per multiprocessor is as fast, and there are fewer splits to merge
    # Long contexts are split among small programs even at 32 sequences, since four such programs fit on a
    # multiprocessor.
    are_enough = load > FULL if small and is_long else load >= FULL - SPARE
    splits = 1 if are_enough else min(splits, pl.cdiv(rows_read, LEAST_SPLIT))

    # Stages. A third tile in flight pays for short tiles and for float8, whose conversion takes time; for a large
    # program of few packed rows it pays only if contexts are not split.
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
    """Returns the sizes for deterministic attention.

    The sizes that set the order of a query's sums depend on heads, head_dim and dtypes only.

    Args:
        q, k_pool, page_table, start: as in `paged_attention`.
        paths: [B, T, depths], as in `paged_attention`; None: causal.
        wide: the matrix products are computed in float32.
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
    """Returns how many of the context's tiles before `tile` belong to `split`.

    Split i of S has the tiles i, i + S, i + 2 S, ... So all splits have the same amount of work at any length, and the
    split that a row belongs to depends on the row alone.
    """
    return pl.cdiv(jnp.maximum(tile - split, 0), splits)
