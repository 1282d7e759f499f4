"""Chooses the tile sizes of `paged_attention`. "Program" means a Pallas program (one CTA) here.

The sizes are the number of queries that a program holds, the number of rows that a program reads per loop iteration,
and the number of programs that share a context. They depend on shapes only, never on the lengths of the contexts in a
call. The thresholds were measured on an H200 (132 multiprocessors); NOTES.md has the figures.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.experimental import pallas as pl

from pallas_kernels.attention.scores import Scores
from pallas_kernels.layers.quantize_rows import FP8

FIXED_SPLITS = 8  # splits of a context in deterministic attention, at any batch size
MMA_ROWS = 16  # smallest side of a matrix product on tensor cores
LEAST_SPLIT = 128  # smallest split in rows of context; one program reads fewer rows before a second one has started
ENOUGH = 512  # rows of context with which one program keeps a multiprocessor busy
MULTIPROCESSORS = 132  # of an H100 or H200; with at most so many programs, each has a multiprocessor to itself
FULL = 264  # programs that fill the GPU: two large programs (four warps each) on each of 132 multiprocessors
SPARE = 8  # the GPU counts as filled with this number of programs fewer than FULL
MERGED = 16  # largest number of splits that one kernel merges and quantises
LONG = 4096  # contexts with more rows are split among small programs even for many sequences
SHORT = 128  # largest size of a row of K in bytes at which instructions, not memory reads, limit the speed


class AttentionTiles(NamedTuple):
    """The static sizes of one call of the attention kernel."""

    group: int  # query heads per KV head
    queries: int  # queries per sequence
    new: int  # new rows (rows after the committed rows) that a query may see
    words: int  # 32-bit words of ancestor bits per query; 0: causal
    page: int  # rows per page
    capacity: int  # rows that the page table can address
    start: int  # first row that queries may see
    window: int  # sliding window: number of newest rows that a query sees; 0: no window
    chunk: int  # rows of a chunk; a query sees rows of its own chunk only; 0: no chunks
    packed: int  # packed rows per program, padded; a packed row is a pair of a query and a query head of the group
    tile: int  # rows of context per loop iteration
    splits: int  # splits of a context; different programs read different splits
    warps: int  # warps per program
    stages: int  # tiles in flight (pipeline stages)
    fixed: bool = False  # deterministic: the order of a query's sums depends only on the rows that it sees
    depths: int = 0  # entries of a query's path; a program then holds one query; 0: queries have no paths
    value_dim: int = 0  # channels of a value, if keys are the rows of V and K side by side (latent attention); 0: not

    @property
    def is_latent(self) -> bool:
        """Whether a key is the row of V followed by the row of K."""
        return self.value_dim > 0

    @property
    def hides_old_rows(self) -> bool:
        """Whether a window or chunks hide committed rows."""
        return self.window > 0 or self.chunk > 0

    @property
    def is_causal(self) -> bool:
        """Whether a query sees the new rows up to its own; it has neither bits nor a path."""
        return not self.words and not self.depths

    @property
    def span(self) -> int:
        """Number of packed rows per query: the whole block if queries have paths, else one per query head."""
        return self.packed if self.depths else self.group


def choose_tiles(
    q: Array | ShapeDtypeStruct,
    k_pool: Array,
    page_table: Array,
    bits: Array | None,
    scores: Scores,
    *,
    new_rows: int,
    wide: bool,
    quantized: bool = False,
) -> AttentionTiles:
    """Chooses tile sizes so that each multiprocessor runs about two large programs or four small programs.

    A large program has four warps, and a small program has two. A program with eight warps counts as two large
    programs. If the queries alone give enough programs to fill the GPU, contexts are not split. Otherwise each context
    has at least two splits.

    Args:
        q, k_pool, page_table, bits, new_rows: as in `paged_attention`; only shapes and dtypes of arrays are used.
        scores: which rows a query sees.
        wide: whether the matrix products are computed in float32.
        quantized: whether the result is quantised. Contexts that one kernel can merge and quantise are not split
            further than that.
    """
    batch, queries, heads = q.shape[:3]
    kv_heads, page, dim = *k_pool.shape[1:3], pl.next_power_of_2(latent_dim(q, k_pool) or q.shape[3])
    group, capacity = heads // kv_heads, page_table.shape[1] * page
    # At most, per sequence.
    rows_read = min([capacity, *(limit + new_rows for limit in scores.most_rows)])
    width, is_narrow = k_pool.dtype.itemsize, dim <= 128 and not wide
    pools = 2 if latent_dim(q, k_pool) else 1  # pools whose bytes are those of V

    # Packed rows. 64 rows with four warps are as fast as 128 rows with eight warps at 1k rows of context, and faster at
    # 8k. A float32 product is three TF32 products, which need four times as many registers.
    most = max(4096 // dim, MMA_ROWS) if wide else min(64 * 256 // dim, 64)
    packed = min(max(pl.next_power_of_2(queries * group), MMA_ROWS), most)
    programs = batch * kv_heads * pl.cdiv(queries * group, packed)

    small = is_narrow and _is_small(packed, programs, rows_read, dim * width)
    few = small or packed == MMA_ROWS
    warps = 2 if small else (8 if wide or packed * max(dim, 128) >= 64 * 256 else 4)
    tile = _tile_rows(dim, width, pools, is_halved=wide or few, is_wide=wide)
    is_full = is_narrow and packed == most
    splits = _splits(programs, warps, rows_read, LEAST_SPLIT // pools, few=few, is_full=is_full)
    # If these are so few that each program has a multiprocessor to itself, small programs with tiles of fewer than 64
    # rows become large, since no others read beside them. Then contexts are split until no multiprocessor is idle.
    if splits * programs <= MULTIPROCESSORS:
        if small and tile < 64:
            warps, tile = 4, 2 * tile
        splits = _splits_of_few(splits, programs, pl.cdiv(rows_read, tile), quantized=quantized)

    # Stages. A third tile in flight saves time for short tiles and for float8, whose conversion takes time. For a large
    # program of few packed rows, a third tile saves time only if contexts are not split; that of latent attention would
    # not fit into the shared memory of smaller GPUs.
    is_alone = splits == 1 and packed <= 32 and pools == 1
    return AttentionTiles(
        group=group,
        queries=queries,
        new=new_rows,
        words=0 if bits is None else bits.shape[-1],
        page=page,
        capacity=capacity,
        start=scores.start,
        window=scores.window or 0,
        chunk=scores.chunk or 0,
        packed=packed,
        tile=tile,
        splits=splits,
        warps=warps,
        stages=3 if few or is_alone or k_pool.dtype == FP8 else 2,
        value_dim=latent_dim(q, k_pool),
    )


def _is_small(packed: int, programs: int, rows_read: int, row_bytes: int) -> bool:
    """Returns whether programs of narrow heads (at most 128 channels, no float32 products) are small, with two warps.

    Programs of 16 packed rows are: with four warps they need so many registers that only three programs fit on a
    multiprocessor. Programs of 32 packed rows are, too, if
    - contexts are long: more programs in flight read faster;
    - large programs would run in two waves (two or more splits of each context, more than FULL in all);
    - a row of K is short (head_dim 64, or float8) and a context would have fewer than three splits of large programs:
      then instructions limit the speed, and two warps execute fewer of them.

    Args:
        packed: packed rows per program.
        programs: number of programs if contexts are not split.
        rows_read: most rows of context that a query reads.
        row_bytes: bytes of a row of K.
    """
    runs_in_two_waves = programs * (1 if programs >= FULL - SPARE else 2) >= FULL
    is_short = row_bytes <= SHORT and 3 * programs > FULL
    return packed == MMA_ROWS or (packed <= 32 and (rows_read > LONG or runs_in_two_waves or is_short))


def _tile_rows(dim: int, width: int, pools: int, *, is_halved: bool, is_wide: bool) -> int:
    """Returns the rows of a tile.

    A tile has 16 KiB of K and 16 KiB of V; for small programs 8 KiB each (`is_halved`), because more of them run side
    by side. A tile of latent attention has as many bytes, nearly all of V. A float8 value counts as two or four bytes
    if heads are wide, because longer tiles would need too many registers.

    Args:
        dim: channels of a value, a power of two.
        width: bytes of a value in the pool.
        pools: pools whose bytes are those of V.
        is_halved: whether tiles have half as many bytes.
        is_wide: whether the matrix products are computed in float32.
    """
    if width == 1 and (dim > 128 or is_wide):
        width = 2 if is_wide or pools == 2 else 4
    return min(max(pools * (8 if is_halved else 16) * 1024 // (dim * width), MMA_ROWS), 64)


def _splits(programs: int, warps: int, rows_read: int, least: int, *, few: bool, is_full: bool) -> int:
    """Returns the splits of a context with which the GPU is filled once with large programs, twice with small ones.

    Args:
        programs: number of programs if contexts are not split.
        warps: warps per program.
        rows_read: most rows of context that a query reads.
        least: smallest split in rows.
        few: whether programs have few packed rows, so that twice as many fill the GPU.
        is_full: whether programs have as many packed rows as are possible, of narrow heads. Then one program for each
            multiprocessor is as fast if splits are short, and fewer splits are merged.
    """
    load = programs if warps < 8 else 2 * programs
    splits = max((2 * FULL if few else FULL) // load, 2)
    if is_full and splits // 2 * ENOUGH >= rows_read:
        splits //= 2
    # Long contexts are split among small programs even at 32 sequences, since four such programs fit on a
    # multiprocessor.
    are_enough = load > FULL if warps == 2 and rows_read > LONG else load >= FULL - SPARE
    return 1 if are_enough else min(splits, pl.cdiv(rows_read, least))


def _splits_of_few(splits: int, programs: int, tiles: int, *, quantized: bool) -> int:
    """Returns so many splits that no multiprocessor is idle, if each program has a multiprocessor to itself.

    The longest split decides the time, so there are only as many splits as make it shorter.

    Args:
        splits: fewest splits of a context.
        programs: number of programs if contexts are not split.
        tiles: tiles of a context.
        quantized: as in `choose_tiles`.
    """
    most_splits = MULTIPROCESSORS // programs
    if quantized and splits <= MERGED:
        most_splits = min(most_splits, MERGED)  # more would need a kernel of their own to quantise
    longest = pl.cdiv(tiles, most_splits)
    return max(splits, pl.cdiv(tiles, longest))


def latent_dim(q: Array | ShapeDtypeStruct, k_pool: Array) -> int:
    """Returns the number of channels of a value if keys are the rows of V and K side by side; 0: they are not."""
    return q.shape[3] - k_pool.shape[3]


def fixed_tiles(
    q: Array,
    k_pool: Array,
    page_table: Array,
    paths: Array | None,
    scores: Scores,
    *,
    wide: bool,
) -> AttentionTiles:
    """Returns the sizes for deterministic attention.

    All sizes that determine the order of a query's sums depend only on heads, head_dim and dtypes.

    Args:
        q, k_pool, page_table: as in `paged_attention`.
        paths: [B, T, depths], as in `paged_attention`; None: causal.
        scores: which rows a query sees.
        wide: whether the matrix products are computed in float32.
    """
    queries, heads, dim = *q.shape[1:3], pl.next_power_of_2(latent_dim(q, k_pool) or q.shape[3])
    group, page = heads // k_pool.shape[1], k_pool.shape[2]
    width = max(k_pool.dtype.itemsize, 2)
    depths = 0 if paths is None else paths.shape[-1]
    return AttentionTiles(
        group=group,
        queries=queries,
        new=depths or queries,
        words=0,
        page=page,
        capacity=page_table.shape[1] * page,
        start=scores.start,
        window=scores.window or 0,
        chunk=scores.chunk or 0,
        packed=max(pl.next_power_of_2(group), MMA_ROWS),
        tile=min(max(8 * 1024 // (dim * width), MMA_ROWS), 64),
        splits=FIXED_SPLITS,
        warps=8 if wide else 4,
        stages=3,
        fixed=True,
        depths=depths,
        value_dim=latent_dim(q, k_pool),
    )


def own_tiles(tile: Array | int, split: Array | int, splits: int) -> Array:
    """Returns how many of the context's tiles before `tile` belong to `split`.

    Split i of S has the tiles i, i + S, i + 2 S and so on. So all splits have nearly equal work at any context length,
    and a row's split depends on the row alone.
    """
    return pl.cdiv(jnp.maximum(tile - split, 0), splits)
