"""Computes which cache rows a Pallas program of the attention kernel reads, and which of these rows each query sees."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.attention.ancestor_bits import mask_tile
from pallas_kernels.attention.ptx import divmod_u32
from pallas_kernels.attention.tiling import AttentionTiles, own_tiles


class KVRange(NamedTuple):
    """The range of cache rows that one Pallas program reads, and limits of the rows that its queries see.

    Rows are numbered from the beginning of the sequence.
    """

    length: Array  # number of committed rows, which is the number of the first new row
    first: Array  # first row to read
    end: Array  # one past the last row to read
    lowest: Array | int  # first row that any query sees
    unmasked_from: Array | int  # every query sees all committed rows from this row on


def first_seen(row: Array, window: int, chunk: int) -> Array:
    """Returns the first row that the query of a row sees: that of its window or of its chunk, whichever is later.

    Args:
        row: row of the query, from the beginning of the sequence.
        window, chunk: number of rows, as in `AttentionTiles`; one of them is not 0.
    """
    firsts = [row - window + 1] if window else []
    if chunk:
        firsts.append(row - divmod_u32(row, chunk)[1])
    return functools.reduce(jnp.maximum, firsts)


def kv_range(length: Array, block: Array, tiles: AttentionTiles) -> KVRange:
    """Returns the range of cache rows for one block of queries.

    Args:
        length: number of committed rows of the sequence.
        block: index of the block; a block has `tiles.packed` packed rows (pairs of a query and a head of the group).
        tiles: static sizes of the kernel call.
    """
    # The numbers of new rows that the block's queries see are from `fewest` to `most`.
    fewest: Array | int = 1
    most: Array | int = tiles.new if tiles.is_causal else min(tiles.new, tiles.window or tiles.new)
    new_rows: Array | int = tiles.new
    if tiles.is_causal:  # the block reads no row after its last query's row
        fewest = block * tiles.packed // tiles.group + 1
        most = ((block + 1) * tiles.packed - 1) // tiles.group + 1
        new_rows = jnp.minimum(most, new_rows)
    first, end = jnp.minimum(tiles.start, length), jnp.minimum(length + new_rows, tiles.capacity)
    if not tiles.hides_old_rows:
        return KVRange(length, first, end, tiles.start, tiles.start)
    first = jnp.maximum(first, first_seen(length + fewest - 1, tiles.window, tiles.chunk))
    lowest = jnp.maximum(first, tiles.start)
    unmasked_from = jnp.maximum(lowest, first_seen(length + most - 1, tiles.window, tiles.chunk))
    return KVRange(length, first, end, lowest, unmasked_from)


def tile_ranges(
    rows: KVRange, begin: Array, end: Array, split: Array, tiles: AttentionTiles
) -> list[tuple[Array, Array, bool]]:
    """Divides the tiles of one split of a context into runs that need an attention mask and runs that need none.

    The first tiles need a mask if `start`, a window or chunks hide rows. The last tiles need a mask because of the new
    rows. The tiles between contain only committed rows that every query sees.

    Args:
        rows: rows that the Pallas program reads.
        begin, end: first tile to divide, and one past the last tile, numbered within the split.
        split: index of the split.
        tiles: static sizes of the kernel call.

    Returns:
        For each run, a tuple (first tile, one past the last tile, whether the run needs a mask).
    """
    if tiles.fixed:  # code without a mask would be compiled to other fused multiply-adds, and would round differently
        return [(begin, end, True)]
    hides_first, open_from = tiles.start or tiles.hides_old_rows, begin
    if hides_first:
        open_from = jnp.clip(own_tiles(pl.cdiv(rows.unmasked_from, tiles.tile), split, tiles.splits), begin, end)
    new_from = own_tiles(jnp.minimum(rows.length, rows.end) // tiles.tile, split, tiles.splits)
    new_from = jnp.maximum(new_from, open_from)
    return [(begin, open_from, True)] * bool(hides_first) + [(open_from, new_from, False), (new_from, end, True)]


def visible_rows(
    row: Array,
    first: Array,
    is_loaded: Array,
    query: Array,
    words: list[Array],
    oldest: Array | None,
    rows: KVRange,
    tiles: AttentionTiles,
) -> Array:
    """Returns the attention mask of one tile, which says which rows of the tile each query sees.

    Args:
        row: the tile's row numbers [tile].
        first: row number of the tile's first row.
        is_loaded: whether a row exists and any query sees it [tile].
        query: query number of each packed row [packed].
        words: the words of the queries' ancestor bits, [packed] each; empty without ancestor bits.
        oldest: first row of each query's window and chunk [packed], or of the one query's if queries have paths; None:
            there are neither windows nor chunks.
        rows: rows that the Pallas program reads.
        tiles: static sizes of the kernel call.

    Returns:
        bool [packed, tile], or [1, tile] where all queries see the same rows.
    """
    if tiles.depths:
        return is_loaded[None, :] if oldest is None else (is_loaded & (row >= oldest))[None, :]
    if tiles.words:
        lowest = rows.lowest if oldest is None else jnp.maximum(rows.lowest, oldest)
        bounds = (lowest - rows.length, rows.end - rows.length)
        return mask_tile(words, first - rows.length, *bounds, tiles.tile)
    visible = (row - rows.length)[None, :] <= jnp.minimum(query, rows.end - rows.length - 1)[:, None]
    if tiles.start:
        visible &= row[None, :] >= rows.lowest
    if oldest is not None:
        visible &= row[None, :] >= oldest[:, None]
    return visible
